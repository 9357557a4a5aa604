package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// DiskUnderWay is how many bytes of pinned memory a transfer with a disk uses at a time at most,
// and has a permit for: StagedUnderWay requests.
const DiskUnderWay = StagedUnderWay * hostRead

// duty is a value in a transfer's context: on whose behalf it runs, and the permit that it has. It
// is in the context, not in arguments, because a program's converter stands between the Mover and
// OnDisk.
type duty struct {
	monitor       bool // an eviction by the monitor, which must not wait for permits of programs
	spare         bool // pre-cleaning, which gives way to all others
	reads, writes bool // the kind of permit that the transfer has
}

type dutyKey struct{}

// ForMonitor returns a context for the transfers of an eviction by the monitor, which never wait
// for the permits of programs; see OnDisk.
func ForMonitor(ctx context.Context) context.Context {
	return context.WithValue(ctx, dutyKey{}, duty{monitor: true})
}

// turns lets pre-cleaning write only while no other transfer uses a disk: writes ahead of need must
// not slow down those that somebody waits for. It counts the others, and cancels the one that
// pre-cleans when another begins. The zero value is ready.
type turns struct {
	mu     sync.Mutex
	others int                     // that are in progress, or wait for a permit
	last   time.Time               // when the last of them has ended
	cancel context.CancelCauseFunc // of the one in spare time; nil if there is none
}

// errTurn means that others use the disks, and pre-cleaning must wait.
var errTurn = fmt.Errorf("convert: others use the disks: %w", context.Canceled)

// Spare returns a context for a transfer that nobody waits for: it takes a permit only if one is
// free. The context ends as soon as another transfer with a disk begins, or waits for a permit.
// There is at most one such context at a time.
//
// An error, which matches context.Canceled, means that another transfer was in progress within the
// time quiet, or that the pool of permits has waiters, perhaps of another engine. Without an error
// end must be called.
func (b *Builtin) Spare(ctx context.Context, quiet time.Duration) (_ context.Context, end func(), err error) {
	t := &b.turns
	waiting := b.Permits.Stats().Waiting
	t.mu.Lock()
	defer t.mu.Unlock()
	if waiting > 0 || t.others > 0 || t.cancel != nil || time.Since(t.last) < quiet {
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

// OnDisk waits for a permit and runs f, which reads bytes from a disk or, if writes is set, writes
// bytes to one. Every transfer of the built-in converters with a disk goes through it, and those of
// a user's converter must. pinned is how many bytes of pinned memory f uses at a time. f must use
// the context that it gets: it records the permit, so that OnDisk within OnDisk asks for no second
// one. f must not wait for room in any memory. The AlteredError of an encrypted volume becomes a
// *image.CorruptError, like that of a wrong checksum.
//
// A user's transfer waits for its bytes of the budget permit.Host, at most the whole budget, and to
// write for a slot. A move of the monitor needs no bytes, because it uses few chunks. To write, it
// takes a free slot, or else the engine's reserve, which users cannot take. A wait ends with ctx,
// when the Mover of ctx is closed, and when the pool is closed.
func (b *Builtin) OnDisk(ctx context.Context, pinned int64, writes bool, f func(context.Context) error) (err error) {
	d, _ := ctx.Value(dutyKey{}).(duty)
	switch {
	case d.writes, d.reads && !writes:
		// This is within another OnDisk whose permit suffices.
		return f(ctx)
	case d.reads: // a wait for a second permit by the holder of the first might never end
		return errors.New("convert: a transfer with a permit to read from disk writes to one")
	}
	// Pre-cleaning ends before this transfer waits for the permit that it may have.
	if t := &b.turns; !d.spare {
		t.mu.Lock()
		if t.others++; t.cancel != nil {
			t.cancel(errTurn)
		}
		t.mu.Unlock()
		defer func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			t.others--
			t.last = time.Now()
		}()
	}
	r := permit.Request{Spill: writes, Capped: true}
	if !d.monitor {
		r.Bytes = map[string]int64{permit.Host: pinned}
	}
	var got *permit.Permit
	if d.monitor || d.spare {
		got, err = b.Permits.TryAcquire(r)
	} else {
		got, err = b.Permits.Acquire(ctx, r)
	}
	switch {
	case err == nil:
	case d.spare:
		return fmt.Errorf("%w: %w", errTurn, err)
	case d.monitor && errors.Is(err, tier.ErrOutOfBudget):
		// Programs have all slots, and may wait for the room that f makes.
		select {
		case b.reserve <- struct{}{}:
			defer func() { <-b.reserve }()
		case <-ctx.Done():
			return fairqueue.Ended(ctx, "convert: a move that makes room waited for another one to write")
		}
	default:
		return err
	}
	defer func() { err = cmp.Or(err, got.Release()) }() // nil if it is the reserve
	// The duty of a monitor is not passed on: a nested call needs no permit.
	err = f(context.WithValue(ctx, dutyKey{}, duty{spare: d.spare, reads: true, writes: writes}))
	if a, ok := errors.AsType[*tier.AlteredError](err); ok && !errors.Is(err, image.ErrCorrupt) {
		return &image.CorruptError{Volume: a.Volume + " " + a.File, Offset: a.Offset, Cause: err}
	}
	return err
}

// Permitted runs f, which transfers bytes from src to dst, with a permit if one of them is a disk.
// f has bytes bytes in progress at a time, but at most DiskUnderWay. If src is nil, the source is
// memory of the program; if dst is nil, the bytes are only looked at. A panic of f is an error, as
// in safely.
func (b *Builtin) Permitted(
	ctx context.Context, dst, src *tier.Space, bytes int64, f func(context.Context) error,
) error {
	is := func(s *tier.Space) bool { return s != nil && s.Kind().IsStorage() }
	guarded := func(ctx context.Context) error { return safely(func() error { return f(ctx) }) }
	if bytes == 0 || !is(dst) && !is(src) {
		return guarded(ctx)
	}
	return b.OnDisk(ctx, min(bytes, DiskUnderWay), is(dst), guarded)
}
