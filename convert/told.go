package convert

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// say emits an event: it calls MoverConfig.Events, which must not be nil. The caller must hold no
// lock.
func (m *Mover) say(e events.Event) {
	if e.At.IsZero() {
		e.At = time.Now()
	}
	if e.Context == nil {
		e.Context = context.Background()
	}
	m.panics.Do("Config.Events", func() { m.cfg.Events(e) })
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

// emitBegun emits MoveBegun for a batch that is in transit. The context has the origin of the move.
// Each call needs one of emitEnded before the transit ends, so that the events of a batch
// alternate.
func (m *Mover) emitBegun(ctx context.Context, moved *Moved, bytes int64) {
	if m.cfg.Events == nil {
		return
	}
	m.say(events.Event{
		Kind: events.MoveBegun, Context: ctx, Origin: events.From(ctx), Batch: uint64(moved.Batch),
		From: moved.From, To: moved.To, Bytes: bytes, Reason: moved.Reason,
	})
}

// emitEnded emits MoveEnded, with the context of emitBegun and while the batch is in transit still.
func (m *Mover) emitEnded(ctx context.Context, moved *Moved) {
	if m.cfg.Events == nil {
		return
	}
	m.say(events.Event{
		Kind: events.MoveEnded, Context: ctx, Origin: events.From(ctx), Batch: uint64(moved.Batch),
		From: moved.From, To: moved.To, Bytes: moved.Bytes, Took: moved.Took,
		Reason: moved.Reason, Copy: moved.Copy, Err: moved.Err,
	})
}

// ofBatch adds the id of b to an error about a batch or about corrupt bytes. For corrupt bytes it
// also counts them and emits Corrupt.
func (m *Mover) ofBatch(ctx context.Context, err error, b *batch.Batch) error {
	var own *batch.UnmovableError
	if errors.As(err, &own) {
		own.Batch = b.ID()
	}
	var c *image.CorruptError
	if errors.As(err, &c) {
		c.Batch = b.ID()
		m.stats.corrupt.Add(1)
		if m.cfg.Events != nil {
			now := b.Info()
			m.say(events.Event{Kind: events.Corrupt, Context: ctx, Origin: originOf(ctx, now.Place), Batch: uint64(now.ID), To: now.Space, Err: c})
		}
	}
	return err
}

// copied emits the events of one copy; it is nil without events. Another goroutine may use or drop
// the copy before made has emitted CopyMade. Then made also emits the event of that.
type copied struct {
	m    *Mover
	e    events.Event
	late atomic.Pointer[events.Event] // what made has to emit, too; &wasMade: made has returned
}

// wasMade is where copied.late points when made has emitted CopyMade.
var wasMade events.Event

// copies returns the emitter for a copy of a batch that is, or will be, in another space.
func (m *Mover) copies(ctx context.Context, now batch.Info, from, in tier.ID, bytes int64, ahead bool) *copied {
	if m.cfg.Events == nil {
		return nil
	}
	return &copied{m: m, e: events.Event{Origin: originOf(ctx, now.Place), Batch: uint64(now.ID), From: from, To: in, Bytes: bytes, Ahead: ahead}}
}

// made emits CopyMade, and then CopyUsed or CopyDropped if the copy has ended meanwhile.
func (c *copied) made() {
	if c == nil {
		return
	}
	e := c.e
	e.Kind = events.CopyMade
	c.m.say(e)
	if !c.late.CompareAndSwap(nil, &wasMade) {
		c.m.say(*c.late.Load())
	}
}

// ended emits CopyUsed or CopyDropped, or leaves that to made.
func (c *copied) ended(used bool) {
	if c == nil {
		return
	}
	e := c.e
	if e.Kind = events.CopyDropped; used {
		e.Kind = events.CopyUsed
	}
	if c.late.Load() == nil {
		late := e // which is on the heap, and e is not
		if c.late.CompareAndSwap(nil, &late) {
			return
		}
	}
	c.m.say(e)
}

// whenEnded is ended, or nil.
func (c *copied) whenEnded() func(used bool) {
	if c == nil {
		return nil
	}
	return c.ended
}

// ahead counts bytes that were brought or copied ahead, and returns what is called when they are
// used, or can be used no more.
func (m *Mover) ahead(ctx context.Context, now batch.Info, from, to tier.ID, bytes int64) (ended func(used bool)) {
	counted := m.stats.ahead(from, to, bytes)
	if m.cfg.Events == nil {
		return counted
	}
	e := events.Event{Origin: originOf(ctx, now.Place), Batch: uint64(now.ID), From: from, To: to, Bytes: bytes}
	return func(used bool) {
		counted(used)
		of := e
		if of.Kind = events.AheadWasted; used {
			of.Kind = events.AheadUsed
		}
		m.say(of)
	}
}

// sayOversized logs, and emits as an event, that a batch went to a slower tier than asked for.
func (m *Mover) sayOversized(ctx context.Context, bytes int64, wanted reservation.Strategy, got tier.ID) {
	guard.Logger(m.cfg.Logger).Warn("spillway: a batch is larger than the space it was meant for; it went to a slower one",
		"bytes", bytes, "wanted", wanted.String(), "got", got.String())
	if m.cfg.Events != nil {
		m.say(events.Event{
			Kind: events.Oversized, Context: ctx, Origin: events.From(ctx), To: got, Bytes: bytes,
			Text: fmt.Sprintf("it was to go to %s", wanted),
		})
	}
}
