package reservation

import (
	"cmp"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/tier"
)

// books are a look at who holds what, who waits for what, and what room there is.
type books struct {
	changes uint64 // reservations that owners have opened and closed so far
	settled bool   // none while the books were read
	owners  map[*Owner]*ownerView
	waits   map[*waiter]*waitView // of owners, and all heads
	lines   map[*line]*lineView
	order   []*line
}

type ownerView struct {
	owner *Owner
	held  map[*line]int64
	total int64
	waits []*waitView
	stuck bool
}

type waitView struct {
	w     *waiter
	owner *ownerView // nil for nobody's
	seq   uint64
	slots []slotView
	ok    bool // it may be served
}

type slotView struct {
	line *line
	need int64
}

type lineView struct {
	room
	ever int64 // what there would be if nobody held anything
	shut bool
	head *waitView
}

// observe reads the books: first what is held, then who waits, then the spaces, so
// that what owners hold is not more than what is used.
func (m *Manager) observe() *books {
	b := &books{owners: make(map[*Owner]*ownerView), waits: make(map[*waiter]*waitView), lines: make(map[*line]*lineView), order: m.lines}
	type open struct {
		owner        *Owner
		reservations []Reservation
	}
	t := &m.progress.owners
	t.Lock()
	b.changes = t.changes
	all := make([]open, 0, len(t.open))
	for o := range t.open {
		all = append(all, open{o, o.reservationsLocked()})
	}
	t.Unlock()
	for _, o := range all {
		v := b.owner(o.owner)
		for _, r := range o.reservations {
			n := r.Bytes()
			v.held[r.rec.line] += n
			v.total += n
		}
	}
	m.mu.Lock()
	for w := range m.progress.waits {
		v := b.wait(w)
		v.owner = b.owner(w.owner)
		v.owner.waits = append(v.owner.waits, v)
	}
	for _, l := range m.lines {
		v := &lineView{shut: l.shut()}
		if head := l.queue.head(); head != nil {
			v.head = b.wait(head.w)
		}
		b.lines[l] = v
	}
	m.mu.Unlock()
	for _, l := range m.lines {
		v := b.lines[l]
		v.used, v.available, v.ever = l.space.Used(), l.space.Available(), l.space.Room()
	}
	t.Lock()
	defer t.Unlock()
	b.settled = t.changes == b.changes
	return b
}

func (b *books) owner(o *Owner) *ownerView {
	v := b.owners[o]
	if v == nil {
		v = &ownerView{owner: o, held: make(map[*line]int64)}
		b.owners[o] = v
	}
	return v
}

// wait returns the view of w, whose place in its lines must not change meanwhile:
// the manager's lock is held.
func (b *books) wait(w *waiter) *waitView {
	v := b.waits[w]
	if v == nil {
		v = &waitView{w: w, seq: w.seq}
		for i := range w.slots {
			if s := &w.slots[i]; s.pos >= 0 {
				v.slots = append(v.slots, slotView{s.line, s.need})
			}
		}
		b.waits[w] = v
	}
	return v
}

// over says whether the wait has ended since it was looked at.
func (v *waitView) over() bool { return v.w.seq != v.seq || v.w.over.Load() }

// stuck returns the waits of the owners that cannot go on, if each line has at most
// the room that the function tells. An owner can go on while one of its goroutines
// runs, or may be served; what it holds may then be given back, which the next round
// takes into account.
func (b *books) stuck(room func(*line) int64) []*waitView {
	for _, v := range b.waits {
		v.ok = false
	}
	for _, o := range b.owners {
		o.stuck = len(o.waits) >= o.owner.Workers()
	}
	for changed := true; changed; {
		changed = false
		for _, v := range b.waits {
			if !v.ok && b.mayBeServed(v, room) {
				v.ok, changed = true, true
				if v.owner != nil {
					v.owner.stuck = false
				}
			}
		}
	}
	var out []*waitView
	for _, o := range b.owners {
		if o.stuck {
			out = append(out, o.waits...)
		}
	}
	slices.SortFunc(out, func(a, b *waitView) int { return cmp.Compare(a.seq, b.seq) })
	return out
}

// mayBeServed says whether there could be room for v in one of its lines. Behind a
// shut door that is only for the head, and for others when the head has gone.
func (b *books) mayBeServed(v *waitView, room func(*line) int64) bool {
	return slices.ContainsFunc(v.slots, func(s slotView) bool {
		l := b.lines[s.line]
		return s.need <= room(s.line) && (!l.shut || l.head == v || l.head != nil && l.head.ok)
	})
}

// room is what there is now.
func (b *books) room(l *line) int64 { return b.lines[l].available }

// mostRoom is what there will ever be until an owner that is stuck gives something
// back: all that nobody, those who run, and those who are no owners hold may come.
func (b *books) mostRoom(l *line) int64 {
	n := b.lines[l].ever
	for _, o := range b.owners {
		if o.stuck {
			n -= o.held[l]
		}
	}
	return n
}

// allStuck says whether no owner is left that could do anything.
func (b *books) allStuck() bool {
	for _, o := range b.owners {
		if !o.stuck {
			return false
		}
	}
	return true
}

// anyMovable says whether something in the way of one of the waits can be moved.
func (b *books) anyMovable(waits []*waitView, movable func(tier.ID) bool) bool {
	if movable == nil {
		return false
	}
	return slices.ContainsFunc(b.waitedFor(waits), func(l *line) bool { return movable(l.space.ID()) })
}

// waitedFor returns the lines in which the waits stand.
func (b *books) waitedFor(waits []*waitView) []*line {
	var out []*line
	for _, l := range b.order {
		if slices.ContainsFunc(waits, func(v *waitView) bool { return v.in(l) }) {
			out = append(out, l)
		}
	}
	return out
}

func (v *waitView) in(l *line) bool {
	return slices.ContainsFunc(v.slots, func(s slotView) bool { return s.line == l })
}

func (b *books) stillness(waits []*waitView) stillness {
	s := stillness{waits: seqs(waits), changes: b.changes}
	for _, l := range b.order { // all: what is held in a slower space may be in a batch's way
		s.rooms = append(s.rooms, b.lines[l].room)
	}
	return s
}

// holdsAny says whether one of those who wait holds something of what is waited
// for.
func (b *books) holdsAny(waits []*waitView) bool { return len(b.holders(waits)) > 0 }

// holders returns the waits whose owner could give something back of what is waited
// for.
func (b *books) holders(waits []*waitView) []*waitView {
	lines := b.waitedFor(waits)
	var out []*waitView
	for _, v := range waits {
		if slices.ContainsFunc(lines, func(l *line) bool { return v.owner.held[l] > 0 }) {
			out = append(out, v)
		}
	}
	return out
}

// tell ends one of the waits, which are those of owners that are stuck: the
// youngest of an owner whose giving up would help and that has not been told yet to
// roll back; if all have, the youngest, and then rolling back again would only turn in
// a circle.
func (m *Manager) tell(b *books, stuck []*waitView) {
	among := b.holders(stuck)
	if len(among) == 0 {
		among = stuck
	}
	v, advice := among[len(among)-1], Split
	t := &m.progress.owners
	t.Lock()
	for _, c := range slices.Backward(among) {
		if !c.owner.owner.told.is {
			v, advice = c, RollBack
			break
		}
	}
	t.Unlock()
	m.tellOne(v, stuck, b.errorOf(v, len(stuck), advice))
}

func (b *books) errorOf(v *waitView, waiters int, advice Advice) *DeadlockError {
	s := v.slots[0]
	return &DeadlockError{
		Space: s.line.space.ID(), Requested: s.need, Available: b.lines[s.line].available,
		Owner: v.owner.owner.name, Held: v.owner.total, Waiters: waiters, Advice: advice, Hint: s.line.hint,
	}
}

// tellOne ends v's wait, unless there is room for it by now. That the owner was told
// is noted before, so that what it does then counts.
func (m *Manager) tellOne(v *waitView, stuck []*waitView, err *DeadlockError) {
	o, t := v.owner.owner, &m.progress.owners
	t.Lock()
	before := o.told
	o.told = told{is: true, past: err.Held + err.Requested, rolledBack: len(o.open) == 0}
	t.Unlock()
	var done over
	m.mu.Lock()
	w := v.w
	ended := !v.over() && !w.fitsLocked()
	if ended {
		err.others = signalOfLocked(stuck, o)
		m.failLocked(w, err, &done)
	}
	m.mu.Unlock()
	if !ended {
		t.Lock()
		o.told = before
		t.Unlock()
		return
	}
	done.wake()
	m.serve()
}

// fitsLocked says whether w is about to be served.
func (w *waiter) fitsLocked() bool {
	for i := range w.slots {
		s := &w.slots[i]
		if s.pos >= 0 && s.line.space.Available() >= s.need && (!s.line.shut() || s.line.queue.head() == s) {
			return true
		}
	}
	return false
}

// shut says whether only the head may be served.
func (l *line) shut() bool { return uint32(l.door.Load()) == 0 }

// signal is set once.
type signal struct {
	once sync.Once
	c    chan struct{}
}

func (s *signal) set() { s.once.Do(func() { close(s.c) }) }

// signalOfLocked returns what is set when one of the waits is over that are not o's;
// nil if there are none.
func signalOfLocked(stuck []*waitView, o *Owner) *signal {
	var s *signal
	for _, v := range stuck {
		if v.owner.owner == o {
			continue
		}
		if s == nil {
			s = &signal{c: make(chan struct{})}
		}
		if v.over() { // just now
			s.set()
			continue
		}
		v.w.tells = append(v.w.tells, s)
	}
	return s
}

// tellThose lets those know who gave way to w that its wait is over.
func (w *waiter) tellThose() {
	for _, s := range w.tells {
		s.set()
	}
}
