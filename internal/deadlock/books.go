package deadlock

import (
	"cmp"
	"math"
	"slices"
)

// Books record what is held, what is waited for, and what room there is. Making them and finding
// the stuck owners takes time in proportion to their size, except for sorting the waits by size.
// Steps counts that. They are filled in the order of their methods, and not changed afterwards.
type Books struct {
	Lines  []*Line
	Owners []*Owner
	Plain  []*Wait // those without an owner
	Steps  int

	Changes uint64 // reservations that owners have opened and closed so far
	Settled bool   // none while the books were made

	waits          []*Wait
	ownerOf        map[any]*Owner
	waitOf         map[any]*Wait
	certain, still []*Wait // see Settle
}

// Line is a space and its waiters. Sizes are bytes.
type Line struct {
	Index     int // in Books.Lines
	Used      int64
	Available int64
	Ever      int64  // what would be available if nothing were held but the engine's own
	Holds     uint64 // changes with each handle and record that is opened or closed
	Shut      bool   // only the head may be served
	Head      *Wait

	kept    int64 // what handles and records keep
	unknown int64 // of kept, what those of unknown owners keep
	memory  map[any]*memory
	waits   []lineWait // the smallest need first

	// Of one search.
	most  int64 // the room that there may be
	next  int   // the first of waits that may not be served
	dirty bool
}

// lineWait is a wait in one line.
type lineWait struct {
	need int64
	wait *Wait
}

// Owner is a holder that also waits.
type Owner struct {
	Of         any // what the books are made of
	Goroutines int // how many must wait before nothing can be expected of the owner
	Waits      []*Wait
	Total      int64 // of what it holds, in all lines

	held  []int64   // by line: reservations, and memory that only this owner keeps
	drawn []int64   // by line: what of its reservations is in buffers
	kept  []*memory // what others keep, too
	stuck bool
}

// memory is what handles and records keep. It is free only when none of them does.
type memory struct {
	line    *Line
	bytes   int64
	owners  []*Owner
	unknown bool // an unknown owner keeps it, too
	stuck   int  // owners
}

// Wait is a request that waits in one or more lines.
type Wait struct {
	Of    any    // what the books are made of
	Seq   uint64 // rises with each wait
	Owner *Owner // nil for none
	Slots []Slot

	ok bool // it may be served
}

// Slot is the place of a wait in a line.
type Slot struct {
	Line *Line
	Need int64
}

// AddLine adds a line.
func (b *Books) AddLine() *Line {
	l := &Line{Index: len(b.Lines), memory: make(map[any]*memory)}
	b.Lines = append(b.Lines, l)
	return l
}

// AddOwner returns the owner of, and adds it if it is new. All lines have been added.
func (b *Books) AddOwner(of any, goroutines int) *Owner {
	o := b.ownerOf[of]
	if o == nil {
		o = &Owner{Of: of, Goroutines: goroutines, held: make([]int64, len(b.Lines)), drawn: make([]int64, len(b.Lines))}
		b.Owners = append(b.Owners, o)
		if b.ownerOf == nil {
			b.ownerOf = make(map[any]*Owner)
		}
		b.ownerOf[of] = o
	}
	return o
}

// Owner returns the owner of, or nil if it was not added.
func (b *Books) Owner(of any) *Owner { return b.ownerOf[of] }

// Promise notes that o holds n bytes of a line.
func (b *Books) Promise(o *Owner, l *Line, n int64) {
	b.Steps++
	o.held[l.Index] += n
	o.Total += n
}

// Drawn notes that n bytes of what was promised to o are in buffers. Handles and records of o may
// keep the same bytes.
func (b *Books) Drawn(o *Owner, l *Line, n int64) { o.drawn[l.Index] += n }

// Keep notes that a handle or record keeps memory of so many bytes in a line; o is nil for an
// unknown owner. Several on the same memory keep it once.
func (b *Books) Keep(o *Owner, l *Line, key any, bytes int64) {
	b.Steps++
	k := l.memory[key]
	if k == nil {
		k = &memory{line: l, bytes: bytes}
		l.memory[key] = k
		l.kept += bytes
	}
	switch {
	case o == nil && !k.unknown:
		k.unknown = true
		l.unknown += bytes
	case o != nil && !slices.Contains(k.owners, o):
		k.owners = append(k.owners, o)
		o.Total += bytes
	}
}

// AddWait adds a wait with its places; o is nil for none. A wait that is only the head of a line,
// and not judged itself, is not among the owner's: see Judged.
func (b *Books) AddWait(of any, seq uint64, slots ...Slot) *Wait {
	w := &Wait{Of: of, Seq: seq, Slots: slots}
	if b.waitOf == nil {
		b.waitOf = make(map[any]*Wait)
	}
	b.waitOf[of] = w
	b.waits = append(b.waits, w)
	b.Steps += len(slots)
	for _, s := range slots {
		s.Line.waits = append(s.Line.waits, lineWait{s.Need, w})
	}
	return w
}

// Wait returns the wait of, or nil if it was not added.
func (b *Books) Wait(of any) *Wait { return b.waitOf[of] }

// Judged makes w one of its owner's waits, or of those without an owner.
func (b *Books) Judged(w *Wait, o *Owner) {
	if w.Owner = o; o == nil {
		b.Plain = append(b.Plain, w)
		return
	}
	o.Waits = append(o.Waits, w)
}

// Settle completes the books, and finds the stuck owners.
func (b *Books) Settle() {
	for _, l := range b.Lines {
		for _, k := range l.memory {
			for _, o := range k.owners { // it may be drawn from what was promised: no byte counts twice
				n := min(o.drawn[l.Index], k.bytes)
				o.drawn[l.Index] -= n
				o.held[l.Index] -= n
				o.Total -= n
			}
			if len(k.owners) == 1 {
				k.owners[0].held[l.Index] += k.bytes
				continue
			}
			for _, o := range k.owners {
				o.kept = append(o.kept, k)
			}
		}
		slices.SortFunc(l.waits, func(a, b lineWait) int { return cmp.Compare(a.need, b.need) })
	}
	b.certain = b.stuck(true)
	b.still = b.stuck(false)
}

// stuck returns the waits of the owners that cannot go on, the oldest first. With gives set, an
// owner that can go on may give back what it holds. The room is then all that stuck owners do not
// hold: what is free, and what running owners and unknown holders have. Without it the room is what
// is free now.
func (b *Books) stuck(gives bool) []*Wait {
	r := search{Books: b, gives: gives}
	for _, l := range b.Lines {
		l.next, l.most = 0, l.Available
		if gives {
			l.most = l.Ever
		}
		r.push(l)
	}
	for _, w := range b.waits {
		w.ok = false
	}
	for _, o := range b.Owners {
		for _, k := range o.kept {
			k.stuck = 0
		}
	}
	for _, o := range b.Owners {
		b.Steps++
		if o.stuck = len(o.Waits) >= o.Goroutines; o.stuck && gives {
			r.take(o)
		}
	}
	for len(r.dirty) > 0 {
		l := r.dirty[len(r.dirty)-1]
		r.dirty = r.dirty[:len(r.dirty)-1]
		l.dirty = false
		r.serve(l)
	}
	var out []*Wait
	for _, o := range b.Owners {
		if o.stuck {
			out = append(out, o.Waits...)
		}
	}
	sortBySeq(out)
	return out
}

func sortBySeq(waits []*Wait) {
	slices.SortFunc(waits, func(a, b *Wait) int { return cmp.Compare(a.Seq, b.Seq) })
}

// search is one search for the stuck owners. A line is examined again only when its room or its
// head has changed.
type search struct {
	*Books
	gives bool
	dirty []*Line
}

func (r *search) push(l *Line) {
	if !l.dirty {
		l.dirty = true
		r.dirty = append(r.dirty, l)
	}
}

// take counts what a stuck owner holds as out of reach.
func (r *search) take(o *Owner) {
	for i, n := range o.held {
		r.Lines[i].most -= n
	}
	for _, k := range o.kept {
		if k.stuck++; k.stuck == 1 {
			k.line.most -= k.bytes
		}
	}
}

// give is the reverse of take.
func (r *search) give(o *Owner) {
	for i, n := range o.held {
		r.Steps++
		if n > 0 {
			r.Lines[i].most += n
			r.push(r.Lines[i])
		}
	}
	for _, k := range o.kept {
		r.Steps++
		if k.stuck--; k.stuck == 0 {
			k.line.most += k.bytes
			r.push(k.line)
		}
	}
}

// serve marks the waiters that may be served from the line. Behind a shut door that is only the
// head, and others when the head has gone.
func (r *search) serve(l *Line) {
	if l.Shut && (l.Head == nil || !l.Head.ok) {
		if l.Head != nil && l.Head.needs(l) <= l.most {
			r.ok(l.Head)
		}
		return
	}
	for l.next < len(l.waits) && l.waits[l.next].need <= l.most {
		w := l.waits[l.next].wait
		l.next++
		r.ok(w)
	}
}

// ok marks a wait that may be served, and its owner, which can go on then.
func (r *search) ok(w *Wait) {
	r.Steps++
	if w.ok {
		return
	}
	w.ok = true
	for _, s := range w.Slots {
		if s.Line.Head == w {
			r.push(s.Line)
		}
	}
	if w.Owner == nil || !w.Owner.stuck {
		return
	}
	w.Owner.stuck = false
	if r.gives {
		r.give(w.Owner)
	}
}

// needs returns what w needs in a line that it is in.
func (w *Wait) needs(l *Line) int64 {
	for _, s := range w.Slots {
		if s.Line == l {
			return s.Need
		}
	}
	return math.MaxInt64
}

// allStuck reports whether no owner is left that could do anything.
func (b *Books) allStuck() bool {
	return !slices.ContainsFunc(b.Owners, func(o *Owner) bool { return !o.stuck })
}

// waitedFor returns the lines in which the waits stand.
func (b *Books) waitedFor(waits []*Wait) []*Line {
	in := make([]bool, len(b.Lines))
	for _, w := range waits {
		for _, s := range w.Slots {
			b.Steps++
			in[s.Line.Index] = true
		}
	}
	var out []*Line
	for i, l := range b.Lines {
		if in[i] {
			out = append(out, l)
		}
	}
	return out
}

// Victim returns which of the stuck waits is to fail, all of which have owners. It prefers the
// youngest of an owner whose giving up would help, and that was not told before to roll back. If
// all were, it takes the youngest, and again is true: rolling back would only go round in a circle.
func (b *Books) Victim(stuck []*Wait, told func(*Owner) bool) (w *Wait, again bool) {
	among := b.holders(stuck)
	if len(among) == 0 {
		among = stuck
	}
	for _, w := range slices.Backward(among) {
		if !told(w.Owner) {
			return w, false
		}
	}
	return among[len(among)-1], true
}

// holders returns the waits whose owner could give something back of what is waited for.
func (b *Books) holders(waits []*Wait) []*Wait {
	lines := b.waitedFor(waits)
	var out []*Wait
	for _, w := range waits {
		if slices.ContainsFunc(lines, w.Owner.holdsIn) {
			out = append(out, w)
		}
	}
	return out
}

func (o *Owner) holdsIn(l *Line) bool {
	return o.held[l.Index] > 0 || slices.ContainsFunc(o.kept, func(k *memory) bool { return k.line == l })
}

// MostKept returns the place of w where handles and records keep most.
func (w *Wait) MostKept() Slot {
	return slices.MaxFunc(w.Slots, func(a, b Slot) int { return cmp.Compare(a.Line.kept, b.Line.kept) })
}

// pinned reports whether w cannot be served before handles or records of unknown owners are closed,
// whatever else becomes free.
func (w *Wait) pinned() bool {
	return !slices.ContainsFunc(w.Slots, func(s Slot) bool { return s.Need <= s.Line.Ever-s.Line.unknown })
}
