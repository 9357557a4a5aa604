package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// lookShare bounds what looking for deadlocks costs: one part in lookShare of a processor.
const lookShare = 20

// holders are those that hold bytes of a space, as a look for deadlocks has found them.
type holders struct {
	changes   uint64           // of the line
	still     time.Duration    // how long nothing has changed
	owners    map[*Owner]int64 // bytes by owner
	ownerless int64            // bytes of reservations, handles and records without one
	occupied  int64            // bytes that were in use before the space was made
	rest      int64            // used bytes that nobody holds: batches at rest, which could leave for slower spaces
	frees     bool             // room will be free by itself, or the head may still make some
	eviction  Eviction         // the last one from the space
}

// stuckRequest is a waiter for which nobody can free room, as far as a look for deadlocks can tell.
type stuckRequest struct {
	*request
	lines     []*line // of the spaces in which somebody would have to free room for it
	full      bool    // batches at rest fill its spaces, and none can leave; else it is in a deadlock
	ownerless bool    // some of what it waits for has no owner
}

// watch is called by the head of a line at each tick. It reports long waits, and ends waits that
// nobody can serve any more.
//
// That is a lack of progress: nothing has changed in the spaces that are waited for, and nobody is
// left who could free anything there. That is so for a space if no batch can be evicted, no memory is
// left that could be reclaimed, and all that hold some of it wait themselves, or have no owner and
// did nothing for Config.StallTimeout. An owner that runs may release something at any time, however
// slow it is. So may one that has begun or ended a wait within grace. Each space is looked at
// by itself, so that a busy one hides no deadlock in another. Where somebody holds bytes, one request
// at a time fails, with a DeadlockError. Where nobody does, batches at rest fill the space, and all
// requests for them fail, with a tier.NoSpaceError.
func (m *Manager) watch(w *request) {
	lockrank.AssertNone("waiters are looked at")
	m.reportLong(w)
	now, still := time.Now(), false
	lines := make(map[*line]*holders)
	var stuck []stuckRequest
	m.mu.Lock()
	if m.mu.waiters.Head() != w {
		m.mu.Unlock() // the oldest, which heads all its lines, looks for all
		return
	}
	for _, l := range m.lines {
		if changes := l.changesLocked(); l.changes != changes || l.nextLocked() != nil {
			l.changes, l.since = changes, now // a waiter that is about to be served is progress
		}
		isWanted := len(l.queue.Waiters) > 0
		h := &holders{changes: l.changes, still: now.Sub(l.since), eviction: l.eviction}
		h.frees = isWanted && (!l.dry || l.eviction.Busy)
		lines[l] = h
		still = still || isWanted && h.still >= grace
	}
	if still = still && !now.Before(m.mu.nextLook); still {
		for _, w := range m.mu.waiters.Waiters {
			stuck = append(stuck, stuckRequest{request: w})
		}
	}
	m.mu.Unlock()
	if !still {
		return
	}
	for l, h := range lines {
		m.find(l, h, now)
	}
	// Begin with all, and take those out for which somebody can still free room, until none is left.
	// An owner with a wait that can still be served may release something then.
	runs := make(map[*Owner]bool)
	for before := -1; before != len(stuck); {
		before = len(stuck)
		left := stuck[:0]
		for _, one := range stuck {
			if m.isStuck(&one, lines, runs) {
				left = append(left, one)
			} else if one.owner != nil {
				runs[one.owner] = true
			}
		}
		stuck = left
	}
	full := slices.DeleteFunc(slices.Clone(stuck), func(one stuckRequest) bool { return !one.full })
	switch {
	case len(full) > 0:
		m.endFull(full, lines)
	case len(stuck) > 0:
		m.endDeadlock(stuck, lines)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.mu.nextLook = time.Now().Add(lookShare * time.Since(now))
}

// changesLocked returns a number that grows with each change of l's waiters and of what its space
// holds, other than by moves that fail.
func (l *line) changesLocked() uint64 { return l.joined + l.space.Books.Now().Progress }

// find looks up who holds bytes of l's space, and whether some will be free.
func (m *Manager) find(l *line, h *holders, now time.Time) {
	h.owners = make(map[*Owner]int64)
	state := l.space.State()
	h.frees = h.frees || state.Retired > state.Unsure
	add := func(owner any, bytes int64) {
		if o, _ := owner.(*Owner); o != nil {
			h.owners[o] += bytes
		} else {
			h.ownerless += bytes
		}
	}
	for _, p := range l.space.Books.Promises() {
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
	for _, v := range l.space.Books.Holds() {
		if k := (keeper{v.Owner, v.Memory}); !seen[k] { // the handle and the record of a batch keep the same bytes
			seen[k] = true
			add(v.Owner, l.space.Describe(&v).Bytes)
		}
	}
	for o := range h.owners {
		h.still = min(h.still, now.Sub(time.Unix(0, o.changed.Load())))
	}
	h.rest = l.atRest()
	m.mu.Lock()
	defer m.mu.Unlock()
	if head := l.queue.Head(); head != nil {
		h.frees = h.frees || m.nextReclaimerLocked(head.request, l, h.rest > 0) != nil
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

// isStuck reports whether nobody can free room for a request, after nothing has changed for long
// enough, and sets the rest of one. Where batches are at rest, those that hold slower spaces count,
// too: with room there the batches could leave. runs has the owners of which a wait can be served.
func (m *Manager) isStuck(one *stuckRequest, lines map[*line]*holders, runs map[*Owner]bool) bool {
	patience, still, engine := grace, time.Duration(math.MaxInt64), m.config.Evict != nil
	one.lines, one.full, one.ownerless = nil, true, false
	for i := range one.candidates {
		c := &one.candidates[i]
		now := c.line.space.State()
		m.mu.Lock() // the need of a request with a size of its own changes
		need, free, fits := c.need, c.leavesFree(&now), one.fits(c, now.Room)
		m.mu.Unlock()
		if !fits { // it can never be served there
			continue
		}
		at := lines[c.line]
		owners, ownerless, occupied := 0, int64(0), int64(0)
		for _, l := range m.lines {
			if l != c.line && (at.rest == 0 || l.space.Kind() <= c.line.space.Kind()) {
				continue
			}
			h := lines[l]
			for o := range h.owners {
				if o.runs() || runs[o] {
					return false
				}
			}
			if h.frees {
				return false
			}
			one.lines = append(one.lines, l)
			owners += len(h.owners)
			ownerless += h.ownerless
			occupied += h.occupied
			still = min(still, h.still)
		}
		if owners > 0 || !engine {
			ownerless += occupied
		}
		after := m.config.StallTimeout
		switch {
		case owners > 0 && ownerless == 0: // grace is enough
			one.full, after = false, 0
		case owners > 0 || ownerless > 0 || !engine:
			one.full, one.ownerless = false, true
			if engine && need <= now.Available+at.rest { // others may consume what is at rest
				return false
			}
		default:
			least := need // before long it leaves no headroom
			if at.eviction.Broken && after > grace {
				after, least = grace, need+free
			}
			if least <= now.Available {
				return false
			}
		}
		if after < 0 {
			return false
		}
		patience = max(patience, after)
	}
	return still >= patience && len(one.lines) > 0
}

// unchangedLocked reports whether nothing has changed in the lines since they were looked at.
func (one *stuckRequest) unchangedLocked(lines map[*line]*holders) bool {
	return one.waits && !slices.ContainsFunc(one.lines, func(l *line) bool {
		return l.changesLocked() != lines[l].changes || l.nextLocked() != nil
	})
}

// endFull ends the waits of requests in whose spaces batches at rest have all room, unless
// something has changed there since they were looked at.
func (m *Manager) endFull(full []stuckRequest, lines map[*line]*holders) {
	hints := make(map[*line]string)
	for l, h := range lines {
		if h.eviction.Why != nil {
			m.panics.Do("Config.Evict", func() { hints[l] = h.eviction.Why() })
		}
	}
	m.mu.Lock()
	full = slices.DeleteFunc(full, func(one stuckRequest) bool { return !one.unchangedLocked(lines) })
	var in []*line
	for _, w := range full {
		in = append(in, w.lines...)
		err := w.noRoom()
		if full, ok := errors.AsType[*tier.NoSpaceError](err); ok {
			full.Hint = cmp.Or(hints[w.candidates[0].line], full.Hint) + notGiven(w.passedLocked())
		}
		m.failLocked(w.request, err)
	}
	m.mu.Unlock()
	if len(full) == 0 {
		return
	}
	m.refused.Add(int64(len(full)))
	var spaces []string
	for _, l := range slices.Backward(m.lines) { // slower spaces first
		if slices.Contains(in, l) {
			spaces = append(spaces, l.space.ID().String())
		}
	}
	text := strings.Join(spaces, ", ")
	guard.Logger(m.config.Logger).Warn("spillway: waiters were refused: all room is taken by batches at rest, "+
		"and no tier below has room", "waiters", len(full), "full", text)
	if m.config.Events != nil {
		m.panics.Do("Config.Events", func() {
			m.config.Events(events.Event{
				Kind: events.Refused, At: time.Now(), Context: context.Background(),
				Text: fmt.Sprintf("%d waiters; full for good: %s", len(full), text),
			})
		})
	}
}

// endDeadlock ends the wait of one of the stuck waiters, if nothing has changed since they were
// looked at: the youngest whose owner holds something where it is waited for, or else the youngest.
func (m *Manager) endDeadlock(stuck []stuckRequest, lines map[*line]*holders) {
	held := make(map[*Owner]int64) // where they are waited for
	for l, h := range lines {
		if slices.ContainsFunc(stuck, func(w stuckRequest) bool { return slices.Contains(w.lines, l) }) {
			for o, n := range h.owners {
				held[o] += n
			}
		}
	}
	victim := stuck[len(stuck)-1]
	for _, w := range slices.Backward(stuck) {
		if held[w.owner] > 0 || w.grows != nil {
			victim = w
			break
		}
	}
	c := &victim.candidates[0]
	l := c.line
	e := &DeadlockError{
		Space: l.space.ID(), Available: l.space.State().Available, Owner: victim.owner.Name(),
		Held: held[victim.owner], Waiters: len(stuck), Hint: l.space.Hint, Holdings: m.holders(l.space.ID()),
	}
	if victim.grows != nil && victim.owner == nil {
		e.Held = victim.grows.Bytes()
	}
	if slices.ContainsFunc(stuck, func(w stuckRequest) bool { return w.ownerless }) {
		e.Still = lines[l].still
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.ContainsFunc(stuck, func(one stuckRequest) bool { return !one.unchangedLocked(lines) }) {
		return
	}
	e.Requested, e.Passed = c.need, victim.passedLocked()
	others := make(chan struct{})
	goOn := sync.OnceFunc(func() { close(others) })
	for _, w := range stuck {
		if w.request != victim.request && (w.owner == nil || w.owner != victim.owner) {
			e.others = others
			w.over = append(w.over, goOn)
		}
	}
	m.failLocked(victim.request, e)
}
