package spillway

import (
	"log/slog"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/volumes"
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

// quotaExceeded logs and emits that more GPU memory is in use than a quota allows. to is the space
// that the quota limits, or the zero ID if there are several.
func (e *Engine) quotaExceeded(to tier.ID, o quota.Over) {
	e.cfg.Logger.Warn("spillway: more GPU memory is in use than its quota allows; batches move down until it is not",
		"quota", o.Quota, "used", o.Used, "limit", o.Limit)
	if e.cfg.Events != nil {
		e.cfg.Events(Event{Kind: events.QuotaExceeded, To: to, Bytes: o.Used, Limit: o.Limit, Text: o.Quota})
	}
}

// lookAtDisks has the volumes emit whether their file systems have room.
func (e *Engine) lookAtDisks() {
	for _, s := range e.spaces {
		if v, ok := s.Pool.(*volumes.Volume); ok {
			v.LookAtRoom()
		}
	}
}
