package reservation_test

import (
	"sync"
	"testing"

	arena "github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// heapPool is a tier.Pool over the Go heap. It rounds up to granule, counts what it has handed out,
// can be made to fail, and can hold freed memory back as a device does that is still at work.
type heapPool struct {
	granule  int64
	onCharge func() // called by Charge, which runs in the middle of a ReserveUpTo

	mu      sync.Mutex
	out     int64 // charged, handed out or held back
	fail    error
	hold    bool
	retired []func()
}

type heapMemory []byte

func (m heapMemory) Size() int64       { return int64(len(m)) }
func (m heapMemory) Extents() [][]byte { return [][]byte{m} }

func (p *heapPool) Charge(size int64) int64 {
	if f := p.onCharge; f != nil {
		f()
	}
	return (size + p.granule - 1) / p.granule * p.granule
}

func (p *heapPool) Alloc(size int64, _ []int64) (tier.Memory, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail != nil {
		return nil, p.fail
	}
	p.out += p.Charge(size)
	return heapMemory(make([]byte, size)), nil
}

func (p *heapPool) Free(m tier.Memory, reclaimed func()) {
	p.mu.Lock()
	p.out -= p.Charge(m.Size())
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
	retired := p.retired
	p.retired = nil
	p.mu.Unlock()
	for _, f := range retired {
		f()
	}
}

func (p *heapPool) failWith(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail = err
}

func (p *heapPool) Close() error { return nil }

// spaceOf is a space without a limit below its capacity, and with a granule of
// one byte.
func spaceOf(t testing.TB, id string, capacity int64) *tier.Space {
	t.Helper()
	return spaceAt(t, id, capacity, 1, -1)
}

func spaceAt(t testing.TB, id string, capacity, granule int64, node int) *tier.Space {
	t.Helper()
	var name tier.ID
	err := name.UnmarshalText([]byte(id))
	if err != nil {
		t.Fatal(err)
	}
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: name, Capacity: capacity, Node: node, Backend: "heap", Hint: "enlarge " + id,
		Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5}, Pool: &heapPool{granule: granule},
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// managerOf returns a manager that is closed, and whose books must be empty,
// when the test ends.
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

// arenaOf returns a manager of one host arena without a limit below its capacity.
// In the end the arena must be empty.
func arenaOf(t testing.TB, capacity int64) (*reservation.Manager, *tier.Space) {
	t.Helper()
	a, err := arena.NewArena(arena.Config{Capacity: capacity, Node: -1})
	if err != nil {
		t.Fatal(err)
	}
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Host}, Capacity: capacity, Node: -1, Backend: "host", Pool: a,
		Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if used := a.Stats().Used; used != 0 {
			t.Errorf("in the end the arena has handed out %d bytes", used)
		}
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return managerOf(t, reservation.Config{Spaces: []*tier.Space{s}}), s
}

// one returns a manager of one GPU space.
func one(t testing.TB, capacity int64, bypass int) (*reservation.Manager, *tier.Space) {
	t.Helper()
	s := spaceOf(t, "gpu:0", capacity)
	return managerOf(t, reservation.Config{Spaces: []*tier.Space{s}, Bypass: bypass}), s
}
