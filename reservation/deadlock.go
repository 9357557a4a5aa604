package reservation

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
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

// watch is called by the head of a line at each tick. It reports long waits, and ends waits that
// nobody can serve any more.
//
// That is a lack of progress: nothing has changed in the spaces that are waited for, and nobody is
// left who could free anything there. That is so for a space if no batch can be evicted, no memory is
// left that could be reclaimed, and all that hold some of it wait themselves, or have no owner and
// did nothing for Config.StallTimeout. An owner that runs may release something at any time, however
// slow it is. So may one that has begun or ended a wait within Config.Grace. Each space is looked at
// by itself, so that a busy one hides no deadlock in another. Where somebody holds bytes, one request
// at a time fails, with a DeadlockError. Where nobody does, batches at rest fill the space, and all
// requests for them fail, with a tier.NoSpaceError.
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
		h := &holders{changes: changes, still: now.Sub(p.since), eviction: l.eviction}
		h.frees = l.queue.Len() > 0 && (!l.dry || l.eviction.Busy)
		lines[l] = h
		still = still || l.queue.Len() > 0 && h.still >= m.config.Grace
	}
	if !still || now.Before(m.mu.nextLook) {
		m.mu.Unlock()
		return
	}
	var waiting []*waiter
	for e := range m.mu.waiters.All() {
		waiting = append(waiting, e.Value)
	}
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
	stuck, ownerless := waiting, false
	var full []*waiter
	served := make(map[*Owner]bool) // owners that have a wait which can still be served
	for before := -1; before != len(stuck); {
		before, ownerless, full = len(stuck), false, nil
		for _, h := range lines {
			h.runs = false
			for o := range h.owners {
				h.runs = h.runs || o.runs() || served[o]
			}
		}
		stuck = slices.DeleteFunc(stuck, func(w *waiter) bool {
			is := m.isStuck(w, lines)
			switch {
			case is == waits && w.owner != nil:
				served[w.owner] = true
			case is == stuckOwnerless:
				ownerless = true
			case is == stuckFull:
				full = append(full, w)
			}
			return is == waits
		})
	}
	switch {
	case len(full) > 0:
		m.endFull(full, lines)
	case len(stuck) > 0:
		m.endDeadlock(stuck, lines, ownerless)
	}
}

// changesLocked returns a number that grows with each change of l's waiters and of what its space
// holds, other than by moves that fail.
func (l *line) changesLocked() uint64 {
	return l.joined + l.space.Books().Now().Progress
}

// holders are those that hold bytes of a space.
type holders struct {
	changes   uint64           // of the line
	still     time.Duration    // how long nothing has changed
	owners    map[*Owner]int64 // bytes by owner
	ownerless int64            // bytes of reservations, handles and records without one
	occupied  int64            // bytes that were in use before the space was made
	rest      int64            // used bytes that nobody holds: batches at rest, which could leave for slower spaces
	runs      bool             // one of the owners may still release something
	frees     bool             // room will be free by itself: a move ends, or the device is done with what was freed
	wanted    bool             // somebody waits for the space, or for room to evict batches to
	eviction  Eviction         // the last one from the space
}

// find looks up who holds bytes of l's space.
func (h *holders) find(l *line, now time.Time) {
	h.owners = make(map[*Owner]int64)
	h.frees = h.frees || l.space.Usage().Retired > l.space.Unsure()
	add := func(owner any, bytes int64) {
		if o, _ := owner.(*Owner); o != nil {
			h.owners[o] += bytes
		} else {
			h.ownerless += bytes
		}
	}
	for _, p := range l.space.Books().Promises() {
		switch {
		case p.Moves:
			h.frees = true // a move ends by itself
		case p.Owner == books.Occupied:
			h.occupied += p.Promised
		case p.Promised > 0:
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

// outlook is what a waiter may expect.
type outlook uint8

const (
	waits          outlook = iota // somebody may still free room for it
	stuckOwners                   // it is in a deadlock of owners
	stuckOwnerless                // the same, and others hold some of what it waits for
	stuckFull                     // batches at rest fill its spaces, and none can leave
)

// isStuck reports whether nobody can free room for w, after nothing has changed for long enough.
// Where batches are at rest, those that hold slower spaces count, too: with room there the batches
// could leave.
func (m *Manager) isStuck(w *waiter, lines map[*line]*holders) outlook {
	patience, still, is := m.config.Grace, time.Duration(math.MaxInt64), stuckFull
	for i := range w.candidates {
		c := &w.candidates[i]
		if !c.fits(c.line.space.Room()) { // it can never be served there
			continue
		}
		at := lines[c.line]
		owners, without, occupied := 0, int64(0), int64(0)
		for _, l := range m.lines {
			h := lines[l]
			below := at.rest > 0 && l.space.Kind() > c.line.space.Kind()
			if l != c.line && !below {
				continue
			}
			if !h.wanted {
				h.wanted = true
				h.frees = h.frees || m.reclaimable(l, h.rest > 0)
			}
			if h.frees || h.runs {
				return waits
			}
			owners += len(h.owners)
			without += h.ownerless
			occupied += h.occupied
			still = min(still, h.still)
		}
		if owners > 0 || m.config.Evict == nil {
			without += occupied
		}
		after := m.config.StallTimeout
		switch {
		case owners == 0 && without == 0 && m.config.Evict != nil:
			least := c.need
			if at.eviction.Broken && after > m.config.Grace {
				after, least = m.config.Grace, c.need+c.spared()
			}
			if least <= c.line.space.Available() || after < 0 { // before long it leaves no headroom
				return waits
			}
			patience = max(patience, after)
			continue
		case without > 0 || owners == 0:
			// In an engine others may consume what is at rest.
			consumed := m.config.Evict != nil && c.need <= c.line.space.Available()+at.rest
			if after < 0 || consumed {
				return waits
			}
			if without == 0 {
				after += unclaimedGrace
			}
			patience = max(patience, after)
			is = stuckOwnerless
		case is == stuckFull:
			is = stuckOwners
		}
	}
	if still < patience {
		return waits
	}
	return is
}

// hasChangedLocked reports whether something has changed since l was looked at.
func (h *holders) hasChangedLocked(l *line) bool {
	return l.changesLocked() != h.changes || l.nextLocked() != nil
}

// endFull ends the waits of requests in whose spaces batches at rest have all room, unless
// something has changed there since they were looked at.
func (m *Manager) endFull(all []*waiter, lines map[*line]*holders) {
	hints := make(map[*line]string)
	for l, h := range lines {
		if h.wanted && h.eviction.Why != nil {
			m.panics.Do("Config.Evict", func() { hints[l] = h.eviction.Why() })
		}
	}
	m.mu.Lock()
	changed := make(map[*line]bool)
	for l, h := range lines {
		changed[l] = h.hasChangedLocked(l)
	}
	waiters, full := 0, make(map[*line]bool)
	for _, w := range all {
		var its []*line
		for i := range w.candidates {
			if !w.candidates[i].entry.Waits() { // it can never be served there
				continue
			}
			for _, l := range m.lines {
				from := w.candidates[i].line
				if l == from || lines[from].rest > 0 && l.space.Kind() > from.space.Kind() {
					its = append(its, l)
				}
			}
		}
		if len(its) == 0 || slices.ContainsFunc(its, func(l *line) bool { return changed[l] }) {
			continue
		}
		for _, l := range its {
			full[l] = true
		}
		err := w.noRoom()
		err.Hint = cmp.Or(hints[w.candidates[0].line], err.Hint) + notGiven(w.passedLocked())
		m.failLocked(w, err)
		waiters++
	}
	m.mu.Unlock()
	if waiters == 0 {
		return
	}
	m.refused.Add(int64(waiters))
	var spaces []string
	for _, l := range slices.Backward(m.lines) { // slower spaces first
		if full[l] {
			spaces = append(spaces, l.space.ID().String())
		}
	}
	text := strings.Join(spaces, ", ")
	guard.Logger(m.config.Logger).Warn("spillway: waiters were refused: all room is taken by batches at rest, "+
		"and no tier below has room", "waiters", waiters, "full", text)
	if m.config.Events != nil {
		m.panics.Do("Config.Events", func() {
			m.config.Events(events.Event{
				Kind: events.Refused, At: time.Now(), Context: context.Background(),
				Text: fmt.Sprintf("%d waiters; full for good: %s", waiters, text),
			})
		})
	}
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
		if h.wanted && h.hasChangedLocked(l) {
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

// reclaimFor asks the largest holder of memory that is not in batches to give some back for w, which
// heads the lines of these candidates, and for which no batch can be evicted. It does not wait: what
// is given back wakes w.
func (m *Manager) reclaimFor(ctx context.Context, w *waiter, heads []*candidate) {
	m.mu.Lock()
	if w.asked != nil && time.Since(w.asks) >= reclaimTime { // it has freed too little
		w.passed, w.asked = append(w.passed, w.asked), nil
	}
	idle := w.asked != nil || len(m.mu.reclaim) == 0
	m.mu.Unlock()
	if idle {
		return
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
		return
	}
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
