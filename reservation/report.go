package reservation

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// longWaitAfter is how long a wait takes before it is reported. The moves that make room
// are over by then: 64 MiB at 20 MB/s, a slow disk, take 3 s. It is reported again after
// twice that time, then four times, and so on.
const longWaitAfter = 5 * time.Second

// holdersAfter is after how long the error of a wait names the holders of what was waited for.
const holdersAfter = time.Second

// LongWait describes a wait that takes long. Sizes are bytes.
type LongWait struct {
	Space     tier.ID
	Requested int64         // by the oldest waiter, as the space charges it
	Waited    time.Duration // by it
	Owner     string        // of it; "" if it has none
	Waiters   int           // all that wait for the space
	Waiting   int64         // the sum of what they need
	Holdings  tier.Holdings // of the space
}

// reportLong calls Config.LongWait for the oldest wait of each line, if it is due.
func (m *Manager) reportLong() {
	if m.config.LongWait == nil {
		return
	}
	var due []LongWait
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.mu.reporting || m.closed.Load() {
		return
	}
	for _, l := range m.lines {
		head := l.queue.Head()
		if head == nil || time.Now().Before(head.Value.waiter.due) {
			continue
		}
		w := head.Value.waiter
		waited := time.Since(w.begun)
		w.due = w.begun.Add(2 * waited) // a wait in several lines is reported once
		one := LongWait{
			Space:     l.space.ID(),
			Requested: head.Value.need,
			Waited:    waited,
			Owner:     w.owner.label(),
			Waiters:   l.queue.Len(),
		}
		var sum Demand
		for e := range l.queue.All() {
			sum.add(Demand{Bytes: e.Value.need, Waiters: 1})
		}
		one.Waiting = sum.Bytes
		due = append(due, one)
	}
	if len(due) == 0 {
		return
	}
	m.mu.reporting = true
	m.reports.Go(func() { // holders may take long to look up
		labels.Alarm.Set()
		for _, one := range due {
			one.Holdings = m.holders(one.Space)
			m.panics.Do("Config.LongWait", func() { m.config.LongWait(one) })
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.mu.reporting = false
	})
}

// holders asks Config.Holders.
func (m *Manager) holders(id tier.ID) (h tier.Holdings) {
	ok := false
	if m.config.Holders != nil {
		m.panics.Do("Config.Holders", func() { h, ok = m.config.Holders(id) })
	}
	if sp, known := m.spaces.ByID(id); !ok && known {
		h = sp.Holdings(nil)
	}
	return h
}

// giveUp ends a wait that its context has ended. After a second its error names the holders of what
// was waited for; of many waits that end at once one looks them up.
func (m *Manager) giveUp(ctx context.Context, w *waiter) (*candidate, int64, error) {
	err := ended(ctx, w.String())
	m.mu.Lock()
	m.failLocked(w, err)
	failed := w.err
	looks := !m.mu.looking && failed == err && time.Since(w.begun) >= holdersAfter
	m.mu.looking = m.mu.looking || looks
	passed := w.passedLocked()
	m.mu.Unlock()
	if !looks {
		return nil, 0, failed
	}
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.mu.looking = false
	}()
	e := &longError{error: err, passed: passed}
	kept := int64(-1)
	for i := range w.candidates { // of the candidates the one where holders keep most
		space := w.candidates[i].line.space
		h := m.holders(space.ID())
		var n int64
		for _, one := range h.Holders {
			n += one.Bytes
		}
		if n > kept {
			kept, e.holdings, e.hint = n, &h, space.Hint()
		}
	}
	return nil, 0, e
}

// WaitStats says how long finished waits took, however they ended, and how many are not over.
// Requests that did not have to wait are not counted.
type WaitStats struct {
	Count int64
	Total time.Duration // of all together; they may overlap
	// P50, P99 and P999 are percentiles, P999 that of 99.9 %. They are at most 1/16 too high.
	P50, P99, P999, Max time.Duration
	// Within is a histogram: how many took less than so long, for the powers of two of nanoseconds
	// from 4 µs to 18 minutes.
	Within  map[time.Duration]int64
	Waiting int64         // that are not over
	Oldest  time.Duration // how long the oldest of them has taken so far
}

// Waits returns how long finished waits took, and how many are not over.
func (m *Manager) Waits() WaitStats {
	sum := m.waits.Summary()
	s := WaitStats{
		Count:  sum.Count,
		Total:  sum.Total,
		P50:    sum.P50,
		P99:    sum.P99,
		P999:   sum.P999,
		Max:    sum.Max,
		Within: sum.Within,
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if first := m.mu.waiters.Head(); first != nil {
		s.Waiting, s.Oldest = int64(m.mu.waiters.Len()), time.Since(first.Value.begun)
	}
	return s
}

// Blocked says how long the waits of the owners of one name took, in all and the longest, and which are
// not over.
type Blocked struct {
	Owner   string        // "" stands for all whose waits have no owner
	Waits   int64         // that are over
	Total   time.Duration // of them; they may overlap
	Longest time.Duration
	Waiting int64         // that are not over
	SoFar   time.Duration // how long these have taken, added up
}

const (
	// maxBlocked is how many names are counted apart, those that waited last: a program that gives
	// each task a name of its own would fill the memory. The rest is counted under otherOwners.
	maxBlocked  = 1024
	otherOwners = "(others)"
)

// waitsByName are finished waits by the name of their owner.
type waitsByName struct {
	names  map[string]*fairqueue.Entry[*Blocked]
	recent fairqueue.Queue[*Blocked] // the names, the one that waited last at the end
	others Blocked                   // of names that were dropped
}

// add adds waits that are over.
func (b *Blocked) add(waits int64, total, longest time.Duration) {
	b.Waits += waits
	b.Total += total
	b.Longest = max(b.Longest, longest)
}

// countBlocked counts a finished wait by the name of its owner.
func (m *Manager) countBlocked(o *Owner, took time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	all, name := &m.mu.blocked, o.label()
	if e := all.names[name]; e != nil {
		e.Remove()
		all.recent.Return(e)
	} else {
		if all.recent.Len() >= maxBlocked {
			oldest := all.recent.Head()
			oldest.Remove()
			delete(all.names, oldest.Value.Owner)
			all.others.add(oldest.Value.Waits, oldest.Value.Total, oldest.Value.Longest)
		}
		if all.names == nil {
			all.names = make(map[string]*fairqueue.Entry[*Blocked])
		}
		all.names[name] = all.recent.Push(&Blocked{Owner: name})
	}
	all.names[name].Value.add(1, took, took)
}

// Blocked returns how long owners have waited for room, and wait still, the longest first. At most
// some thousand names are counted apart: those that waited last. The rest is "(others)".
func (m *Manager) Blocked() []Blocked {
	all := make(map[string]*Blocked)
	of := func(name string) *Blocked {
		if all[name] == nil {
			all[name] = &Blocked{Owner: name}
		}
		return all[name]
	}
	m.mu.Lock()
	for e := range m.mu.blocked.recent.All() {
		*of(e.Value.Owner) = *e.Value
	}
	if o := m.mu.blocked.others; o.Waits > 0 {
		of(otherOwners).add(o.Waits, o.Total, o.Longest)
	}
	for e := range m.mu.waiters.All() {
		name := e.Value.owner.label()
		if all[name] == nil && len(all) >= maxBlocked {
			name = otherOwners
		}
		of(name).Waiting++
		of(name).SoFar += time.Since(e.Value.begun)
	}
	m.mu.Unlock()
	var out []Blocked
	for _, b := range all {
		out = append(out, *b)
	}
	slices.SortFunc(out, func(a, b Blocked) int {
		return cmp.Or(cmp.Compare(b.Total+b.SoFar, a.Total+a.SoFar), cmp.Compare(a.Owner, b.Owner))
	})
	return out
}
