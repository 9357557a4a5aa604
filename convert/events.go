package convert

import (
	"context"
	"errors"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// emit calls MoverConfig.Events with an event, if that is set. The caller must hold no lock.
func (m *Mover) emit(e events.Event) {
	if m.cfg.Events == nil {
		return
	}
	if e.At = time.Now(); e.Context == nil {
		e.Context = context.Background()
	}
	m.panics.Do("Config.Events", func() { m.cfg.Events(e) })
}

// originOf returns the origin of events about work on a batch at a place: the place, and the task
// of the context's owner.
func originOf(ctx context.Context, p batch.Place) events.Origin {
	o := p.Origin()
	if owner := reservation.OwnerOf(ctx); owner != nil {
		o.Task = owner.Name()
	}
	if of := events.From(ctx); of.Task == o.Task {
		o.TaskID = of.TaskID
	}
	return o
}

// ofBatch adds the id of b to an error about a batch or about corrupt bytes. For corrupt bytes it
// also counts them and emits Corrupt.
func (m *Mover) ofBatch(ctx context.Context, err error, b *batch.Batch) error {
	if own, ok := errors.AsType[*batch.UnmovableError](err); ok {
		own.Batch = b.ID()
	}
	if c, ok := errors.AsType[*image.CorruptError](err); ok {
		c.Batch = b.ID()
		m.stats.corrupt.Add(1)
		now := b.Info()
		m.emit(events.Event{
			Kind: events.Corrupt, Context: ctx, Origin: originOf(ctx, now.Place),
			Batch: uint64(now.ID), To: now.Space, Err: c,
		})
	}
	return err
}

// residentEvents returns a function that emits the events of one image of a batch: of a clean one,
// which a move from a space has left in another one or which was pre-cleaned there, and of one that
// was prefetched. ahead means that bytes were moved before they were needed. They are counted, and
// so is their end: AheadUsed or AheadWasted.
func (m *Mover) residentEvents(
	ctx context.Context, now batch.Info, from, in tier.ID, bytes int64, ahead bool,
) func(events.Kind) {
	o := originOf(ctx, now.Place)
	if ahead {
		m.stats.ahead(from, in, bytes, 0, 0)
	}
	return func(kind events.Kind) {
		e := events.Event{Kind: kind, Origin: o, Batch: uint64(now.ID), From: from, To: in, Bytes: bytes}
		switch kind {
		case events.AheadUsed:
			m.stats.ahead(from, in, 0, bytes, 0)
		case events.AheadWasted:
			m.stats.ahead(from, in, 0, 0, bytes)
		default:
			e.Ahead = ahead
		}
		m.emit(e)
	}
}
