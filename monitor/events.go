package monitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Normal events are logged at debug level: moves, moves that find no room or a batch in use, crossed
// marks, and needs that work in progress will meet. Events that need an action are at warning level:
// failed moves (once for those that failed together), batches that cannot be converted, and tiers
// that are too small. A lost space is at debug level, and so are the moves that this has ended,
// because the opener of the space warns of it.

// logMove logs the end of a move.
func (m *Monitor) logMove(v Victim, from, to *space, reason string, took time.Duration, err error) {
	ctx := context.Background()
	if err == nil && !m.cfg.Logger.Enabled(ctx, slog.LevelDebug) {
		return
	}
	attrs := []any{
		"batch", v.ID, "from", from.ID(), "to", to.ID(), "bytes", v.Bytes, "reason", reason, "took", took, "error", err,
	}
	switch kind := kindOf(err, to.ID()); {
	case kind == moved:
		m.cfg.Logger.Debug("spillway: a move has ended", attrs[:len(attrs)-2]...)
	case kind == cancelled:
		m.cfg.Logger.Debug("spillway: a move was broken off; the batch stays where it is", attrs...)
	case kind == failed && !errors.Is(err, tier.ErrLost):
		m.cfg.Logger.Warn("spillway: a move failed; the batch stays where it is", attrs...)
	default:
		m.cfg.Logger.Debug("spillway: a move failed; the batch stays where it is", attrs...)
	}
}

// reportPressure reports that a space's pressure rose to the trigger, or fell to the stop mark. When
// a space without a tier below reaches its trigger, that is at warning level once, and then at debug
// level.
func (m *Monitor) reportPressure(s *space, pressure int64, rose bool) {
	e := events.Event{Kind: events.PressureFell, To: s.ID(), Bytes: pressure}
	level, text := slog.LevelDebug, "spillway: pressure fell to the stop mark"
	if rose {
		e.Kind, text = events.PressureRose, "spillway: pressure rose to the trigger"
	}
	if rose && s.lower == 0 {
		e.Text, text = "there is no slower tier", text+", and there is no tier below"
		if !s.warned {
			s.warned, level = true, slog.LevelWarn
		}
	}
	marks := s.State()
	m.cfg.Logger.Log(context.Background(), level, text, "space", s.ID(), "bytes", pressure,
		"capacity", s.Capacity(), "trigger", marks.Trigger, "stop", marks.Stop)
	m.cfg.Events(e)
}

// These bits describe the last report of a stuck space.
const (
	stuckAtAll   = 1 << iota
	stuckForRoom // a request waits; else only the pressure is too high
	stuckAtRest  // with batches at rest; else there is nothing to move until work in progress ends
)

// reportStuck reports once that a space needs room and nothing can be moved for it, when that has
// been so for a period. It reports it again if work in progress was to free room then, and the
// batches at rest are not in use now.
func (m *Monitor) reportStuck(now time.Time, s *space, demand []reservation.Demand) {
	var waiters int
	var need int64
	is, reason := stuckAtAll, decide.Trigger
	for _, d := range demand {
		if lack := d.Bytes - s.Available(); d.Space == s.ID() && lack > 0 {
			is, reason, need, waiters = is|stuckForRoom, decide.Demand, min(lack, s.State().Limit), d.Waiters
		}
	}
	if now := s.State(); need == 0 && m.excess(s) > 0 {
		need = max(now.Pressure-now.Trigger+1, now.Used()-now.Ceiling)
	}
	if need <= 0 || s.dry.Load() == nil {
		s.stuckSince, s.stuck = time.Time{}, 0
		return
	}
	if s.stuckSince.IsZero() {
		s.stuckSince = now
	}
	level, text := slog.LevelDebug, "spillway: room is needed that only work in progress can free"
	resting := m.index.summary(s.place).idle
	if resting > 0 {
		is, level, text = is|stuckAtRest, slog.LevelWarn, "spillway: room is needed and no batch can be moved down"
	}
	if s.stuck|is == s.stuck || now.Sub(s.stuckSince) < m.cfg.Period {
		return
	}
	s.stuck |= is
	details := fmt.Sprintf("%d wait, %d bytes are used of %d, %d of them in batches at rest",
		waiters, s.Used(), s.State().Limit, resting)
	for _, t := range s.below(m) {
		below := t.State()
		details += fmt.Sprintf(", %s has %d", t.ID(), max(0, below.Ceiling-below.Used()))
	}
	m.cfg.Logger.Log(context.Background(), level, text,
		"space", s.ID(), "reason", reason, "need", need, "capacity", s.Capacity(), "details", details)
	m.cfg.Events(events.Event{Kind: events.Stuck, To: s.ID(), Bytes: need, Reason: reason, Text: details})
}
