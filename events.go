package spillway

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// Event is one thing that happened in an engine; see Config.Events and package events.
type Event = events.Event

// Tee returns a function that calls all functions that are not nil, in their order; nil if none is left.
// Those after one that panics are called, too, and then the panic goes on.
func Tee(to ...func(Event)) func(Event) { return events.Tee(to...) }

// LogEvents returns a function for Config.Events that writes each event to l as one line, at debug
// level. Events that need an action are at warning level: failing, slow and full disks, corruption,
// lost spaces, exceeded quotas, batches that cannot be moved and waiters that cannot be served. The
// engine's own Logger gets such warnings anyway.
//
// The message is the kind, as "spillway: move ended". A line has those of these attributes that the
// event has: batch, from, to, bytes, limit, hint, took, reason, copy, ahead, plan, operator, port,
// partition, task, taskID, text and error. They are made only for levels that l takes, so at
// warning level a move costs two calls. The function is safe for concurrent use if l's handler is.
func LogEvents(l *slog.Logger) func(Event) { return events.Log(l) }

// say calls Config.Events, which is not nil. A panic is logged.
func (e *Engine) say(ev Event) {
	if ev.At.IsZero() {
		ev.At = time.Now()
	}
	if ev.Context == nil {
		ev.Context = context.Background()
	}
	e.panics.Do("Config.Events", func() { e.cfg.Events(ev) })
}

// sayer is say, or nil if nobody listens.
func (e *Engine) sayer() func(Event) {
	if e.cfg.Events == nil {
		return nil
	}
	return e.say
}

// codecChosen says that what goes to a disk is compressed otherwise from now on.
func (e *Engine) codecChosen(disk tier.ID, k convert.Codec, cost float64) {
	e.say(
		Event{
			Kind: events.CodecChosen,
			To:   disk,
			Text: fmt.Sprintf("%s, which should cost %.2f of what bytes cost as they are", k, cost),
		},
	)
}

// monitorEvent passes an event of the monitor on. A lost GPU is warned of at once.
func (e *Engine) monitorEvent(ev Event) {
	if ev.Kind == events.Lost {
		e.logWarnings()
	}
	if e.cfg.Events != nil {
		e.say(ev)
	}
}

// quotaExceeded logs and emits that more GPU memory is in use than a quota allows. to is the space
// that the quota limits, or the zero ID if there are several.
func (e *Engine) quotaExceeded(to tier.ID, o quota.Over) {
	e.cfg.Logger.Warn("spillway: more GPU memory is in use than its quota allows; batches move down until it is not",
		"quota", o.Quota, "used", o.Used, "limit", o.Limit)
	if e.cfg.Events != nil {
		e.say(Event{Kind: events.QuotaExceeded, To: to, Bytes: o.Used, Limit: o.Limit, Text: o.Quota})
	}
}

// watchDisks has the volumes say whether their file systems have room, if somebody listens, until
// ctx ends.
func (e *Engine) watchDisks(ctx context.Context) {
	if e.cfg.Events == nil {
		return
	}
	tick := time.NewTicker(watchPeriod)
	defer tick.Stop()
	for {
		for _, s := range e.spaces {
			if v, ok := s.Pool().(*volumes.Volume); ok {
				v.LookAtRoom()
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// tellTask says that a task has begun, and returns what says that it has ended. Config.Events is not
// nil. What is done with the context is the task's.
func (e *Engine) tellTask(
	ctx context.Context,
	owner *reservation.Owner,
	inputs []*batch.Batch,
	waited time.Duration,
) (_ context.Context, ended func(error)) {
	var o events.Origin
	if len(inputs) > 0 {
		o = ofPlace(inputs[0].Info().Place)
	}
	o.Task, o.TaskID = owner.Name(), e.tasks.Add(1)
	begun, ctx := time.Now(), events.With(ctx, o)
	e.say(Event{Kind: events.TaskBegun, At: begun, Context: ctx, Origin: o, Took: waited})
	return ctx, func(err error) {
		e.say(Event{Kind: events.TaskEnded, Context: ctx, Origin: o, Took: time.Since(begun), Err: err})
	}
}

// ofPlace is the origin of what is done for a batch by no task.
func ofPlace(p batch.Place) events.Origin {
	return events.Origin{Plan: p.Name, Operator: p.Operator, Port: p.Port, Partition: p.Partition}
}
