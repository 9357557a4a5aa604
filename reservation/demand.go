package reservation

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Demand is what waits for one space.
type Demand struct {
	Space    tier.ID
	Bytes    int64 // sum of what waits, or the largest int64 if that is more
	Smallest int64 // the least that one of them needs
	Headroom int64 // the most that one of them leaves free besides; only Waiting sets it
	Waiters  int
}

// add adds another request for the same space.
func (d *Demand) add(other Demand) {
	if d.Waiters == 0 {
		*d = other
		return
	}
	d.Waiters += other.Waiters
	d.Smallest = min(d.Smallest, other.Smallest)
	d.Headroom = max(d.Headroom, other.Headroom)
	d.Bytes += min(other.Bytes, math.MaxInt64-d.Bytes)
}

// Demand appends to dst one entry for each space with waiters, ordered by kind and ordinal, and
// returns it. Bytes are counted as the space charges them, and of ReserveUpTo the least; the
// headroom that a waiter leaves free is added. A waiter with several candidates counts in each of
// them, though it will be served from one.
func (m *Manager) Demand(dst []Demand) []Demand {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		var sum Demand
		for e := range l.queue.All() {
			d := e.Value.demand()
			d.Bytes += d.Headroom
			d.Smallest, d.Headroom = d.Bytes, 0
			sum.add(d)
		}
		if sum.Waiters > 0 {
			dst = append(dst, sum)
		}
	}
	return dst
}

// demand returns what c's request needs.
func (c *candidate) demand() Demand {
	return Demand{Space: c.line.space.ID(), Bytes: c.need, Smallest: c.need, Headroom: c.spared(), Waiters: 1}
}

// Choice is a request that any of several spaces may serve: what it needs in each, in the order of
// its strategy.
type Choice []Demand

// Waiting is Demand for the monitor. Requests that any of several spaces may serve are not in the
// sums. Waiting appends them to any, the oldest first, because they need room in one of the spaces
// only. Headroom is not in Bytes, because the requests need it once together.
func (m *Manager) Waiting(dst []Demand, any []Choice) ([]Demand, []Choice) {
	m.mu.Lock()
	defer m.mu.Unlock()
	alone := make(map[*line]Demand)
	for e := range m.mu.waiters.All() {
		var choice Choice
		var last *line
		for i := range e.Value.candidates {
			if c := &e.Value.candidates[i]; c.entry.Waits() {
				choice, last = append(choice, c.demand()), c.line
			}
		}
		switch len(choice) {
		case 0:
		case 1:
			sum := alone[last]
			sum.add(choice[0])
			alone[last] = sum
		default:
			any = append(any, choice)
		}
	}
	for _, l := range m.lines {
		if sum, ok := alone[l]; ok {
			dst = append(dst, sum)
		}
	}
	return dst, any
}

// Arriving returns how many bytes of a space belong to reservations that left its headroom free.
// Soon these bytes are in batches at rest. Then Arriving may count them for a moment longer.
func (m *Manager) Arriving(id tier.ID) int64 {
	if l := m.line(id); l != nil {
		return l.arriving.Load()
	}
	return 0
}

// Reconsider, called while there are waiters, asks Config.Headroom how much headroom those leave
// free now that do. A wait of more than Config.StallTimeout leaves none any more: consumers have had
// their time. It must be called with no lock held.
func (m *Manager) Reconsider() {
	if m.config.Headroom == nil {
		return
	}
	var all []*candidate
	m.mu.Lock()
	for _, l := range m.lines {
		for e := range l.queue.All() {
			if e.Value.keeps {
				all = append(all, e.Value)
			}
		}
	}
	m.mu.Unlock()
	for _, c := range all {
		keeps, spare := m.config.StallTimeout < 0 || time.Since(c.waiter.begun) < m.config.StallTimeout, int64(0)
		if keeps {
			spare = m.headroom(c.line.space.ID(), c.need)
		}
		m.mu.Lock()
		c.keeps, c.spare = keeps, spare
		m.mu.Unlock()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		l.wakeLocked()
	}
}

// Refuse, called when nothing can be evicted any more, ends the waits whose candidates are all
// full, with a tier.NoSpaceError that carries hint, and returns how many those were. full is called
// once for each space with waiters, with no lock held. Waiters that came after that, or fit by now,
// keep waiting. So do those that fit into the headroom, which they may take after
// Config.StallTimeout, unless full returns early as well: then nobody waits so long there.
func (m *Manager) Refuse(full func(tier.ID) (full, early bool), hint string) (refused int) {
	m.mu.Lock()
	waiting := m.allLocked()
	m.mu.Unlock()
	lockrank.AssertNone("full is asked")
	early := make(map[*line]bool)
	for _, l := range m.lines {
		if !slices.ContainsFunc(waiting, func(w *waiter) bool { return w.in(l) != nil }) {
			continue
		}
		if is, soon := full(l.space.ID()); is {
			early[l] = soon
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range waiting {
		if !w.waits.Waits() || !w.isStuckLocked(early) {
			continue
		}
		err := w.noRoom()
		err.Hint = cmp.Or(hint, err.Hint) + notGiven(w.passedLocked())
		m.failLocked(w, err)
		refused++
	}
	return refused
}

// allLocked returns all that wait, the oldest first.
func (m *Manager) allLocked() (all []*waiter) {
	for e := range m.mu.waiters.All() {
		all = append(all, e.Value)
	}
	return all
}

// isStuckLocked reports whether each line that w is in is one of early, and has no room for it. The
// headroom that w leaves is room where early is false: before long w leaves none, see Reconsider.
func (w *waiter) isStuckLocked(early map[*line]bool) bool {
	for i := range w.candidates {
		c := &w.candidates[i]
		if !c.entry.Waits() {
			continue
		}
		soon, full := early[c.line]
		least := c.need
		if soon {
			least += c.spared()
		}
		if !full || c.line.space.Available() >= least {
			return false
		}
	}
	return true
}
