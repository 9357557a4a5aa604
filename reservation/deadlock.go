package reservation

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// progress is what the oldest waiter saw of a line when it last looked for deadlocks.
type progress struct {
	changes uint64    // of the line and of its space
	since   time.Time // since when these are the same
}

// lookShare bounds what looking for deadlocks costs: one part in lookShare of a processor.
const lookShare = 20

// unclaimedGrace is added to Config.StallTimeout where nobody is known to hold anything.
const unclaimedGrace = 500 * time.Millisecond

// watch is called by the head of a line at each tick. It reports long waits, and ends the wait of a
// request that is part of a deadlock.
//
// A deadlock is a lack of progress: nothing has changed in the spaces that are waited for, and
// nobody is left who could free anything there. That is so for a space if all that hold some of it
// wait themselves, or have no owner and did nothing for Config.StallTimeout; if no batch can be
// evicted; and if no memory is left that could be reclaimed. An owner that runs may release
// something at any time, however slow it is. So may one that has begun or ended a wait within
// Config.Grace. Each space is looked at by itself, so that a busy one hides no deadlock in another.
func (m *Manager) watch(w *waiter) {
	lockrank.AssertNone("waiters are looked at")
	m.reportLong(w)
	m.mu.Lock()
	first := m.mu.waiters.Head()
	if first == nil || first.Value != w { // one looks for all: the oldest, which heads all its lines
		m.mu.Unlock()
		return
	}
	now, still := time.Now(), false
	lines := make(map[*line]*holders)
	for _, l := range m.lines {
		p, changes := &l.progress, l.changesLocked()
		if p.changes != changes || l.nextLocked() != nil { // a waiter that is about to be served is progress
			*p = progress{changes, now}
		}
		lines[l] = &holders{changes: changes, still: now.Sub(p.since)}
		still = still || l.queue.Len() > 0 && lines[l].still >= m.config.Grace
	}
	if !still || now.Before(m.mu.nextLook) {
		m.mu.Unlock()
		return
	}
	stuck := m.allLocked()
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.mu.nextLook = time.Now().Add(lookShare * time.Since(now))
	}()
	for l, h := range lines {
		h.find(l, now)
	}
	// Begin with all, and take those out for which somebody can still free room, until none is left.
	ownerless := false
	served := make(map[*Owner]bool) // owners that have a wait which can still be served
	for before := -1; before != len(stuck); {
		before, ownerless = len(stuck), false
		for _, h := range lines {
			h.runs = false
			for o := range h.owners {
				h.runs = h.runs || o.runs() || served[o]
			}
		}
		stuck = slices.DeleteFunc(stuck, func(w *waiter) bool {
			is, without := m.isStuck(w, lines)
			ownerless = ownerless || without
			if !is && w.owner != nil {
				served[w.owner] = true
			}
			return !is
		})
	}
	if len(stuck) > 0 {
		m.endDeadlock(stuck, lines, ownerless)
	}
}

// changesLocked returns a number that grows with each change of l's waiters and of what its space
// holds.
func (l *line) changesLocked() uint64 {
	return l.joined + l.space.Books().Now().Changes
}

// holders are those that hold bytes of a space.
type holders struct {
	changes   uint64           // of the line
	still     time.Duration    // how long nothing has changed
	owners    map[*Owner]int64 // bytes by owner
	ownerless int64            // bytes of reservations, handles and records without one
	rest      int64            // used bytes that nobody holds: batches at rest, which could leave for slower spaces
	runs      bool             // one of the owners may still release something
	frees     bool             // room will be free by itself: a move ends, or the device is done with what was freed
	wanted    bool             // somebody waits for the space, or for room to evict batches to
}

// find looks up who holds bytes of l's space.
func (h *holders) find(l *line, now time.Time) {
	h.owners = make(map[*Owner]int64)
	u := l.space.Usage()
	h.frees = u.Retired > l.space.Unsure()
	add := func(owner any, bytes int64) {
		if o, _ := owner.(*Owner); o != nil {
			h.owners[o] += bytes
		} else {
			h.ownerless += bytes
		}
	}
	for _, p := range l.space.Books().Promises() {
		if p.Moves {
			h.frees = true // a move ends by itself
		} else if p.Promised > 0 {
			add(p.Owner, p.Promised)
		}
	}
	type keeper struct{ owner, memory any }
	seen := make(map[keeper]bool)
	for _, v := range l.space.Books().Holds() {
		if k := (keeper{v.Owner, v.Memory}); !seen[k] { // the handle and the record of a batch keep the same bytes
			seen[k] = true
			add(v.Owner, l.space.Describe(&v).Bytes)
		}
	}
	h.rest = l.atRest()
	for o := range h.owners {
		h.still = min(h.still, now.Sub(time.Unix(0, o.changed.Load())))
	}
}

// atRest returns how many used bytes of l's space nobody holds: those of batches at rest, for the most
// part.
func (l *line) atRest() (bytes int64) {
	for _, h := range l.space.Holdings(nil).Holders {
		if h.What == "buffer" {
			bytes = h.Bytes
		}
	}
	return bytes
}

// isStuck reports whether nobody can free room for w, after nothing has changed for so long, and
// whether holders without an owner are among those that keep it. Where batches are at rest, those
// that hold slower spaces count, too: with room there the batches could leave.
func (m *Manager) isStuck(w *waiter, lines map[*line]*holders) (stuck, ownerless bool) {
	patience, still := m.config.Grace, time.Duration(math.MaxInt64)
	for i := range w.candidates {
		c := &w.candidates[i]
		if !c.fits(c.line.space.Room()) { // it can never be served there
			continue
		}
		owners, without := 0, int64(0)
		for _, l := range m.lines {
			h := lines[l]
			below := lines[c.line].rest > 0 && l.space.Kind() > c.line.space.Kind()
			if l != c.line && !below {
				continue
			}
			if !h.wanted {
				h.wanted = true
				h.frees = h.frees || m.movable(l) || m.reclaimable(l, h.rest > 0)
			}
			if h.frees || h.runs {
				return false, false
			}
			owners += len(h.owners)
			without += h.ownerless
			still = min(still, h.still)
		}
		if without > 0 || owners == 0 {
			ownerless = true
			after := m.config.StallTimeout
			// In an engine others may consume what is at rest. If nobody is left who could, the monitor
			// refuses the request.
			consumed := m.config.Movable != nil && c.need <= c.line.space.Available()+lines[c.line].rest
			if after < 0 || consumed {
				return false, false
			}
			if without == 0 {
				after += unclaimedGrace
			}
			patience = max(patience, after)
		}
	}
	return still >= patience, still >= patience && ownerless
}

// movable asks Config.Movable whether batches may leave a space. If that panics they may.
func (m *Manager) movable(l *line) (movable bool) {
	if m.config.Movable == nil {
		return false
	}
	movable = true
	m.panics.Do("Config.Movable", func() { movable = m.config.Movable(l.space.ID()) })
	return movable
}

// endDeadlock ends the wait of one of the stuck waiters, if nothing has changed since they were
// looked at: the youngest whose owner holds something where it is waited for, or else the youngest.
func (m *Manager) endDeadlock(stuck []*waiter, lines map[*line]*holders, ownerless bool) {
	held := func(o *Owner) (bytes int64) {
		if o == nil {
			return 0
		}
		for _, h := range lines {
			if h.wanted {
				bytes += h.owners[o]
			}
		}
		return bytes
	}
	victim := stuck[len(stuck)-1]
	for _, w := range slices.Backward(stuck) {
		if held(w.owner) > 0 || w.grows != nil {
			victim = w
			break
		}
	}
	c := &victim.candidates[0]
	l := c.line
	e := &DeadlockError{
		Space: l.space.ID(), Requested: c.need, Available: l.space.Available(), Owner: victim.owner.label(),
		Held: held(victim.owner), Waiters: len(stuck), Hint: l.space.Hint(),
	}
	if victim.grows != nil && victim.owner == nil {
		v, _ := victim.grows.promise.View()
		e.Held = v.Promised
	}
	if ownerless {
		e.Still = lines[l].still
	}
	e.Holdings = m.holders(e.Space)
	m.mu.Lock()
	defer m.mu.Unlock()
	for l, h := range lines {
		if h.wanted && (l.changesLocked() != h.changes || l.nextLocked() != nil) {
			return
		}
	}
	e.Passed = victim.passedLocked()
	others := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(others) })
	for _, w := range stuck {
		if w != victim && (w.owner == nil || w.owner != victim.owner) && w.waits.Waits() {
			e.others = others
			w.over = append(w.over, goOn)
		}
	}
	m.failLocked(victim, e)
}

// A Reclaimer is memory that is not in batches, and that its holder gives back when it is asked:
// the state of an operator at rest. Reclaim is called on a goroutine of its own, one call at a
// time, when a request waits for room in the reservation's space, or in a faster tier, and no batch
// can be evicted for it. want is how many bytes the request lacks. Reclaim gives memory back by
// Reservation.Shrink. ctx ends after a second, after which the request asks another Reclaimer.
type Reclaimer struct {
	Reservation Reservation
	Name        string // for errors
	Reclaim     func(ctx context.Context, want int64)
}

// reclaimer is a registered Reclaimer.
type reclaimer struct {
	Reclaimer
	busy chan struct{} // holds one value while Reclaim runs
}

// passedLocked names the memory that gave w too little in time, as far as there is some left.
func (w *waiter) passedLocked() (names []string) {
	for _, r := range w.passed {
		if n := r.Reservation.Bytes(); n > 0 {
			names = append(names, fmt.Sprintf("%s, which has %d bytes", r.Name, n))
		}
	}
	return names
}

// reclaimTime is how long a request waits for one Reclaimer.
const reclaimTime = time.Second

// OnReclaim registers memory that can be reclaimed. The returned function unregisters it and waits
// until Reclaim has returned; a second call does nothing. A zero Reservation has nothing to reclaim
// and is not registered.
func (m *Manager) OnReclaim(r Reclaimer) (cancel func()) {
	if r.Reservation.IsZero() {
		return func() {}
	}
	one := &reclaimer{Reclaimer: r, busy: make(chan struct{}, 1)}
	m.mu.Lock()
	m.mu.reclaim = append(m.mu.reclaim, one)
	m.mu.Unlock()
	return func() {
		m.mu.Lock()
		m.mu.reclaim = slices.DeleteFunc(m.mu.reclaim, func(o *reclaimer) bool { return o == one })
		m.mu.Unlock()
		one.busy <- struct{}{} // none begins any more
		<-one.busy
	}
}

// Requested returns how many bytes requests that wait for a space lack.
func (m *Manager) Requested(id tier.ID) (bytes int64) {
	for _, d := range m.Demand(nil) {
		if sp, ok := m.spaces.ByID(id); ok && d.Space == id {
			bytes = max(0, d.Bytes-sp.Available())
		}
	}
	return bytes
}

// nextReclaimerLocked returns the largest reservation that w can ask for memory in a space; nil if
// there is none. If batches are at rest there, which can leave when there is room for them, and the
// space has no such reservation, it is one in a slower space. A Grow does not ask its own.
func (m *Manager) nextReclaimerLocked(w *waiter, l *line, atRest bool) (next *reclaimer) {
	var largest int64
	near := false // next is in l's space
	for _, r := range m.mu.reclaim {
		s, n := r.Reservation.state, r.Reservation.Bytes()
		here, below := s.line == l, atRest && s.line.space.Kind() > l.space.Kind()
		if s == w.grows || n == 0 || !here && !below || slices.Contains(w.passed, r) {
			continue
		}
		if next == nil || here && !near || here == near && n > largest {
			next, near, largest = r, here, n
		}
	}
	return next
}

// reclaimable reports whether the head of the line may still ask for memory that is not in batches.
func (m *Manager) reclaimable(l *line, atRest bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	head := l.queue.Head()
	return head != nil &&
		(head.Value.waiter.asked != nil || m.nextReclaimerLocked(head.Value.waiter, l, atRest) != nil)
}

// reclaimFor asks the largest holder of memory that is not in batches to give some back for w, if w
// heads lines and no batch can be evicted for it. It does not wait: what is given back wakes w. It
// reports whether w heads a line.
func (m *Manager) reclaimFor(ctx context.Context, w *waiter) (isHead bool) {
	m.mu.Lock()
	if w.asked != nil && time.Since(w.asks) >= reclaimTime { // it has freed too little
		w.passed, w.asked = append(w.passed, w.asked), nil
	}
	heads := w.headsLocked()
	waits := w.asked != nil || len(m.mu.reclaim) == 0 ||
		slices.ContainsFunc(heads, func(c *candidate) bool { return c.lack() <= 0 })
	m.mu.Unlock()
	if waits || slices.ContainsFunc(heads, func(c *candidate) bool { return m.movable(c.line) }) {
		return len(heads) > 0
	}
	atRest := make(map[*line]int64)
	for _, c := range heads {
		atRest[c.line] = c.line.atRest()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range heads {
		r := m.nextReclaimerLocked(w, c.line, atRest[c.line] > 0)
		if r == nil || !c.entry.Waits() { // the wait may have failed meanwhile, as by Close
			continue
		}
		w.asked, w.asks = r, time.Now()
		select {
		case r.busy <- struct{}{}:
			lack := c.lack()
			m.calls.Go(func() {
				labels.Reclaim.Set()
				m.reclaim(context.WithoutCancel(ctx), w, r, lack)
			})
		default: // it was asked for another request: see reclaim
		}
		break
	}
	return len(heads) > 0
}

// reclaim asks r for memory for w. When r has returned, it wakes w and those that found r busy: they
// may ask it for what they lack themselves.
func (m *Manager) reclaim(ctx context.Context, w *waiter, r *reclaimer, lack int64) {
	ctx, cancel := context.WithTimeout(ctx, reclaimTime)
	defer cancel()
	defer func() { // also after runtime.Goexit
		m.mu.Lock()
		defer m.mu.Unlock()
		<-r.busy
		if w.asked == r { // w asks another if this was too little
			w.passed, w.asked = append(w.passed, r), nil
		}
		w.wakeUp()
		for e := range m.mu.waiters.All() {
			if e.Value.asked == r {
				e.Value.asked = nil
				e.Value.wakeUp()
			}
		}
	}()
	m.panics.Do("a function that reclaims memory", func() { r.Reclaim(ctx, lack) })
}
