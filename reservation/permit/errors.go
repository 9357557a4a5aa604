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
	return fmt.Sprintf("permit: %d bytes are more than all %d of budget %q (Config.Budgets or SetTotal makes it larger)",
		e.Requested, e.Limit, e.Budget)
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

// lack is the reason why a request was not granted: the resource that has too little, or that is
// kept for an older waiter. lackError makes an error of it, without the lock.
type lack struct {
	resource              int
	ever                  bool // the whole resource is smaller than the need
	kept                  bool
	need, free, used, all int64
}

func (p *Pool) lackError(l lack) error {
	if l.ever {
		return &ExceededError{Budget: p.names[l.resource], Requested: l.need, Limit: l.all}
	}
	var err error
	if l.resource == p.slots {
		err = fmt.Errorf("permit: no spill slot is free: %d of %d are taken (Config.Slots or SetSlots makes them more): %w",
			l.used, l.all, tier.ErrOutOfBudget)
	} else {
		err = &tier.OutOfBudgetError{
			Budget:    fmt.Sprintf("permit budget %q (SetTotal makes it larger)", p.names[l.resource]),
			Requested: l.need, Remaining: max(0, l.free), Current: l.used, Limit: l.all,
		}
	}
	if l.kept {
		err = fmt.Errorf("permit: the free part is kept for an older request: %w", err)
	}
	return err
}
