package tier

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// Draw allocates a buffer of size bytes. The caller has turned Charge(size) bytes of p into live
// ones before, with p.Draw. After an error they are p's again, or free if it is released. cuts are
// ascending multiples of 4096 at which the memory may be split if it cannot be had in one piece; see
// Pool. A size of 0 gives a nil buffer and no error.
//
// When the memory is reclaimed, the bytes return to p if it is still open, and otherwise are free.
func (s *Space) Draw(p *books.Promise, size int64, cuts []int64) (*Buffer, error) {
	switch {
	case size < 0:
		return nil, fmt.Errorf("tier: %s: cannot allocate %d bytes", s.ID(), size)
	case size == 0:
		return nil, nil
	}
	charge, failed := s.Charge(size), s.Lost()
	for n := size; failed == nil; n = min(2*n, s.Capacity) {
		seen := s.Books.Now().CleanChanges
		mem, err := s.alloc(size, cuts)
		if err == nil {
			return s.newBuffer(mem, charge, p), nil
		}
		// Where the pool has no room, or not in one piece, clean images are dropped, twice as many
		// with each try.
		if !errors.Is(err, ErrNoSpace) || !s.DropOldest(n, seen) {
			failed = cmp.Or(s.Lost(), err) // the error may be the device's report of its loss
		}
	}
	s.Books.Retire(charge)
	s.NotifyFreed(p.Reclaim(charge))
	return nil, failed
}

// newBuffer returns a buffer that its owner has.
func (s *Space) newBuffer(mem Memory, charge int64, p *books.Promise) *Buffer {
	b := &Buffer{space: s, mem: mem, charge: charge, promise: p, stack: invariants.Stack()}
	b.holders.Store(owned)
	return b
}

// DrawNew draws a buffer from a promise of its own, for code that has no reservation.Manager.
func (s *Space) DrawNew(size int64, cuts ...int64) (*Buffer, error) {
	p, err := s.Promise(s.Charge(size))
	if err != nil {
		return nil, err
	}
	p.Draw(s.Charge(size), 0, false)
	b, err := s.Draw(p, size, cuts)
	return b, errors.Join(err, s.Release(p))
}

// Adopt returns a buffer of memory that the pool has handed out already, or that is lent. It draws
// Charge(mem.Size()) bytes from p, which must have them. The buffer frees the memory as its own.
func (s *Space) Adopt(p *books.Promise, mem Memory) *Buffer {
	charge := s.Charge(mem.Size())
	if out := p.Draw(charge, 0, false); out != (books.Outcome{}) {
		panic(fmt.Sprintf("tier: %s: adopting %d bytes: %+v", s.ID(), charge, out))
	}
	return s.newBuffer(mem, charge, p)
}

// alloc asks the pool. It makes a panic of a backend an error, and completes an error for lack of
// room with the space, the numbers of its books, and a hint.
func (s *Space) alloc(size int64, cuts []int64) (mem Memory, err error) {
	lockrank.AssertNone("a pool allocates")
	defer guard.Error(&err, "a pool's Alloc")
	if p, ok := s.Pool.(paced); ok {
		p.Promised(s.Books.Now().Reserved)
	}
	mem, err = s.Pool.Alloc(size, cuts)
	if err == nil && mem == nil {
		err = fmt.Errorf("tier: %s: the pool gave no memory for %d bytes, and no error", s.ID(), size)
	}
	if full, ok := errors.AsType[*NoSpaceError](err); ok && !full.Space.Valid() {
		full.Space = s.ID()
		if full.Cause == nil && full.Largest == 0 { // not because of pieces or another limit
			full.Cause = fmt.Errorf("%s memory refuses what the space has promised; it has %d bytes",
				s.Backend, full.Available)
			full.Available = s.State().Available + s.Charge(size)
			full.Hint = cmp.Or(full.Hint, "other programs may hold the memory: a smaller space would leave it to them")
		}
		full.Hint = cmp.Or(full.Hint, s.Hint) // a pool has a hint if its memory is not what was too small
	}
	return mem, err
}

// giver is memory of a space's device that other code has allocated, and wants back: the
// buffer of such memory returns it there instead of to the space's pool.
type giver interface {
	// GiveBack is called once, when the memory is not in use any more, with no lock held. It calls
	// reclaimed when the memory is its owner's again, as Pool.Free does, and must not panic either.
	GiveBack(reclaimed func())
}

// free returns a buffer's memory to the pool. The bytes are retired until the pool calls back, when
// the device is done with them. Those of a clean image were cached, and are just free.
//
// free does not recover panics: the pool recovers those of a device or of a program, so others are
// bugs.
func (s *Space) free(b *Buffer) {
	lockrank.AssertNone("a pool frees")
	clean := b.holders.Load()&cached != 0
	if !clean {
		s.Books.Retire(b.charge)
	}
	reclaimed := func() {
		if clean {
			s.Books.Uncache(b.charge)
			s.notify(false)
			return
		}
		if b.reclaimed != nil {
			b.reclaimed(b.charge)
		}
		s.NotifyFreed(b.promise.Reclaim(b.charge))
	}
	if m, ok := b.mem.(giver); ok {
		m.GiveBack(reclaimed)
	} else {
		s.Pool.Free(b.mem, reclaimed)
	}
	if s.State().Unsure > 0 { // Room may have fallen, so that a waiter may never fit
		s.notify(false)
	}
}

// shrinker is what a Pool implements that can take the end of a memory back: an arena, a spill
// volume.
type shrinker interface {
	// Shrink leaves the first size bytes of m, or more if it cannot cut there.
	Shrink(m Memory, size int64)
}

// Shrink gives the end of the memory back, so that size > 0 bytes are left. Where the pool cannot cut
// the memory, all or some of the rest stays in it, and stays charged. Only the owner may call it,
// while nothing else uses the buffer.
func (b *Buffer) Shrink(size int64) {
	pool, ok := b.space.Pool.(shrinker)
	if !ok || size <= 0 || size >= b.Size() {
		return
	}
	pool.Shrink(b.mem, size)
	rest := b.charge - b.space.Charge(b.mem.Size())
	if rest <= 0 {
		return
	}
	b.charge -= rest
	b.space.Books.Retire(rest)
	if b.reclaimed != nil {
		b.reclaimed(rest)
	}
	b.space.NotifyFreed(b.promise.Reclaim(rest))
}

// splitter is what a Pool implements that can make several memories of one: a spill volume.
type splitter interface {
	Together() int64
	Split(m Memory, sizes []int64) []Memory
}

// Together returns how many bytes are best drawn as one buffer now, to be written at once and then
// split; 0 where buffers cannot be.
func (s *Space) Together() int64 {
	if pool, ok := s.Pool.(splitter); ok {
		return pool.Together()
	}
	return 0
}

// Split makes several buffers of b, with the bytes that are in it: of so many bytes each, in order,
// which are whole pages and add up to all of it. They are charged together what b is. Only the
// caller may have b, which is gone then. Where the pool cannot, Split returns nil, and b is as
// it was.
func (s *Space) Split(b *Buffer, sizes []int64) (parts []*Buffer) {
	for i, mem := range s.Pool.(splitter).Split(b.mem, sizes) {
		b.holders.Store(0)
		part := s.newBuffer(mem, sizes[i], b.promise)
		part.reclaimed = b.reclaimed
		parts = append(parts, part)
	}
	return parts
}
