package tier

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// Draw turns Charge(size) promised bytes, which the caller must hold, into a
// buffer. cuts are ascending multiples of 4096 at which the memory may be
// split if it cannot be had in one piece; see Pool. On an error the bytes are
// promised still. A size of 0 gives a nil buffer and no error. account, which
// may be nil, is offered the bytes when the buffer is gone.
func (in inside) Draw(size int64, cuts []int64, account Account) (*Buffer, error) {
	return in.DrawOf(size, cuts, keptOf(account), 0)
}

// keptOf returns a pointer to an account, as buffers keep it; nil for none.
func keptOf(account Account) *Account {
	if account == nil {
		return nil
	}
	return &account
}

// DrawOf is Draw for an account that serves several reservations, one after the other. of is the
// number of the reservation, which Credit gets back; a reservation.Manager passes its generation.
func (in inside) DrawOf(size int64, cuts []int64, account *Account, of uint64) (*Buffer, error) {
	if size < 0 {
		return nil, fmt.Errorf("tier: %s: cannot allocate %d bytes", in.cfg.ID, size)
	}
	if err := in.Lost(); err != nil {
		return nil, err
	}
	if size == 0 {
		return nil, nil
	}
	charge := in.Charge(size)
	in.ledger.Draw(charge)
	mem, err := in.allocBesideCopies(size, cuts)
	if err != nil {
		in.ledger.Undraw(charge)
		return nil, cmp.Or(in.Lost(), err) // it may be the device's word for its loss
	}
	b := &Buffer{space: in.Space, mem: mem, charge: charge, account: account, of: of, stack: invariants.Stack()}
	in.list(b)
	return b, nil
}

// list adds a new buffer, which its owner has, to the space's list of buffers.
func (s *Space) list(b *Buffer) {
	b.holders.Store(owned)
	s.mu.Lock()
	s.mu.buffers[b] = struct{}{}
	s.mu.Unlock()
}

// alloc asks the pool and makes a panic of a backend an error.
func (s *Space) alloc(size int64, cuts []int64) (mem Memory, err error) {
	lockrank.AssertNone("a pool allocates")
	defer func() {
		if p := recover(); p != nil {
			if v, ok := p.(lockrank.Violation); ok {
				panic(v) // ours, and not to be hidden
			}
			mem, err = nil, fmt.Errorf("tier: %s: allocating %d bytes panicked: %v", s.cfg.ID, size, p)
		}
	}()
	if s.paced != nil {
		s.paced.Promised(s.ledger.Snapshot().Reserved)
	}
	mem, err = s.cfg.Pool.Alloc(size, cuts)
	var full *NoSpaceError
	if errors.As(err, &full) && !full.Space.Valid() {
		s.name(full, size)
	}
	if err == nil && mem == nil {
		err = fmt.Errorf("tier: %s: the pool gave no memory for %d bytes, and no error", s.cfg.ID, size)
	}
	return mem, err
}

// name completes a pool's error for size reserved bytes: the space, the numbers of its ledger, and
// a hint.
func (s *Space) name(full *NoSpaceError, size int64) {
	full.Space = s.cfg.ID
	if full.Cause == nil && full.Largest == 0 { // the room is neither in pieces, nor is another limit the cause
		full.Cause = fmt.Errorf("%s memory refuses what the space has promised; it has %d bytes",
			s.cfg.Backend, full.Available)
		full.Available = s.Available() + s.Charge(size)
		if full.Hint == "" && s.Kind() == GPU {
			full.Hint = "other programs may hold the GPU's memory: a smaller space would leave it to them"
		}
	}
	if full.Hint == "" { // else it was not the space's memory that was too small
		full.Hint = s.cfg.Hint
	}
}

// free returns a buffer's memory to the pool. The bytes are retired until the pool calls back, when
// the device is done with them. Then the account may keep them for its reservation (Credit);
// otherwise they are free, and the listeners are called. The memory of a clean image was cached,
// and is just free.
//
// free does not recover panics: the pool recovers those of a device or of a program, so others are
// bugs.
func (s *Space) free(b *Buffer) {
	lockrank.AssertNone("a pool frees")
	s.mu.Lock()
	delete(s.mu.buffers, b)
	s.mu.Unlock()
	charge, account, of, copied := b.charge, b.account, b.of, b.holders.Load()&cached != 0
	unsure, fresh := s.Inside().Unsure(), s.fresh.Load()
	if copied {
		fresh = nil
	} else {
		s.ledger.Retire(charge)
	}
	if fresh != nil {
		fresh.Add(charge)
	}
	free := s.cfg.Pool.Free
	if m, ok := b.mem.(giver); ok {
		free = func(_ Memory, reclaimed func()) { m.GiveBack(reclaimed) }
	}
	free(b.mem, func() {
		if copied {
			s.ledger.Forget(charge)
			s.notify(released)
			return
		}
		if fresh != nil {
			fresh.Add(-charge)
		}
		if account != nil && (*account).Credit(of, charge) {
			return
		}
		s.ledger.Reap(charge)
		s.credited(charge)
	})
	if s.Inside().Unsure() > unsure { // Room fell, so a waiter may never fit
		s.notify(released)
	}
}

// Account is what the bytes of a buffer were drawn from: a reservation, which may take them back.
type Account interface {
	// Credit is called with no lock held when the memory of a buffer that was charged n bytes is
	// reclaimed. An account that keeps the bytes reserved calls Inside().Recall(n) and returns
	// true; if it returns false they become free. of is what the buffer was drawn with (DrawOf).
	Credit(of uint64, n int64) bool
}

// giver is memory of a space's device that other code has allocated, and wants back: the
// buffer of such memory returns it there instead of to the space's pool.
type giver interface {
	// GiveBack is called once, when the memory is not in use any more, with no lock held. It calls
	// reclaimed when the memory is its owner's again, as Pool.Free does, and must not panic either.
	GiveBack(reclaimed func())
}
