package monitor

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// pause is the time for which something that failed is not tried again. It grows with each failure
// in a row. The zero pause is over.
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
	// unmovableMax is backoffMax for a batch that cannot be converted: 51 seconds by default. A failed
	// conversion costs processor time each, and there may be many.
	unmovableMax = 10
	// giveUp is after how many failures in a row an edge is broken. It is still tried now and then.
	giveUp = 3
)

// edge is a way down. From the second failure in a row on nothing is moved there during the pause:
// the first failure may be the batch's own. The index's lock guards it.
type edge struct {
	pause
	why error // the last failure
}

// isBlocked reports whether moves are not tried now. e is nil where there is no way.
func (e *edge) isBlocked(now time.Time) bool {
	return e == nil || e.failures > 1 && now.Before(e.until)
}

// refusal records that a space had no room for a move although its books had: the file system is
// full, or the room is in pieces. The index's lock guards it.
type refusal struct {
	pause
	bytes int64
	used  int64 // at that time
	why   error // of the last, if it was not the space's own size
}

// bound returns how many bytes would still be refused, 0 for none. When less is used than then, it
// is worth another try at once; but only the first time, because a file system that is full stays
// so, however often moves to it give back what they took.
func (f *refusal) bound(now time.Time, used int64) int64 {
	if !now.Before(f.until) || f.failures == 1 && used < f.used {
		f.bytes = 0
	}
	return f.bytes
}

// fault is what is remembered of a batch whose move went wrong, until it is moved, gets another form
// or is dropped. Until a pause is over, the batch is not moved to the tier that it could not be moved
// to. The index's lock guards it.
type fault struct {
	pauses      [tier.Disk + 1]pause // by the tier of the target
	conversions decide.Kinds         // the tiers for which it could not be converted last
	why         error                // of the last conversion that failed; nil if none did
	reported    bool                 // an Unmovable was sent
}

// excludePaused excludes the batch of e from the tiers for which it is paused now, and makes putBack
// look at it again when a pause is over. It returns the tiers of those pauses for which the batch
// could not be converted. The index's lock must be held.
func (m *Monitor) excludePaused(e *entry, f *fault, now time.Time) (conversions decide.Kinds) {
	var not decide.Kinds
	for k, p := range f.pauses {
		if !now.Before(p.until) {
			continue
		}
		not = not.With(tier.Kind(k))
		if m.index.mu.due.IsZero() || p.until.Before(m.index.mu.due) {
			m.index.mu.due = p.until
		}
	}
	e.excludeLocked(not)
	return not & f.conversions
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

// noteMove notes the end of a move, with the pauses that follow an error. It returns what the end
// means, and whether another list of moves will have other ones because of it.
func (m *Monitor) noteMove(v Victim, from, to *space, err error) (kind outcome, retry bool) {
	kind = kindOf(err, to.ID())
	m.stats.outcomes[kind].Add(1)
	now, unit, k := time.Now(), m.cfg.Period, to.Kind()
	var cause error // of a full space, if that is not its size but its file system
	var full *tier.NoSpaceError
	if errors.As(err, &full) && full.Cause != nil {
		cause = err
	}
	x := m.index
	x.mu.Lock()
	way, e := from.edges[to.place], x.entryLocked(v.Batch) // without an entry, it was dropped meanwhile
	var f *fault
	switch kind {
	case moved:
		m.stats.bytes.Add(v.Bytes)
		way.failures = 0
		delete(x.mu.faults, e)
		if v.Bytes >= to.refusal.bytes {
			to.refusal = refusal{}
		}
	case noRoom:
		if to.Available() >= to.Charge(v.Bytes) || cause != nil {
			to.refusal.bytes, to.refusal.used, to.refusal.why = v.Bytes, to.Used(), cause
			to.refusal.fail(now, unit, backoffMax)
		}
		retry = to.refusal.bound(now, to.Used()) > 0
	case busy, unmovable, failed:
		retry = true
		if f = x.mu.faults[e]; f == nil {
			f = &fault{}
		}
	}
	switch kind {
	case busy: // and not only for this tier
		for k := range f.pauses {
			if again := now.Add(unit); from.lower.Has(tier.Kind(k)) && f.pauses[k].until.Before(again) {
				f.pauses[k].until = again
			}
		}
	case unmovable:
		f.why = err
		f.conversions = f.conversions.With(k)
		f.pauses[k].fail(now, unit, unmovableMax)
	case failed:
		way.why = err
		way.fail(now, unit, backoffMax)
		f.conversions &^= decide.Kinds(0).With(k)
		f.pauses[k].fail(now, unit, backoffMax)
	}
	var report *Unmovable
	if f != nil && e != nil {
		x.mu.faults[e] = f
		if m.excludePaused(e, f, now) == from.lower && !f.reported {
			f.reported = true
			report = &Unmovable{Batch: v.ID, Space: x.ids[e.in.place], To: to.ID(), Form: e.form, Bytes: e.bytes, Err: err}
		}
	}
	x.mu.Unlock()
	if report != nil {
		report.Place = v.Batch.Inside().Cut().Place
		m.events.Unmovable(*report)
	}
	return kind, retry
}

// putBack makes batches victims again whose pauses are over, and all that could not be converted if
// that may be possible now.
func (m *Monitor) putBack(now time.Time) {
	changes := uint64(0)
	if m.cfg.Changes != nil {
		changes = m.cfg.Changes()
	}
	x := m.index
	x.mu.Lock()
	defer x.mu.Unlock()
	changed := changes != x.mu.changes
	x.mu.changes = changes
	if !changed && (x.mu.due.IsZero() || now.Before(x.mu.due)) {
		return
	}
	x.mu.due = time.Time{}
	for e, f := range x.mu.faults {
		if changed && f.why != nil {
			e.excludeLocked(0)
			delete(x.mu.faults, e)
			continue
		}
		for to, way := range m.spaces[e.in.place].edges {
			// Another batch, if there is one, shows first whether the edge works.
			k := m.spaces[to].Kind()
			p := &f.pauses[k]
			isOver := p.failures > 0 && !f.conversions.Has(k) && !now.Before(p.until)
			if isOver && way.failures > 0 && e.in.victims.Len() > 0 {
				p.until = now.Add(m.cfg.Period << min(p.failures, backoffMax))
			}
		}
		m.excludePaused(e, f, now)
	}
}

// refuseHint is part of the error of refused waiters.
const refuseHint = "batches at rest fill it, and no slower tier has room for them: " +
	"consume or drop some, or make the slower tiers larger"

// failing returns the last error of the moves out of a space that fail, nil if none do, and whether
// they fail to all disks: a consumer cannot repair those.
func (m *Monitor) failing(s *space, below []*space) (why error, broken bool) {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	disks := 0
	for _, from := range append([]*space{s}, below...) { // what cannot leave a slower space is in the way
		for i, t := range m.spaces {
			e := from.edges[i]
			switch {
			case e == nil || t.Lost() != nil || why != nil && from != s:
				continue
			case e.failures > 0:
				why = e.why
			case t.refusal.bytes > 0 && t.refusal.why != nil:
				why = t.refusal.why
			}
			if from == s && t.Kind() == tier.Disk && e.failures < giveUp {
				disks++
			}
		}
	}
	return why, why != nil && disks == 0
}

// whyDry returns why no batch can leave a space, for errors. failing is the error of moves that fail.
// It looks at all batches that could not be moved, so it is for requests that are refused.
func (m *Monitor) whyDry(s *space, failing error) string {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	var n, bytes int64
	var cannot error
	for e, f := range m.index.mu.faults {
		if f.why != nil && e.in.place == s.place {
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
	if m.index.mu.spaces[s.place].victims.Len() > 0 {
		return hint + "; " + unmovable
	}
	return "all that is left there at rest cannot be moved: " + unmovable +
		": register a converter, or consume or drop them"
}
