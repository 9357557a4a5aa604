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
	"slices"
)

// chunkLen is how many records are one object. An owner of few has one.
const chunkLen = 128

// Table is records, each with a number above 0 for as long as it is there: a P, which may have
// pointers, and an R, which should not. The zero value is ready.
type Table[P, R any] struct {
	chunks []*chunk[P, R] // nil where no record is
	open   []uint32       // indices of those that are not full
	spare  *chunk[P, R]   // an empty one; may be nil
	n      int
}

type chunk[P, R any] struct {
	pointers [chunkLen]P
	records  *[chunkLen]R
	free     []uint8 // places that were in use
	used     uint8   // places that were in use at some time
	open     bool    // it is in Table.open
}

func (c *chunk[P, R]) full() bool { return c.used == chunkLen && len(c.free) == 0 }

func (c *chunk[P, R]) empty() bool { return int(c.used) == len(c.free) }

// Add makes a record of p and the zero R.
func (t *Table[P, R]) Add(p P) (number uint32) {
	if len(t.open) == 0 {
		t.open = append(t.open, uint32(len(t.chunks)))
		t.chunks = append(t.chunks, nil)
	}
	at := t.open[len(t.open)-1]
	c := t.chunks[at]
	if c == nil {
		if c, t.spare = t.spare, nil; c == nil {
			c = &chunk[P, R]{records: new([chunkLen]R)}
		}
		c.open = true
		t.chunks[at] = c
	}
	place := c.used
	if last := len(c.free) - 1; last >= 0 {
		place, c.free = c.free[last], c.free[:last]
	} else {
		c.used++
	}
	if c.full() {
		c.open = false
		t.open = t.open[:len(t.open)-1]
	}
	c.pointers[place] = p
	t.n++
	return at*chunkLen + uint32(place) + 1
}

// Of returns the P of a number that Add returned at some time; the zero P if it is not in use.
func (t *Table[P, R]) Of(number uint32) (p P) {
	if c := t.chunkOf(number); c != nil {
		p = c.pointers[(number-1)%chunkLen]
	}
	return p
}

// All yields the Ps that are in use, without order. The Table must not be changed meanwhile.
func (t *Table[P, R]) All() iter.Seq[P] {
	return func(yield func(P) bool) {
		for _, c := range t.chunks {
			for i := 0; c != nil && i < int(c.used); i++ {
				if !slices.Contains(c.free, uint8(i)) && !yield(c.pointers[i]) {
					return
				}
			}
		}
	}
}

// chunkOf returns nil for a number that is not in use, and for some others that are not.
func (t *Table[P, R]) chunkOf(number uint32) *chunk[P, R] {
	if at := (number - 1) / chunkLen; number > 0 && int(at) < len(t.chunks) {
		return t.chunks[at]
	}
	return nil
}

// At returns the R of a number that is in use, to be read and changed until it is removed.
func (t *Table[P, R]) At(number uint32) *R {
	return &t.chunks[(number-1)/chunkLen].records[(number-1)%chunkLen]
}

// Remove ends the use of a number. Another record may get it.
func (t *Table[P, R]) Remove(number uint32) {
	var (
		at    = (number - 1) / chunkLen
		place = (number - 1) % chunkLen
		c     = t.chunks[at]
		noP   P
		noR   R
	)
	c.pointers[place], c.records[place] = noP, noR
	c.free = append(c.free, uint8(place))
	if t.n--; t.n == 0 {
		c.free, c.used, c.open = nil, 0, false
		*t = Table[P, R]{spare: c}
		return
	}
	if !c.open {
		c.open = true
		t.open = append(t.open, at)
	}
	if c.empty() {
		c.free, c.used = nil, 0
		t.chunks[at], t.spare = nil, c
	}
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
