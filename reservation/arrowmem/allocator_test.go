package arrowmem_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	arena "github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/tier"
)

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
		Fractions: tier.Fractions{Limit: 1, Trigger: 0.9, Stop: 0.5},
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
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if u := s.Usage(); u.Used() != 0 {
			t.Errorf("the space is not empty at the end: %+v", u)
		}
	})
	return m, s
}

// allocatorOf returns an allocator over a reservation of bytes, which is released in
// the end with nothing left in it.
func allocatorOf(t testing.TB, capacity, bytes int64, opts ...reservation.Option) *arrowmem.Allocator {
	t.Helper()
	m, _ := arenaOf(t, capacity)
	r, err := m.TryReserve(reservation.AnyInTier(tier.Host), bytes, opts...)
	if err != nil {
		t.Fatal(err)
	}
	a, err := arrowmem.New(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
		release(t, r)
	})
	return a
}

// guarded returns what an allocation came to.
func guarded(f func()) error {
	return arrowmem.Guard(func() error { f(); return nil })
}

func TestAllocatorOnlyOverHostMemory(t *testing.T) {
	s, err := tier.NewSpace(tier.SpaceConfig{ID: tier.ID{Kind: tier.Disk}, Capacity: 1 << 20, Pool: noPool{}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	r, err := m.TryReserve(reservation.AnyInTier(tier.Disk), 100)
	if err != nil {
		t.Fatal(err)
	}
	defer release(t, r)
	if _, err := arrowmem.New(r); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("over a disk: %v", err)
	}
	if _, err := arrowmem.New(reservation.Reservation{}); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("over no reservation: %v", err)
	}
}

func TestAllocatorGivesZeroedAlignedMemory(t *testing.T) {
	a := allocatorOf(t, 1<<20, 1<<20)
	for range 2 { // the second time what is had was used before
		var all [][]byte
		for _, size := range []int{1, 63, 64, 65, 1000, 4000, 4096, 5000, 8192, 8193, 100000} {
			b := a.Allocate(size)
			if len(b) != size || cap(b) != size || addressOf(b)%64 != 0 {
				t.Fatalf("%d bytes: %d with room for %d at %#x", size, len(b), cap(b), addressOf(b))
			}
			for i := range b {
				if b[i] != 0 {
					t.Fatalf("byte %d of %d is %d", i, size, b[i])
				}
				b[i] = byte(i) | 1
			}
			all = append(all, b)
		}
		for _, b := range all {
			for i := range b {
				if b[i] != byte(i)|1 {
					t.Fatal("two allocations overlap")
				}
			}
			a.Free(b)
		}
	}
	if a.Allocated() != 0 {
		t.Errorf("%d bytes are allocated in the end", a.Allocated())
	}
}

func TestAllocatorZeroBytes(t *testing.T) {
	a := allocatorOf(t, 1<<20, 0)
	if b := a.Allocate(0); b != nil {
		t.Error("0 bytes are not nil")
	}
	if b := a.Reallocate(0, nil); b != nil {
		t.Error("0 bytes of nothing are not nil")
	}
	a.Free(nil)
	a.Free([]byte{})
	for _, size := range []int{-1, -1 << 62} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%d bytes: no panic", size)
				}
			}()
			_ = guarded(func() { a.Allocate(size) })
		}()
	}
}

func TestAllocatorRefusalsCarryTheirError(t *testing.T) {
	const size = 64 << 10
	m, s := arenaOf(t, 16*size)
	r, err := m.TryReserve(reservation.AnyInTier(tier.Host), size)
	if err != nil {
		t.Fatal(err)
	}
	a, err := arrowmem.New(r)
	if err != nil {
		t.Fatal(err)
	}
	b := a.Allocate(size)
	var exceeded *reservation.ExceededError
	err = guarded(func() { a.Allocate(1) })
	if !errors.As(err, &exceeded) || exceeded.Limit != size || !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("beyond the promise: %v", err)
	}
	if err := guarded(func() { a.Allocate(1 << 62) }); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("more than there is: %v", err)
	}
	// A program with a recover of its own finds the same.
	func() {
		defer func() {
			if e, ok := recover().(error); !ok || !errors.As(e, &exceeded) {
				t.Error("the panic's value does not carry the error")
			}
		}()
		a.Allocate(1)
	}()
	release(t, r)
	if err := guarded(func() { a.Allocate(1) }); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("after Release: %v", err)
	}
	if s.Used() != size {
		t.Errorf("%d bytes are used while an array lives on", s.Used())
	}
	a.Free(b)
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := guarded(func() { a.Allocate(1) }); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("after both: %v", err)
	}
	if err := a.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
}

// TestAllocatorInPieces: what was reserved can be allocated in one piece, also where the arena has no
// free range that is as long.
func TestAllocatorInPieces(t *testing.T) {
	const size = 64 << 10
	a := allocatorOf(t, 8*size, 8*size)
	var all [][]byte
	for range 8 {
		all = append(all, a.Allocate(size))
	}
	for i := 0; i < 8; i += 2 {
		a.Free(all[i])
	}
	if err := guarded(func() { a.Free(a.Allocate(4 * size)) }); err != nil {
		t.Errorf("four times the largest piece: %v", err)
	}
	for i := 1; i < 8; i += 2 {
		a.Free(all[i])
	}
}

func TestReallocate(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, opts := range [][]reservation.Option{
		nil, {reservation.WithPolicy(reservation.Ignore())}, {reservation.WithPolicy(reservation.Increase(1.25))},
	} {
		a := allocatorOf(t, 80<<10, 32<<10, opts...)
		var b, model []byte
		grown, refused := 0, 0
		for range 1000 {
			size := r.IntN(1 << r.IntN(17))
			var next []byte
			err := guarded(func() { next = a.Reallocate(size, b) })
			if err != nil {
				if !errors.Is(err, reservation.ErrExceeded) && !errors.Is(err, tier.ErrNoSpace) {
					t.Fatal(err)
				}
				if size <= len(b) {
					t.Fatalf("from %d to %d bytes: %v", len(b), size, err)
				}
				refused++
			} else {
				if len(next) != size {
					t.Fatalf("%d bytes; want %d", len(next), size)
				}
				for i := len(model); i < size; i++ {
					if next[i] != 0 {
						t.Fatalf("from %d to %d bytes: byte %d is not zero", len(model), size, i)
					}
				}
				if size > len(model) {
					grown++
				}
				b = next
			}
			if a.Allocated() != int64(len(b)) {
				t.Fatalf("%d bytes are allocated; want %d", a.Allocated(), len(b))
			}
			for i := range min(len(b), len(model)) {
				if b[i] != model[i] {
					t.Fatalf("byte %d of %d changed", i, len(b))
				}
			}
			for i := range b {
				b[i] = byte(r.Uint32()) | 1
			}
			model = append(model[:0], b...)
		}
		if grown == 0 || refused == 0 {
			t.Errorf("grown %d times and refused %d times: the test shows nothing", grown, refused)
		}
		a.Free(b)
	}
}

func TestReallocateInPlaceWhereTheChargeAllows(t *testing.T) {
	const size = 64 << 10
	a := allocatorOf(t, size, size)
	b := a.Allocate(size - 4000) // charged all of it
	b[0], b[size-4001] = 1, 2
	c := a.Reallocate(size, b)
	if &c[0] != &b[0] || c[0] != 1 || c[size-4001] != 2 {
		t.Error("it was not grown in place")
	}
	d := a.Reallocate(10, c) // no room to move it
	if &d[0] != &b[0] || d[0] != 1 || len(d) != 10 {
		t.Error("it was not made shorter in place")
	}
	for i := range c[10:20] {
		c[10+i] = 9
	}
	d = a.Reallocate(20, d)
	for _, x := range d[10:] {
		if x != 0 {
			t.Error("what was given up comes back")
		}
	}
	if a.Allocated() != 20 {
		t.Errorf("%d bytes are allocated", a.Allocated())
	}
	a.Free(d)
	b = a.Allocate(size / 2)
	c = a.Reallocate(100, b)
	err := guarded(func() { // all but a page, in the two pieces beside it
		d, e := a.Allocate(size/2), a.Allocate(size/2-tier.Page)
		a.Free(d)
		a.Free(e)
	})
	if err != nil {
		t.Errorf("what a shorter block gave up is not to be had: %v", err)
	}
	a.Free(c)
}

func TestForeignMemory(t *testing.T) {
	for name, f := range map[string]func(a *arrowmem.Allocator, freed, live []byte){
		"free twice":         func(a *arrowmem.Allocator, freed, _ []byte) { a.Free(freed) },
		"free another's":     func(a *arrowmem.Allocator, _, _ []byte) { a.Free(make([]byte, 10)) },
		"free a part":        func(a *arrowmem.Allocator, _, live []byte) { a.Free(live[1:]) },
		"reallocate freed":   func(a *arrowmem.Allocator, freed, _ []byte) { a.Reallocate(200, freed) },
		"reallocate foreign": func(a *arrowmem.Allocator, _, _ []byte) { a.Reallocate(5, make([]byte, 10)) },
	} {
		a := allocatorOf(t, 1<<20, 1<<20)
		freed, live := a.Allocate(100), a.Allocate(100)
		a.Free(freed)
		var err error
		func() {
			defer func() {
				if p := recover(); p != nil {
					if err = p.(error); !invariants.Enabled {
						t.Errorf("%s: the panic was not for Guard", name)
					}
				}
			}()
			err = guarded(func() { f(a, freed, live) })
		}()
		reported := invariants.Enabled || strings.HasPrefix(name, "reallocate")
		if reported && !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s: %v", name, err)
		}
		if a.Allocated() != 100 {
			t.Errorf("%s: %d bytes are allocated", name, a.Allocated())
		}
		a.Free(live)
		if err := a.Close(); !invariants.Enabled && !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s: Close: %v", name, err)
		}
	}
}

func TestCloseReportsAndFreesWhatIsLeft(t *testing.T) {
	a := allocatorOf(t, 1<<20, 1<<20)
	a.Allocate(100)
	a.Allocate(10000)
	err := a.Close()
	var left *arrowmem.UnfreedError
	if !errors.As(err, &left) || left.Bytes != 10100 || len(left.Left) != 2 {
		t.Fatalf("Close: %v", err)
	}
	if l := left.Left; l[0].Bytes != 10000 || l[1].Bytes != 100 || (l[0].Stack != "") != invariants.Enabled {
		t.Errorf("left are %+v", l)
	}
	if err := guarded(func() { a.Allocate(1) }); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}
