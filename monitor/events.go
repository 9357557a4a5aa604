package monitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// Pressure reports that a space's pressure crossed one of its marks. All sizes are
// bytes.
type Pressure struct {
	Space         tier.ID
	Bytes         int64 // the pressure: used + external
	Capacity      int64
	Trigger, Stop int64
	Above         bool // it rose to the trigger; else it fell to the stop mark
	Lowest        bool // there is no tier below, so nothing will be moved
}

// Stuck reports that a space needs bytes that nothing can be moved for. All sizes
// are bytes.
type Stuck struct {
	Space    tier.ID
	Reason   string // "demand": a request waits; "trigger": only the pressure is too high
	Need     int64
	Used     int64
	Limit    int64
	Capacity int64
	Waiters  int
	// Resting is in batches that are neither in use nor subscribed to. If it is 0 there is nothing to
	// move until work in progress ends.
	Resting int64
	Below   []Room
}

// Room is what a slower space could take, in bytes.
type Room struct {
	Space     tier.ID
	Available int64
}

// Unmovable reports that a batch could not be converted for any of the slower tiers. It is skipped
// with growing pauses, and other batches go instead of it. A batch that gets another form is tried
// at once, as all are when a converter is added or removed.
type Unmovable struct {
	Batch     batch.ID
	Place     batch.Place // whose it is
	Space, To tier.ID     // where it is, and where it should have gone last
	Form      batch.PayloadType
	Bytes     int64 // charged in Space
	Err       error // matches batch.ErrUnmovable
}

// Lost reports that a space's device is lost. Nothing is moved from it or to it any more.
type Lost struct {
	Space tier.ID
	Err   error // a *tier.LostError
}

// Events are called as a monitor works; each function may be nil. They are called with no lock
// held: Unmovable on the goroutines that move, several at once, and the others on Run's. A slow one
// slows them down. Moves are reported by the mover.
type Events struct {
	Pressure func(Pressure)
	// Stuck is called once, until the space has got what it needs or moves again; and once when Resting
	// has risen from 0.
	Stuck     func(Stuck)
	Unmovable func(Unmovable) // once for each batch and form
	Lost      func(Lost)      // once for each space
}

// also returns a function that logs an event and then calls f, which may be nil. A panic of f is
// logged.
func also[T any](panics *guard.Log, name string, log, f func(T)) func(T) {
	return func(event T) {
		log(event)
		if f != nil {
			panics.Do(name, func() { f(event) })
		}
	}
}

// eventLog logs events. Normal events are at debug level: moves, moves that find no room or a batch
// in use, crossed marks, and needs that work in progress will meet. Events that need an action are
// at warning level: failed moves (once for those that failed together), batches that cannot be
// converted, refusals, and tiers that are too small. When a space without a tier below reaches its
// trigger, that is at warning level once, and then at debug level. A lost space is at debug level,
// and so are the moves that this has ended, because the opener of the space warns of it.
type eventLog struct {
	*slog.Logger
	full sync.Map // the lowest spaces of which there was a warning
}

// moved logs the end of a move.
func (l *eventLog) moved(v Victim, from, to *space, reason string, took time.Duration, err error) {
	level, text := slog.LevelDebug, "spillway: a move failed; the batch stays where it is"
	switch kind := kindOf(err, to.ID()); {
	case kind == moved:
		text = "spillway: a move has ended"
	case kind == cancelled:
		text = "spillway: a move was broken off; the batch stays where it is"
	case kind == failed && !errors.Is(err, tier.ErrLost):
		level = slog.LevelWarn
	}
	ctx := context.Background()
	if !l.Enabled(ctx, level) {
		return
	}
	attrs := []any{
		"batch", v.ID, "from", from.ID(), "to", to.ID(), "bytes", v.Bytes, "reason", reason, "took", took,
	}
	if err != nil {
		attrs = append(attrs, "error", err)
	}
	l.Log(ctx, level, text, attrs...)
}

func (l *eventLog) pressure(p Pressure) {
	level, text := slog.LevelDebug, "spillway: pressure fell to the stop mark"
	switch {
	case p.Above && p.Lowest:
		text = "spillway: pressure rose to the trigger, and there is no tier below"
		if _, again := l.full.LoadOrStore(p.Space, true); !again {
			level = slog.LevelWarn
		}
	case p.Above:
		text = "spillway: pressure rose to the trigger"
	}
	l.Log(context.Background(), level, text,
		"space", p.Space, "bytes", p.Bytes, "capacity", p.Capacity, "trigger", p.Trigger, "stop", p.Stop)
}

func (l *eventLog) stuck(s Stuck) {
	level, text := slog.LevelDebug, "spillway: room is needed that only work in progress can free"
	if s.Resting > 0 {
		level, text = slog.LevelWarn, "spillway: room is needed and no batch can be moved down"
	}
	below := make([]string, len(s.Below))
	for i, r := range s.Below {
		below[i] = fmt.Sprintf("%s has %d", r.Space, r.Available)
	}
	l.Log(context.Background(), level, text,
		"space", s.Space, "reason", s.Reason, "need", s.Need, "used", s.Used, "limit", s.Limit,
		"capacity", s.Capacity, "waiters", s.Waiters, "resting", s.Resting, "below", strings.Join(below, ", "))
}

func (l *eventLog) unmovable(u Unmovable) {
	l.Warn("spillway: a batch cannot be converted and stays where it is; others are moved instead",
		"batch", u.Batch, "space", u.Space, "to", u.To, "form", u.Form, "bytes", u.Bytes, "error", u.Err)
}

func (l *eventLog) lost(s Lost) {
	l.Debug("spillway: a space is lost", "space", s.Space, "error", s.Err)
}
