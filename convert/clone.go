package convert

import (
	"context"
	"errors"
	"fmt"

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
	ctx, end, err := m.operations.begin(ctx)
	if err != nil {
		return nil, err
	}
	defer end()
	q := &request{m: m, origin: reservation.Incoming(), waits: true, b: b}
	defer func() { _ = q.close() }()
	for {
		now := b.Info()
		if now.State == batch.Released {
			return nil, &batch.StateError{Batch: now.ID, State: now.State, Op: "clone", Status: batch.MissingData}
		}
		if err := lostWith(now); err != nil {
			return nil, fmt.Errorf("cloning batch %d: %w", now.ID, err)
		}
		moved := func(then batch.Info) bool { return then.Space != now.Space || then.Form != now.Form }
		var form batch.PayloadType
		form, q.Strategy = m.cloneForm(now.Form, now.Space)
		q.what, q.source, q.useless = m.takes(now, form), now.Payload.Space(), moved
		var p batch.Payload
		r, err := q.reserve(ctx)
		if err == nil {
			p, err = m.copyOf(ctx, b, moved, form, &q.what, r)
		}
		again, err := q.end(err)
		switch {
		case again:
			continue
		case errors.Is(err, errStale): // it was moved while the clone waited for room
			q.attempts = attempts{}
			continue
		case err != nil:
			return nil, m.ofBatch(ctx, err, b)
		}
		if observer == nil {
			observer = m.cfg.Observer
		}
		c, err := batch.New(batch.Options{IDs: m.cfg.IDs, Payload: p, Observer: observer})
		if err != nil {
			return nil, errors.Join(err, release(p))
		}
		return c, nil
	}
}

// copyOf makes a payload of that form out of b's, drawn from r, while it holds b. If b was moved, the
// error is errStale.
func (m *Mover) copyOf(
	ctx context.Context, b *batch.Batch, moved func(batch.Info) bool, form batch.PayloadType,
	what *takes, r reservation.Reservation,
) (out batch.Payload, err error) {
	h, err := b.Inside().Read(ctx, tier.ID{})
	if err != nil {
		return nil, err
	}
	if moved(b.Inside().Cut()) {
		return nil, errors.Join(errStale, h.Close())
	}
	out, err = m.convert(ctx, h.Payload(), form, what, r)
	if err = errors.Join(err, h.Close()); err != nil && out != nil {
		return nil, errors.Join(err, release(out))
	}
	return out, err
}

// cloneForm returns the form of a clone of a payload in a space, and where the clone goes.
func (m *Mover) cloneForm(from batch.PayloadType, at tier.ID) (batch.PayloadType, reservation.Strategy) {
	for _, form := range []batch.PayloadType{from, batch.ImageType(at.Kind)} {
		if _, err := m.cfg.Registry.lookup(from, form); err == nil {
			return form, reservation.Specific(at)
		}
	}
	return batch.HostImage, reservation.AnyInTier(tier.Host)
}
