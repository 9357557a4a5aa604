package reservation

import "github.com/spillway-db/spillway/tier"

// LimitPolicy decides what happens when more is allocated from a reservation than
// was promised. The zero value is Fail.
type LimitPolicy struct {
	kind    policyKind
	padding float64
}

type policyKind uint8

const (
	policyFail policyKind = iota
	policyIgnore
	policyIncrease
)

// Fail refuses the allocation with an ExceededError.
func Fail() LimitPolicy { return LimitPolicy{} }

// Ignore takes the shortfall out of the space if that has room under its limit,
// so never over its capacity, and leaves the promise as it is: when buffers are
// freed, what was taken beyond the promise goes back to the space first.
func Ignore() LimitPolicy { return LimitPolicy{kind: policyIgnore} }

// Increase makes the promise larger by ⌈shortfall × padding⌉ bytes, or by the shortfall if there is
// no room for more. It refuses the allocation if there is no room for that either. padding must be
// at least 1; 1.25 is a good one.
func Increase(padding float64) LimitPolicy {
	return LimitPolicy{kind: policyIncrease, padding: padding}
}

// Purpose is what the bytes of a reservation are for. It decides about the headroom of a space
// (Config.Headroom), which consumers use to fetch batches when all tiers are full of incoming data.
type Purpose uint8

// The purposes of reservations.
const (
	// Working is for all that is in no batch.
	Working Purpose = iota
	// Incoming is for data from outside. The request leaves the headroom free.
	Incoming
	// Early is Incoming for a batch that will be needed soon, and is meant for TryReserve. The pressure
	// of the space stays at its stop mark at most, also if several such requests come at once. Only one
	// that is larger may have the space alone.
	Early
	// Consuming is for a batch that is about to be opened. The request may use the headroom, and goes
	// ahead of requests that leave it free.
	Consuming
)

// Options are the options of a request and of its reservation. Nil means the zero value.
type Options struct {
	// Owner has the reservation and its waits, also those of Grow.
	Owner *Owner
	// Name is the name under which errors and listings of holders have a reservation without an owner.
	Name string
	// Policy is what happens when the promise is exceeded.
	Policy LimitPolicy
	// OutOfMemory is called when an allocation from the reservation fails for want of memory: the
	// promise is used up and the policy refuses, or the space or the device has no room. It gets the
	// reservation, the bytes that were asked for, as the space charges them, and an ExceededError or a
	// tier.NoSpaceError, or what wraps one. It may free something, or let the reservation grow, and
	// returns whether the allocation should be tried once more. If it returns false, the allocation's
	// error is returned as it was. If the second try fails too, the error wraps both, the second before
	// the first. An allocation that could never fit, because it is larger than the space's capacity, is
	// refused without a call.
	//
	// OutOfMemory runs on the goroutine that allocates and with no lock held, on several at once if
	// several allocate. While it runs, allocations from the same reservation on its goroutine do not
	// call it again: they just fail. If it panics, the allocation's error wraps the panic and the first
	// cause, and the books are as if it had not been called.
	OutOfMemory func(r *Reservation, requested int64, err error) (again bool)
	// NoClearing makes allocations from the reservation fail at once where the room is in pieces.
	// Nothing is moved out of the way (Config.Clear). It is for callers that can go elsewhere, or do
	// such moving themselves.
	NoClearing bool
	// Sized makes a request take as many bytes in a space as it returns, in place of those that the
	// request asks for: a batch needs room for a dictionary only where that is not yet. It is called
	// with no lock held, on the goroutine that makes the request, each time it looks for room. release,
	// which may be nil, gives up what the size depends on, such as references to the dictionaries that
	// are there. It is called at once if the bytes cannot be taken, and otherwise when the reservation
	// is released.
	Sized func(s *tier.Space) (bytes int64, release func())
	// Moving marks a reservation for data that the engine is writing to the space. While it is open,
	// its buffers are not listed as a program's (tier.Holdings.Others).
	Moving bool
	// Purpose is what the bytes are for.
	Purpose Purpose
	// From is set in a request for a batch from another tier, in place of Purpose. In slower tiers it
	// is Incoming, and in faster ones Consuming.
	From tier.Kind
}
