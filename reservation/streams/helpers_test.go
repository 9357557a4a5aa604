package streams_test

import (
	"sync"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var (
	gpu0   = tier.ID{Kind: tier.GPU}
	gpu1   = tier.ID{Kind: tier.GPU, Ordinal: 1}
	host   = tier.ID{Kind: tier.Host}
	onGPU0 = reservation.Specific(gpu0)
)

// heapPool is a tier.Pool over the Go heap. It can hold freed memory back, as a device does that is
// still at work.
type heapPool struct {
	mu      sync.Mutex
	hold    bool
	retired []func()
}

type heapMemory []byte

func (m heapMemory) Size() int64       { return int64(len(m)) }
func (m heapMemory) Extents() [][]byte { return [][]byte{m} }

func (p *heapPool) Charge(size int64) int64 { return size }
func (p *heapPool) Close() error            { return nil }

func (p *heapPool) Alloc(size int64, _ []int64) (tier.Memory, error) {
	return heapMemory(make([]byte, size)), nil
}

func (p *heapPool) Free(_ tier.Memory, reclaimed func()) {
	p.mu.Lock()
	if p.hold {
		p.retired = append(p.retired, reclaimed)
		p.mu.Unlock()
		return
	}
	p.mu.Unlock()
	reclaimed()
}

// reap gives back what was held back.
func (p *heapPool) reap() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.retired {
		f()
	}
	p.retired = nil
}

func spaceOf(t testing.TB, id tier.ID, capacity int64) *tier.Space {
	t.Helper()
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: id, Capacity: capacity, Node: -1, Backend: "heap", Fractions: tier.Fractions{Limit: 1}, Pool: &heapPool{},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// managerOf returns a manager whose spaces must be empty in the end.
func managerOf(t testing.TB, cfg reservation.Config) *reservation.Manager {
	t.Helper()
	m, err := reservation.NewManager(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Errorf("closing the manager: %v", err)
		}
		for _, s := range cfg.Spaces {
			if u := s.State().Usage; u.Used() != 0 {
				t.Errorf("%s is not empty at the end: %+v", s.ID(), u)
			}
		}
	})
	return m
}

// one returns a manager of one space.
func one(t testing.TB, capacity int64) (*reservation.Manager, *tier.Space) {
	t.Helper()
	s := spaceOf(t, gpu0, capacity)
	return managerOf(t, reservation.Config{Spaces: []*tier.Space{s}}), s
}

func mustTry(
	t testing.TB, m *reservation.Manager, s reservation.Strategy, bytes int64, opts *reservation.Options,
) *reservation.Reservation {
	t.Helper()
	r, err := m.TryReserve(s, bytes, opts)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func release(t testing.TB, rs ...interface{ Release() error }) {
	t.Helper()
	for _, r := range rs {
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
}

func wantReservation(t testing.TB, r *reservation.Reservation, promised, unused int64) {
	t.Helper()
	if r.Bytes() != promised || r.Unused() != unused {
		t.Errorf("the reservation promises %d, %d unused; want %d, %d", r.Bytes(), r.Unused(), promised, unused)
	}
}
