package reservation

import (
	"math"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

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
func (m *Manager) Waiting(dst []Demand, any []Choice) ([]Demand, []Choice) {
	m.mu.Lock()
	if m.mu.special == 0 && m.mu.served == nil {
		m.mu.Unlock()
		return m.Demand(dst), any
	}
	defer m.mu.Unlock()
	alone := make([]Demand, len(m.lines))
	for w := m.mu.oldest; w != nil; w = w.next {
		if w == m.mu.served {
			continue
		}
		var c Choice
		for i := range w.slots {
			if s := &w.slots[i]; s.in() {
				c = append(c, Demand{Space: s.line.space.ID(), Bytes: s.need, Smallest: s.need, Headroom: s.wants() - s.need, Waiters: 1})
			}
		}
		switch len(c) {
		case 0:
		case 1:
			alone[m.spaces.index(c[0].Space)].add(c[0])
		default:
			any = append(any, c)
		}
	}
	for _, d := range alone {
		if d.Waiters > 0 {
			dst = append(dst, d)
		}
	}
	return dst, any
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

// Reconsider is for the monitor, while there are waiters: it asks anew how much headroom those
// leave free that do. A wait of more than Config.StuckAfter leaves none any more: consumers have
// had their time. It must be called with no lock held.
func (m *Manager) Reconsider() {
	if m.room == nil {
		return
	}
	type ask struct {
		s           *slot
		need, spare int64
	}
	var asks []ask
	now := time.Since(m.made)
	patience := m.progress.judge.Strangers
	m.mu.Lock()
	if m.mu.special > 0 {
		for w := m.mu.oldest; w != nil; w = w.next {
			for i := range w.slots {
				if s := &w.slots[i]; s.in() && s.keeps {
					a := ask{s, s.need, -1}
					if patience >= 0 && now-w.begun >= patience {
						a.spare = 0
					}
					asks = append(asks, a)
				}
			}
		}
	}
	m.mu.Unlock()
	lockrank.AssertNone("headroom is asked")
	for i := range asks {
		if a := &asks[i]; a.spare < 0 {
			a.spare = m.headroom(a.s.line, a.need)
		}
	}
	changed := make(map[*line]bool)
	m.mu.Lock()
	for _, a := range asks {
		if s := a.s; s.in() && s.spare != a.spare {
			s.spare = a.spare
			changed[s.line] = true
		}
	}
	for l := range changed {
		l.refillLocked()
		l.dirty.Store(true)
	}
	m.mu.Unlock()
	if len(changed) > 0 {
		m.serve()
	}
}

// Refuse is for the monitor, when nothing can be moved away any more. It ends the waits whose
// candidates are all full, with a tier.NoSpaceError that carries hint, and returns how many those
// were. full is called once for each space with waiters, with no lock held. Waiters that came after
// that, or fit by now, keep waiting.
func (m *Manager) Refuse(full func(tier.ID) bool, hint string) int {
	waited := make([]bool, len(m.lines))
	m.mu.Lock()
	newest := m.mu.seq
	for i, l := range m.lines {
		waited[i] = l.waits.Len() > 0
	}
	m.mu.Unlock()
	lockrank.AssertNone("full is asked")
	isFull := make(map[*line]bool)
	for i, l := range m.lines {
		if waited[i] && full(l.space.ID()) {
			isFull[l] = true
		}
	}
	if len(isFull) == 0 {
		return 0
	}
	var done over
	n := 0
	m.mu.Lock()
	for w := m.mu.oldest; w != nil && w.seq <= newest; {
		next := w.next
		if w.stuckLocked(isFull) {
			m.failLocked(w, w.refusalLocked(hint), &done)
			n++
		}
		w = next
	}
	m.mu.Unlock()
	done.wake()
	m.serve()
	return n
}

// stuckLocked reports whether each line that w is in is full and has no room for it.
func (w *waiter) stuckLocked(full map[*line]bool) bool {
	for i := range w.slots {
		s := &w.slots[i]
		if s.in() && (!full[s.line] || s.line.space.Available() >= s.wants()) {
			return false
		}
	}
	return true
}

// refusalLocked is about the first line that w is in.
func (w *waiter) refusalLocked(hint string) error {
	for i := range w.slots {
		if s := &w.slots[i]; s.in() {
			e := &tier.NoSpaceError{Space: s.line.space.ID(), Requested: s.need, Available: s.line.space.Available(), Hint: hint}
			if hint == "" {
				e.Hint = s.line.hint
			}
			return e
		}
	}
	return w.first().exceeded()
}
