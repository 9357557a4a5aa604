package tier

import (
	"errors"

	"github.com/spillway-db/spillway/internal/copies"
)

// KeepCopy makes the memory of bufs a clean image, which the space calls a copy. From now on it is
// cached: it counts as free, and the space frees it, the oldest copies first, when a reservation
// needs the room. shares tells that it keeps shared dictionaries in use. The copy is in a list,
// from which one caller takes it, to use the memory again (Revive) or to free it (Copy.Release,
// which calls release; that must release bufs).
//
// KeepCopy returns nil, and has done nothing, if a lease is open, if the space is lost, and in a
// space with a quota, because other spaces or processes may be waiting for the bytes.
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

// Revive makes the buffers of a copy usable again: it is Draw without an allocation. The caller has
// taken c, and has reserved as many bytes. bufs are those that KeepCopy got.
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

// Evicted returns how many bytes of clean images were freed so far because the pool could not
// allocate what the ledger has free. It does not count evicted batches.
func (in inside) Evicted() int64 { return in.evicted.Load() }

// Cached returns the bytes of copies.
func (in inside) Cached() int64 { return in.ledger.Cached() }

// DropSharing frees clean images that keep shared dictionaries in use, the oldest first, until used
// bytes have fallen by at least bytes or none is left. bytes may be 0 or less.
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

// DropCopies frees all copies that are listed now. A copy that is held (Copy.Hold) is freed when
// its holder lets it go.
func (in inside) DropCopies() {
	in.copies.DropHeld()
	for in.ledger.Cached() > 0 {
		if in.dropCopies(1) == 0 {
			return
		}
	}
}

// CopyChanges returns a number that changes with each change of the space's copies.
func (in inside) CopyChanges() uint64 { return in.copies.Changes() }

// DropOldest frees the oldest copies, until n bytes are free or none is left. It reports whether
// any were freed, by it or, since CopyChanges was seen, by others. If others are about to free the
// last ones, it waits for that.
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

// allocBesideCopies is alloc, and frees clean images while the pool has no room for size bytes, or
// not in one piece: twice as many with each try. It does not look at the cached bytes, because
// memory that is becoming a copy is in no account for a moment.
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
