package host

import (
	"errors"
	"maps"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// inPieces fills an arena with memory of one step and a page, and frees every other one. So no free
// range is as long as two.
func inPieces(t testing.TB, a *Arena) (held []tier.HostMemory) {
	t.Helper()
	var holes []tier.HostMemory
	for i := 0; a.Stats().LargestFree >= step+tier.Page; i++ {
		m := alloc(t, a, step+tier.Page)
		if fill(m, byte(i)); i%2 == 0 {
			holes = append(holes, m)
		} else {
			held = append(held, m)
		}
	}
	free(a, holes...)
	return held
}

// counted notes what is asked of a mapping.
type counted struct {
	Mapping
	asked map[string]int
}

func (c counted) huge() error       { c.asked["huge"]++; return c.Mapping.huge() }
func (c counted) bind(n int) error  { c.asked["bind"]++; return c.Mapping.bind(n) }
func (c counted) lock([]byte) error { c.asked["lock"]++; return nil }
func (c counted) Release() error    { c.asked["release"]++; return c.Mapping.Release() }

// TestRelocatedMemoryIsAsTheArena: it is asked for the same, and the mapping ends with the memory.
func TestRelocatedMemoryIsAsTheArena(t *testing.T) {
	for _, cfg := range []Config{{Node: -1}, {Huge: true, Lock: true}} {
		cfg.Capacity = 8 * (step + tier.Page)
		a := openFaulty(t, cfg, &faulty{onLock: func([]byte) error { return nil }})
		asked, reserve := make(map[string]int), a.reserve
		a.reserve = func(size int64) (Mapping, error) {
			m, err := reserve(size)
			return counted{m, asked}, err
		}
		held := inPieces(t, a)
		free(a, alloc(t, a, step), alloc(t, a, 2*step), alloc(t, a, 100))
		want := map[string]int{"release": 1}
		if cfg.Huge {
			want = map[string]int{"huge": 1, "bind": 1, "lock": 1, "release": 1}
		}
		if !maps.Equal(asked, want) {
			t.Errorf("%+v: asked for %v, want %v", cfg, asked, want)
		}
		free(a, held...)
	}
}

// TestRoomInPieces: memory that fits in no free range has a mapping of its own, in place of
// as many free pages, which are there again when it is freed.
func TestRoomInPieces(t *testing.T) {
	const capacity = 8 * (step + tier.Page)
	var released atomic.Int64
	a := openFaulty(t, Config{Capacity: capacity, Node: -1, Touch: true}, &faulty{released: &released})
	held := inPieces(t, a)
	trim(a) // so that some of the pages are not there
	m := alloc(t, a, 3*step-100)
	if e := m.Extents(); len(e) != 1 || len(e[0]) != 3*step-100 || cap(e[0]) != len(e[0]) {
		t.Fatalf("%d extents, the first has %d bytes and room for %d", len(e), len(e[0]), cap(e[0]))
	}
	fill(m, 99)
	s := a.Stats()
	if s.Used != 4*(step+tier.Page)+3*step || s.Slack != 0 {
		t.Errorf("with three steps of four in use: %+v", s)
	}
	if !onHeap {
		there := present(t, a.mem) + present(t, m.(*memory).own.Bytes())
		if there > s.Committed || s.Committed > capacity {
			t.Errorf("%d bytes of pages, and %d are reported, of %d", there, s.Committed, capacity)
		}
	}
	for i, h := range held {
		mustHold(t, h, byte(2*i+1))
	}
	rest := alloc(t, a, step+4*tier.Page) // all that is left
	if _, err := a.Alloc(1, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("one byte more: %v", err)
	}
	free(a, rest)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	mustHold(t, m, 99)
	free(a, held...)
	mustHold(t, m, 99)
	if n := released.Load(); n != 0 {
		t.Errorf("the arena was unmapped %d times while memory was in use", n)
	}
	free(a, m)
	if n := released.Load(); n != 1 {
		t.Errorf("the arena was unmapped %d times", n)
	}
}

// TestPinnedPagesStay: an arena that is pinned, or cannot give pages back or map others, reports that
// its room is in pieces, and loses nothing.
func TestPinnedPagesStay(t *testing.T) {
	refused := errors.New("refused")
	for name, c := range map[string]struct {
		refuse func(t *testing.T, a *Arena, f *faulty)
		caused bool
	}{
		"pinned": {func(t *testing.T, a *Arena, _ *faulty) {
			if onHeap {
				t.Skip("needs memory that can be pinned: this build has arenas on the Go heap")
			}
			if err := a.Pin(&pinner{t: t, onUnpin: func() {}}); err != nil {
				t.Fatal(err)
			}
		}, false},
		"pinned meanwhile": {func(t *testing.T, a *Arena, f *faulty) {
			if onHeap {
				t.Skip("needs memory that can be pinned: this build has arenas on the Go heap")
			}
			a.stopTouch = func() { // Alloc has taken the free ranges, and not yet given their pages back
				a.stopTouch = func() {}
				if err := a.Pin(&pinner{t: t, onUnpin: func() {}}); err != nil {
					t.Fatal(err)
				}
			}
			f.onDiscard = func([]byte) error { t.Error("pages of a pinned arena are given back"); return nil }
		}, true},
		"discard": {func(_ *testing.T, _ *Arena, f *faulty) {
			f.onDiscard = func([]byte) error { return refused }
		}, true},
		"map": {func(_ *testing.T, a *Arena, _ *faulty) {
			a.reserve = func(int64) (Mapping, error) { return nil, refused }
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			const capacity = 8 * (step + tier.Page)
			f := &faulty{}
			a := openFaulty(t, Config{Capacity: capacity, Node: -1}, f)
			held := inPieces(t, a)
			c.refuse(t, a, f)
			_, err := a.Alloc(3*step, nil)
			var full *tier.NoSpaceError
			if !errors.As(err, &full) || full.Available != capacity/2 || full.Largest != step+tier.Page ||
				(full.Cause != nil) != c.caused {
				t.Errorf("three steps in one piece: %v", err)
			}
			cut := alloc(t, a, 3*step, step, 2*step)
			if n := len(cut.Extents()); n != 3 {
				t.Errorf("with cuts: %d extents", n)
			}
			free(a, held...)
			free(a, cut)
			adds(t, a)
			free(a, alloc(t, a, capacity))
		})
	}
}

// TestNothingIsRelocatedForTrim: a request waits for the range that Trim works on, though there are
// enough other pages.
func TestNothingIsRelocatedForTrim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leave := make(chan struct{})
		a := openFaulty(t, Config{Capacity: 8 * step, Node: -1}, &faulty{
			onDiscard: func([]byte) error { <-leave; return nil },
		})
		var halves []tier.HostMemory
		for range 8 {
			halves = append(halves, alloc(t, a, step/2))
		}
		for i := 0; i < 8; i += 2 {
			free(a, halves[i])
		}
		trimmed := make(chan int64)
		go func() { trimmed <- trim(a) }()
		synctest.Wait()
		got := make(chan tier.HostMemory)
		go func() { got <- alloc(t, a, step) }()
		synctest.Wait()
		close(leave)
		<-trimmed
		m := <-got
		if m.(*memory).own != nil {
			t.Error("relocated")
		}
		free(a, m, halves[1], halves[3], halves[5], halves[7])
	})
}

// TestReservedMemoryCanBeAllocated allocates and frees at random, with cuts as images have them,
// and never more than the arena has: nothing is refused, and no two memories share a byte.
func TestReservedMemoryCanBeAllocated(t *testing.T) {
	const capacity = 512 * tier.Page
	for seed := range testseed.Each(t, 10) {
		r := rand.New(rand.NewPCG(seed, 1))
		a := open(t, Config{Capacity: capacity, Node: -1, Touch: r.IntN(2) == 0})
		type owned struct {
			tier.HostMemory
			id byte
		}
		var held []owned
		relocated := 0
		for i := range 500 {
			room := capacity - a.Stats().Used
			if len(held) > 0 && (room == 0 || r.IntN(5) < 2) {
				j := r.IntN(len(held))
				mustHold(t, held[j], held[j].id)
				free(a, held[j].HostMemory)
				held[j] = held[len(held)-1]
				held = held[:len(held)-1]
				continue
			}
			size := tier.Page * (1 + r.Int64N(min(room/tier.Page, 128)))
			var cuts []int64
			for at := int64(0); at < size; at += tier.Page * (1 + r.Int64N(64)) {
				if at > 0 {
					cuts = append(cuts, at)
				}
			}
			m, err := a.Alloc(size, cuts)
			if err != nil {
				t.Fatalf("step %d: %d bytes of %d that are free: %v", i, size, room, err)
			}
			if m.(*memory).own != nil {
				relocated++
			}
			held = append(held, owned{m.(tier.HostMemory), byte(i)})
			fill(held[len(held)-1], byte(i))
			if r.IntN(100) == 0 {
				trim(a)
			}
		}
		for _, m := range held {
			mustHold(t, m, m.id)
			free(a, m.HostMemory)
		}
		adds(t, a)
		free(a, alloc(t, a, capacity))
		if relocated == 0 {
			t.Error("all memory fitted into ranges: the test shows nothing")
		}
	}
}

// TestReservedMemoryConcurrently is the same with goroutines that allocate, free and trim at the
// same time.
func TestReservedMemoryConcurrently(t *testing.T) {
	const capacity = 512 * tier.Page
	seed := testseed.One(t)
	a := open(t, Config{Capacity: capacity, Node: -1, Touch: true})
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Host}, Capacity: capacity, Pool: a, Node: -1, Backend: "host",
		Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
	})
	if err != nil {
		t.Fatal(err)
	}
	var granted atomic.Int64
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, g))
			var held []*tier.Buffer
			for i := range 150 {
				if n := len(held); n > 0 && r.IntN(5) < 2 {
					j := r.IntN(n)
					mustHold(t, held[j].Memory().(tier.HostMemory), byte(g))
					if err := held[j].Release(); err != nil {
						t.Error(err)
					}
					held[j] = held[n-1]
					held = held[:n-1]
					continue
				}
				size := tier.Page * (1 + r.Int64N(64))
				p, err := space.Promise(size)
				if err != nil {
					continue // it is full
				}
				p.Draw(size, 0, false)
				b, err := space.Draw(p, size, nil)
				if err != nil {
					t.Errorf("%d bytes that were reserved: %v", size, err)
				}
				if err := errors.Join(err, space.Release(p)); err != nil {
					continue
				}
				granted.Add(1)
				fill(b.Memory().(tier.HostMemory), byte(g))
				held = append(held, b)
				if i%50 == 0 {
					trim(a)
				}
			}
			for _, b := range held {
				if err := b.Release(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	adds(t, a)
	free(a, alloc(t, a, capacity))
	if granted.Load() == 0 {
		t.Error("nothing was granted")
	}
	if err := space.Close(); err != nil {
		t.Error(err)
	}
}
