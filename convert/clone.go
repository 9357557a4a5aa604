package convert

import (
	"context"
	"errors"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Clone copies b to memory of its own, and returns a new batch with a new id;
// dictionaries are shared. It waits for room, without holding b, and leaves b's pending tasks
// to their callers. observer is the clone's; nil means MoverConfig.Observer.
//
// The clone has b's form and is in b's space, as all built-in forms can. A program's own form
// without a converter to itself becomes an image in b's space. If there is no converter to that
// either, it becomes an image in host memory. Without any of them the error is a *NoConverterError.
func (m *Mover) Clone(ctx context.Context, b *batch.Batch, observer batch.Observer) (*batch.Batch, error) {
	if b == nil {
		return nil, errors.New("convert: cloning a batch: the batch is nil")
	}
	ctx, end, err := m.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	for {
		p, err := m.clone(ctx, b)
		switch {
		case err == nil:
			if observer == nil {
				observer = m.cfg.Observer
			}
			c, err := batch.New(batch.Options{IDs: m.cfg.IDs, Payload: p, Observer: observer})
			if err != nil {
				err = errors.Join(err, release(p))
			}
			return c, err
		case !errors.Is(err, errStale):
			return nil, m.ofBatch(ctx, err, b)
		case ctx.Err() != nil:
			return nil, context.Cause(ctx)
		}
	}
}

// clone copies b's payload while it holds b. If b was moved while it waited for room, the error is
// errStale.
func (m *Mover) clone(ctx context.Context, b *batch.Batch) (out batch.Payload, err error) {
	now := b.Info()
	if err := present(now, "clone"); err != nil {
		return nil, err
	}
	moved := func(then batch.Info) bool { return then.Space != now.Space || then.Form != now.Form }
	from, to := Form{now.Form, now.Space.Kind}, reservation.Specific(now.Space)
	convert, err := m.cfg.Registry.Lookup(from, from)
	if err != nil {
		convert, err = m.cfg.Registry.Lookup(from, ImageIn(now.Space.Kind))
	}
	if err != nil {
		to = reservation.AnyInTier(tier.Host)
		if convert, err = m.cfg.Registry.Lookup(from, ImageIn(tier.Host)); err != nil {
			return nil, err
		}
	}
	q := &request{
		m: m, to: to, what: m.footprint(now.Descriptor, now.Bytes), waits: true,
		room:   reservation.Options{Purpose: reservation.Incoming},
		source: now.Payload.Space(), b: b, useless: moved,
	}
	err = q.inRoom(ctx, func(r *reservation.Reservation) error {
		h, err := b.Read(ctx, tier.ID{})
		if err != nil {
			return err
		}
		if moved(b.Snapshot()) {
			return errors.Join(errStale, h.Close())
		}
		out, err = convert(ctx, h.Payload(), r)
		if err = errors.Join(err, h.Close()); err != nil && out != nil {
			err = errors.Join(err, release(out))
		}
		return err
	})
	return out, err
}
