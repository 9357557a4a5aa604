// Package compact keeps what there may be a million of in few objects, most of them without
// pointers, so that it costs the garbage collector little and gives its memory back when it is
// gone.
//
//	Table   records by number
//	Order   numbers of records, by key
//	Set     which ids there are
//
// Nothing here has a lock: owners guard what they have.
package compact

import (
	"iter"
	"math/bits"
)

// chunkLen is how many records are one object. An owner of few has one.
const chunkLen = 128

// sparse is how many records of a chunk are so few that they move to others.
const sparse = chunkLen / 8

// Table is records, each with a number above 0 for as long as it is there: a P, which may have
// pointers, and an R, which should not. Where few of many are left, Remove gives them other numbers,
// so that the memory of the others is free. The zero value is ready once Moved is set.
type Table[P, R any] struct {
	// Moved tells the owner of a record that was moved by Remove. Its number was from, and is to.
	// Meanwhile the Table must not be changed.
	Moved func(p P, from, to uint32)

	chunks []*chunk[P, R] // nil where no record is
	open   []uint32       // indices of those that are there and not full
	vacant []uint32       // indices of those that are nil
	spare  *chunk[P, R]   // an empty one; may be nil
	n      int
}

type chunk[P, R any] struct {
	pointers [chunkLen]P
	records  *[chunkLen]R
	used     [chunkLen / 64]uint64 // a bit for each place
	opened   uint32                // its place in Table.open, plus 1; 0 if it is full
}

func (c *chunk[P, R]) len() (n int) {
	for _, u := range c.used {
		n += bits.OnesCount64(u)
	}
	return n
}

// take takes the first free place, of which there is one.
func (c *chunk[P, R]) take() (place uint32) {
	for i, u := range c.used {
		if u != ^uint64(0) {
			bit := bits.TrailingZeros64(^u)
			c.used[i] |= 1 << bit
			return uint32(64*i + bit)
		}
	}
	panic("compact: a chunk that is full")
}

// clear ends the use of a place.
func (c *chunk[P, R]) clear(place uint32) {
	var (
		noP P
		noR R
	)
	c.pointers[place], c.records[place] = noP, noR
	c.used[place/64] &^= 1 << (place % 64)
}

// places yields those in use, ascending, as they were at the begin.
func (c *chunk[P, R]) places() iter.Seq[uint32] {
	return func(yield func(uint32) bool) {
		for i, u := range c.used {
			for ; u != 0; u &= u - 1 {
				if !yield(uint32(64*i + bits.TrailingZeros64(u))) {
					return
				}
			}
		}
	}
}

// Add makes a record of p and the zero R.
func (t *Table[P, R]) Add(p P) (number uint32) {
	if len(t.open) == 0 {
		t.begin()
	}
	t.n++
	return t.place(p, len(t.open)-1)
}

// begin adds an empty chunk.
func (t *Table[P, R]) begin() {
	c := t.spare
	if t.spare = nil; c == nil {
		c = &chunk[P, R]{records: new([chunkLen]R)}
	}
	at := uint32(len(t.chunks))
	if last := len(t.vacant) - 1; last >= 0 {
		at, t.vacant = t.vacant[last], t.vacant[:last]
		t.chunks[at] = c
	} else {
		t.chunks = append(t.chunks, c)
	}
	t.reopen(at, c)
}

// reopen lists a chunk that is not full.
func (t *Table[P, R]) reopen(at uint32, c *chunk[P, R]) {
	t.open = append(t.open, at)
	c.opened = uint32(len(t.open))
}

// shut ends what reopen began.
func (t *Table[P, R]) shut(c *chunk[P, R]) {
	last := len(t.open) - 1
	moved := t.open[last]
	t.open[c.opened-1], t.chunks[moved].opened = moved, c.opened
	t.open, c.opened = t.open[:last], 0
}

// place puts p into the chunk at that place of open.
func (t *Table[P, R]) place(p P, open int) (number uint32) {
	at := t.open[open]
	c := t.chunks[at]
	place := c.take()
	c.pointers[place] = p
	if c.len() == chunkLen {
		t.shut(c)
	}
	return at*chunkLen + place + 1
}

// Of returns the P of a number that Add or Moved gave at some time; the zero P if it is not in use.
func (t *Table[P, R]) Of(number uint32) (p P) {
	if at := (number - 1) / chunkLen; number > 0 && int(at) < len(t.chunks) && t.chunks[at] != nil {
		p = t.chunks[at].pointers[(number-1)%chunkLen]
	}
	return p
}

// Numbers returns the largest number that may be in use.
func (t *Table[P, R]) Numbers() uint32 { return uint32(len(t.chunks)) * chunkLen }

// All yields the Ps that are in use, without order. The Table must not be changed meanwhile.
func (t *Table[P, R]) All() iter.Seq[P] {
	return func(yield func(P) bool) {
		for _, c := range t.chunks {
			if c == nil {
				continue
			}
			for i := range c.places() {
				if !yield(c.pointers[i]) {
					return
				}
			}
		}
	}
}

// Len returns how many records there are.
func (t *Table[P, R]) Len() int { return t.n }

// At returns the R of a number that is in use, to be read and changed until a record is removed.
func (t *Table[P, R]) At(number uint32) *R {
	return &t.chunks[(number-1)/chunkLen].records[(number-1)%chunkLen]
}

// Remove ends the use of a number. Another record may get it, also one that is there.
func (t *Table[P, R]) Remove(number uint32) {
	at := (number - 1) / chunkLen
	c := t.chunks[at]
	c.clear((number - 1) % chunkLen)
	if t.n--; t.n == 0 {
		c.opened = 0
		*t = Table[P, R]{Moved: t.Moved, spare: c}
		return
	}
	if c.opened == 0 {
		t.reopen(at, c)
	}
	if c.len() < sparse {
		t.spread(at, c)
	}
}

// spread moves what a sparse chunk has to others, as far as they have room. So a chunk that is
// emptied costs the removal of most of its records, and one move of each other.
func (t *Table[P, R]) spread(at uint32, c *chunk[P, R]) {
	for from := range c.places() {
		to := len(t.open) - 1
		if t.open[to] == at {
			to--
		}
		if to < 0 {
			return // no other has room
		}
		p, r := c.pointers[from], c.records[from]
		c.clear(from)
		number := t.place(p, to)
		*t.At(number) = r
		t.Moved(p, at*chunkLen+from+1, number)
	}
	t.shut(c)
	t.chunks[at], t.spare = nil, c
	t.vacant = append(t.vacant, at)
}

// pageLen is how many ids that follow each other are one object.
const pageLen = 512

// Set is a set of ids. Ids that follow each other take a bit each, others some 100 bytes. The zero
// value is ready.
type Set struct{ pages map[uint64]*page }

type page [pageLen / 64]uint64

func (p *page) at(id uint64) (word *uint64, bit uint64) {
	return &p[id%pageLen/64], 1 << (id % 64)
}

// Has reports whether id is there.
func (s *Set) Has(id uint64) bool {
	p := s.pages[id/pageLen]
	if p == nil {
		return false
	}
	word, bit := p.at(id)
	return *word&bit != 0
}

// Add adds id.
func (s *Set) Add(id uint64) {
	p := s.pages[id/pageLen]
	if p == nil {
		if s.pages == nil {
			s.pages = make(map[uint64]*page)
		}
		p = new(page)
		s.pages[id/pageLen] = p
	}
	word, bit := p.at(id)
	*word |= bit
}

// Remove removes id, if it is there.
func (s *Set) Remove(id uint64) {
	p := s.pages[id/pageLen]
	if p == nil {
		return
	}
	word, bit := p.at(id)
	*word &^= bit
	if *p == (page{}) {
		delete(s.pages, id/pageLen)
		if len(s.pages) == 0 {
			s.pages = nil // a map does not shrink
		}
	}
}
