package convert

import (
	"context"
	"errors"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Clone copies b to memory of its own in the same space, and returns a new
// batch with a new id; dictionaries are shared. It waits for room, without holding b. observer is the
// clone's; nil means MoverConfig.Observer.
func (m *Mover) Clone(ctx context.Context, b *batch.Batch, observer batch.Observer) (*batch.Batch, error) {
	ctx, leave, err := m.gate.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	for {
		p, err := m.clone(ctx, b, b.Info().Space)
		if errors.Is(err, errMoved) || errors.Is(err, errGone) {
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
			return nil, errors.Join(err, p.Release())
		}
		return c, nil
	}
}

// openAny locks b where it is, with a task of its own. Somebody else may use that
// up before; then there is another.
func openAny(ctx context.Context, b *batch.Batch) (*batch.Handle, error) {
	for {
		if err := b.CreateTask(ctx); err != nil {
			return nil, err
		}
		h, err := b.LockAny(ctx)
		var se *batch.StateError
		switch {
		case err == nil:
			return h, nil
		case errors.As(err, &se) && se.Status == batch.TaskNotCreated:
		case errors.As(err, &se) && se.State == batch.Released:
			return nil, err
		default:
			return nil, errors.Join(err, b.CancelTask())
		}
	}
}

var errMoved = errors.New("convert: the batch was moved meanwhile")

// clone copies b's payload in the space at, if b is there once there is room.
func (m *Mover) clone(ctx context.Context, b *batch.Batch, at tier.ID) (out batch.Payload, err error) {
	desc := b.Descriptor()
	if desc == nil || !at.Valid() {
		return nil, &batch.StateError{Batch: b.ID(), State: b.State(), Op: "clone", Status: batch.MissingData}
	}
	to, dicts := reservation.Specific(at), m.cfg.Builtin.dicts.of(desc.AllDictionaries())
	what := takesAs(b.PayloadType(), desc, desc.Body, dicts)
	err = m.inRoom(ctx, true, to, m.reserver(ctx, &what), func(r reservation.Reservation) (err error) {
		h, err := openAny(ctx, b)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, h.Close()) }()
		if h.Space().ID() != at {
			return errMoved
		}
		return m.pinned(r, &what, func() (err error) {
			out, err = m.cfg.Registry.convert(ctx, h.Payload(), h.Payload().Type(), r)
			return err
		})
	})
	return out, err
}
