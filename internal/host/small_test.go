package host

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// adds checks that no more is used, free and withheld than the arena has, and that all of an unused
// one is free.
func adds(t testing.TB, a *Arena) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if slack := a.slackLocked(); slack < 0 || a.mu.used == 0 && slack != 0 {
		t.Errorf("used %d, free %d and withheld %d of %d bytes", a.mu.used, a.mu.free.FreeBytes(), a.mu.withheld,
			a.cfg.Capacity)
	}
}

func mustHold(t testing.TB, m tier.HostMemory, seed byte) {
	t.Helper()
	if !holds(m, seed) {
		t.Fatalf("%d bytes of memory have another's", m.Size())
	}
}

func TestSmallMemorySharesPages(t *testing.T) {
	a := open(t, Config{Capacity: 64 * tier.Page, Node: -1})
	var ms []tier.HostMemory
	for range 1024 { // 64 KiB of 64 pages
		ms = append(ms, alloc(t, a, 40))
	}
	if s := a.Stats(); s.Used != 1024*64 || s.Slabs != 1024*64 || s.Slack != 0 {
		t.Errorf("1024 times 40 bytes take %d bytes in slabs of %d", s.Used, s.Slabs)
	}
	seen := make(map[uintptr]bool)
	for _, m := range ms {
		at := extent.Address(m.Extents()[0])
		if at%64 != 0 || seen[at] {
			t.Fatalf("a place at %#x", at)
		}
		seen[at] = true
	}
	free(a, ms...)
	adds(t, a)
}

// TestWhatTheBooksAllowIsHadInPlaces: with small memory of one size a whole arena
// can be filled, and every hole can be filled again.
func TestWhatTheBooksAllowIsHadInPlaces(t *testing.T) {
	seed := testseed.One(t)
	const capacity = 7 * 5 * 3 * 32 << 10 / 4 // a multiple of each length of a slab
	for class := range classCount {
		a := open(t, Config{Capacity: capacity, Node: -1})
		size := classSize(class)
		r := rand.New(rand.NewPCG(seed, uint64(class)))
		var ms []tier.HostMemory
		for range capacity / size / 8 { // an eighth is enough to see it, the rest goes in one
			ms = append(ms, alloc(t, a, size))
		}
		rest := alloc(t, a, a.mu.free.FreeBytes())
		for int64(len(ms))*size < capacity-rest.Size() {
			ms = append(ms, alloc(t, a, size))
		}
		if _, err := a.Alloc(1, nil); !errors.Is(err, tier.ErrNoSpace) {
			t.Fatalf("%d bytes in places of %d, and one byte more: %v", a.Stats().Used, size, err)
		}
		for range 200 {
			i := r.IntN(len(ms))
			free(a, ms[i])
			ms[i] = alloc(t, a, size-r.Int64N(place))
		}
		free(a, ms...)
		free(a, rest)
		adds(t, a)
	}
}

// TestSmallIsRefusedOnlyIfNothingIsFree fills an arena so that only places of
// larger slabs are left.
func TestSmallIsRefusedOnlyIfNothingIsFree(t *testing.T) {
	a := open(t, Config{Capacity: 8 * tier.Page, Node: -1})
	one := alloc(t, a, 7168) // a slab of 7 pages: three more places
	page := alloc(t, a, tier.Page)
	if n := a.mu.free.FreeBytes(); n != 0 {
		t.Fatalf("%d bytes are free", n)
	}
	_, err := a.Alloc(2*tier.Page, []int64{tier.Page})
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Available != 3*7168 || full.Largest <= 0 || full.Largest >= 2*tier.Page {
		t.Errorf("two pages, where only places are free: %v", err)
	}
	ms := []tier.HostMemory{alloc(t, a, 100), alloc(t, a, 1000), alloc(t, a, 3000)}
	if s := a.Stats(); s.Used != 7168+tier.Page+128+1024+3072 || s.Used+s.Slack != 8*tier.Page {
		t.Errorf("a larger place is charged as what lies in it: %+v", s)
	}
	_, err = a.Alloc(1, nil)
	if !errors.As(err, &full) || full.Largest <= 0 {
		t.Errorf("one byte, where no place is free and the books have room: %v", err)
	}
	for i, m := range ms {
		fill(m, byte(i))
	}
	for i, m := range ms {
		mustHold(t, m, byte(i))
	}
	free(a, ms...)
	free(a, page, one)
	adds(t, a)
	free(a, alloc(t, a, 8*tier.Page))
}

// TestShortSlabs: where only single pages are free, they are cut up.
func TestShortSlabs(t *testing.T) {
	a := open(t, Config{Capacity: 16 * tier.Page, Node: -1})
	var pages []tier.HostMemory
	for range 16 {
		pages = append(pages, alloc(t, a, tier.Page))
	}
	for i := 0; i < 16; i += 2 {
		free(a, pages[i])
	}
	var ms []tier.HostMemory
	for range 3 { // of seven pages for 3584, and of as many for 448
		ms = append(ms, alloc(t, a, 3584))
		fill(ms[len(ms)-1], byte(len(ms)))
	}
	for range 2 * tier.Page / 448 {
		ms = append(ms, alloc(t, a, 448))
		fill(ms[len(ms)-1], byte(len(ms)))
	}
	for i, m := range ms {
		mustHold(t, m, byte(i+1))
	}
	if m, err := a.Alloc(6000, []int64{tier.Page}); err != nil || len(m.(tier.HostMemory).Extents()) != 2 {
		t.Errorf("6000 bytes that may be cut at a page: %v", err)
	} else {
		ms = append(ms, m.(tier.HostMemory))
	}
	if _, err := a.Alloc(6000, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("6000 bytes, with one free page and the rest in slabs: %v", err)
	}
	adds(t, a)
	free(a, ms...)
	for i := 1; i < 16; i += 2 {
		free(a, pages[i])
	}
	adds(t, a)
	free(a, alloc(t, a, 16*tier.Page))
}

func TestEmptySlabsGoBack(t *testing.T) {
	a := open(t, Config{Capacity: 64 * tier.Page, Node: -1})
	var ms []tier.HostMemory
	for range 4 * 64 { // four pages of 64 places
		ms = append(ms, alloc(t, a, 64))
	}
	rand.Shuffle(len(ms), func(i, j int) { ms[i], ms[j] = ms[j], ms[i] })
	free(a, ms...)
	if s := a.Stats(); s.Slabs != 0 || s.LargestFree != 64*tier.Page {
		t.Errorf("empty slabs stay: %+v", s)
	}
}

// TestSmallAndLargeAtOnce lets goroutines draw small and large memory from an arena
// through a space, so that everything is under way at once: slabs that come and go,
// Trim, and requests that take the last byte. What the books allow is had, or the
// error says that the room is in pieces.
func TestSmallAndLargeAtOnce(t *testing.T) {
	seed := testseed.One(t)
	const capacity = 256 * tier.Page
	a := open(t, Config{Capacity: capacity, Node: -1})
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Host}, Capacity: capacity, Pool: a, Node: -1, Backend: "host",
		Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
	})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, g))
			var held []*tier.Buffer
			for i := range 3000 {
				if len(held) > 0 && r.IntN(2) == 0 || len(held) > 60 {
					j := r.IntN(len(held))
					mustHold(t, held[j].Memory().(tier.HostMemory), byte(g))
					if err := held[j].Release(); err != nil {
						t.Error(err)
					}
					held[j] = held[len(held)-1]
					held = held[:len(held)-1]
					continue
				}
				size := 1 + r.Int64N(1<<(1+r.IntN(13)))
				if i%8 == 0 {
					size = 1 + r.Int64N(8*tier.Page)
				}
				charge := space.Charge(size)
				p, err := space.Promise(charge)
				if err != nil {
					continue
				}
				p.Draw(charge, 0, false)
				b, err := space.Draw(p, size, nil)
				if err := space.Release(p); err != nil {
					t.Error(err)
				}
				if err != nil {
					var full *tier.NoSpaceError
					if !errors.As(err, &full) || full.Largest == 0 {
						t.Errorf("%d bytes that the books have: %v", size, err)
					}
					continue
				}
				fill(b.Memory().(tier.HostMemory), byte(g))
				held = append(held, b)
				if i%500 == 0 {
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
	if s := a.Stats(); s.Used != 0 || space.State().Used() != 0 {
		t.Errorf("in the end %+v", s)
	}
	free(a, alloc(t, a, capacity))
	if err := space.Close(); err != nil {
		t.Error(err)
	}
}

// TestFewPagesForMany: goroutines that all want a place while there is one page, and
// take turns in having its slab: the books have room for all, so nobody is refused.
func TestFewPagesForMany(t *testing.T) {
	a := open(t, Config{Capacity: tier.Page, Node: -1})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				m, err := a.Alloc(900, nil) // four places
				if err != nil {
					t.Error(err)
					return
				}
				a.Free(m, func() {})
			}
		})
	}
	wg.Wait()
}

func TestSmallMemoryOutlivesItsArena(t *testing.T) {
	a := open(t, Config{Capacity: 8 * tier.Page, Node: -1})
	m, n := alloc(t, a, 100), alloc(t, a, 100)
	fill(m, 7)
	free(a, n)
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	mustHold(t, m, 7)
	if _, err := a.Alloc(100, nil); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("Alloc after Close: %v", err)
	}
	free(a, m)
	if a.mu.refs != 0 {
		t.Error("the mapping stays after the last Free")
	}
}

func TestSmallFreeTwicePanics(t *testing.T) {
	a := open(t, Config{Capacity: 8 * tier.Page, Node: -1})
	keep, m := alloc(t, a, 100), alloc(t, a, 100)
	free(a, m)
	for name, f := range map[string]func(){
		"freed twice":      func() { free(a, m) },
		"another's memory": func() { a.Free(nil, func() {}) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
	free(a, keep)
	adds(t, a)
}

// TestWriteAfterFreeIsFound is for an invariants build: places that are free have
// one pattern, and who finds another says so.
func TestWriteAfterFreeIsFound(t *testing.T) {
	if !invariants.Enabled {
		t.Skip("needs -tags invariants")
	}
	a := open(t, Config{Capacity: 8 * tier.Page, Node: -1})
	keep, m := alloc(t, a, 100), alloc(t, a, 100)
	e := m.Extents()[0]
	free(a, m)
	if e[5] != freedByte {
		t.Error("a freed place keeps its bytes")
	}
	e[5] = 1
	func() {
		defer func() {
			if p, _ := recover().(string); !strings.Contains(p, "byte 5 of 128") {
				t.Errorf("the next Alloc: %q", p)
			}
		}()
		alloc(t, a, 100)
	}()
	free(a, alloc(t, a, 100), keep)
	adds(t, a)
}

func TestFailedShowGivesPlacesBack(t *testing.T) {
	if !poison {
		t.Skip("needs -tags invariants without -race, to show pages")
	}
	refused := errors.New("refused")
	var f *faulty
	a, err := newArena(Config{Capacity: 16 * tier.Page, Node: -1}, func(size int64) (Mapping, error) {
		m, err := reserve(size)
		f = &faulty{Mapping: m}
		return f, err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	f.onShow = refused
	if _, err := a.Alloc(100, nil); !errors.Is(err, refused) { // neither a slab, nor pages by themselves
		t.Errorf("100 bytes: %v", err)
	}
	f.onShow = nil
	free(a, alloc(t, a, 7168), alloc(t, a, 100))
	adds(t, a)
}
