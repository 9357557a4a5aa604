package reservation

import (
	"fmt"
	"math"

	"github.com/spillway-db/spillway/tier"
)

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

func (p LimitPolicy) validate() error {
	if p.kind == policyIncrease && !(p.padding >= 1 && p.padding <= math.MaxFloat64) {
		return fmt.Errorf("reservation: a padding of %v must be a number from 1", p.padding)
	}
	return nil
}

// hint returns what helps when an allocation was refused.
func (p LimitPolicy) hint() string {
	if p.kind == policyFail {
		return "reserve more, or with the policy Increase or Ignore"
	}
	return "reserve more from the start, or free some of it"
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

// of returns what a request with this origin may do with the headroom of a line's space: keep it
// free, or use it ahead of those that keep it. The slowest tier has no headroom.
func (o origin) of(l *line) (keeps, uses bool) {
	if o < within {
		return (o == incoming || o == early) && !l.lowest, o == consuming
	}
	from := tier.Kind(o - within)
	return from < l.space.Kind() && !l.lowest, from > l.space.Kind()
}

// Option is an option of a reservation.
type Option func(*options)

type options struct {
	policy  LimitPolicy
	owner   *Owner
	name    label
	memory  *memoryHook
	origin  origin
	noClear bool // see WithoutClearing
	moves   bool // see Moving
}

func gather(opts []Option) (o options, err error) {
	if len(opts) > 0 {
		all := new(options)
		for _, f := range opts {
			f(all)
		}
		o = *all
	}
	return o, o.policy.validate()
}

// WithPolicy sets what happens when the promise is exceeded; Fail is the
// default.
func WithPolicy(p LimitPolicy) Option { return func(o *options) { o.policy = p } }

// WithoutClearing makes allocations from the reservation fail at once where the room is in pieces.
// Nothing is moved out of the way (Config.Clear). It is for callers that can go elsewhere, or do
// such moving themselves.
func WithoutClearing() Option { return func(o *options) { o.noClear = true } }

// Moving says that the bytes are for data that is written to the space just now: what is drawn from
// the reservation is no program's buffer while that is open (tier.Holdings.Others).
func Moving() Option { return func(o *options) { o.moves = true } }

// Incoming says that the bytes are for data from outside. The request leaves the headroom of a
// space free (Config.Headroom). So consumers can still bring what they work on to where they need
// it when all tiers are full of incoming data.
func Incoming() Option { return func(o *options) { o.origin = incoming } }

// Early is Incoming for what somebody will need soon, and is meant for TryReserve. The pressure of
// the space stays at its stop mark at most, also if several such requests come at once. Only one
// that is larger may have the space alone.
func Early() Option { return func(o *options) { o.origin = early } }

// Consuming says that the bytes are for a batch that somebody opens. The request may use the
// headroom of a space, ahead of those that leave it free.
func Consuming() Option { return func(o *options) { o.origin = consuming } }

// MovedFrom says that the bytes are for a batch from another tier. In slower tiers the request
// leaves the headroom free, as with Incoming. In faster ones it may use it, as with Consuming.
func MovedFrom(k tier.Kind) Option { return func(o *options) { o.origin = within + origin(k) } }
