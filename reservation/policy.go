package reservation

import "github.com/spillway-db/spillway/tier"

// LimitPolicy says what happens when more is allocated from a reservation than
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
	unknown   origin = iota // a reservation for work, or whose maker does not say
	incoming                // from outside
	early                   // for what nobody needs yet
	consuming               // for what somebody works on
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

// Moving says that the bytes are for data that is written to the space just now: what is drawn from
// the reservation is no program's buffer while that is open (tier.Holdings.Others).
func Moving() Option { return func(s *state) { s.promise.Moves = true } }

// Incoming says that the bytes are for data from outside. The request leaves the headroom of a
// space free (Config.Headroom). So consumers can still bring what they work on to where they need
// it when all tiers are full of incoming data.
func Incoming() Option { return func(s *state) { s.origin = incoming } }

// Early is Incoming for what somebody will need soon, and is meant for TryReserve. The pressure of
// the space stays at its stop mark at most, also if several such requests come at once. Only one
// that is larger may have the space alone.
func Early() Option { return func(s *state) { s.origin = early } }

// Consuming says that the bytes are for a batch that somebody opens. The request may use the
// headroom of a space, ahead of those that leave it free.
func Consuming() Option { return func(s *state) { s.origin = consuming } }

// MovedFrom says that the bytes are for a batch from another tier. In slower tiers the request
// leaves the headroom free, as with Incoming. In faster ones it may use it, as with Consuming.
func MovedFrom(k tier.Kind) Option { return func(s *state) { s.origin = within + origin(k) } }
