package transfer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spillway-db/spillway/reservation/permit"
)

// turns knows of the transfers with disks that somebody waits for. One transfer at a time may be
// made in the time that they spare. The zero value is ready.
type turns struct {
	mu     sync.Mutex
	others int                     // that are under way, or wait for a permit
	last   time.Time               // when the last of them has ended
	cancel context.CancelCauseFunc // of the one in spare time; nil if there is none
}

// errTurn: a transfer that somebody waits for has begun.
var errTurn = fmt.Errorf("convert: others use the disks: %w", context.Canceled)

func (t *turns) enter() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.others++
	if t.cancel != nil {
		t.cancel(errTurn)
	}
}

func (t *turns) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.others--
	t.last = time.Now()
}

// Spare returns a context for a transfer that nobody waits for: it takes a permit only if one is
// free. The context ends as soon as another transfer with a disk begins, or waits for a permit. An
// error, which matches context.Canceled, says that there has been one within the time quiet, or
// that the pool of permits has waiters, which may be another engine's. end must be called.
func (b *Builtin) Spare(ctx context.Context, quiet time.Duration) (_ context.Context, end func(), err error) {
	if b.Permits.Stats().Waiting > 0 {
		return nil, nil, errTurn
	}
	t := &b.turns
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.others > 0 || t.cancel != nil || time.Since(t.last) < quiet {
		return nil, nil, errTurn
	}
	ctx, t.cancel = context.WithCancelCause(context.WithValue(ctx, dutyKey{}, duty{spare: true}))
	return ctx, func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.cancel(nil)
		t.cancel = nil
	}, nil
}

// inSpare runs f with a permit if there is one now.
func (b *Builtin) inSpare(ctx context.Context, r permit.Request, d duty, f func(context.Context) error) (err error) {
	got, err := b.Permits.TryAcquire(r)
	if err != nil {
		return fmt.Errorf("%w: %w", errTurn, err)
	}
	defer func() { err = errors.Join(err, got.Release()) }()
	return f(context.WithValue(ctx, dutyKey{}, d))
}
