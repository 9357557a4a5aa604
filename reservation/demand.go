package reservation

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// inside is a Manager as the monitor and copies see it, who make room.
type inside struct{ *Manager }

// Inside returns what only this module's packages do with reservations. Programs have no use for
// it.
func (m *Manager) Inside() inside { return inside{m} }

// Demand is what waits for one space.
type Demand struct {
	Space    tier.ID
	Bytes    int64 // sum of what waits, or the largest int64 if that is more
	Smallest int64 // the least that one of them needs
	Headroom int64 // the most that one of them leaves free beside; Waiting alone fills it in
	Waiters  int
}

// Demand appends to dst one entry for each space with waiters, ordered by kind and ordinal, and
// returns it. Bytes are counted as the space charges them, and of ReserveUpTo the least; the
// headroom that a waiter leaves free is added. A waiter with several candidates counts in each of
// them, though it will be served from one.
func (m *Manager) Demand(dst []Demand) []Demand {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		if q := &l.waits; q.Len() > 0 {
			dst = append(dst, Demand{Space: l.space.ID(), Bytes: q.Sum(), Smallest: q.Least(), Waiters: q.Len()})
		}
	}
	return dst
}

// Choice is a request that any of several spaces may serve: what it needs in each, in the order of
// its strategy.
type Choice []Demand

// Waiting is Demand for who makes room: requests that any of several spaces may serve are no part
// of the sums. They are appended to any, the oldest first, because room is needed in one of the
// spaces only. A request that is just being served is left out: its bytes are in use already.
// Headroom is no part of Bytes: it is needed once for all.
func (m inside) Waiting(dst []Demand, any []Choice) ([]Demand, []Choice) {
	m.mu.Lock()
	if m.mu.special == 0 && m.mu.served == nil {
		m.mu.Unlock()
		return m.Demand(dst), any
	}
	defer m.mu.Unlock()
	alone := make([]Demand, len(m.lines))
	for w := range m.waitersLocked() {
		if w == m.mu.served {
			continue
		}
		var c Choice
		for s := range w.placesLocked() {
			c = append(c, Demand{Space: s.line.space.ID(), Bytes: s.need, Smallest: s.need, Headroom: s.spared(), Waiters: 1})
		}
		switch len(c) {
		case 0:
		case 1:
			alone[m.spaces.index(c[0].Space)].add(c[0])
		default:
			any = append(any, c)
		}
	}
	alone = slices.DeleteFunc(alone, func(d Demand) bool { return d.Waiters == 0 })
	return append(dst, alone...), any
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

// Arriving returns how many bytes of a space reservations have that left its headroom free. They
// are no work that ends, but batches at rest before long. It may be somewhat more when they are.
func (m inside) Arriving(id tier.ID) int64 {
	if i := m.spaces.index(id); i >= 0 {
		return m.lines[i].arriving.Load()
	}
	return 0
}

// OnDemand calls f whenever a request begins to wait, on its goroutine and with no lock held; f
// must be quick and must not block. A panic of f is logged. The returned function ends that; a call
// that has begun may still be running when it returns.
func (m *Manager) OnDemand(f func()) (cancel func()) { return m.subscribers.Add(f) }

func (m *Manager) announce() {
	if m.subscribers.IsEmpty() {
		return
	}
	lockrank.AssertNone("demand is announced")
	m.subscribers.Each(func(f func()) { m.panics.Do("a subscriber to demand", f) })
}

// Reconsider, called while there are waiters, asks anew how much headroom those
// leave free that do. A wait of more than Config.StuckAfter leaves none any more: consumers have
// had their time. It must be called with no lock held.
func (m inside) Reconsider() {
	if m.config.Headroom == nil {
		return
	}
	spare := make(map[*slot]int64)
	var asks []*slot
	now := time.Since(m.made)
	patience := m.progress.judge.Strangers
	m.mu.Lock()
	if m.mu.special > 0 {
		for w := range m.waitersLocked() {
			for s := range w.placesLocked() {
				switch {
				case !s.keeps:
				case patience >= 0 && now-w.begun >= patience:
					spare[s] = 0
					w.spent.Store(true)
				default:
					asks = append(asks, s)
				}
			}
		}
	}
	m.mu.Unlock()
	lockrank.AssertNone("headroom is asked")
	for _, s := range asks {
		spare[s] = m.headroom(s.line, s.need)
	}
	changed := make(map[*line]bool)
	m.mu.Lock()
	for s, n := range spare {
		if s.in() {
			s.spare = n
			changed[s.line] = changed[s.line] || s.place.Need() != s.wants()
		}
	}
	for l, is := range changed {
		if is {
			l.refillLocked()
			l.dirty.Store(true)
		}
	}
	m.mu.Unlock()
	m.serve()
}

// Refuse, called when nothing can be moved away any more, ends the waits whose
// candidates are all full, with a tier.NoSpaceError that carries hint, and returns how many those
// were. full is called once for each space with waiters, with no lock held. Waiters that came after
// that, or fit by now, keep waiting. So do those that fit into the headroom, which they may take
// after Config.StuckAfter, unless full returns early as well: then nobody waits so long there.
func (m inside) Refuse(full func(tier.ID) (full, early bool), hint string) int {
	m.mu.Lock()
	newest := m.mu.seq
	lines := slices.DeleteFunc(slices.Clone(m.lines), func(l *line) bool { return l.waits.Len() == 0 })
	m.mu.Unlock()
	lockrank.AssertNone("full is asked")
	early := make(map[*line]bool)
	for _, l := range lines {
		if is, soon := full(l.space.ID()); is {
			early[l] = soon
		}
	}
	if len(early) == 0 {
		return 0
	}
	n := 0
	m.end(func(done *over) {
		for w := range m.waitersLocked() {
			if w.seq <= newest && w.stuckLocked(early) {
				m.failLocked(w, w.refusalLocked(hint), done)
				n++
			}
		}
	})
	return n
}

// stuckLocked reports whether each line that w is in is one of early, and has no room for it. The
// headroom that w leaves is room where early is false: before long w leaves none, see Reconsider.
func (w *waiter) stuckLocked(early map[*line]bool) bool {
	for s := range w.placesLocked() {
		soon, full := early[s.line]
		least := s.need
		if soon {
			least = s.wants()
		}
		if !full || s.line.space.Available() >= least {
			return false
		}
	}
	return true
}

// refusalLocked is about the first line that w is in.
func (w *waiter) refusalLocked(hint string) error {
	s := w.placeLocked()
	if s == nil {
		return w.first().exceeded()
	}
	e := s.full()
	e.Hint = cmp.Or(hint, e.Hint)
	return e
}
