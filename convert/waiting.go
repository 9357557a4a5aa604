package convert

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// errStale ends a wait that has become useless: the batch was moved or dropped meanwhile, or its
// space was lost. The caller looks at the batch again.
var errStale = errors.New("convert: the batch was moved, dropped or lost meanwhile")

// watch returns a context that ends with errStale when a wait has become useless: space is lost, or
// b was dropped or useless returns true for it. Without b only the loss counts, and without a space
// only the batch. useless must not call functions of the program. A goroutine watches until the
// caller calls done.
func watch(
	ctx context.Context, space *tier.Space, b *batch.Batch, useless func(now batch.Info) bool,
) (_ context.Context, done func()) {
	var lost <-chan struct{}
	switch {
	case space != nil:
		lost = space.WhenLost()
	case b == nil:
		return ctx, func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	watched := make(chan struct{})
	go func() {
		labels.Watch.Set()
		defer close(watched)
		for {
			var changed <-chan struct{}
			if b != nil {
				changed = b.Changed()
				if now := b.Snapshot(); now.State == batch.Released || useless(now) {
					cancel(errStale)
					return
				}
			}
			select {
			case <-changed:
			case <-lost:
				cancel(errStale)
				return
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-watched
	}
}

// present returns an error of an operation, such as "move", if the batch was dropped, or if its bytes
// are gone with its space.
func present(now batch.Info, operation string) error {
	if now.State == batch.Released {
		return &batch.StateError{Batch: now.ID, State: now.State, Op: operation, Status: batch.MissingData}
	}
	if err := now.Payload.Space().Lost(); err != nil {
		return fmt.Errorf("%s of batch %d: %w", operation, now.ID, err)
	}
	return nil
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
