// Package permit limits what transfers have under way: bytes of several budgets
// and spill slots, asked for all at once. A Permit is taken for the time of one
// transfer, where a reservation is kept for as long as there is data.
//
//	Request ── Acquire, TryAcquire, With ──▶ Pool ── grants ──▶ Permit ── Release ──┐
//	                                          ▲ budgets, slots, waiters             │
//	                                          └─────────────────────────────────────┘
//
// A Pool has named budgets of bytes in a fixed order, and slots, which limit how many
// transfers write to disk at once. A Request names bytes of some of the budgets, or
// none, and may ask for a slot:
//
//	slots configured   asked   granted     CanSpill   Limited
//	n                  yes     one of n    yes        yes
//	n                  no      none        no         no
//	unlimited          yes     unlimited   yes        no
//	unlimited          no      none        no         no
//
// It is granted all or nothing, under one lock. So two requests for the same two budgets never hold
// one each and wait for the other.
//
// A pool of n slots grants n. An engine's monitor takes slots like its users, and writes without
// one, one transfer at a time, if all are taken: users may wait for the room that it makes.
//
// # Waiting
//
// A waiter is in one line for each budget that the request needs, and in the line of the slots if
// it asks for one. A request passes freely if it needs nothing that others wait for. Each line is
// first come, first served, with a bounded bypass. While the head, its oldest waiter, does not fit,
// others that fit may be served before it, but at most Config.Bypass of them. Then the line is
// closed: the pool keeps what is free of that resource until the head fits. The oldest waiter of all
// is the head of all its lines, so the pool keeps all that it needs in the end.
//
// A wait ends when the request is granted, when its context ends, by Close, or when lowered limits
// make it impossible to grant.
//
// Waits must point downwards: the holder of a permit must not wait for room in a memory, nor for
// another permit. A caller that needs both takes the room first and the permit last, around the
// transfer only.
//
// # Ownership
//
// The caller owns a Permit and must Release it once, on any goroutine. A Pool belongs to its
// creator. It owns no goroutine. Close wakes the waiters and reports the permits that are still
// held. Those stay valid until they are released.
//
// # Locks
//
// A Pool has one mutex, of the rank Reservation. No lock is taken under it.
package permit

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// The budgets that a pool has by default. The converters of disks charge Host for the pinned memory
// that a transfer uses.
const (
	Device = "device" // the budget of device memory
	Host   = "host"   // the budget of pinned host memory
)

// Unlimited as a number of slots means that every request for a slot is granted one.
const Unlimited = -1

// Budget is a named number of bytes.
type Budget struct {
	Name  string
	Bytes int64
}

// Config describes a Pool. The zero value has 256 MiB of Device, 512 MiB of Host, and 16 slots. A
// budget of 0 bytes, an empty list of budgets and 0 slots are errors.
type Config struct {
	// Budgets are the pool's budgets in their order. Nil means Device and
	// Host; an empty list that is not nil is an error.
	Budgets []Budget
	// Slots is the number of spill slots, as new(8), or Unlimited. Nil means 16.
	Slots *int
	// Bypass is how many requests may be served before the oldest one of a line while that does not
	// fit. 0 means 16. If it is negative, no request may bypass the oldest.
	Bypass int
}

// Validate returns the error that New would return.
func (c Config) Validate() error {
	if c.Budgets != nil && len(c.Budgets) == 0 {
		return errors.New("permit: a pool needs a budget (nil means the defaults)")
	}
	var all Request
	for i, b := range c.Budgets {
		sum, err := all.And(b.Name, b.Bytes)
		switch {
		case err != nil:
			return err
		case b.Bytes == 0:
			return fmt.Errorf("permit: budget %q of 0 bytes: want more", b.Name)
		case len(sum.budgets) == i:
			return fmt.Errorf("permit: there are two budgets %q", b.Name)
		}
		all = sum
	}
	if c.Slots != nil && *c.Slots < 1 && *c.Slots != Unlimited {
		return fmt.Errorf("permit: a pool of %d slots: want at least 1, or Unlimited", *c.Slots)
	}
	return nil
}

// Request lists the bytes of budgets, and the slot, that a permit is to have. The zero value asks
// for nothing, and each open pool grants it. It is a value: its methods return another one.
type Request struct {
	budgets []Budget // each name once, none of 0 bytes; its elements never change
	bytes   int64    // of all budgets
	slot    bool
	capped  bool
}

// And returns r with more bytes of a budget. 0 bytes change nothing, and the pool need not have the
// budget then. An empty name, a negative number, and a sum that overflows an int64 are errors.
func (r Request) And(name string, bytes int64) (Request, error) {
	switch {
	case name == "":
		return r, errors.New("permit: a budget has no name")
	case bytes < 0:
		return r, fmt.Errorf("permit: budget %q of %d bytes: want at least 0", name, bytes)
	case bytes > math.MaxInt64-r.bytes:
		return r, fmt.Errorf("permit: budget %q of %d bytes: all are more than %d bytes together",
			name, bytes, int64(math.MaxInt64))
	case bytes == 0:
		return r, nil
	}
	r.bytes += bytes
	r.budgets = slices.Clone(r.budgets)
	for i, b := range r.budgets {
		if b.Name == name {
			r.budgets[i].Bytes += bytes
			return r, nil
		}
	}
	r.budgets = append(r.budgets, Budget{name, bytes})
	return r, nil
}

// Spill returns r with a slot, which writing to disk requires.
func (r Request) Spill() Request {
	r.slot = true
	return r
}

// Capped returns r with each number of bytes limited to the budget's total. It is for transfers
// that can work with less, and must not be refused when a budget is small.
func (r Request) Capped() Request {
	r.capped = true
	return r
}

// ErrNoBudget reports that a request names a budget that the pool does not have. Other errors match
// tier.ErrOutOfBudget (not now), reservation.ErrExceeded (never), tier.ErrReleased and
// tier.ErrClosed.
var ErrNoBudget = errors.New("no such budget")

// ExceededError reports that a request can never be granted. It matches reservation.ErrExceeded.
// Slots are never the reason, because a pool has at least one.
type ExceededError struct {
	Budget    string // the budget's name
	Requested int64  // bytes
	Limit     int64  // bytes of the whole budget
}

func (e *ExceededError) Error() string {
	return fmt.Sprintf(
		"permit: %d bytes are more than all %d of budget %q (Config.Budgets or SetTotal makes it larger)",
		e.Requested,
		e.Limit,
		e.Budget,
	)
}

// Is matches reservation.ErrExceeded.
func (e *ExceededError) Is(target error) bool { return target == reservation.ErrExceeded }

// Leak is a permit that was never released.
type Leak struct {
	Budgets []Budget // the bytes of each
	Slot    bool
	Stack   string // of the call that took it; only in an invariants build
}

// LeakError reports the permits that were still held at Close.
type LeakError struct{ Leaks []Leak }

func (e *LeakError) Error() string {
	text := fmt.Sprintf("permit: %d permits were not released:", len(e.Leaks))
	for _, l := range e.Leaks {
		for _, b := range l.Budgets {
			text += fmt.Sprintf(" %d bytes of %q", b.Bytes, b.Name)
		}
		if l.Slot {
			text += " a slot"
		} else if len(l.Budgets) == 0 {
			text += " nothing"
		}
		text += ";"
		if l.Stack != "" {
			text += " taken at\n" + l.Stack
		}
	}
	return text
}

func closedError() error { return fmt.Errorf("permit: the pool is %w", tier.ErrClosed) }
