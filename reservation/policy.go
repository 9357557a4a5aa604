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

// origin is where the bytes come from that a reservation is for.
type origin uint8

const (
	unknown   origin = iota // for work, or without an option
	incoming                // from outside the engine
	early                   // for a prefetch
	consuming               // for a batch that is opened
	within                  // within + k: from tier k
)

// Option is an option of a reservation. It is applied before the request is made.
type Option func(*state)

// WithPolicy sets what happens when the promise is exceeded; Fail is the
// default.
func WithPolicy(p LimitPolicy) Option { return func(s *state) { s.policy = p } }

// WithoutClearing makes allocations from the reservation fail at once where the room is in pieces.
// Nothing is moved out of the way (Config.Clear). It is for callers that can go elsewhere, or do
// such moving themselves.
func WithoutClearing() Option { return func(s *state) { s.noClear.Store(true) } }

// Sized makes a request take as many bytes in a space as size returns, in place of those that it asks
// for: a batch needs room for a dictionary only where that is not yet. size is called with no lock
// held, on the goroutine that makes the request, each time it looks for room. release, which may be
// nil, gives up what the size depends on, such as references to the dictionaries that are there. It is
// called at once if the bytes cannot be taken, and otherwise when the reservation is released.
func Sized(size func(s *tier.Space) (bytes int64, release func())) Option {
	return func(s *state) { s.size = size }
}

// Moving marks a reservation for data that the engine is writing to the space. While it is open,
// its buffers are not listed as a program's (tier.Holdings.Others).
func Moving() Option { return func(s *state) { s.promise.Moves = true } }

// Incoming marks a request for data from outside. It leaves the headroom of a space free
// (Config.Headroom), so that consumers can still fetch batches when all tiers are full of incoming
// data.
func Incoming() Option { return func(s *state) { s.origin = incoming } }

// Early is Incoming for a batch that will be needed soon, and is meant for TryReserve. The pressure
// of the space stays at its stop mark at most, also if several such requests come at once. Only one
// that is larger may have the space alone.
func Early() Option { return func(s *state) { s.origin = early } }

// Consuming marks a request for a batch that is about to be opened. It may use the headroom of a
// space, and goes ahead of requests that leave it free.
func Consuming() Option { return func(s *state) { s.origin = consuming } }

// MovedFrom marks a request for a batch from another tier. In slower tiers it leaves the headroom
// free, as with Incoming. In faster ones it may use it, as with Consuming.
func MovedFrom(k tier.Kind) Option { return func(s *state) { s.origin = within + origin(k) } }
