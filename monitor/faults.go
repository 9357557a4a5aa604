package monitor

import (
	"fmt"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// After an error things are tried again later: after two periods, then four, and
// so on up to 64, which is about three seconds by default.
const (
	backoffMax = 6 // doublings
	// unmovableMax is backoffMax for a batch that cannot be converted: 51 seconds by
	// default. A failed conversion costs processor time each, and there may be many.
	unmovableMax = 10
	// giveUp is after how many failures in a row waiting for an edge or a batch is no use. It is
	// still tried now and then.
	giveUp = 3
)

func backoff(period time.Duration, failures int) time.Duration {
	return period << min(max(1, failures), backoffMax)
}

// edge is a way down.
type edge struct {
	underWay int
	failures int // in a row
	until    time.Time
	last     time.Time // the last failure
	why      error     // and why
}

// fail notes a failure. The first may be the batch's own, so that it does not
// block the edge.
func (e *edge) fail(now time.Time, period time.Duration) {
	e.last = now
	if e.failures++; e.failures > 1 {
		e.until = now.Add(backoff(period, e.failures))
	}
}

func (e *edge) broken() bool { return e.failures >= giveUp }

func (e *edge) state(to int, now time.Time, perEdge int) decide.Edge {
	joint := jointly
	if e.failures > 0 {
		perEdge, joint = 1, decide.Load{} // one try shows whether it works again
	}
	return decide.Edge{
		To: to, UnderWay: e.underWay, Free: max(0, perEdge-e.underWay), Joint: joint,
		Blocked: now.Before(e.until), Broken: e.broken(),
	}
}

// jointly is what one executor moves at most: several, because to decide on a move and to wait for
// its end takes longer than to move 4 KiB. To a disk small ones are moved together: 1 MiB of these.
var jointly = decide.Load{Batches: 256, Bytes: 4 << 20}

// jointlyFor is after which time an executor takes no other batch. So a slow disk does not keep the
// batches that it would move next from being moved elsewhere.
const jointlyFor = 2 * time.Millisecond

// fault is a batch whose move went wrong.
type fault struct {
	form     form      // that the batch had then
	failures int       // in a row, with that form
	edge     *edge     // of the last; nil if the batch was only busy, or it was the batch's own
	to       tier.Kind // where edge leads to
	until    time.Time // when it is to be a victim again
	forget   time.Time
	back     bool // it is a victim, and only its failures are remembered

	own      [tier.Disk + 1]refused // conversions, by the tier that they were for
	not      decide.Kinds           // the tiers of own whose pause is not over
	why      error                  // of the last of own; nil if there was none
	reported bool                   // an Unmovable was sent
}

// refused counts the failures in a row of one conversion of a batch.
type refused struct {
	failures int
	until    time.Time
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

// hopeful reports whether the next try may well succeed, so that it is worth waiting for. e is what
// the index has of the batch.
func (f *fault) hopeful(e *entry) bool {
	if e.aside && !f.back && f.failures < giveUp && (f.edge == nil || !f.edge.broken()) {
		return true
	}
	for k, r := range f.own {
		if e.not.Has(tier.Kind(k)) && r.failures < giveUp {
			return true
		}
	}
	return false
}

// refused notes a failed conversion for a tier, of those in lower, and reports whether there is
// none left to convert the batch for.
func (f *fault) refused(to tier.Kind, lower decide.Kinds, now time.Time, period time.Duration, why error) (all bool) {
	r := &f.own[to]
	r.failures++
	r.until = now.Add(period << min(r.failures, unmovableMax))
	f.why = why
	if f.not = f.pausing(now); f.not != lower {
		return false
	}
	f.until, f.failures, f.edge = r.until, r.failures, nil
	for k, r := range f.own {
		if f.not.Has(tier.Kind(k)) && r.until.Before(f.until) {
			f.until = r.until
		}
		if f.not.Has(tier.Kind(k)) {
			f.failures = min(f.failures, r.failures)
		}
	}
	return true
}

// pausing returns the tiers that the batch is not to be converted for now.
func (f *fault) pausing(now time.Time) (not decide.Kinds) {
	for k, r := range f.own {
		if now.Before(r.until) {
			not = not.With(tier.Kind(k))
		}
	}
	return not
}

// remember sets until when f is remembered: for a while after its last pause.
func (f *fault) remember(period time.Duration) {
	f.forget = f.until
	for _, r := range f.own {
		if r.until.After(f.forget) {
			f.forget = r.until
		}
	}
	f.forget = f.forget.Add(period << (backoffMax + 1))
}

// due is when f is to be looked at again.
func (f *fault) due() time.Time {
	due := f.forget
	if !f.back && f.until.Before(due) {
		due = f.until
	}
	for k, r := range f.own {
		if f.not.Has(tier.Kind(k)) && r.until.Before(due) {
			due = r.until
		}
	}
	return due
}

// fault records what went wrong with the batch of r. It returns the tiers that the batch is not to
// be converted for, and whether it is skipped for a while.
func (m *Monitor) fault(r result, kind outcome, now time.Time) (not decide.Kinds, aside bool) {
	b, from, to, period := r.Victim.Batch, m.spaces[r.From], m.spaces[r.To], m.cfg.Period
	is, report := formOf(b), false
	m.index.mu.Lock()
	f := m.faults[b]
	if f == nil || f.form != is {
		f = &fault{form: is}
		m.faults[b] = f
	}
	f.back = false
	switch kind {
	case busy:
		f.until = now.Add(period)
	case failed:
		e := from.edges[r.To]
		e.fail(now, period)
		e.why = r.err
		f.failures++
		f.edge, f.to = e, to.Kind()
		f.until = now.Add(backoff(period, f.failures))
	case unmovable:
		f.back = !f.refused(to.Kind(), from.lower, now, period, r.err)
		report = !f.back && !f.reported && is.kind != "" // else it was dropped meanwhile
		f.reported = f.reported || report
	}
	f.remember(period)
	m.index.failLocked(b, is.kind, f.not, !f.back)
	m.lookAtLocked(f.due())
	not, aside = f.not, !f.back
	m.index.mu.Unlock()
	if report {
		m.events.unmovable(Unmovable{
			Batch: r.Victim.ID, Place: b.Inside().Cut().Place, Space: is.space, To: to.ID(),
			Form: is.kind, Bytes: is.bytes, Err: r.err,
		})
	}
	return not, aside
}

// lookAtLocked makes putBack look at the faults at a time, or before.
func (m *Monitor) lookAtLocked(due time.Time) {
	if m.due.IsZero() || due.Before(m.due) {
		m.due = due
	}
}

// putBack makes batches victims again that were skipped for long enough, and lets conversions be
// tried again. A batch that cannot be converted is remembered until it is dropped, so that it is
// reported once.
func (m *Monitor) putBack(now time.Time) {
	changes := uint64(0)
	if m.cfg.Changes != nil {
		changes = m.cfg.Changes()
	}
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	if changes != m.changes { // batches that could not be converted are victims again
		m.changes = changes
		for b, f := range m.faults {
			if f.why == nil {
				continue
			}
			if !f.back { // else it is a victim already, or being moved
				m.index.setAsideLocked(b, false)
			}
			m.index.allowLocked(b, 0)
			delete(m.faults, b)
		}
	}
	if m.due.IsZero() || now.Before(m.due) {
		return
	}
	m.due = time.Time{}
	for b, f := range m.faults {
		if not := f.pausing(now); not != f.not {
			f.not = not
			m.index.allowLocked(b, not)
		}
		if !f.back && !now.Before(f.until) {
			// If the edge has failed last, and there is another batch to try it with, that goes first.
			e := m.index.entryLocked(b)
			if f.edge != nil && f.edge.failures > 0 && e != nil && e.in.smallestLocked()[f.to] > 0 {
				f.until = now.Add(backoff(m.cfg.Period, f.failures))
				f.remember(m.cfg.Period)
			} else {
				f.back = true
				m.index.setAsideLocked(b, false)
			}
		}
		if !now.Before(f.forget) {
			if m.index.entryLocked(b) == nil || !f.reported || formOf(b) != f.form {
				delete(m.faults, b)
				continue
			}
			f.forget = now.Add(m.cfg.Period << (backoffMax + 1))
		}
		m.lookAtLocked(f.due())
	}
}

// aside counts, for each space, the victims that are kept back from a tier, or from all, and are
// worth waiting for.
func (m *Monitor) aside() []int {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	n := make([]int, len(m.spaces))
	for b, f := range m.faults {
		if e := m.index.entryLocked(b); e != nil && f.hopeful(e) {
			n[e.in.place]++
		}
	}
	return n
}

// cannotMove returns which batches of space i cannot be converted for some tier, and why; "" if
// there are none.
func (m *Monitor) cannotMove(i int) string {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	var n, bytes int64
	var why error
	for b, f := range m.faults {
		if e := m.index.entryLocked(b); e != nil && e.not != 0 && e.in.place == i {
			n++
			bytes += f.form.bytes
			why = f.why
		}
	}
	switch n {
	case 0:
		return ""
	case 1:
		return fmt.Sprintf("a batch of %d bytes cannot be converted (%v)", bytes, why)
	}
	return fmt.Sprintf("%d batches of %d bytes cannot be converted (one of them: %v)", n, bytes, why)
}
