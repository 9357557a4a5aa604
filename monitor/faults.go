package monitor

import (
	"fmt"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// After an error things are tried again later: after two periods, then four, and so on up to 64,
// which is about three seconds by default.
const (
	backoffMax = 6 // doublings
	// unmovableMax is backoffMax for a batch that cannot be converted: 51 seconds by default. A failed
	// conversion costs processor time each, and there may be many.
	unmovableMax = 10
	// giveUp is after how many failures in a row an edge is broken. It is still tried now and then.
	giveUp = 3
)

func backoff(period time.Duration, failures, most int) time.Duration {
	return period << min(max(1, failures), most)
}

// edge is a way down. After the second failure in a row nothing is moved there until until: the
// first may be the batch's own. The index's lock guards it.
type edge struct {
	failures int // in a row
	until    time.Time
	why      error // the last failure
}

// refusal records that a space had no room for a move although its books had: the file system is
// full, or the room is in pieces. The index's lock guards it.
type refusal struct {
	bytes int64
	used  int64 // at that time
	until time.Time
	times int   // in a row
	why   error // of the last, if it was not the space's own size
}

// bound returns how many bytes would still be refused, 0 for none. When less is used than then, it
// is worth another try at once; but only the first time, because a file system that is full stays
// so, however often moves to it give back what they took.
func (f *refusal) bound(now time.Time, used int64) int64 {
	if !now.Before(f.until) || f.times == 1 && used < f.used {
		f.bytes = 0
	}
	return f.bytes
}

// fault is what is remembered of a batch whose move went wrong, until it is moved, gets another form
// or is dropped. Until a pause is over, the batch is not moved to the tier that it could not be moved
// to. The index's lock guards it.
type fault struct {
	form     form
	pauses   [tier.Disk + 1]setback // by the tier of the target
	why      error                  // of the last conversion that failed; nil if none did
	reported bool                   // an Unmovable was sent
}

// setback follows moves of one batch to one tier that failed in a row.
type setback struct {
	failures   int
	conversion bool // the last one failed because the batch could not be converted
	until      time.Time
}

// form is what a batch is in a space. Its failures do not concern another form.
type form struct {
	space tier.ID
	kind  batch.PayloadType
	bytes int64
}

func formOf(b *batch.Batch) form {
	now := b.Inside().Cut()
	return form{now.Space, now.Form, now.Bytes}
}

// pausedLocked returns the tiers that the batch is not to be moved to now, and those of them that it
// could not be converted for. It makes putBack look at f again when a pause is over.
func (m *Monitor) pausedLocked(f *fault, now time.Time) (all, conversions decide.Kinds) {
	for k, p := range f.pauses {
		if !now.Before(p.until) {
			continue
		}
		all = all.With(tier.Kind(k))
		if p.conversion {
			conversions = conversions.With(tier.Kind(k))
		}
		if m.due.IsZero() || p.until.Before(m.due) {
			m.due = p.until
		}
	}
	return all, conversions
}

// noteMove notes the end of a move, with the pause that follows an error. It returns what the end
// means.
func (m *Monitor) noteMove(v Victim, from, to *space, err error) outcome {
	kind, now, period := kindOf(err, to.ID()), time.Now(), m.cfg.Period
	m.stats.count(kind, v.Bytes)
	is, report := formOf(v.Batch), false
	m.index.mu.Lock()
	e, f := from.edges[to.place], m.faults[v.Batch]
	switch {
	case kind == moved:
		e.failures = 0
		delete(m.faults, v.Batch)
		if v.Bytes >= to.refusal.bytes {
			to.refusal = refusal{}
		}
	case kind == noRoom && (to.Available() >= to.Charge(v.Bytes) || causeOf(err) != nil):
		to.refusal.times++
		to.refusal.bytes, to.refusal.used, to.refusal.why = v.Bytes, to.Used(), causeOf(err)
		to.refusal.until = now.Add(backoff(period, to.refusal.times, backoffMax))
	case kind == busy || kind == failed || kind == unmovable:
		if f == nil || f.form != is {
			f = &fault{form: is}
			m.faults[v.Batch] = f
		}
		p := &f.pauses[to.Kind()]
		switch kind {
		case busy: // and not only for this tier
			for k := range f.pauses {
				if again := now.Add(period); from.lower.Has(tier.Kind(k)) && f.pauses[k].until.Before(again) {
					f.pauses[k].until = again
				}
			}
		case failed:
			e.why = err
			if e.failures++; e.failures > 1 {
				e.until = now.Add(backoff(period, e.failures, backoffMax))
			}
			*p = setback{failures: p.failures + 1, until: now.Add(backoff(period, p.failures+1, backoffMax))}
		case unmovable:
			f.why = err
			*p = setback{p.failures + 1, true, now.Add(backoff(period, p.failures+1, unmovableMax))}
		}
		not, conversions := m.pausedLocked(f, now)
		m.index.excludeLocked(v.Batch, is.kind, not)
		if conversions == from.lower && !f.reported && is.kind != "" { // else it was dropped meanwhile
			f.reported, report = true, true
		}
	}
	m.index.mu.Unlock()
	if report {
		m.events.unmovable(Unmovable{
			Batch: v.ID, Place: v.Batch.Inside().Cut().Place, Space: is.space, To: to.ID(),
			Form: is.kind, Bytes: is.bytes, Err: err,
		})
	}
	return kind
}

// putBack makes batches victims again whose pauses are over, and all that could not be converted if
// that may be possible now.
func (m *Monitor) putBack(now time.Time) {
	changes := uint64(0)
	if m.cfg.Changes != nil {
		changes = m.cfg.Changes()
	}
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	changed := changes != m.changes
	m.changes = changes
	if !changed && (m.due.IsZero() || now.Before(m.due)) {
		return
	}
	m.due = time.Time{}
	for b, f := range m.faults {
		entry := m.index.entryLocked(b)
		if entry == nil || formOf(b) != f.form || changed && f.why != nil {
			m.index.excludeLocked(b, "", 0)
			delete(m.faults, b)
			continue
		}
		for to, e := range m.spaces[entry.in.place].edges {
			// Another batch, if there is one, shows first whether the edge works.
			p := &f.pauses[m.spaces[to].Kind()]
			over := p.failures > 0 && !p.conversion && !now.Before(p.until)
			if over && e.failures > 0 && entry.in.victims.Len() > 0 {
				p.until = now.Add(backoff(m.cfg.Period, p.failures, backoffMax))
			}
		}
		not, _ := m.pausedLocked(f, now)
		m.index.excludeLocked(b, f.form.kind, not)
	}
}

// refuseHint is part of the error of refused waiters.
const refuseHint = "batches at rest fill it, and no slower tier has room for them: " +
	"consume or drop some, or make the slower tiers larger"

// failing returns the last error of the moves out of a space that fail, nil if none do, and whether
// they fail to all disks: a consumer cannot repair those.
func (m *Monitor) failing(s *space) (why error, broken bool) {
	below := s.below(m)
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
	for b, f := range m.faults {
		if f.why != nil && f.form.space == s.ID() && m.index.entryLocked(b) != nil {
			n, bytes, cannot = n+1, bytes+f.form.bytes, f.why
		}
	}
	unmovable := ""
	if n > 0 {
		unmovable = fmt.Sprintf("%d batches of %d bytes cannot be converted (one of them: %v)", n, bytes, cannot)
	}
	if n > 0 && m.index.mu.spaces[s.place].victims.Len() == 0 {
		return "all that is left there at rest cannot be moved: " + unmovable +
			": register a converter, or consume or drop them"
	}
	hint := refuseHint
	if failing != nil {
		hint = fmt.Sprintf("batches at rest fill it, and cannot be moved down: %v", failing)
	}
	if unmovable != "" {
		hint += "; " + unmovable
	}
	return hint
}
