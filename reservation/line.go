package reservation

import (
	"cmp"
	"errors"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/waitline"
	"github.com/spillway-db/spillway/tier"
)

// line is a space and its waiters.
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
	// lowest is whether no space is of a slower tier, so that nothing is ever moved away.
	lowest bool

	arriving atomic.Int64 // see Arriving

	records sync.Pool     // of *record, none of which is in use
	made    atomic.Uint32 // records so far

	// waits are the waiters. Manager.mu guards it, except for what takes no lock.
	waits waitline.Line[*slot]
	// dirty is set when there may be room for a waiter. The goroutine that sets it then calls
	// Manager.serve, or leaves that to the head by ringing its bell.
	dirty atomic.Bool
	limit atomic.Int64 // the space's limit when the line was last filled; written under Manager.mu

	holdings atomic.Pointer[dated] // the last that an error names
	looking  atomic.Bool           // somebody looks them up

	attending bool // there are waiters, and the space knows; guarded by Manager.mu
}

const maxBypass = 1 << 20

// nothing is a charge that never fits.
const nothing = waitline.Nothing

func newLine(m *Manager, sp *tier.Space) *line {
	all := m.spaces.all
	l := &line{m: m, space: sp, hint: sp.Inside().Hint(), lowest: sp.Kind() == all[len(all)-1].Kind()}
	l.waits.Bypass = uint32(max(0, cmp.Or(m.config.Bypass, defaultBypass)))
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

// take charges the space for a request that has not waited: what least bytes need, or more, up
// to most, if there is more. It returns how much it charged.
func (s *slot) take(least, most int64) (n int64, ok bool) {
	l := s.line
	if most == 0 && s.need == 0 {
		return 0, true
	}
	door, ok := s.enter()
	switch {
	case !ok:
		return 0, false
	case door.Open():
		n, ok, _ = s.fill(s.spared(), least, most) // waiters get the error of a broken quota
		return n, ok
	}
	n, ok, _ = s.fillPassing(door, s.spared(), least, most)
	if n == 0 { // a request that took nothing has used no pass
		l.unpass(door)
	}
	return n, ok
}

// takeAt is take of a fixed size, for a record that parks there; need is above 0.
func (l *line) takeAt(at uint32, need int64) bool {
	if l.waits.Door().Open() {
		return l.space.Inside().TryReserveAt(at, need)
	}
	_, ok := l.ask(need).take(need, need)
	return ok
}

// ask is a request for need bytes, which l charges.
func (l *line) ask(need int64) *slot { return &slot{line: l, need: need} }

// enter lets a request in that has not waited: freely if the line is empty, else with a pass of
// the door's, which the caller uses or gives back. It is false if the door is shut or there is
// too little room. What may use the headroom needs no pass where the head leaves that free.
func (s *slot) enter() (door waitline.Door, ok bool) {
	l := s.line
	for {
		door = l.waits.Door()
		switch {
		case door.Open():
			return door, true
		case l.space.Available() < max(1, s.wants()):
			return door, false
		case door.Shut():
			return 0, s.upward && l.keeps()
		case l.waits.Pass(door):
			return door, true
		}
	}
}

// keeps reports whether the head of the line leaves headroom free.
func (l *line) keeps() bool {
	head := l.waits.Head()
	return head != nil && head.Of.keeps && !head.Of.w.spent.Load()
}

// fillPassing is fill with a pass of door's, which the caller gives back if there is no room. If a
// pool or a quota panics, it gives the pass back itself. No waiter is served then: the serving
// goroutine may be the one that panics, and would record nothing any more.
func (s *slot) fillPassing(door waitline.Door, spare, least, most int64) (n int64, ok bool, err error) {
	returned := false
	defer func() {
		if !returned {
			s.line.waits.GiveBack(door)
		}
	}()
	n, ok, err = s.fill(spare, least, most)
	returned = true
	return n, ok, err
}

// unpass gives back a pass that was taken from door. While it was out, the door
// may have looked shut to a waiter that could have run.
func (l *line) unpass(door waitline.Door) {
	if l.waits.GiveBack(door) {
		l.dirty.Store(true)
		l.m.serve()
	}
}

// fill charges the space, with or without waiters. No lock may be held, because the space calls its
// listeners. An error is not about room: the space's quota cannot report whether there is any, and
// asking it again would not end.
func (s *slot) fill(spare, least, most int64) (int64, bool, error) {
	l := s.line
	for {
		room := l.space.Available() - spare
		if room < s.need || room == 0 {
			return 0, false, nil
		}
		n := s.need
		if most > least {
			n = l.space.Charge(size.Largest(l.space.Charge, least, most, room))
		}
		err := l.space.Inside().ReserveLeaving(n, spare)
		if err == nil {
			return n, true, nil
		}
		if errors.Is(err, tier.ErrLost) { // a waiter gets this when the line is refreshed, or goes on waiting for others
			return 0, false, nil
		}
		var full *tier.NoSpaceError
		if errors.As(err, &full) && full.Cause != nil && !errors.Is(full.Cause, tier.ErrOutOfBudget) {
			return 0, false, err
		}
		// Another request was faster; there is less room now.
	}
}

// changed is called by the space after each change, without locks.
func (l *line) changed(_ *tier.Space, pressed bool) {
	// A new waiter shuts the door first and looks for room then. A release does it the other way
	// round. So one of the two sees the other.
	if pressed {
		return
	}
	if l.space.Room() != l.limit.Load() { // seldom; some waiters may not be in the line
		l.dirty.Store(true)
		l.m.serve()
		return
	}
	door := l.waits.Door()
	if door.Open() {
		return
	}
	need := l.waits.Least()
	if door.Shut() && !l.keeps() {
		need = l.waits.HeadNeed()
	}
	if l.space.Available() < need {
		return
	}
	// The order matters. The goroutine that takes the head out of the line serves those behind it
	// afterwards. So either it sees the room, and clears dirty, or the new head is seen here.
	if l.dirty.Load() || l.dirty.Swap(true) {
		return // the head was woken and has not looked yet
	}
	if head := l.waits.Head(); head != nil {
		head.Of.w.ring()
	}
}

// attendLocked has the space report every release while there are waiters. It is called after each
// change of the waiters.
func (l *line) attendLocked() {
	switch waits := l.waits.Len() > 0; {
	case waits && !l.attending:
		l.space.Inside().Attend()
	case !waits && l.attending:
		l.space.Inside().EndAttend()
	}
	l.attending = l.waits.Len() > 0
}

// pickLocked returns the waiter to serve from the room that there is: the head, or else the oldest
// that fits, while the door is open. For the latter it takes a pass, and returns the door that it
// is from.
func (l *line) pickLocked() (s *slot, door waitline.Door) {
	room := l.space.Available()
	head := l.waits.Head()
	if head == nil {
		return nil, 0
	}
	if head.Need() <= room {
		return head.Of, 0
	}
	oldest := l.waits.Oldest(room)
	if oldest == nil {
		return nil, 0
	}
	for {
		door = l.waits.Door()
		if door.Shut() {
			if l.keeps() {
				return l.upwardLocked(room), 0
			}
			return nil, 0
		}
		if l.waits.Pass(door) {
			return oldest.Of, door
		}
	}
}

// upwardLocked returns the oldest waiter that may use headroom and needs at most room, or nil.
func (l *line) upwardLocked(room int64) *slot {
	for p := l.waits.Oldest(room); p != nil; p = l.waits.Next(p) {
		if p.Of.upward && p.Need() <= room {
			return p.Of
		}
	}
	return nil
}

// exceeded is the error of a request that can never fit: that it is too large, or that the space is
// lost.
func (l *line) exceeded(bytes int64) error {
	if err := l.space.Lost(); err != nil {
		return err
	}
	return &ExceededError{
		Space: l.space.ID(), Requested: bytes, Available: l.space.Available(), Limit: l.space.Room(), Hint: l.hint,
	}
}

// full is the error of a request that does not fit now.
func (s *slot) full() *tier.NoSpaceError {
	l := s.line
	e := &tier.NoSpaceError{Space: l.space.ID(), Requested: s.need, Available: l.space.Available(), Hint: l.hint}
	switch {
	case e.Available >= s.wants() && l.waits.Door().Shut():
		e.Cause = errKept
	case e.Available >= s.need && e.Available < s.wants():
		e.Cause = errHeadroom
	}
	return e
}
