package transfer

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// DiskUnderWay is how many bytes of one transfer a volume has under way between host
// memory and its file: eight requests of 1 MiB, as volumes have by default.
const DiskUnderWay = StagedUnderWay << 20

// duty is a context's state of permits: what the transfer is for, and what it has a permit for
// already.
type duty struct {
	monitor       bool
	spare         bool // nobody waits for it
	reads, writes bool
}

type dutyKey struct{}

// ForMonitor marks the transfers of a move that makes room for others.
func ForMonitor(ctx context.Context) context.Context {
	return context.WithValue(ctx, dutyKey{}, duty{monitor: true})
}

// IsMonitors reports whether a context is of such a move.
func IsMonitors(ctx context.Context) bool {
	d, _ := ctx.Value(dutyKey{}).(duty)
	return d.monitor
}

// OnDisk runs f, which reads bytes from a disk or, if writes is set, writes bytes to one, when it
// has a permit for that. Every transfer of the built-in converters with a disk goes through it, and
// one of a user's converter must. pinned is the bytes of pinned memory that it uses at a time. f
// must use the context that it gets: it records the permit, so that OnDisk within OnDisk asks for
// no second one. f must not wait for room in any memory.
//
// A user's transfer waits for its bytes of the budget permit.Host, or as many as that budget has,
// and to write for a slot. A move of the monitor's needs only the slot, which users never hold up;
// the chunks that it passes through are few anyway. A wait ends with ctx, when the Mover that gave
// it is closed, and when the pool is.
func (b *Builtin) OnDisk(ctx context.Context, pinned int64, writes bool, f func(context.Context) error) error {
	d, _ := ctx.Value(dutyKey{}).(duty)
	switch {
	case d.writes, d.reads && !writes:
		return f(ctx)
	case d.reads: // to wait for a second permit with the first in hand might never end
		return errors.New("convert: a transfer with a permit to read from disk writes to one")
	}
	if err := b.NeedsPermits(); err != nil {
		return err
	}
	var r permit.Request
	if !d.monitor {
		var err error
		if r, err = r.And(permit.Host, pinned); err != nil {
			return err
		}
		r = r.Capped()
	}
	if writes {
		r = r.Spill()
	}
	if d.monitor {
		r = r.ForMonitor()
	}
	if d.spare {
		return b.inSpare(ctx, r, duty{spare: true, reads: true, writes: writes}, f)
	}
	b.turns.enter()
	defer b.turns.leave()
	return b.Permits.With(ctx, r, func(ctx context.Context, _ permit.Permit) error {
		return f(context.WithValue(ctx, dutyKey{}, duty{reads: true, writes: writes}))
	})
}

// NeedsPermits says what is wrong with b.Permits.
func (b *Builtin) NeedsPermits() error {
	if b.Permits == nil {
		return errors.New("convert: the disk converters require permits: Builtin.Permits is nil")
	}
	if _, ok := b.Permits.Total(permit.Host); !ok {
		return fmt.Errorf("convert: the disk converters take what they have under way from a budget that the pool of permits must have: %q: %w",
			permit.Host, permit.ErrNoBudget)
	}
	return nil
}

// Permitted runs f, which transfers bodies of at most so many bytes, one after the other, from src
// to dst, with a permit if one of them is a disk. A src of nil is memory that is not Spillway's.
func (b *Builtin) Permitted(ctx context.Context, dst, src *tier.Space, body int64, f func(context.Context) error) error {
	writes := dst.Kind() == tier.Disk
	reads := src != nil && src.Kind() == tier.Disk
	if body == 0 || !writes && !reads {
		return f(ctx)
	}
	pinned, err := b.underWay(dst, src)
	if err != nil {
		return err
	}
	return b.OnDisk(ctx, min(body, pinned), writes, f)
}

// underWay returns how many bytes of pinned memory a transfer with a disk uses at a
// time at most: of the arena, or of the chunks that it passes through.
func (b *Builtin) underWay(dst, src *tier.Space) (int64, error) {
	node := dst.Node()
	switch {
	case src == nil:
	case src.Kind() == tier.Host:
		return DiskUnderWay, nil
	case dst.Kind() == tier.Host:
		return ReadsAhead * MaxPiece, nil
	case dst.Kind() == tier.Disk:
		node = src.Node()
	}
	return b.StagedAtOnce(node)
}

// StagedAtOnce returns how many bytes of chunks a staged transfer uses at a time.
func (b *Builtin) StagedAtOnce(node int) (int64, error) {
	pool, err := b.Staging(node)
	if err != nil {
		return 0, err
	}
	return StagedUnderWay * pool.Chunk(), nil
}
