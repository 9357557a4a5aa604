package convert

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
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
	m.cfg.Events(e)
}

// originOf returns for whom a context's work is: the place of the batch in its plan, and the task.
func originOf(ctx context.Context, p batch.Place) events.Origin {
	o := events.Origin{Plan: p.Name, Operator: p.Operator, Port: p.Port, Partition: p.Partition}
	if owner := reservation.OwnerOf(ctx); owner != nil {
		o.Task = owner.Name()
	}
	if of := events.From(ctx); of.Task == o.Task {
		o.TaskID = of.TaskID
	}
	return o
}

// emitMove emits MoveBegun or MoveEnded for a batch that is in transit. bytes are those to move, or
// those that were moved. The context has the origin of the move. Each MoveBegun needs one MoveEnded
// before the transit ends, so that the events of a batch alternate.
func (m *Mover) emitMove(ctx context.Context, kind events.Kind, moved *Moved, bytes int64) {
	m.emit(events.Event{
		Kind: kind, Context: ctx, Origin: events.From(ctx), Batch: uint64(moved.Batch),
		From: moved.From, To: moved.To, Bytes: bytes, Took: moved.Took,
		Reason: moved.Reason, Copy: moved.Copy, Err: moved.Err,
	})
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

// cleanEvents returns what emits the events of one clean image, as batch.CommitOptions.Retained
// calls it. from is where the batch is current. ahead means that the image was pre-cleaned.
func (m *Mover) cleanEvents(
	ctx context.Context, now batch.Info, from, in tier.ID, bytes int64, ahead bool,
) func(events.Kind) {
	o := originOf(ctx, now.Place)
	return func(kind events.Kind) {
		m.emit(events.Event{
			Kind: kind, Origin: o, Batch: uint64(now.ID), From: from, To: in, Bytes: bytes, Ahead: ahead,
		})
	}
}

// countAhead counts bytes that were prefetched or pre-cleaned. The function that it returns takes
// AheadUsed or AheadWasted, counts them as that, and emits the event.
func (m *Mover) countAhead(
	ctx context.Context, now batch.Info, from, to tier.ID, bytes int64,
) (ended func(events.Kind)) {
	m.stats.ahead(from, to, bytes, 0, 0)
	o := originOf(ctx, now.Place)
	return func(kind events.Kind) {
		if kind == events.AheadUsed {
			m.stats.ahead(from, to, 0, bytes, 0)
		} else {
			m.stats.ahead(from, to, 0, 0, bytes)
		}
		m.emit(events.Event{Kind: kind, Origin: o, Batch: uint64(now.ID), From: from, To: to, Bytes: bytes})
	}
}

// emitOversized logs, and emits as an event, that a batch went to a slower tier than asked for.
func (m *Mover) emitOversized(ctx context.Context, bytes int64, wanted reservation.Strategy, got tier.ID) {
	guard.Logger(m.cfg.Logger).Warn("spillway: a batch is larger than the space it was meant for; it went to a slower one",
		"bytes", bytes, "wanted", wanted.String(), "got", got.String())
	m.emit(events.Event{
		Kind: events.Oversized, Context: ctx, Origin: events.From(ctx), To: got, Bytes: bytes,
		Text: fmt.Sprintf("it was to go to %s", wanted),
	})
}
