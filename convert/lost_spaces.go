package convert

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// errLost: the source or the target space was lost meanwhile. Everything must be checked again:
// there may be other spaces, or another caller may have brought the batch out before.
var errLost = errors.New("convert: the space was lost meanwhile")

// lostWith returns the error of a batch that lies in a space which is lost: its bytes cannot be had
// any more.
func lostWith(now batch.Info) error {
	if now.Payload == nil {
		return nil
	}
	return now.Payload.Space().Lost()
}

// ofLost says of an error of work in spaces that one of them is lost, if that is so: what a backend
// says is its own.
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

// losses has, for each GPU space, a context that ends with errLost when the space is lost; no other
// is ever lost. It has one subscription to each: a space calls all its subscribers at each change,
// and there may be thousands of waiters.
type losses struct {
	of     map[tier.ID]context.Context
	cancel []func()
}

func newLosses(spaces []*tier.Space) *losses {
	l := &losses{of: make(map[tier.ID]context.Context, len(spaces))}
	for _, s := range spaces {
		ctx, end := context.WithCancelCause(context.Background())
		look := func(s *tier.Space, _ bool) {
			if s.Lost() != nil {
				end(errLost)
			}
		}
		l.of[s.ID()] = ctx
		l.cancel = append(l.cancel, s.Inside().Subscribe(look), func() { end(nil) })
		look(s, false) // it may have been before
	}
	return l
}

func (l *losses) close() {
	for _, cancel := range l.cancel {
		cancel()
	}
}

// untilLost returns a context that ends, with errLost, when the space is lost: waiting for room for
// what lies there is useless then. done must be called.
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
