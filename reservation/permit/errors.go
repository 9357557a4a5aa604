package permit

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-db/spillway/internal/waitline"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// ErrNoBudget: a request names a budget that the pool does not have. Other errors
// match tier.ErrOutOfBudget (not now), reservation.ErrExceeded (never),
// tier.ErrReleased and tier.ErrClosed.
var ErrNoBudget = errors.New("no such budget")

// ExceededError reports that a request can never be granted, so that waiting would be
// in vain. It matches reservation.ErrExceeded.
type ExceededError struct {
	Budget    string // the budget's name; empty for slots
	Requested int64  // bytes, or slots
	Limit     int64  // what the requester could ever have of it
}

func (e *ExceededError) Error() string {
	if e.Budget == "" {
		return fmt.Sprintf("permit: the pool has %d spill slots for users, one being the monitor's (Config.Slots or SetSlots makes them more)", e.Limit)
	}
	return fmt.Sprintf("permit: %d bytes are more than budget %q has in all, %d (Config.Budgets or SetTotal makes it larger)", e.Requested, e.Budget, e.Limit)
}

// Is matches reservation.ErrExceeded.
func (e *ExceededError) Is(target error) bool { return target == reservation.ErrExceeded }

// Leak is a permit that was never released.
type Leak struct {
	Budgets []Budget // what it has of each
	Slot    bool
	Monitor bool
	Stack   string // where it was taken; only in an invariants build
}

// LeakError is what Close returns if permits are still held.
type LeakError struct{ Leaks []Leak }

func (e *LeakError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "permit: %d permits were not released:", len(e.Leaks))
	for i, l := range e.Leaks {
		if i > 0 {
			b.WriteByte(';')
		}
		for _, n := range l.Budgets {
			fmt.Fprintf(&b, " %d bytes of %q", n.Bytes, n.Name)
		}
		switch {
		case l.Slot:
			b.WriteString(" a slot")
		case len(l.Budgets) == 0:
			b.WriteString(" nothing")
		}
	}
	for _, l := range e.Leaks {
		if l.Stack != "" {
			b.WriteString("\ntaken at\n" + l.Stack)
		}
	}
	return b.String()
}

func ended(ctx context.Context) error { return waitline.Ended(ctx, "permit: not granted") }

func closedError() error { return fmt.Errorf("permit: the pool is %w", tier.ErrClosed) }

func noBudget(name string) error { return fmt.Errorf("permit: %q: %w", name, ErrNoBudget) }

// lack is why a request was not granted: a resource of which there is too little,
// or that is kept for an older waiter. It is made into an error without the lock.
type lack struct {
	resource              int
	ever                  bool // there is never so much
	kept                  bool
	need, free, used, all int64
}

func (p *Pool) lackError(l lack, monitor bool) error {
	slot := l.resource == p.slots
	if l.ever {
		e := &ExceededError{Requested: l.need, Limit: l.all}
		if !slot {
			e.Budget = p.names[l.resource]
		}
		return e
	}
	var err error
	if slot {
		kept := ""
		if !monitor {
			kept = ", and one is always the monitor's"
		}
		err = fmt.Errorf("permit: no spill slot is free: %d of %d are taken%s (Config.Slots or SetSlots makes them more): %w",
			l.used, l.all, kept, tier.ErrOutOfBudget)
	} else {
		err = &tier.OutOfBudgetError{
			Budget:    fmt.Sprintf("permit budget %q (SetTotal makes it larger)", p.names[l.resource]),
			Requested: l.need, Remaining: max(0, l.free), Current: l.used, Limit: l.all,
		}
	}
	if l.kept {
		err = fmt.Errorf("permit: what is free is kept for an older request: %w", err)
	}
	return err
}
