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
	Space   tier.ID
	Bytes   int64 // sum of what waits, or the largest int64 if that is more
	Waiters int
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
		if len(l.queue.Waiters) > 0 {
			dst = append(dst, l.demandLocked(false))
		}
	}
	return dst
}

// demandLocked sums up what waits in the line; with first, only requests for which it is the first
// line that they wait in.
func (l *line) demandLocked(first bool) Demand {
	now := l.space.State()
	d := Demand{Space: l.space.ID()}
	var headroom int64
	for _, c := range l.queue.Waiters {
		if first && c != c.request.firstLocked() {
			continue
		}
		if first && (d.Waiters == maxTogether || d.Bytes > now.Room) {
			break
		}
		d.Waiters++
		d.Bytes += min(c.need, math.MaxInt64-d.Bytes)
		headroom = max(headroom, c.leavesFree(&now))
	}
	d.Bytes += min(headroom, math.MaxInt64-d.Bytes)
	return d
}

// Requested returns how many bytes requests that wait for a space lack.
func (m *Manager) Requested(id tier.ID) (bytes int64) {
	for _, d := range m.Demand(nil) {
		if sp, _ := m.spaces.ByID(id); d.Space == id {
			bytes = max(0, d.Bytes-sp.State().Available)
		}
	}
	return bytes
}

// Arriving returns how many bytes of a space belong to reservations that left its headroom free.
// Soon these bytes are in batches at rest. Then Arriving may count them for a moment longer.
func (m *Manager) Arriving(id tier.ID) int64 {
	for _, l := range m.lines {
		if l.space.ID() == id {
			return l.arriving.Load()
		}
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
	if m.waiting.Load() == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		if l.space.ID() == id {
			l.wakeLocked(true)
		}
	}
}

const (
	// maxTogether bounds for how many requests of a line batches are evicted together.
	maxTogether = 256
	// comingFor is how long a request waits for what is coming in one space before batches are
	// evicted from another that may serve it.
	comingFor = 50 * time.Millisecond
)

// makeRoom works for a waiter that heads lines: it has batches evicted in the first of its spaces
// in which that helps, and where it helps in none it asks for memory that is not in batches. It reports
// whether w should look for room and call it again at once, because batches have left or others may,
// and whether w heads a line.
func (m *Manager) makeRoom(ctx context.Context, w *request) (again, isHead bool) {
	lockrank.AssertNone("batches are evicted")
	coming := false
	for i := range w.candidates {
		c := &w.candidates[i]
		l := c.line
		m.mu.Lock()
		if l.queue.Head() != c {
			m.mu.Unlock()
			continue
		}
		isHead = true
		now := l.space.State()
		own := c.need + c.leavesFree(&now) - now.Available
		lack := max(own, min(l.demandLocked(true).Bytes, now.Room)-now.Available)
		m.mu.Unlock()
		if own <= 0 {
			return false, true
		}
		if m.config.Evict == nil {
			continue
		}
		var e Eviction
		m.panics.Do("Config.Evict", func() { e = m.config.Evict(ctx, l.space.ID(), lack) })
		m.mu.Lock()
		l.eviction, l.dry = e, e.Moved == 0 && !e.Again && !e.Coming
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
