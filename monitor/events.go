package monitor

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/reservation"
)

// Normal events are logged at debug level: moves, moves that find no room or a batch in use, crossed
// marks, and needs that work in progress will meet. Events that need an action are at warning level:
// failed moves (once for those that failed together), batches that cannot be converted, and tiers
// that are too small. A lost space is at debug level, and so are the moves that this has ended,
// because the opener of the space warns of it.

// report logs an event, with what its line has besides, and emits it if it has a kind.
func (m *Monitor) report(level slog.Level, text string, e events.Event, more ...slog.Attr) {
	if ctx := context.Background(); m.cfg.Logger.Enabled(ctx, level) {
		m.cfg.Logger.LogAttrs(ctx, level, "spillway: "+text, append(e.Attrs(), more...)...)
	}
	if e.Kind != 0 && m.cfg.Events != nil {
		m.cfg.Events(e)
	}
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
		if lack := d.Bytes - s.State().Available; d.Space == s.ID() && lack > 0 {
			is, reason, need, waiters = is|stuckForRoom, decide.Demand, min(lack, s.State().Limit), d.Waiters
		}
	}
	if now := s.State(); need == 0 && m.excess(s) > 0 {
		need = max(now.Pressure-now.Trigger+1, now.Used()-now.Ceiling)
	}
	dry := s.dry.Load()
	if need <= 0 || dry == nil {
		s.stuckSince, s.stuck = time.Time{}, 0
		return
	}
	if s.stuckSince.IsZero() {
		s.stuckSince = now
	}
	level, text := slog.LevelDebug, "room is needed that only work in progress can free"
	resting := m.sums(s).idle
	if resting > 0 && dry.resting > 0 { // those that came to rest since then may be moved by the next list
		is, level, text = is|stuckAtRest, slog.LevelWarn, "room is needed and no batch can be moved down"
	}
	if s.stuck|is == s.stuck || now.Sub(s.stuckSince) < m.cfg.Period {
		return
	}
	s.stuck |= is
	details := fmt.Sprintf("%d wait, %d bytes are used of %d, %d of them in batches at rest",
		waiters, s.State().Used(), s.State().Limit, resting)
	for _, t := range s.below(m) {
		below := t.State()
		details += fmt.Sprintf(", %s has %d", t.ID(), max(0, below.Ceiling-below.Used()))
	}
	m.report(level, text, events.Event{Kind: events.Stuck, To: s.ID(), Bytes: need, Reason: reason, Text: details},
		slog.Int64("capacity", s.Capacity))
}
