package arrowmem_test

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	arena "github.com/spillway-db/spillway/internal/host"
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
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if u := s.State().Usage; u.Used() != 0 {
			t.Errorf("the space is not empty at the end: %+v", u)
		}
	})
	return m, s
}

// testAllocator is an allocator that has an arena of its own.
type testAllocator struct {
	*arrowmem.Allocator
	space *tier.Space
}

// live returns how many bytes are allocated, as the space charges them.
func (a testAllocator) live() int64 { return a.space.State().Live }

// allocatorOf returns an allocator over a reservation of bytes, which is released in
// the end with nothing left in it.
func allocatorOf(t testing.TB, capacity, bytes int64, opts *reservation.Options) testAllocator {
	t.Helper()
	m, s := arenaOf(t, capacity)
	r, err := m.TryReserve(reservation.AnyInTier(tier.Host), bytes, opts)
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
	return testAllocator{a, s}
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
	r, err := m.TryReserve(reservation.AnyInTier(tier.Disk), 100, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer release(t, r)
	if _, err := arrowmem.New(r); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("over a disk: %v", err)
	}
	if _, err := arrowmem.New(nil); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("over no reservation: %v", err)
	}
}

func TestAllocatorGivesZeroedAlignedMemory(t *testing.T) {
	a := allocatorOf(t, 1<<20, 1<<20, nil)
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
	if a.live() != 0 {
		t.Errorf("%d bytes are allocated in the end", a.live())
	}
}

func TestAllocatorZeroBytes(t *testing.T) {
	a := allocatorOf(t, 1<<20, 0, nil)
	if b := a.Allocate(0); b != nil {
		t.Error("0 bytes are not nil")
	}
	if b := a.Reallocate(0, nil); b != nil {
		t.Error("0 bytes of nothing are not nil")
	}
	a.Free(nil)
	a.Free([]byte{})
	for _, size := range []int{-1, -1 << 62} {
		if a.Allocate(size) != nil || a.Reallocate(size, nil) != nil {
			t.Errorf("%d bytes are not nil", size)
		}
	}
	if err := a.Close(); err == nil || !strings.Contains(err.Error(), "-1 bytes") {
		t.Errorf("Close after negative sizes: %v", err)
	}
}

func TestAllocatorRefusalsCarryTheirError(t *testing.T) {
	const size = 64 << 10
	m, s := arenaOf(t, 16*size)
	r, err := m.TryReserve(reservation.AnyInTier(tier.Host), size, nil)
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
	if s.State().Used() != size {
		t.Errorf("%d bytes are used while an array lives on", s.State().Used())
	}
	a.Free(b)
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := guarded(func() { a.Allocate(1) }); !errors.Is(err, tier.ErrClosed) {
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
	a := allocatorOf(t, 8*size, 8*size, nil)
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
	for _, opts := range []*reservation.Options{
		nil, {Policy: reservation.Ignore()}, {Policy: reservation.Increase(1.25)},
	} {
		a := allocatorOf(t, 80<<10, 32<<10, opts)
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
			if n := int64(len(b)); a.live() < n || n == 0 && a.live() > 0 {
				t.Fatalf("%d bytes are allocated; want at least %d", a.live(), n)
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

// TestReallocateInPlace: what shrinks stays where it is if there is no room for less, or if little
// would be saved. It grows there again, and what it gave up does not come back.
func TestReallocateInPlace(t *testing.T) {
	const size = 64 << 10
	// Under the policy Ignore there is room, but not within the promise.
	for _, policy := range []reservation.LimitPolicy{reservation.Fail(), reservation.Ignore()} {
		a := allocatorOf(t, 2*size, size, &reservation.Options{Policy: policy})
		b := a.Allocate(size)
		for i := range b {
			b[i] = 9
		}
		at := addressOf(b)
		for _, next := range []int{10, 20, size} {
			b = a.Reallocate(next, b)
			if len(b) != next || cap(b) != next || addressOf(b) != at {
				t.Fatalf("%d bytes with room for %d; want %d in place", len(b), cap(b), next)
			}
			for i, x := range b {
				if (x == 9) != (i < 10) {
					t.Fatalf("byte %d of %d is %d", i, next, x)
				}
			}
		}
		a.Free(b)
		b = a.Allocate(size / 2)
		at = addressOf(b)
		if b = a.Reallocate(size/2*3/4+1, b); addressOf(b) != at || a.live() != size/2 {
			t.Errorf("little would be saved, and it was moved, to %d bytes", a.live())
		}
		b = a.Reallocate(size/2*3/4, b)
		if addressOf(b) == at || a.live() != size/2*3/4 {
			t.Errorf("much would be saved, and it was not moved: %d bytes", a.live())
		}
		a.Free(b)
	}
}

// TestForeignMemory changes nothing, and is an error of Close.
func TestForeignMemory(t *testing.T) {
	for name, f := range map[string]func(a testAllocator, freed, live []byte){
		"free twice":       func(a testAllocator, freed, _ []byte) { a.Free(freed) },
		"free another's":   func(a testAllocator, _, _ []byte) { a.Free(make([]byte, 10)) },
		"free a part":      func(a testAllocator, _, live []byte) { a.Free(live[1:]) },
		"reallocate freed": func(a testAllocator, freed, _ []byte) { a.Free(a.Reallocate(200, freed)) },
		"reallocate foreign": func(a testAllocator, _, _ []byte) {
			b := a.Reallocate(5, []byte("some other"))
			if string(b) != "some " {
				t.Errorf("its bytes are %q", b)
			}
			a.Free(b)
		},
	} {
		a := allocatorOf(t, 1<<20, 1<<20, nil)
		freed, live := a.Allocate(100), a.Allocate(100)
		a.Free(freed)
		before := a.live()
		f(a, freed, live)
		if a.live() != before {
			t.Errorf("%s: %d bytes are allocated; want %d", name, a.live(), before)
		}
		a.Free(live)
		if err := a.Close(); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("%s: Close: %v", name, err)
		}
	}
}

func TestCloseReportsAndFreesWhatIsLeft(t *testing.T) {
	a := allocatorOf(t, 1<<20, 1<<20, nil)
	b := a.Allocate(100)
	a.Allocate(10000)
	err := a.Close()
	var left *arrowmem.UnfreedError
	if !errors.As(err, &left) || left.Bytes != 10100 || left.Allocations != 2 || a.live() != 0 {
		t.Fatalf("Close: %v", err)
	}
	if err := guarded(func() { a.Allocate(1) }); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	a.Free(b) // which a build with invariants would not let pass if b were released again
}
