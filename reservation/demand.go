package reservation

import (
	"context"
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
	Waiters  int
}

// Demand appends to dst one entry for each space with waiters, ordered by kind and ordinal, and
// returns it. Bytes are counted as the space charges them, and of ReserveUpTo the least. The headroom
// that waiters leave free is added once. A waiter with several candidates counts in each of them,
// though it will be served from one.
func (m *Manager) Demand(dst []Demand) []Demand {
	if m.waiting.Load() == 0 {
		return dst
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		if l.queue.Len() > 0 {
			dst = append(dst, l.demandLocked(false))
		}
	}
	return dst
}

// demandLocked sums up what waits in the line; with first, only requests for which it is the first
// line that they wait in.
func (l *line) demandLocked(first bool) Demand {
	d := Demand{Space: l.space.ID(), Smallest: math.MaxInt64}
	var headroom int64
	for e := range l.queue.All() {
		c := e.Value
		if first && c != c.request.firstLocked() {
			continue
		}
		if first && (d.Waiters == maxTogether || d.Bytes > l.space.Room()) {
			break
		}
		spared := c.spared()
		d.Waiters++
		d.Bytes += min(c.need, math.MaxInt64-d.Bytes)
		d.Smallest = min(d.Smallest, c.need+spared)
		headroom = max(headroom, spared)
	}
	d.Bytes += min(headroom, math.MaxInt64-d.Bytes)
	return d
}

// Requested returns how many bytes requests that wait for a space lack.
func (m *Manager) Requested(id tier.ID) (bytes int64) {
	if l := m.line(id); l != nil && m.waiting.Load() > 0 {
		m.mu.Lock()
		defer m.mu.Unlock()
		bytes = max(0, l.demandLocked(false).Bytes-l.space.Available())
	}
	return bytes
}

// Arriving returns how many bytes of a space belong to reservations that left its headroom free.
// Soon these bytes are in batches at rest. Then Arriving may count them for a moment longer.
func (m *Manager) Arriving(id tier.ID) int64 {
	if l := m.line(id); l != nil {
		return l.arriving.Load()
	}
	return 0
}

// An Eviction is the outcome of Config.Evict.
type Eviction struct {
	Moved  int64 // bytes that have left the space
	Again  bool  // another call may move other batches: some could not be moved after all
	Coming bool  // others evict from the space, or bytes of it will be free by themselves
	Busy   bool  // batches of the space, or of slower ones, are in transit: no request is refused now
	// Why returns why no batch can leave, for the errors of refused requests. It is called with no
	// lock held, and may be nil.
	Why func() string
	// Broken is set if moves fail where only a repair helps: requests are refused after 100 ms.
	Broken bool
}

// Wake makes the oldest waiter for a space look again, because there may be something to evict.
func (m *Manager) Wake(id tier.ID) {
	l := m.line(id)
	if m.waiting.Load() == 0 || l == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	l.wakeLocked(true)
}

const (
	// maxTogether bounds for how many requests of a line batches are evicted together.
	maxTogether = 256
	// retryEvict is after how long Evict is called again for a waiter although nothing has woken it:
	// a pause after a failed move may be over.
	retryEvict = 4 * tick
	// comingFor is how long a request waits for what is coming in one space before batches are
	// evicted from another that may serve it.
	comingFor = 50 * time.Millisecond
)

// makeRoom works for a waiter that heads lines: it has batches evicted in the first of its spaces
// where that helps, and where it helps in none it asks for memory that is not in batches. woken is
// set if something may have changed. It reports whether w should look for room and call it again at
// once, because batches have left or others may, and whether w heads a line.
func (m *Manager) makeRoom(ctx context.Context, w *request, woken bool) (again, isHead bool) {
	lockrank.AssertNone("batches are evicted")
	coming := false
	for i := range w.candidates {
		c := &w.candidates[i]
		l := c.line
		m.mu.Lock()
		if !c.headsLocked() {
			m.mu.Unlock()
			continue
		}
		isHead = true
		own := c.lack()
		lack := max(own, min(l.demandLocked(true).Bytes, l.space.Room())-l.space.Available())
		skip := m.config.Evict == nil || !woken && l.dry && time.Since(l.tried) < retryEvict
		m.mu.Unlock()
		if own <= 0 {
			return false, true
		}
		if skip {
			continue
		}
		var e Eviction
		m.panics.Do("Config.Evict", func() { e = m.config.Evict(ctx, l.space.ID(), lack) })
		m.mu.Lock()
		l.tried, l.dry, l.eviction = time.Now(), e.Moved == 0 && !e.Again && !e.Coming, e
		m.mu.Unlock()
		if e.Moved > 0 || e.Again {
			return true, true
		}
		if coming = coming || e.Coming; e.Coming && time.Since(w.begun) < comingFor {
			break
		}
	}
	if isHead && !coming {
		m.reclaimFor(ctx, w)
	}
	return false, isHead
}
