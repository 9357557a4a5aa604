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
	for {
		p, err := m.clone(ctx, b)
		if errors.Is(err, errMoved) {
			continue
		}
		if err != nil {
			return nil, err
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

var errMoved = errors.New("convert: the batch was moved meanwhile")

// clone copies b's payload in the space in which b is, if it is there still once there is room.
func (m *Mover) clone(ctx context.Context, b *batch.Batch) (out batch.Payload, err error) {
	now := b.Info()
	if now.State == batch.Released {
		return nil, &batch.StateError{Batch: now.ID, State: now.State, Op: "clone", Status: batch.MissingData}
	}
	from := now.Payload.Type()
	form, to := m.cloneForm(from, now.Space)
	what := m.takes(now.Descriptor, now.Bytes, form)
	until := func(ctx context.Context) (context.Context, func()) {
		moved := func(then batch.Info) bool { return then.Space != now.Space || then.Form != now.Form }
		return m.untilVain(ctx, b, now.Payload.Space(), moved, errMoved)
	}
	err = m.inRoom(ctx, &errand{to: to, what: &what, origin: reservation.Incoming(), waits: true, until: until, do: func(r reservation.Reservation) (err error) {
		h, err := b.Inside().Read(ctx, tier.ID{})
		if err != nil {
			return err
		}
		defer func() {
			if err = errors.Join(err, h.Close()); err != nil && out != nil {
				err = errors.Join(err, release(out))
				out = nil
			}
		}()
		if h.Space() != now.Payload.Space() || h.Payload().Type() != from {
			return errMoved
		}
		return m.pinned(r, &what, func() error {
			p, err := m.cfg.Registry.convert(ctx, h.Payload(), form, r)
			switch {
			case err != nil:
				return err
			case p == h.Payload():
				return &batch.UnmovableError{Batch: now.ID, Err: fmt.Errorf("the converter from %s to %s has made no copy", from, form)}
			}
			out = p
			return misplaced(p, r.Space())
		})
	}})
	if errors.Is(err, errLost) {
		if err = lostWith(b.Info()); err == nil {
			err = errMoved
		}
	}
	return out, m.ofBatch(ctx, err, b)
}

// cloneForm says what a clone of a payload in a space is, and where.
func (m *Mover) cloneForm(from batch.PayloadType, at tier.ID) (batch.PayloadType, reservation.Strategy) {
	for _, form := range []batch.PayloadType{from, batch.ImageType(at.Kind)} {
		if _, err := m.cfg.Registry.lookup(from, form); err == nil {
			return form, reservation.Specific(at)
		}
	}
	return batch.HostImage, reservation.AnyInTier(tier.Host)
}
