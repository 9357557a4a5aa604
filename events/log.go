package events

import (
	"context"
	"log/slog"
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
	add := func(is bool, a slog.Attr) {
		if is {
			all = append(all, a)
		}
	}
	add(e.Batch != 0, slog.Uint64("batch", e.Batch))
	add(e.From.Valid(), slog.String("from", e.From.String()))
	add(e.To.Valid(), slog.String("to", e.To.String()))
	add(e.Bytes != 0, slog.Int64("bytes", e.Bytes))
	add(e.Limit != 0, slog.Int64("limit", e.Limit))
	add(e.Kind == BatchHinted, slog.Int64("hint", e.Hint))
	add(e.Took != 0, slog.Duration("took", e.Took))
	add(e.Reason != "", slog.String("reason", e.Reason))
	add(e.Copy, slog.Bool("copy", true))
	add(e.Ahead, slog.Bool("ahead", true))
	add(e.Plan != "", slog.String("plan", e.Plan))
	add(e.Operator != "", slog.String("operator", e.Operator))
	add(e.Operator != "", slog.Int("port", e.Port))
	add(e.Operator != "", slog.Int("partition", e.Partition))
	add(e.Task != "", slog.String("task", e.Task))
	add(e.TaskID != 0, slog.Uint64("taskID", e.TaskID))
	add(e.Text != "", slog.String("text", e.Text))
	add(e.Err != nil, slog.Any("error", e.Err))
	return all
}
