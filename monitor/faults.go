package monitor

import (
	"fmt"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// After an error things are tried again later: after two periods, then four, and
// so on up to 64, which is about three seconds by default.
const (
	backoffMax = 6 // doublings
	// unmovableMax is backoffMax for a batch that cannot be converted: 51 seconds by
	// default. A failed conversion costs processor time each, and there may be many.
	unmovableMax = 10
	// giveUp is after how many failures in a row nobody should wait for an edge
	// or a batch any more. It is still tried now and then.
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
	why      error // of the last failure
}

// fail notes a failure. The first may be the batch's own, so that it does not
// block the edge.
func (e *edge) fail(now time.Time, period time.Duration) {
	if e.failures++; e.failures > 1 {
		e.until = now.Add(backoff(period, e.failures))
	}
}

func (e *edge) broken() bool { return e.failures >= giveUp }

func (e *edge) state(to int, now time.Time, perEdge int) Edge {
	if e.failures > 0 {
		perEdge = 1 // one try tells whether it works again
	}
	return Edge{
		To: to, UnderWay: e.underWay, Free: max(0, perEdge-e.underWay),
		Blocked: now.Before(e.until), Broken: e.broken(),
	}
}

// fault is a batch whose move went wrong.
type fault struct {
	form     form  // that the batch had then
	failures int   // in a row, with that form
	own      bool  // the last was the batch's own
	told     bool  // an Unmovable was sent
	why      error // of the last
	edge     *edge // of the last; nil if the batch was only busy
	until    time.Time
	forget   time.Time
	back     bool // it is a victim again, and only its failures are remembered
}

// form is what a batch is in a space. Its failures say nothing about another form.
type form struct {
	space tier.ID
	kind  batch.PayloadType
	bytes int64
}

func formOf(b *batch.Batch) form {
	info := b.Info()
	return form{info.Space, b.PayloadType(), info.Bytes}
}

// hopeful says whether the next try may well succeed, so that it is worth waiting for.
func (f *fault) hopeful() bool {
	return f.failures < giveUp && (f.edge == nil || !f.edge.broken())
}

// fault sets the batch of r aside for a while.
func (m *Monitor) fault(r result, kind outcome, now time.Time) {
	b, e := r.Victim.Batch, m.spaces[r.From].edges[r.To]
	is := formOf(b)
	f := m.faults[b]
	if f == nil || f.form != is {
		f = &fault{form: is}
		m.faults[b] = f
	}
	period := m.cfg.Period
	f.back = false
	switch kind {
	case busy:
		f.until = now.Add(period)
	case failed:
		e.fail(now, period)
		e.why = r.err
		f.failures++
		f.own, f.why, f.edge = false, r.err, e
		f.until = now.Add(backoff(period, f.failures))
	case unmovable:
		f.failures++
		f.until = now.Add(period << min(f.failures, unmovableMax))
		f.own, f.why, f.edge = true, r.err, nil
		if !f.told {
			f.told = true
			m.events.unmovable(Unmovable{Batch: r.Victim.ID, Space: is.space, To: m.spaces[r.To].ID(), Form: is.kind, Bytes: is.bytes, Err: r.err})
		}
	}
	f.forget = f.until.Add(period << (backoffMax + 1))
	m.index.keepAside(b)
	if m.due.IsZero() || f.until.Before(m.due) {
		m.due = f.until
	}
}

// othersTell says whether the edge on which b failed has failed last, and there is another
// batch to try it with.
func (m *Monitor) othersTell(b *batch.Batch, f *fault) bool {
	if f.edge == nil || f.edge.failures == 0 {
		return false
	}
	place, _ := m.index.where(b)
	return place >= 0 && m.index.summary(place).smallest > 0
}

// putBack makes victims again of what was set aside for long enough. A batch that cannot be
// converted is remembered until it is dropped, so that it is reported once.
func (m *Monitor) putBack(now time.Time) {
	if m.cfg.Changes != nil {
		if c := m.cfg.Changes(); c != m.changes {
			m.changes = c
			m.forgive()
		}
	}
	if m.due.IsZero() || now.Before(m.due) {
		return
	}
	m.due = time.Time{}
	for b, f := range m.faults {
		if !f.back && !now.Before(f.until) && m.othersTell(b, f) {
			f.until = now.Add(backoff(m.cfg.Period, f.failures))
			f.forget = f.until.Add(m.cfg.Period << (backoffMax + 1))
		}
		if !f.back && !now.Before(f.until) {
			f.back = true
			m.index.setAside(b, false)
		}
		due := f.until
		if f.back {
			due = f.forget
			if !now.Before(due) {
				if place, _ := m.index.where(b); !f.told || place < 0 || formOf(b) != f.form {
					delete(m.faults, b)
					continue
				}
				f.forget = now.Add(m.cfg.Period << (backoffMax + 1))
				due = f.forget
			}
		}
		if m.due.IsZero() || due.Before(m.due) {
			m.due = due
		}
	}
}

// forgive makes victims again of all batches that could not be converted.
func (m *Monitor) forgive() {
	for b, f := range m.faults {
		if !f.told {
			continue
		}
		if !f.back { // else it is a victim already, or being moved
			m.index.setAside(b, false)
		}
		delete(m.faults, b)
	}
}

// aside counts, for each space, the victims that were set aside and are worth
// waiting for.
func (m *Monitor) aside() []int {
	n := make([]int, len(m.spaces))
	for b, f := range m.faults {
		if place, aside := m.index.where(b); aside && !f.back && f.hopeful() {
			n[place]++
		}
	}
	return n
}

// cannotMove says which batches of space i cannot be converted, and why; "" if there are
// none.
func (m *Monitor) cannotMove(i int) string {
	var n, bytes int64
	var why error
	for b, f := range m.faults {
		if place, aside := m.index.where(b); f.own && aside && place == i {
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
