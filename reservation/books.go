package reservation

import (
	"cmp"
	"slices"
	"time"

	"github.com/spillway-db/spillway/tier"
)

// books are a look at who holds what, who waits for what, and what room there is. Making
// them, and finding who is stuck, takes time in proportion to what is looked at, but for
// the sorting of waits by size: steps counts that.
type books struct {
	changes uint64 // reservations that owners have opened and closed so far
	settled bool   // none while the books were read
	owners  map[*Owner]*ownerView
	waits   map[*waiter]*waitView // that are looked at, and all heads
	plain   []*waitView           // of waits: those without an owner
	lines   []*lineView           // as Manager.lines
	steps   int

	certain, still []*waitView // what stuck returns with the most room, and with what there is

	quiet time.Duration // how long nothing has changed, if handles and records of unknown owners are in the way
}

// ownerView is what an owner holds and waits for.
type ownerView struct {
	owner *Owner
	held  []int64 // by line: reservations, and memory that only this owner holds
	kept  []*commons
	total int64 // of all, in all spaces
	waits []*waitView
	stuck bool
}

// commons is what handles and records of more than one owner keep. It is free only when
// none of them does.
type commons struct {
	line    *lineView
	bytes   int64
	owners  []*ownerView
	stuck   int  // of owners
	nobodys bool // by a handle or record of an unknown owner, too
}

type waitView struct {
	w     *waiter
	owner *ownerView // nil for nobody's
	seq   uint64
	begun time.Duration // since Manager.made
	slots []slotView
	ok    bool // it may be served
}

type slotView struct {
	line *lineView
	need int64
}

type lineView struct {
	*line
	room
	index   int
	ever    int64 // what there would be if nobody held anything
	own     int64 // what the engine has of it for as long as it is open
	kept    int64 // bytes that handles and records keep
	nobodys int64 // of these, what those of unknown owners keep
	shut    bool
	head    *waitView
	waits   []lineWait // the smallest need first

	// Of one run of stuck.
	most  int64 // the room that there may be
	next  int   // the first of waits that may not be served
	dirty bool
}

type lineWait struct {
	need int64
	wait *waitView
}

// observe reads the books: first what is held, then who waits, then the spaces, so
// that what owners hold is not more than what is used.
func (m *Manager) observe() *books {
	b := &books{owners: make(map[*Owner]*ownerView), waits: make(map[*waiter]*waitView)}
	for i, l := range m.lines {
		b.lines = append(b.lines, &lineView{line: l, index: i})
	}
	b.changes = m.observeReservations(b)
	m.observeHolds(b)
	m.mu.Lock()
	for w := range m.progress.waits {
		v := b.wait(w)
		if w.owner == nil {
			b.plain = append(b.plain, v)
			continue
		}
		v.owner = b.owner(w.owner)
		v.owner.waits = append(v.owner.waits, v)
	}
	for _, l := range b.lines {
		l.shut = l.line.shut()
		if head := l.line.waits.Head(); head != nil {
			l.head = b.wait(head.Of.w)
		}
	}
	m.mu.Unlock()
	for _, l := range b.lines {
		l.used, l.available, l.ever, l.own = l.space.Used(), l.space.Available(), l.space.Room(), l.space.Held()
		slices.SortFunc(l.waits, func(a, b lineWait) int { return cmp.Compare(a.need, b.need) })
	}
	t := &m.progress.owners
	t.Lock()
	defer t.Unlock()
	b.settled = t.changes == b.changes
	return b
}

// observeReservations reads what reservations of owners promise.
func (m *Manager) observeReservations(b *books) (changes uint64) {
	type open struct {
		owner        *Owner
		reservations []Reservation
	}
	t := &m.progress.owners
	t.Lock()
	changes = t.changes
	all := make([]open, 0, len(t.open))
	for o := range t.open {
		all = append(all, open{o, o.reservationsLocked()})
	}
	t.Unlock()
	for _, o := range all {
		v := b.owner(o.owner)
		for _, r := range o.reservations {
			b.steps++
			n := r.Bytes()
			v.held[r.rec.line.index] += n
			v.total += n
		}
	}
	return changes
}

// observeHolds reads which handles and records keep memory. Several on the same memory
// keep it once.
func (m *Manager) observeHolds(b *books) {
	var views []tier.HoldView
	for _, l := range b.lines {
		views = l.space.Holds(views[:0])
		if len(views) == 0 {
			continue
		}
		kept := make(map[any]*commons, len(views))
		for i := range views {
			var owner *ownerView
			if o, ok := views[i].Owner.(*Owner); ok && o.maybeOf(m) {
				owner = b.owner(o)
			}
			views[i].Each(func(memory any, bytes int64) {
				b.steps++
				k := kept[memory]
				if k == nil {
					k = &commons{line: l, bytes: bytes}
					kept[memory] = k
					l.kept += bytes
				}
				switch {
				case owner == nil && !k.nobodys:
					k.nobodys = true
					l.nobodys += bytes
				case owner != nil && !slices.Contains(k.owners, owner):
					k.owners = append(k.owners, owner)
				}
			})
		}
		for _, k := range kept {
			for _, o := range k.owners {
				o.total += k.bytes
			}
			if len(k.owners) == 1 {
				k.owners[0].held[l.index] += k.bytes
				continue
			}
			for _, o := range k.owners {
				o.kept = append(o.kept, k)
			}
		}
	}
}

// maybeOf says whether o is m's, or has not asked any manager yet.
func (o *Owner) maybeOf(m *Manager) bool {
	is := o.manager.Load()
	return is == nil || is == m
}

func (b *books) owner(o *Owner) *ownerView {
	v := b.owners[o]
	if v == nil {
		v = &ownerView{owner: o, held: make([]int64, len(b.lines))}
		b.owners[o] = v
	}
	return v
}

// wait returns the view of w, whose place in its lines must not change meanwhile:
// the manager's lock is held.
func (b *books) wait(w *waiter) *waitView {
	v := b.waits[w]
	if v != nil {
		return v
	}
	v = &waitView{w: w, seq: w.seq, begun: w.begun}
	b.waits[w] = v
	for i := range w.slots {
		if s := &w.slots[i]; s.in() {
			b.steps++
			l := b.lines[s.line.index]
			v.slots = append(v.slots, slotView{l, s.need})
			l.waits = append(l.waits, lineWait{s.need, v})
		}
	}
	return v
}

// over says whether the wait has ended since it was looked at.
func (v *waitView) over() bool { return v.w.seq != v.seq || v.w.over.Load() }

// stuck returns the waits of the owners that cannot go on, the oldest first. An owner can
// go on while one of its goroutines runs, or may be served. With gives set, what it holds
// may then be given back, and the room is all that owners who are stuck do not hold: what
// nobody, those who run, and those who are no owners hold may come. Without it the room is
// what there is now.
func (b *books) stuck(gives bool) []*waitView {
	r := run{books: b, gives: gives}
	for _, l := range b.lines {
		l.next, l.most = 0, l.available
		if gives {
			l.most = l.ever
		}
		r.push(l)
	}
	for _, v := range b.waits {
		v.ok = false
	}
	for _, o := range b.owners {
		for _, k := range o.kept {
			k.stuck = 0
		}
	}
	for _, o := range b.owners {
		b.steps++
		if o.stuck = len(o.waits) >= o.owner.Workers(); o.stuck && gives {
			r.take(o)
		}
	}
	for len(r.dirty) > 0 {
		l := r.dirty[len(r.dirty)-1]
		r.dirty = r.dirty[:len(r.dirty)-1]
		l.dirty = false
		r.serve(l)
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

// run is one search for those who are stuck. A line is looked at again only when its room
// or its head has changed.
type run struct {
	*books
	gives bool
	dirty []*lineView
}

func (r *run) push(l *lineView) {
	if !l.dirty {
		l.dirty = true
		r.dirty = append(r.dirty, l)
	}
}

// take counts what a stuck owner holds as out of reach.
func (r *run) take(o *ownerView) {
	for i, n := range o.held {
		r.lines[i].most -= n
	}
	for _, k := range o.kept {
		if k.stuck++; k.stuck == 1 {
			k.line.most -= k.bytes
		}
	}
}

// give is the reverse of take.
func (r *run) give(o *ownerView) {
	for i, n := range o.held {
		r.steps++
		if n > 0 {
			r.lines[i].most += n
			r.push(r.lines[i])
		}
	}
	for _, k := range o.kept {
		r.steps++
		if k.stuck--; k.stuck == 0 {
			k.line.most += k.bytes
			r.push(k.line)
		}
	}
}

// serve marks those who may be served from the line: behind a shut door that is only the
// head, and others when the head has gone.
func (r *run) serve(l *lineView) {
	if l.shut && (l.head == nil || !l.head.ok) {
		if l.head != nil && l.head.needs(l) <= l.most {
			r.ok(l.head)
		}
		return
	}
	for l.next < len(l.waits) && l.waits[l.next].need <= l.most {
		v := l.waits[l.next].wait
		l.next++
		r.ok(v)
	}
}

func (r *run) ok(v *waitView) {
	r.steps++
	if v.ok {
		return
	}
	v.ok = true
	for _, s := range v.slots {
		if s.line.head == v {
			r.push(s.line)
		}
	}
	if v.owner == nil || !v.owner.stuck {
		return
	}
	v.owner.stuck = false
	if r.gives {
		r.give(v.owner)
	}
}

// needs returns what v needs in a line that it stands in.
func (v *waitView) needs(l *lineView) int64 {
	for _, s := range v.slots {
		if s.line == l {
			return s.need
		}
	}
	return nothing
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
	return slices.ContainsFunc(b.waitedFor(waits), func(l *lineView) bool { return movable(l.space.ID()) })
}

// waitedFor returns the lines in which the waits stand.
func (b *books) waitedFor(waits []*waitView) []*lineView {
	in := make([]bool, len(b.lines))
	for _, v := range waits {
		for _, s := range v.slots {
			b.steps++
			in[s.line.index] = true
		}
	}
	var out []*lineView
	for i, l := range b.lines {
		if in[i] {
			out = append(out, l)
		}
	}
	return out
}

func (b *books) stillness(waits []*waitView) stillness {
	s := stillness{waits: seqs(waits), changes: b.changes}
	for _, l := range b.lines { // all: what is held in a slower space may be in a batch's way
		s.rooms = append(s.rooms, l.room)
		s.holds += l.space.HoldChanges()
	}
	return s
}

// holdsAny says whether one of those who wait holds something of what is waited
// for.
func (b *books) holdsAny(waits []*waitView) bool { return len(b.holders(waits)) > 0 }

// strangersHold says whether handles or records of unknown owners keep something of what
// is waited for: they may be closed at any moment.
func (b *books) strangersHold(waits []*waitView) bool {
	return slices.ContainsFunc(b.waitedFor(waits), func(l *lineView) bool { return l.nobodys > 0 })
}

// pinned says whether v cannot be served before handles or records of unknown owners are
// closed, whatever else becomes free.
func (v *waitView) pinned() bool {
	return !slices.ContainsFunc(v.slots, func(s slotView) bool { return s.need <= s.line.ever-s.line.own-s.line.nobodys })
}

// slot returns the place of v where handles and records keep most.
func (v *waitView) slot() slotView {
	return slices.MaxFunc(v.slots, func(a, b slotView) int { return cmp.Compare(a.line.kept, b.line.kept) })
}

// holders returns the waits whose owner could give something back of what is waited
// for.
func (b *books) holders(waits []*waitView) []*waitView {
	lines := b.waitedFor(waits)
	var out []*waitView
	for _, v := range waits {
		if slices.ContainsFunc(lines, v.owner.holdsIn) {
			out = append(out, v)
		}
	}
	return out
}

func (o *ownerView) holdsIn(l *lineView) bool {
	return o.held[l.index] > 0 || slices.ContainsFunc(o.kept, func(k *commons) bool { return k.line == l })
}
