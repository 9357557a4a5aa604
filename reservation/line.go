package reservation

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/tier"
)

// line is a space and those who wait for it, in the order in which they came.
//
// The oldest waiter is the head. While it does not fit, others that do may be
// served before it, but only Config.Bypass of them: each takes a pass from the
// door, and when none is left the door is shut, so that what is freed from then
// on adds up until the head fits. A new head brings new passes.
//
// Freed bytes are not handed to the head; its bell is rung, and when it runs it
// takes them, or gives them to others that fit. Until then a goroutine that is
// running may have them, for a pass. Otherwise every release among goroutines that
// contend for a few slots would have to wait for another goroutine to be
// scheduled before the bytes are used again.
type line struct {
	m     *Manager
	index int // in Manager.lines
	space *tier.Space
	hint  string

	records sync.Pool     // of *record, none of which is in use
	made    atomic.Uint32 // records so far

	// door is doorOpen while nobody waits; else the head's number, in the upper
	// half, over the passes that are left. It is an atomic so that who passes by
	// need not lock; heads change under Manager.mu.
	door atomic.Uint64
	// dirty is set when there may be room for a waiter. Whoever sets it calls
	// Manager.serve then, or leaves that to the head by ringing its bell.
	dirty atomic.Bool
	// What changed has to know without a lock; written under Manager.mu.
	head     atomic.Pointer[waiter]
	headNeed atomic.Int64
	least    atomic.Int64 // smallest need in the queue
	limit    atomic.Int64 // the space's limit when the queue was last built

	account atomic.Pointer[dated] // the last that an error names

	// Guarded by Manager.mu.
	queue     queue
	heads     uint32 // number of the last head
	attending bool   // somebody waits, and the space knows
}

const (
	doorOpen  = math.MaxUint64
	maxBypass = 1 << 20
)

func newLine(m *Manager, sp *tier.Space) *line {
	l := &line{m: m, space: sp, hint: sp.Hint()}
	l.door.Store(doorOpen)
	l.least.Store(nothing)
	l.limit.Store(sp.Room())
	return l
}

// charge returns what bytes take out of the space, or nothing, which never
// fits, if it is more than there is, or the space is lost. (So that a pool need not round a number
// that overflows.)
func (l *line) charge(bytes int64) int64 {
	if bytes > l.space.Capacity() || l.space.Lost() != nil {
		return nothing
	}
	return l.space.Charge(bytes)
}

// take charges the space for someone who did not wait: what least bytes need, or
// more, up to most, if there is more. It says how much it charged.
func (l *line) take(need, least, most int64) (n int64, ok bool) {
	if most == 0 && need == 0 {
		return 0, true
	}
	l.throughDoor(need, func() bool {
		n, ok, _ = l.fill(need, least, most) // who waits is told of a broken quota
		return ok && n > 0                   // who is content with nothing has passed nobody
	})
	return n, ok
}

// takeAt is take of a fixed size, for a record that parks there; need is above 0.
func (l *line) takeAt(at uint32, need int64) bool {
	if l.door.Load() == doorOpen {
		return l.space.TryReserveAt(at, need)
	}
	return l.throughDoor(need, func() bool { return l.space.TryReserveAt(at, need) })
}

// throughDoor calls charge, for a pass if somebody waits; false if the door is shut or
// there is no room.
func (l *line) throughDoor(need int64, charge func() bool) bool {
	for {
		door := l.door.Load()
		if door == doorOpen {
			return charge()
		}
		if uint32(door) == 0 || l.space.Available() < max(1, need) {
			return false
		}
		if !l.door.CompareAndSwap(door, door-1) {
			continue
		}
		ok := charge()
		if !ok {
			l.unpass(door)
		}
		return ok
	}
}

// unpass gives back a pass that was taken from door. While it was out, the door
// may have looked shut to a waiter that could have run.
func (l *line) unpass(door uint64) {
	for {
		now := l.door.Load()
		if now == doorOpen || now>>32 != door>>32 {
			return
		}
		if l.door.CompareAndSwap(now, now+1) {
			if uint32(now) == 0 {
				l.dirty.Store(true)
				l.m.serve()
			}
			return
		}
	}
}

// fill charges the space, whoever waits. No lock may be held, for the space
// tells its listeners. An error is not about room: the space's quota cannot say
// whether there is any, and asking it again would not end.
func (l *line) fill(need, least, most int64) (int64, bool, error) {
	for {
		room := l.space.Available()
		if room < need || room == 0 {
			return 0, false, nil
		}
		n := need
		if most > least {
			n = l.upTo(least, most, room)
		}
		err := l.space.Reserve(n)
		if err == nil {
			return n, true, nil
		}
		if errors.Is(err, tier.ErrLost) { // who waits is told when the line is refreshed, or goes on waiting for others
			return 0, false, nil
		}
		if cause := errors.Unwrap(err); cause != nil && !errors.Is(cause, tier.ErrOutOfBudget) {
			return 0, false, err
		}
		// Somebody was faster; there is less room now.
	}
}

// upTo returns the charge of the largest size from least to most whose charge
// fits into room; that of least does.
func (l *line) upTo(least, most, room int64) int64 {
	most = min(most, room) // a charge is never below the size
	if n := l.space.Charge(most); n <= room {
		return n
	}
	lo, hi := least, most // lo fits, hi does not
	for hi-lo > 1 {
		mid := lo + (hi-lo)/2
		if l.space.Charge(mid) <= room {
			lo = mid
		} else {
			hi = mid
		}
	}
	return l.space.Charge(lo)
}

// changed is called by the space after each change, without locks.
func (l *line) changed(_ *tier.Space, c tier.Change) {
	// Who begins to wait shuts the door first and looks for room then; who frees
	// does it the other way round. So one of the two sees the other.
	if c != tier.Released {
		return
	}
	if l.space.Room() != l.limit.Load() { // seldom; some may wait who do not stand in the line
		l.dirty.Store(true)
		l.m.serve()
		return
	}
	door := l.door.Load()
	if door == doorOpen {
		return
	}
	need := &l.least
	if uint32(door) == 0 {
		need = &l.headNeed
	}
	if l.space.Available() < need.Load() {
		return
	}
	// The order matters: whoever takes the head out of the line serves those behind
	// it afterwards, so either that sees the room, and clears dirty, or the new
	// head is seen here.
	if l.dirty.Load() || l.dirty.Swap(true) {
		return // somebody was told and has not looked yet
	}
	if w := l.head.Load(); w != nil {
		w.ring()
	}
}

// updateLocked makes door and least agree with the queue, after each change.
func (l *line) updateLocked() {
	l.least.Store(l.queue.least())
	head := l.queue.head()
	switch {
	case head == nil:
		l.head.Store(nil)
		l.door.Store(doorOpen)
		if l.attending {
			l.attending = false
			l.space.EndAttend()
		}
	case head.w != l.head.Load():
		l.headNeed.Store(head.need)
		l.head.Store(head.w)
		if l.heads++; l.heads == math.MaxUint32 { // doorOpen has that number
			l.heads = 0
		}
		l.door.Store(uint64(l.heads)<<32 | uint64(l.m.bypass))
		if !l.attending {
			l.attending = true
			l.space.Attend()
		}
	}
}

// pickLocked returns who is to be served from the room that there is: the head,
// or else the oldest that fits, while the door is open. For the latter it takes
// a pass, and returns the door that it is from, else doorOpen.
func (l *line) pickLocked() (s *slot, door uint64) {
	room := l.space.Available()
	head := l.queue.head()
	if head == nil || head.need <= room {
		return head, doorOpen
	}
	s = l.queue.oldest(room)
	if s == nil {
		return nil, doorOpen
	}
	for {
		door = l.door.Load()
		if uint32(door) == 0 {
			return nil, doorOpen
		}
		if l.door.CompareAndSwap(door, door-1) {
			return s, door
		}
	}
}

// exceeded is the error of a request that can never fit: that it is too large, or that the space is lost.
func (l *line) exceeded(bytes int64) error {
	if err := l.space.Lost(); err != nil {
		return err
	}
	return &ExceededError{
		Space: l.space.ID(), Requested: bytes, Available: l.space.Available(), Limit: l.space.Room(), Hint: l.hint,
	}
}

// full is the error of a request that does not fit now.
func (l *line) full(need int64) error {
	e := &tier.NoSpaceError{Space: l.space.ID(), Requested: need, Available: l.space.Available(), Hint: l.hint}
	if e.Available >= need && uint32(l.door.Load()) == 0 {
		e.Cause = errKept
	}
	return e
}
