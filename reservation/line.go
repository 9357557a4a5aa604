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

// line is a space and its waiters. One that has several candidates is in several lines.
//
// A release does not give the freed bytes to the head. It rings the head's bell, and when the head
// runs, it takes the bytes or gives them to others that fit. Until then a request of a running
// goroutine may take them, for a pass. Otherwise goroutines that contend for a few slots would, at
// every release, wait for another goroutine to be scheduled before the bytes are used again.
type line struct {
	m     *Manager
	index int // in Manager.lines
	space *tier.Space
	hint  string // the setting that would make the space larger, for errors
	// lowest is whether there is no slower tier, so that nothing can be evicted from the space.
	lowest bool

	arriving atomic.Int64 // see Manager.Inside().Arriving

	records sync.Pool     // of *record, none of which is in use
	made    atomic.Uint32 // how many records were made

	// waits are the waiters. Manager.mu guards it, except for what takes no lock.
	waits waitline.Line[*slot]
	// dirty is set when there may be room for a waiter. The goroutine that sets it then calls
	// Manager.serve, or leaves that to the head by ringing its bell.
	dirty atomic.Bool
	limit atomic.Int64 // the space's limit when the line was last filled; written under Manager.mu

	holdings atomic.Pointer[dated] // the holders that errors name, as last looked up
	looking  atomic.Bool           // a goroutine is looking them up

	attending bool // there are waiters, and the space knows; guarded by Manager.mu
}

const maxBypass = 1 << 20

// nothing is the charge of a request that can never fit; it is larger than any room.
const nothing = waitline.Nothing

func newLine(m *Manager, sp *tier.Space) *line {
	all := m.spaces.all
	l := &line{m: m, space: sp, hint: sp.Inside().Hint(), lowest: sp.Kind() == all[len(all)-1].Kind()}
	l.waits.Bypass = uint32(max(0, cmp.Or(m.config.Bypass, defaultBypass)))
	l.limit.Store(sp.Room())
	return l
}

// charge returns what the space charges for a buffer of bytes. It returns the constant nothing if
// that is more than the capacity or the space is lost; a pool then need not round a number that
// overflows.
func (l *line) charge(bytes int64) int64 {
	if bytes > l.space.Capacity() || l.space.Lost() != nil {
		return nothing
	}
	return l.space.Charge(bytes)
}

// take charges the space for a request that has not waited, if the line lets it in (enter): what
// least bytes need, or up to what most bytes need. It returns how much it charged.
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

// takeAt is take for a fixed size above 0. It prefers bytes that were parked under the record's
// number.
func (l *line) takeAt(at uint32, need int64) bool {
	if l.waits.Door().Open() {
		return l.space.Inside().TryReserveAt(at, need)
	}
	_, ok := l.ask(need).take(need, need)
	return ok
}

// ask returns a slot for a request of need bytes in l, as the space charges them.
func (l *line) ask(need int64) *slot { return &slot{line: l, need: need} }

// enter reports whether a request that has not waited may try to charge the space. If the line is
// empty it always may. Otherwise it needs a pass from the door, which the caller uses or gives
// back. It may not if the door is shut or there is too little room. A request that may use headroom
// needs no pass while the head waits only because it leaves headroom free.
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

// keeps reports whether the head of the line leaves headroom free, and has not waited too long for
// it.
func (l *line) keeps() bool {
	head := l.waits.Head()
	return head != nil && head.Of.keeps && !head.Of.w.spent.Load()
}

// fillPassing is fill for a request that has a pass from door. The caller gives the pass back if
// there is no room. If a pool or a quota panics, fillPassing does, without serving waiters: the
// goroutine that panics may be the one that serves them.
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

// unpass gives back a pass that was taken from door, and serves waiters: one that fits may have
// found the door shut meanwhile.
func (l *line) unpass(door waitline.Door) {
	if l.waits.GiveBack(door) {
		l.dirty.Store(true)
		l.m.serve()
	}
}

// fill charges the space, and leaves spare bytes free. It does not look at the line. No lock may be
// held, because the space calls its listeners. It returns false if there is no room. An error means
// that the space's quota failed and cannot report whether there is room, so trying again is
// useless.
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

// changed is the line's subscription to the space: it is called after each change, with no lock
// held. After a release it rings the head's bell if a waiter may fit now.
func (l *line) changed(_ *tier.Space, pressed bool) {
	// A new waiter shuts the door first and looks for room then. A release does it the other way
	// round. So one of the two sees the other.
	if pressed {
		return
	}
	if l.space.Room() != l.limit.Load() { // rare; serve then rebuilds the line, see refreshLocked
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

// attendLocked makes the space report every release while the line has waiters: otherwise the space
// may park released bytes silently (see tier's Attend). It is called after each change of the
// waiters.
func (l *line) attendLocked() {
	switch waits := l.waits.Len() > 0; {
	case waits && !l.attending:
		l.space.Inside().Attend()
	case !waits && l.attending:
		l.space.Inside().EndAttend()
	}
	l.attending = l.waits.Len() > 0
}

// pickLocked returns the waiter to serve with the present room: the head, or else the oldest that
// fits, while the door has passes. For the latter it takes a pass, and returns the door. It returns
// nil if no waiter can be served.
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

// exceeded returns the error of a request that can never fit: an *ExceededError, or a
// *tier.LostError.
func (l *line) exceeded(bytes int64) error {
	if err := l.space.Lost(); err != nil {
		return err
	}
	return &ExceededError{
		Space: l.space.ID(), Requested: bytes, Available: l.space.Available(), Limit: l.space.Room(), Hint: l.hint,
	}
}

// full returns the error of a request that does not fit now. Its Cause tells whether the room is
// kept for older requests or as headroom.
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
