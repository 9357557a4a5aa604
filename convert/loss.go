package convert

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

// errLost: the space that something was being brought to, or out of, was lost meanwhile, and everything must be looked at again:
// there may be other spaces, or somebody else may have brought it out before.
var errLost = errors.New("convert: the space was lost meanwhile")

// lostIn returns the error of a batch that lies in a space which is lost: its bytes cannot be had any more.
func (m *Mover) lostIn(id tier.ID) error {
	if s, ok := m.cfg.Reservations.Spaces().ByID(id); ok {
		return s.Lost()
	}
	return nil
}

// ofLost says of an error of work in spaces that one of them is lost, if that is so: what a backend says is its own.
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

// untilLost returns a context that ends, with errLost, when the space is lost: waiting for room for what lies there is in vain then.
// done must be called.
func untilLost(ctx context.Context, s *tier.Space) (_ context.Context, done func()) {
	if s.Kind() != tier.GPU { // no other is ever lost
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	look := func(s *tier.Space, _ tier.Change) {
		if s.Lost() != nil {
			cancel(errLost)
		}
	}
	unsubscribe := s.Subscribe(look)
	look(s, tier.Released) // it may have been before
	return ctx, func() {
		unsubscribe()
		cancel(nil)
	}
}
