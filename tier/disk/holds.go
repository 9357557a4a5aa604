package disk

import (
	"context"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// seals are a memory's units. The first and the last of a piece may be shorter than
// others: a unit begins at a multiple of its length in the memory, or with the piece, and
// what lies in two pieces is two units.
type seals struct {
	key    *volumeKey
	number uint64 // of the memory, under that key
	first  []int  // the first unit of each piece
	units  []seal // read by who holds a unit, written by who holds it for writing

	mu struct {
		lockrank.Mutex[lockrank.Device]
		holds []*hold // in the order in which they came
		lost  error   // why a unit was lost first
	}
}

// hold is a request's right to some units: to all of them at once, so that nobody waits
// for units while he has others. Reads share. It is not a mutex, for the disk is
// read and written under it.
type hold struct {
	first, end int // units
	write      bool
	over       chan struct{}
}

// unitsIn is how many units n > 0 bytes at off of a memory are.
func unitsIn(off, n int64) int64 { return (off+n-1)/unit - off/unit + 1 }

// newSeals makes the seals for pieces: none of them written.
func newSeals(key *volumeKey, number uint64, pieces []piece) *seals {
	s := &seals{key: key, number: number, first: make([]int, len(pieces))}
	n := 0
	for i, p := range pieces {
		s.first[i] = n
		n += int(unitsIn(p.Off, p.Len))
	}
	s.units = make([]seal, n)
	return s
}

// lose notes that writing units failed: what they held, if anything, may be gone. They are
// held for writing.
func (s *seals) lose(first, end int, err error) {
	for u := first; u < end; u++ {
		if s.units[u].nonce == unwritten { // nothing to lose
			continue
		}
		s.units[u].nonce = lost
		s.mu.Lock()
		if s.mu.lost == nil {
			s.mu.lost = err
		}
		s.mu.Unlock()
	}
}

// whyLost returns why what unit u held is gone, if it is. The unit is held.
func (s *seals) whyLost(u int) error {
	if s.units[u].nonce != lost {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Errorf("writing it failed before: %w", bare(s.mu.lost))
}

// unitsOf returns which units of a piece n > 0 bytes at off lie in.
func (e *Extents) unitsOf(piece int, off, n int64) (first, end int) {
	zero := e.seals.first[piece] - int(e.pieces[piece].Off/unit)
	return zero + int(off/unit), zero + int((off+n-1)/unit) + 1
}

// unitAt returns where unit u of a piece begins and ends in the memory. The last ends
// on a page, as the room does.
func (e *Extents) unitAt(piece, u int) (begin, end int64) {
	p := &e.pieces[piece]
	begin = (int64(u-e.seals.first[piece]) + p.Off/unit) * unit
	return max(begin, p.Off), min(begin+unit, p.Off+round(p.Len))
}

// hold waits until nobody who came before needs the units in another way. The caller
// must release what it gets.
func (s *seals) hold(ctx context.Context, first, end int, write bool) (*hold, error) {
	h := &hold{first: first, end: end, write: write, over: make(chan struct{})}
	var before []*hold
	s.mu.Lock()
	for _, o := range s.mu.holds {
		if o.first < end && first < o.end && (o.write || write) {
			before = append(before, o)
		}
	}
	s.mu.holds = append(s.mu.holds, h)
	s.mu.Unlock()
	for _, o := range before {
		select {
		case <-o.over:
		case <-ctx.Done():
			s.release(h)
			return nil, context.Cause(ctx)
		}
	}
	return h, nil
}

func (s *seals) release(h *hold) {
	s.mu.Lock()
	i := slices.Index(s.mu.holds, h)
	s.mu.holds = slices.Delete(s.mu.holds, i, i+1)
	s.mu.Unlock()
	close(h.over)
}
