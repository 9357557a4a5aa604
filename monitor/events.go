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

// Move describes one move of a batch.
type Move struct {
	Batch    batch.ID
	From, To tier.ID
	Bytes    int64  // charged in From
	Reason   string // "trigger" or "demand"; see Stuck
}

// Pressure reports that a space's pressure crossed one of its marks. All sizes are
// bytes.
type Pressure struct {
	Space         tier.ID
	Bytes         int64 // the pressure: used + foreign
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
// held: MoveBegun, MoveEnded and Unmovable on the goroutines that move, several at once, and the
// others on Run's. A slow one slows them down.
type Events struct {
	MoveBegun func(Move)
	MoveEnded func(m Move, took time.Duration, err error)
	Pressure  func(Pressure)
	// Stuck is called once, until the space has got what it needs or moves again; and once when Resting
	// has risen from 0.
	Stuck     func(Stuck)
	Unmovable func(Unmovable) // once for each batch and form
	Lost      func(Lost)      // once for each space
}

// eventList calls several Events alike.
type eventList struct {
	all    []Events
	panics guard.Log
}

func (l *eventList) moveBegun(m Move) {
	for _, e := range l.all {
		if e.MoveBegun != nil {
			l.panics.Do("Events.MoveBegun", func() { e.MoveBegun(m) })
		}
	}
}

func (l *eventList) moveEnded(m Move, took time.Duration, err error) {
	for _, e := range l.all {
		if e.MoveEnded != nil {
			l.panics.Do("Events.MoveEnded", func() { e.MoveEnded(m, took, err) })
		}
	}
}

func (l *eventList) pressure(p Pressure) {
	for _, e := range l.all {
		if e.Pressure != nil {
			l.panics.Do("Events.Pressure", func() { e.Pressure(p) })
		}
	}
}

func (l *eventList) stuck(s Stuck) {
	for _, e := range l.all {
		if e.Stuck != nil {
			l.panics.Do("Events.Stuck", func() { e.Stuck(s) })
		}
	}
}

func (l *eventList) unmovable(u Unmovable) {
	for _, e := range l.all {
		if e.Unmovable != nil {
			l.panics.Do("Events.Unmovable", func() { e.Unmovable(u) })
		}
	}
}

func (l *eventList) lost(s Lost) {
	for _, e := range l.all {
		if e.Lost != nil {
			l.panics.Do("Events.Lost", func() { e.Lost(s) })
		}
	}
}

// slogEvents returns events that are logged. Normal events are at debug level: moves, moves that
// find no room or a batch in use, crossed marks, and needs that work in progress will meet. Events
// that need an action are at warning level: failed moves (once for those that failed together),
// batches that cannot be converted, refusals, and tiers that are too small. When a space without a
// tier below reaches its trigger, that is at warning level once, and then at debug level. A lost
// space is at debug level, and so are the moves that this has ended, because the opener of the
// space warns of it.
func slogEvents(l *slog.Logger) Events {
	ctx := context.Background()
	var full sync.Map // the lowest spaces of which there was a warning
	return Events{
		MoveBegun: func(m Move) {
			if l.Enabled(ctx, slog.LevelDebug) {
				l.Debug("spillway: a move begins", m.attrs()...)
			}
		},
		MoveEnded: func(m Move, took time.Duration, err error) {
			if err == nil {
				if l.Enabled(ctx, slog.LevelDebug) {
					l.Debug("spillway: a move has ended", append(m.attrs(), "took", took)...)
				}
				return
			}
			level, text := slog.LevelDebug, "spillway: a move failed; the batch stays where it is"
			switch kind := kindOf(err, m.To); {
			case kind == cancelled:
				text = "spillway: a move was broken off; the batch stays where it is"
			case errors.Is(err, errTogether):
				text = "spillway: batches were not moved together; each is moved alone"
			case kind == failed && !errors.Is(err, tier.ErrLost):
				level = slog.LevelWarn
			}
			l.Log(ctx, level, text, append(m.attrs(), "took", took, "error", err)...)
		},
		Pressure: func(p Pressure) {
			level, text := slog.LevelDebug, "spillway: pressure fell to the stop mark"
			switch {
			case p.Above && p.Lowest:
				text = "spillway: pressure rose to the trigger, and there is no tier below"
				if _, again := full.LoadOrStore(p.Space, true); !again {
					level = slog.LevelWarn
				}
			case p.Above:
				text = "spillway: pressure rose to the trigger"
			}
			l.Log(ctx, level, text,
				"space", p.Space, "bytes", p.Bytes, "capacity", p.Capacity, "trigger", p.Trigger, "stop", p.Stop)
		},
		Stuck: func(s Stuck) {
			level, text := slog.LevelDebug, "spillway: room is needed that only work in progress can free"
			if s.Resting > 0 {
				level, text = slog.LevelWarn, "spillway: room is needed and no batch can be moved down"
			}
			below := make([]string, len(s.Below))
			for i, r := range s.Below {
				below[i] = fmt.Sprintf("%s has %d", r.Space, r.Available)
			}
			l.Log(ctx, level, text,
				"space", s.Space, "reason", s.Reason, "need", s.Need, "used", s.Used, "limit", s.Limit,
				"capacity", s.Capacity, "waiters", s.Waiters, "resting", s.Resting, "below", strings.Join(below, ", "))
		},
		Unmovable: func(u Unmovable) {
			l.Warn("spillway: a batch cannot be converted and stays where it is; others are moved instead",
				"batch", u.Batch, "space", u.Space, "to", u.To, "form", u.Form, "bytes", u.Bytes, "error", u.Err)
		},
		Lost: func(s Lost) { l.Debug("spillway: a space is lost", "space", s.Space, "error", s.Err) },
	}
}

func (m Move) attrs() []any {
	return []any{"batch", m.Batch, "from", m.From, "to", m.To, "bytes", m.Bytes, "reason", m.Reason}
}

// outcome is what the end of a move means to the monitor.
type outcome uint8

const (
	moved     outcome = iota
	noRoom            // the target had none after all
	busy              // another user has the batch
	unmovable         // the batch cannot be converted
	cancelled         // the monitor is ending
	failed            // anything else: the device or the disk
)

func kindOf(err error, to tier.ID) outcome {
	var full *tier.NoSpaceError
	var state *batch.StateError
	switch {
	case err == nil:
		return moved
	case errors.Is(err, ErrEnding):
		return cancelled
	case ofBatch(err):
		return unmovable
	case errors.As(err, &full) && (full.Space == to || !full.Space.Valid()): // a pool does not name its space
		return noRoom
	case errors.As(err, &state):
		return busy
	}
	return failed
}

// ofBatch reports whether err is about the batch alone. Where a space is lost it is not, unless
// that is a converter's error about another object.
func ofBatch(err error) bool {
	var own *batch.UnmovableError
	return errors.Is(err, batch.ErrUnmovable) &&
		(!errors.Is(err, tier.ErrLost) || errors.As(err, &own) && errors.Is(own.Err, tier.ErrLost))
}

// causeOf returns err if something else than the size of a space is the cause of a
// tier.NoSpaceError in it: the file system of the disk.
func causeOf(err error) error {
	var full *tier.NoSpaceError
	if errors.As(err, &full) && full.Cause != nil {
		return err
	}
	return nil
}
