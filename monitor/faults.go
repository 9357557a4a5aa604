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

// fault is what is remembered of a batch whose move went wrong. Until a pause is over, the batch is
// not moved to the tier that it could not be moved to. The index's lock guards it.
type fault struct {
	form     form
	tries    [tier.Disk + 1]tries // by the tier of the target
	why      error                // of the last conversion that failed; nil if none did
	forget   time.Time
	reported bool // an Unmovable was sent
}

// tries are moves of one batch to one tier that failed in a row.
type tries struct {
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

// paused returns the tiers that the batch is not to be moved to now, and those of them that it
// could not be converted for.
func (f *fault) paused(now time.Time) (all, conversions decide.Kinds) {
	for k, t := range f.tries {
		if now.Before(t.until) {
			all = all.With(tier.Kind(k))
			if t.conversion {
				conversions = conversions.With(tier.Kind(k))
			}
		}
	}
	return all, conversions
}

// due returns when a pause ends, or when f is to be forgotten.
func (f *fault) due(now time.Time) time.Time {
	due := f.forget
	for _, t := range f.tries {
		if t.until.After(now) && t.until.Before(due) {
			due = t.until
		}
	}
	return due
}

// fault records what went wrong with the batch of r. It returns the tiers that the batch is not to
// be moved to for a while.
func (m *Monitor) fault(r result, kind outcome, now time.Time) decide.Kinds {
	b, from, to, period := r.Victim.Batch, m.spaces[r.From], m.spaces[r.To].ID(), m.cfg.Period
	is, report := formOf(b), false
	m.index.mu.Lock()
	f := m.faults[b]
	if f == nil || f.form != is {
		f = &fault{form: is}
		m.faults[b] = f
	}
	t := &f.tries[to.Kind]
	switch kind {
	case busy: // and not only for this tier
		for k := range f.tries {
			if again := now.Add(period); from.lower.Has(tier.Kind(k)) && f.tries[k].until.Before(again) {
				f.tries[k].until = again
			}
		}
	case failed:
		e := from.edges[r.To]
		e.fail(now, period)
		e.why = r.err
		t.failures++
		t.conversion = false
		t.until = now.Add(backoff(period, t.failures))
	case unmovable:
		t.failures++
		t.conversion, f.why = true, r.err
		t.until = now.Add(period << min(t.failures, unmovableMax))
	}
	not, conversions := f.paused(now)
	if conversions == from.lower && !f.reported && is.kind != "" { // else it was dropped meanwhile
		f.reported, report = true, true
	}
	m.remember(f, now)
	m.index.excludeLocked(b, is.kind, not)
	m.index.mu.Unlock()
	if report {
		m.events.unmovable(Unmovable{
			Batch: r.Victim.ID, Place: b.Inside().Cut().Place, Space: is.space, To: to,
			Form: is.kind, Bytes: is.bytes, Err: r.err,
		})
	}
	return not
}

// remember sets until when f is remembered: for a while after its last pause. It makes putBack look
// at f in time.
func (m *Monitor) remember(f *fault, now time.Time) {
	f.forget = now
	for _, t := range f.tries {
		f.forget = latest(f.forget, t.until)
	}
	f.forget = f.forget.Add(m.cfg.Period << (backoffMax + 1))
	if due := f.due(now); m.due.IsZero() || due.Before(m.due) {
		m.due = due
	}
}

// putBack makes batches victims again whose pauses are over, and all that could not be converted if
// that may be possible now. A batch that cannot be converted is remembered until it is dropped, so
// that it is reported once.
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
		e := m.index.entryLocked(b)
		if e == nil || changed && f.why != nil || !now.Before(f.forget) && (!f.reported || formOf(b) != f.form) {
			m.index.excludeLocked(b, "", 0)
			delete(m.faults, b)
			continue
		}
		for to, edge := range m.spaces[e.in.place].edges {
			k := m.spaces[to].Kind()
			t := &f.tries[k]
			// Another batch, if there is one, shows first whether the edge works.
			if over := !now.Before(t.until); over && t.failures > 0 && !t.conversion && edge.failures > 0 &&
				e.in.smallestLocked()[k] > 0 {
				t.until = now.Add(backoff(m.cfg.Period, t.failures))
			}
		}
		not, _ := f.paused(now)
		m.index.excludeLocked(b, f.form.kind, not)
		m.remember(f, now)
	}
}

// aside counts, for each space, the victims that the monitor does not move to some tier now, but
// will try again.
func (m *Monitor) aside() []int {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	n := make([]int, len(m.spaces))
	for b, f := range m.faults {
		e := m.index.entryLocked(b)
		if e == nil {
			continue
		}
		for to, edge := range m.spaces[e.in.place].edges {
			t := f.tries[m.spaces[to].Kind()]
			if m.last.Before(t.until) && t.failures < giveUp && (t.conversion || !edge.broken()) {
				n[e.in.place]++
				break
			}
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
		_, conversions := f.paused(m.last)
		if e := m.index.entryLocked(b); e != nil && conversions != 0 && e.in.place == i {
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
