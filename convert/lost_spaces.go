package convert

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// errLost ends a wait because the source or the target space was lost. The caller checks everything
// again: there may be other spaces, or another caller may have moved the batch before the loss.
var errLost = errors.New("convert: the space was lost meanwhile")

// lostWith returns a *tier.LostError if the batch is in a lost space, where its bytes are gone;
// else nil.
func lostWith(now batch.Info) error {
	if now.Payload == nil {
		return nil
	}
	return now.Payload.Space().Lost()
}

// ofLost wraps err in the *tier.LostError of the first of the spaces that is lost. Backends return
// errors of their own for a lost device.
func ofLost(err error, spaces ...*tier.Space) error {
	if err == nil || errors.Is(err, tier.ErrLost) {
		return err
	}
	for _, s := range spaces {
		if lost := s.Lost(); lost != nil {
			return fmt.Errorf("%w: %w", lost, err)
		}
	}
	return err
}

// losses has a context for each GPU space, which ends with errLost when the space is lost. Other
// spaces are never lost. It subscribes once to each space, because a space calls all subscribers at
// each change, and there may be thousands of waiters.
type losses struct {
	of     map[tier.ID]context.Context
	cancel []func()
}

func newLosses(spaces []*tier.Space) *losses {
	l := &losses{of: make(map[tier.ID]context.Context, len(spaces))}
	for _, s := range spaces {
		ctx, end := context.WithCancelCause(context.Background())
		look := func(bool) {
			if s.Lost() != nil {
				end(errLost)
			}
		}
		l.of[s.ID()] = ctx
		l.cancel = append(l.cancel, s.Subscribe(look), func() { end(nil) })
		look(false) // it may have been before
	}
	return l
}

func (l *losses) close() {
	for _, cancel := range l.cancel {
		cancel()
	}
}

// untilLost returns a context that ends with errLost when s is lost, because waiting for room for a
// batch in s is useless then. The caller must call done.
func (m *Mover) untilLost(ctx context.Context, s *tier.Space) (_ context.Context, done func()) {
	life, ok := m.losses.of[s.ID()]
	if !ok {
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	if life.Err() != nil {
		cancel(errLost)
	}
	stop := context.AfterFunc(life, func() {
		labels.Cancel.Set()
		cancel(errLost)
	})
	return ctx, func() {
		stop()
		cancel(nil)
	}
}
