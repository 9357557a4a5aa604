package events

import (
	"context"
	"log/slog"
	"reflect"
)

// Log returns a function that writes each event to l as one line: at warning level if it needs an
// action, otherwise at debug level. The handler gets the event's Context.
func Log(l *slog.Logger) func(Event) {
	return func(e Event) {
		level := slog.LevelDebug
		switch e.Kind {
		case Corrupt, DiskSlow, DiskNearlyFull, DiskFailing, Refused, Unmovable, Lost, QuotaExceeded, Oversized:
			level = slog.LevelWarn
		}
		ctx := e.Context
		if ctx == nil { // no engine made the event
			ctx = context.Background()
		}
		if !l.Enabled(ctx, level) {
			return
		}
		l.LogAttrs(ctx, level, "spillway: "+e.Kind.String(), e.Attrs()...)
	}
}

// Attrs returns the fields that the event has.
func (e Event) Attrs() (all []slog.Attr) {
	add := func(key string, value any) { all = append(all, slog.Any(key, value)) }
	addSet := func(key string, value any) {
		if !reflect.ValueOf(value).IsZero() {
			add(key, value)
		}
	}
	addSet("batch", e.Batch)
	if e.From.Valid() {
		add("from", e.From.String())
	}
	if e.To.Valid() {
		add("to", e.To.String())
	}
	addSet("bytes", e.Bytes)
	addSet("limit", e.Limit)
	if e.Kind == BatchHinted {
		add("hint", e.Hint)
	}
	addSet("took", e.Took)
	addSet("reason", e.Reason)
	addSet("copy", e.Copy)
	addSet("ahead", e.Ahead)
	addSet("plan", e.Plan)
	if e.Operator != "" {
		add("operator", e.Operator)
		add("port", e.Port)
		add("partition", e.Partition)
	}
	addSet("task", e.Task)
	addSet("taskID", e.TaskID)
	addSet("text", e.Text)
	if e.Err != nil {
		add("error", e.Err)
	}
	return all
}
