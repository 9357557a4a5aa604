package tier

import (
	"errors"
	"sync"
	"testing"
)

// TestAdoptedMemoryIsChargedAsDrawn: what was in use before the space is promised even above
// the limit, never above the capacity, and its buffers are as any others.
func TestAdoptedMemoryIsChargedAsDrawn(t *testing.T) {
	pool := &adoptPool{}
	s, err := NewSpace(SpaceConfig{ID: ID{Kind: Disk}, Capacity: 10 * Page, Fractions: Fractions{Limit: 0.5, Trigger: 0.5, Stop: 0.4}, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Inside().Occupy(8 * Page); err != nil {
		t.Fatal(err)
	}
	if err := s.Inside().Occupy(3 * Page); !errors.Is(err, ErrNoSpace) {
		t.Errorf("more than the capacity is in use: %v", err)
	}
	if err := s.Inside().Reserve(Page); !errors.Is(err, ErrNoSpace) {
		t.Errorf("reserved above the limit: %v", err)
	}
	b := s.Inside().Adopt(adoptMemory(3*Page), nil)
	if u := s.Usage(); u.Live != 3*Page || u.Reserved != 5*Page || b.Size() != 3*Page || len(s.Leaks()) != 1 {
		t.Errorf("%+v, a buffer of %d", u, b.Size())
	}
	end, ok := b.TryLease()
	if !ok {
		t.Fatal("no lease on a buffer that is held")
	}
	if err := b.Release(); err != nil || pool.freed != 0 {
		t.Errorf("released with a lease: %v, %d freed", err, pool.freed)
	}
	again, ok := b.TryLease()
	if !ok {
		t.Fatal("no lease while there is one")
	}
	end()
	again()
	if _, ok := b.TryLease(); ok || pool.freed != 1 {
		t.Errorf("a lease on memory that is gone; %d freed", pool.freed)
	}
	if _, ok := (*Buffer)(nil).TryLease(); !ok {
		t.Error("no lease on no bytes")
	}
	s.Inside().Unreserve(5 * Page)
	if s.Used() != 0 {
		t.Errorf("%+v", s.Usage())
	}
}

// TestTryLeaseBesideRelease: the memory goes once, and never under a lease.
func TestTryLeaseBesideRelease(t *testing.T) {
	pool := &adoptPool{}
	s, err := NewSpace(SpaceConfig{ID: ID{Kind: Disk}, Capacity: 10 * Page, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	for round := range 500 {
		if err := s.Inside().Occupy(Page); err != nil {
			t.Fatal(err)
		}
		b := s.Inside().Adopt(adoptMemory(Page), nil)
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() {
				if end, ok := b.TryLease(); ok {
					if pool.count() != round {
						t.Error("freed under a lease")
					}
					end()
				}
			})
		}
		all.Go(func() {
			if err := b.Release(); err != nil {
				t.Error(err)
			}
		})
		all.Wait()
		if pool.count() != round+1 || s.Used() != 0 {
			t.Fatalf("round %d: %d freed, %+v", round, pool.count(), s.Usage())
		}
	}
}

type adoptMemory int64

func (m adoptMemory) Size() int64 { return int64(m) }

// adoptPool counts what is freed.
type adoptPool struct {
	mu    sync.Mutex
	freed int
}

func (p *adoptPool) count() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.freed
}

func (p *adoptPool) Charge(n int64) int64 { return (n + Page - 1) / Page * Page }

func (p *adoptPool) Alloc(int64, []int64) (Memory, error) { return nil, ErrNotSupported }

func (p *adoptPool) Free(_ Memory, reclaimed func()) {
	p.mu.Lock()
	p.freed++
	p.mu.Unlock()
	reclaimed()
}

func (p *adoptPool) Close() error { return nil }

// lent counts how often it was given back.
type lent struct {
	adoptMemory
	back *int
}

func (m lent) GiveBack(reclaimed func()) {
	*m.back++
	reclaimed()
}

// Lent memory is charged like any, and goes back to its owner and not to the pool, once, when the
// last lease has ended.
func TestLentMemoryGoesBack(t *testing.T) {
	pool := new(adoptPool)
	s, err := NewSpace(SpaceConfig{ID: ID{Kind: GPU}, Capacity: 4 * Page, Pool: pool, Backend: "test"})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Inside().Occupy(2 * Page); err != nil {
		t.Fatal(err)
	}
	back := 0
	b := s.Inside().Adopt(lent{2 * Page, &back}, nil)
	if u := s.Usage(); u.Live != 2*Page {
		t.Errorf("the books say %+v", u)
	}
	end := b.Lease()
	if err := b.Release(); err != nil {
		t.Fatal(err)
	}
	if back != 0 {
		t.Error("given back under a lease")
	}
	end()
	if back != 1 || pool.count() != 0 || s.Used() != 0 {
		t.Errorf("given back %d times, to the pool %d times, %+v", back, pool.count(), s.Usage())
	}
}
