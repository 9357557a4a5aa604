package tier

import (
	"errors"

	"github.com/spillway-db/spillway/internal/copies"
)

// KeepCopy gives the memory of bufs, which their owner has no use for, to whoever needs the room:
// from now on it is cached, and counts as free. shares says that more memory stays in use for it.
// Only the taker of the copy uses the memory again, with Revive, or frees it, with Copy.Release. It
// calls release, which must release bufs. KeepCopy returns nil, and has done nothing, if a lease is
// open, and in a space that does not keep copies: those with a quota do not, because others may be
// waiting for the bytes.
func (in inside) KeepCopy(bufs []*Buffer, shares bool, release func()) *copies.Copy {
	if in.cfg.Quota != nil || in.Lost() != nil {
		return nil
	}
	var bytes int64
	for i, b := range bufs {
		if !b.holders.CompareAndSwap(owned, owned|cached) {
			for _, b := range bufs[:i] {
				b.holders.And(^int64(cached))
			}
			return nil
		}
		bytes += b.charge
	}
	c := in.copies.New(bytes, shares, release)
	for _, b := range bufs {
		account := b.account
		in.mu.Lock() // for those who look whose it is
		b.account = nil
		in.mu.Unlock()
		in.ledger.Retire(b.charge)
		if account != nil && (*account).Credit(b.of, b.charge) {
			in.ledger.CacheRecalled(b.charge)
		} else {
			in.ledger.Cache(b.charge)
		}
	}
	c.Add()
	in.fitCopies() // the limit may have fallen, or the space may be lost
	in.notify(released)
	return c
}

// Revive is Draw onto the memory of a copy, which the caller has taken, for its promise of as many
// bytes. bufs are those that KeepCopy got.
func (in inside) Revive(c *copies.Copy, bufs []*Buffer, account *Account, of uint64) {
	defer c.Used()
	for _, b := range bufs {
		in.ledger.Revive(b.charge)
		in.mu.Lock()
		b.account, b.of = account, of
		in.mu.Unlock()
		b.holders.And(^int64(cached))
	}
}

// Evicted returns how many bytes of copies were freed so far because the pool had less room than
// the space's books say.
func (in inside) Evicted() int64 { return in.evicted.Load() }

// Cached returns the bytes of copies.
func (in inside) Cached() int64 { return in.ledger.Cached() }

// DropSharing frees the oldest copies that keep shared memory in use, until more than bytes are
// free because of that or none is left. bytes may be 0 or less.
func (in inside) DropSharing(bytes int64) {
	if bytes <= 0 || in.Cached() == 0 {
		return
	}
	for before := in.Used(); in.Used() > before-bytes; {
		c := in.copies.TakeOldest(true)
		if c == nil {
			return
		}
		c.Release()
	}
}

// DropCopies frees all copies that are listed now. Who holds one frees it then.
func (in inside) DropCopies() {
	in.copies.DropHeld()
	for in.ledger.Cached() > 0 {
		if in.dropCopies(1) == 0 {
			return
		}
	}
}

// CopyChanges returns a number that is another after each change of the space's copies.
func (in inside) CopyChanges() uint64 { return in.copies.Changes() }

// DropOldest frees the oldest copies, until n bytes are free or none is left. It reports whether any
// were freed, by it or, since CopyChanges was seen, by others. If others are about to free the last
// ones, it waits for that.
func (in inside) DropOldest(n int64, seen uint64) bool {
	return in.dropCopies(n) > 0 || in.copies.Settle() || in.copies.Changes() != seen
}

// dropCopies frees the oldest copies, until n bytes are free or none is left, and returns how many
// that were.
func (s *Space) dropCopies(n int64) (dropped int64) {
	for dropped < n {
		c := s.copies.TakeOldest(false)
		if c == nil {
			break
		}
		c.Release()
		dropped += c.Bytes()
	}
	return dropped
}

// fitCopies frees copies until all memory is within the limit, and no more of them. It is called
// when promised bytes are to become memory, and where the limit falls.
func (s *Space) fitCopies() {
	over := func() int64 { return s.ledger.Memory() - s.Limit() }
	for s.ledger.Cached() > 0 && over() > 0 {
		seen := s.copies.Changes()
		if c := s.copies.TakeOver(over); c != nil {
			c.Release()
		} else if !s.copies.Settle() && s.copies.Changes() == seen {
			return
		}
	}
}

// allocBesideCopies is alloc, and frees copies where the pool has no room for size bytes, or not in
// one piece: more of them with each try. Memory that becomes a copy is in no account for a moment,
// so what is cached does not count here.
func (s *Space) allocBesideCopies(size int64, cuts []int64) (Memory, error) {
	s.fitCopies()
	for n := size; ; n = min(2*n, s.cfg.Capacity) {
		seen := s.copies.Changes()
		mem, err := s.alloc(size, cuts)
		if !errors.Is(err, ErrNoSpace) {
			return mem, err
		}
		dropped := s.dropCopies(n)
		s.evicted.Add(dropped)
		if dropped == 0 && !s.copies.Settle() && s.copies.Changes() == seen {
			return mem, err
		}
	}
}
