package tier

import "github.com/spillway-db/spillway/internal/invariants"

// Occupy promises n bytes for memory of the pool's that was in use before the space was
// made: files that outlived a process. The limit does not count, for the bytes are
// there; more than the capacity is a NoSpaceError. The caller must either Adopt or
// Unreserve every byte.
func (s *Space) Occupy(n int64) error {
	mustNotBeNegative(n)
	if err := s.Lost(); err != nil {
		return err
	}
	if s.cfg.Quota != nil {
		if err := s.cfg.Quota.Charge(n); err != nil {
			return s.refusal(n, err)
		}
	}
	if !s.ledger.Reserve(n, s.cfg.Capacity) {
		if s.cfg.Quota != nil {
			s.cfg.Quota.Credit(n)
		}
		return s.refusal(n, nil)
	}
	s.tellPressure()
	return nil
}

// LentMemory is memory of a space's device that somebody else has allocated, and wants
// back: the buffer of such memory gives it to them instead of the space's pool.
type LentMemory interface {
	Memory
	// GiveBack is called once, when nobody uses the memory any more, with no lock held.
	// It calls reclaimed when the memory is its owner's again, as Pool.Free does.
	GiveBack(reclaimed func())
}

// Adopt is Draw for memory that the pool has handed out already, or for LentMemory, for
// which the caller holds Charge(mem.Size()) promised bytes. The buffer frees it as its own.
func (s *Space) Adopt(mem Memory, account Account) *Buffer {
	charge := s.Charge(mem.Size())
	s.ledger.Draw(charge)
	b := &Buffer{space: s, mem: mem, size: mem.Size(), charge: charge, account: account, stack: invariants.Stack()}
	b.holders.Store(owned)
	s.mu.Lock()
	s.mu.buffers[b] = struct{}{}
	s.mu.Unlock()
	return b
}

// TryLease is Lease for those who hold neither the buffer nor a lease: it returns false
// if the memory is gone.
func (b *Buffer) TryLease() (end func(), ok bool) {
	if b == nil {
		return func() {}, true
	}
	for {
		n := b.holders.Load()
		if n == 0 {
			return nil, false
		}
		if b.holders.CompareAndSwap(n, n+1) {
			return b.leaseEnd(), true
		}
	}
}
