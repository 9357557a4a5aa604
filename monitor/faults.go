package monitor

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// pause is the back-off of everything that may fail: a batch, an edge, and pre-cleaning. Whatever
// failed is not tried again until the pause is over, and each failure in a row makes the next pause
// twice as long. A success ends the row. The zero pause is over.
type pause struct {
	failures int // in a row
	until    time.Time
}

// fail begins the pause after another failure: of two units, then four, and so on up to 1<<most.
func (p *pause) fail(now time.Time, unit time.Duration, most int) {
	p.failures++
	p.until = now.Add(unit << min(p.failures, most))
}

const (
	// backoffMax bounds pauses to 64 units, which is about three seconds for units of defaultPeriod.
	backoffMax = 6
	// unmovableMax is backoffMax for a batch that cannot be converted: 51 seconds by default. Each
	// failed conversion costs processor time, and there may be many.
	unmovableMax = 10
	// giveUp is after how many failures in a row an edge is broken. It is still tried now and then.
	giveUp = 3
)

// edge is a way down. After a failure the target refuses all batches from a size on during the
// pause: everything, or the size for which it had no room although its books had, because the file
// system is full or the room is in pieces. The Monitor's lock guards it.
type edge struct {
	pause
	refuses int64 // bytes
	used    int64 // of the target, when it refused
	why     error // the last failure; nil if that was for the target's own size
}

// fail notes another failure, after which the target refuses batches from so many bytes on.
func (e *edge) fail(now time.Time, unit time.Duration, refuses, used int64, why error) {
	if (refuses == everything) != (e.refuses == everything) {
		e.failures = 0 // of another kind
	}
	e.refuses, e.used, e.why = refuses, used, why
	e.pause.fail(now, unit, backoffMax)
}

// everything is what an edge refuses on which moves fail.
const everything = 1

// refused returns from how many bytes on batches are not to be moved now, 0 if there is no bound.
// The first failure counts for little: it may be the batch's own, and when less is used than at a
// refusal, it is worth another try at once. Later it is not, because a file system that is full stays
// so, however often moves to it give back what they took.
func (e *edge) refused(now time.Time, used int64) int64 {
	if !now.Before(e.until) || e.failures == 1 && (e.refuses == everything || used < e.used) {
		return 0
	}
	return e.refuses
}

// fault is what is remembered of a batch whose move went wrong, until it is moved, gets another form
// or is dropped. Until the pause is over, the batch is not moved to the tiers that it could not be
// moved to. The Monitor's lock guards it.
type fault struct {
	pause
	not         decide.Kinds // the tiers to which moves have failed since the pause began
	conversions decide.Kinds // those of them for which the batch could not be converted
	busy        time.Time    // until then it is moved nowhere, because it was in use
	why         error        // of the last conversion that failed; nil if none did
	reported    bool         // an Unmovable was sent
}

// excludePaused excludes the batch of e from the tiers that it is not to be moved to now, and makes
// putBack look at it again when that ends. It returns those for which it cannot be converted. The
// Monitor's lock must be held.
func (m *Monitor) excludePaused(e *entry, f *fault, now time.Time) (conversions decide.Kinds) {
	var not decide.Kinds
	if now.Before(f.until) {
		not, conversions = f.not, f.conversions
	}
	if now.Before(f.busy) {
		not = e.in.lower
	}
	for _, until := range []time.Time{f.until, f.busy} {
		if due := &m.mu.due; now.Before(until) && (due.IsZero() || until.Before(*due)) {
			*due = until
		}
	}
	e.excludeLocked(not)
	return conversions
}

// outcome is what the end of a move means to the monitor: see noteMove.
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
	var own *batch.UnmovableError
	switch {
	case err == nil:
		return moved
	case errors.Is(err, errEnding):
		return cancelled
	// Where a space is lost the error is not about the batch alone, unless it is a converter's about
	// another object.
	case errors.Is(err, batch.ErrUnmovable) &&
		(!errors.Is(err, tier.ErrLost) || errors.As(err, &own) && errors.Is(own.Err, tier.ErrLost)):
		return unmovable
	case errors.As(err, &full) && (full.Space == to || !full.Space.Valid()): // a pool does not name its space
		return noRoom
	case errors.As(err, &state):
		return busy
	}
	return failed
}

// noteMove notes the end of a move, with the pauses that follow an error. It returns whether another
// list of moves will have other ones because of it: without a record of the failure the same move would
// be chosen again and again.
//
//	moved      the failures of the batch and the edge are forgotten
//	noRoom     the edge refuses such sizes, if the books had room; else another request took it
//	busy       the batch is left alone for a period
//	unmovable  the batch is not moved to the tier for a while
//	failed     the same, and the edge is not used from the second time on
//	cancelled  nothing
func (m *Monitor) noteMove(v Victim, from, to *space, kind outcome, err error) (retry bool) {
	now, unit, k := time.Now(), m.cfg.Period, to.Kind()
	var report events.Event
	m.mu.Lock()
	stats, way := &m.mu.stats, &from.edges[to.place]
	e := m.mu.entries[v.ID]
	if e != nil && e.b != v.Batch {
		e = nil // it was dropped meanwhile
	}
	f := m.mu.faults[e]
	if f == nil {
		f = &fault{}
	}
	switch kind {
	case moved:
		stats.Moves, stats.Bytes = stats.Moves+1, stats.Bytes+v.Bytes
		delete(m.mu.faults, e)
		if v.Bytes >= way.refuses {
			*way = edge{}
		}
	case noRoom:
		stats.NoRoom++
		cause := causeOf(err)
		if to.State().Available >= to.Charge(v.Bytes) || cause != nil { // else the room was taken meanwhile
			way.fail(now, unit, v.Bytes, to.Books.Now().Used(), cause)
		}
		retry = way.refused(now, to.Books.Now().Used()) > 0
	case busy:
		stats.Busy++
		f.busy, retry = now.Add(unit), true
	case unmovable, failed:
		retry = true
		if !now.Before(f.until) { // else it has failed for another tier as well
			f.not, f.conversions = 0, 0
			most := backoffMax
			if kind == unmovable {
				most = unmovableMax
			}
			f.fail(now, unit, most)
		}
		f.not = f.not.With(k)
		if kind == unmovable {
			stats.Unmovable++
			f.why, f.conversions = err, f.conversions.With(k)
			break
		}
		stats.Failed++
		way.fail(now, unit, everything, 0, err)
	}
	if e != nil && retry && kind != noRoom {
		m.mu.faults[e] = f
		if m.excludePaused(e, f, now) == from.lower && !f.reported {
			f.reported = true
			report = events.Event{
				Kind: events.Unmovable, Batch: uint64(v.ID), From: e.in.ID(), To: to.ID(),
				Bytes: e.bytes, Text: string(e.form), Err: err,
			}
		}
	}
	m.mu.Unlock()
	if report.Batch != 0 {
		report.Origin = v.Batch.Snapshot().Place.Origin()
		m.report(slog.LevelWarn, "a batch cannot be converted and stays where it is; others are moved instead", report)
	}
	return retry
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

// putBack makes batches victims again whose pauses are over, and all that could not be converted if
// that may be possible now.
func (m *Monitor) putBack(now time.Time) {
	changes := uint64(0)
	if m.cfg.Changes != nil {
		changes = m.cfg.Changes()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	changed := changes != m.mu.changes
	m.mu.changes = changes
	if !changed && (m.mu.due.IsZero() || now.Before(m.mu.due)) {
		return
	}
	m.mu.due = time.Time{}
	for e, f := range m.mu.faults {
		if changed && f.why != nil {
			e.excludeLocked(0)
			delete(m.mu.faults, e)
			continue
		}
		for to, way := range e.in.edges {
			// Another batch, if there is one, shows first whether the edge works.
			k := m.spaces[to].Kind()
			isOver := f.not.Has(k) && !f.conversions.Has(k) && !now.Before(f.until)
			if isOver && way.failures > 0 && e.in.victims.Len() > 0 {
				f.until = now.Add(m.cfg.Period << min(f.failures, backoffMax))
			}
		}
		m.excludePaused(e, f, now)
	}
}

// refuseHint is part of the error of refused waiters.
const refuseHint = "batches at rest fill it, and no slower tier has room for them: " +
	"consume or drop some, or make the slower tiers larger"

// whyDry returns why no batch can leave a space, for errors. failing is the error of moves that fail.
// It looks at all batches that could not be moved, so it is for requests that are refused.
func (m *Monitor) whyDry(s *space, failing error) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var n, bytes int64
	var cannot error
	for e, f := range m.mu.faults {
		if f.why != nil && e.in == s {
			n, bytes, cannot = n+1, bytes+e.bytes, f.why
		}
	}
	hint := refuseHint
	if failing != nil {
		hint = fmt.Sprintf("batches at rest fill it, and cannot be moved down: %v", failing)
	}
	if n == 0 {
		return hint
	}
	unmovable := fmt.Sprintf("%d batches of %d bytes cannot be converted (one of them: %v)", n, bytes, cannot)
	if s.victims.Len() > 0 {
		return hint + "; " + unmovable
	}
	return "all that is left there at rest cannot be moved: " + unmovable +
		": register a converter, or consume or drop them"
}
