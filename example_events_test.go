package spillway_test

import (
	"errors"
	"log/slog"
	"os"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// A program logs what needs an action, and counts tasks itself.
func ExampleLogEvents() {
	handler := slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{
		Level: slog.LevelWarn, // slog.LevelDebug: every move, too
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey { // which is another each time
				return slog.Attr{}
			}
			return a
		},
	})
	tasks := 0
	cfg := spillway.Config{
		Events: spillway.Tee(spillway.LogEvents(slog.New(handler)), func(e spillway.Event) {
			if e.Kind == events.TaskEnded {
				tasks++
			}
		}),
	}

	// What an engine would call it with:
	disk := tier.ID{Kind: tier.Disk}
	cfg.Events(spillway.Event{Kind: events.MoveEnded, Batch: 7, From: tier.ID{Kind: tier.GPU}, To: disk, Bytes: 4096, Took: time.Millisecond, Reason: "demand"})
	cfg.Events(spillway.Event{Kind: events.DiskFailing, To: disk, Err: errors.New("input/output error")})
	cfg.Events(spillway.Event{Kind: events.Corrupt, Origin: events.Origin{Plan: "query-17", Operator: "join"}, Batch: 7, To: disk, Err: errors.New("batch 7 is corrupt")})
	// Output:
	// level=WARN msg="spillway: disk failing" to=disk:0 error="input/output error"
	// level=WARN msg="spillway: corruption found" batch=7 to=disk:0 plan=query-17 operator=join port=0 partition=0 error="batch 7 is corrupt"
}
