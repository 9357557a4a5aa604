package tiertest

import (
	"bytes"
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// poolCapacity is what the suite asks a pool to hold: 256 pages, enough for
// every pattern of fragmentation here and small enough for a slow disk.
const poolCapacity = 256 * tier.Page

// RunPool checks that a pool keeps the contract of tier.Pool. open returns an
// empty pool of capacity bytes, a multiple of 64 pages; the suite closes it.
// What else the pool is made of (a directory, a device) open cleans up with
// t.Cleanup.
//
// The suite allocates pieces of up to a sixteenth of the capacity without cuts on an empty pool. So
// a pool of several segments passes if its segments hold that much.
func RunPool(t *testing.T, open func(t *testing.T, capacity int64) tier.Pool, traits ...Trait) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, p *poolUnderTest)
	}{
		{"Charge", testPoolCharge},
		{"Shape", testPoolShape},
		{"Contents", testPoolContents},
		{"Exhaustion", testPoolExhaustion},
		{"Fragmentation", testPoolFragmentation},
		{"Cuts", testPoolCuts},
		{"Small", testPoolSmall},
		{"ReclaimedOnce", testPoolReclaimedOnce},
		{"AllocInReclaimed", testPoolAllocInReclaimed},
		{"CloseWaits", testPoolCloseWaits},
		{"AfterClose", testPoolAfterClose},
		{"Random", testPoolRandom},
		{"Concurrent", testPoolConcurrent},
	} {
		t.Run(c.name, func(t *testing.T) {
			// open's cleanups run before this one, which was made first.
			NoLeaks(t)
			p := &poolUnderTest{Pool: open(t, poolCapacity), holesUnknown: slices.Contains(traits, HolesUnknown)}
			t.Cleanup(func() {
				if !p.closed.Load() {
					p.close(t)
				}
			})
			c.run(t, p)
		})
	}
}

// Trait is something that a pool may be like, and need not.
type Trait int

// HolesUnknown: another component, such as a driver, places what is allocated. The pool may have
// room where others would be fragmented, and does not know how long the longest piece is, but only
// that it is too short.
const HolesUnknown Trait = iota

// poolUnderTest counts what reclaimed was called for.
type poolUnderTest struct {
	tier.Pool
	holesUnknown bool
	closed       atomic.Bool
	freed        atomic.Int64
	reclaimed    atomic.Int64
}

func (p *poolUnderTest) alloc(t *testing.T, size int64, cuts []int64) tier.Memory {
	t.Helper()
	m, err := p.Alloc(size, cuts)
	if err != nil {
		t.Fatalf("Alloc(%d) with %d cuts: %v", size, len(cuts), err)
	}
	checkShape(t, m, size, cuts)
	return m
}

// free frees m and counts the call of reclaimed.
func (p *poolUnderTest) free(m tier.Memory) {
	p.freed.Add(1)
	p.Free(m, func() {
		lockrank.AssertNone("reclaimed is called")
		p.reclaimed.Add(1)
	})
}

// freeAndWait frees all and waits until all of it is reclaimed.
func (p *poolUnderTest) freeAndWait(ms ...tier.Memory) {
	var wg sync.WaitGroup
	wg.Add(len(ms))
	for _, m := range ms {
		p.Free(m, wg.Done)
	}
	wg.Wait()
}

// close closes the pool and checks that by then all that was freed is
// reclaimed, each once.
func (p *poolUnderTest) close(t *testing.T) {
	t.Helper()
	p.closed.Store(true)
	if err := p.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if f, r := p.freed.Load(), p.reclaimed.Load(); f != r {
		t.Errorf("after Close: %d freed, reclaimed was called %d times", f, r)
	}
}

func testPoolCharge(t *testing.T, p *poolUnderTest) {
	if c := p.Charge(0); c != 0 {
		t.Errorf("Charge(0) = %d", c)
	}
	checkCharge(t, p.Charge)
	if c := p.Charge(poolCapacity); c != poolCapacity {
		t.Errorf("Charge(%d) = %d: the whole pool must fit into the space", int64(poolCapacity), c)
	}
}

func checkCharge(t *testing.T, charge func(int64) int64) {
	t.Helper()
	sizes := []int64{1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 4095, 4096, 4097, 8191, 8192, 8193, 65535, 65536, 65537, 1<<20 - 1, 1 << 20, 1<<20 + 1, 1 << 40}
	for i, a := range sizes {
		ca := charge(a)
		if ca < a {
			t.Errorf("Charge(%d) = %d is less than the size", a, ca)
		}
		if cc := charge(ca); cc != ca {
			t.Errorf("Charge(%d) = %d and Charge(%d) = %d: rounding twice changes it", a, ca, ca, cc)
		}
		for _, b := range sizes[i:] {
			cb := charge(b)
			if cb < ca {
				t.Errorf("Charge(%d) = %d and Charge(%d) = %d", a, ca, b, cb)
			}
		}
	}
}

func testPoolShape(t *testing.T, p *poolUnderTest) {
	for _, size := range []int64{1, 2, 63, 64, 65, 4095, 4096, 4097, 8192, 10000, poolCapacity / 16} {
		m := p.alloc(t, size, nil)
		mustStore(t, m, 1)
		mustHold(t, m, 1)
		p.freeAndWait(m)
	}
	m := p.alloc(t, poolCapacity, pages(poolCapacity))
	mustStore(t, m, 2)
	mustHold(t, m, 2)
	p.free(m)
}

// testPoolContents writes at offsets that fit nothing, and checks the bytes
// beside.
func testPoolContents(t *testing.T, p *poolUnderTest) {
	const size = 3*tier.Page + 100
	m := p.alloc(t, size, pages(size))
	model := pattern(size, 1)
	mustStore(t, m, 1)
	r := rand.New(rand.NewPCG(1, 1))
	for range 60 {
		off := r.Int64N(size)
		part := pattern(r.Int64N(size-off+1), r.Uint64())
		if err := store(m, part, off); err != nil {
			t.Fatalf("writing %d bytes at %d: %v", len(part), off, err)
		}
		copy(model[off:], part)
		off = r.Int64N(size)
		got := make([]byte, r.Int64N(size-off+1))
		if err := load(m, got, off); err != nil {
			t.Fatalf("reading %d bytes at %d: %v", len(got), off, err)
		}
		if want := model[off : off+int64(len(got))]; !bytes.Equal(got, want) {
			t.Fatalf("reading %d bytes at %d: wrong from byte %d", len(got), off, firstDifference(got, want))
		}
	}
	p.free(m)
}

// mustRefuse checks that a request is refused as the contract says.
func mustRefuse(t *testing.T, p tier.Pool, size int64, cuts []int64) *tier.NoSpaceError {
	t.Helper()
	m, err := p.Alloc(size, cuts)
	return refusal(t, m, err, size, cuts)
}

// refusal checks what Alloc returned when there was no room.
func refusal(t *testing.T, m tier.Memory, err error, size int64, cuts []int64) *tier.NoSpaceError {
	t.Helper()
	if err == nil {
		t.Fatalf("Alloc(%d) with %d cuts gave %d bytes of a pool that has no room for them", size, len(cuts), m.Size())
	}
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || !errors.Is(err, tier.ErrNoSpace) {
		t.Fatalf("Alloc(%d) with %d cuts: %v; want a NoSpaceError", size, len(cuts), err)
	}
	return full
}

func testPoolExhaustion(t *testing.T, p *poolUnderTest) {
	const piece = poolCapacity / 16
	mustRefuse(t, p, poolCapacity+1, pages(poolCapacity+1))
	for round := range 3 { // what is given back is as good as new
		var held []tier.Memory
		for i := range 16 {
			m := p.alloc(t, piece, nil)
			mustStore(t, m, uint64(i))
			held = append(held, m)
		}
		mustRefuse(t, p, 1, nil)
		mustRefuse(t, p, piece, pages(piece))
		for i, m := range held {
			mustHold(t, m, uint64(i))
		}
		if round == 0 { // a hole of exactly the right size is used
			p.freeAndWait(held[5])
			held[5] = p.alloc(t, piece, nil)
		}
		p.freeAndWait(held...)
	}
}

func testPoolFragmentation(t *testing.T, p *poolUnderTest) {
	const piece = poolCapacity / 16
	var held []tier.Memory
	for range 16 {
		held = append(held, p.alloc(t, piece, nil))
	}
	// Every other piece is freed, in the order of where they lie: no two holes
	// touch.
	order := byPlace(held)
	var holes, rest []tier.Memory
	for i, m := range order {
		if i%2 == 0 {
			holes = append(holes, m)
		} else {
			rest = append(rest, m)
		}
	}
	p.freeAndWait(holes...)
	m, err := p.Alloc(2*piece, nil)
	if err == nil && p.holesUnknown {
		mustStore(t, m, 7)
		mustHold(t, m, 7)
		p.freeAndWait(append(rest, m)...)
		p.free(p.alloc(t, poolCapacity, pages(poolCapacity)))
		return
	}
	full := refusal(t, m, err, 2*piece, nil)
	if full.Largest != piece && !(p.holesUnknown && full.Largest >= piece && full.Largest < 2*piece) {
		t.Errorf("half of the pool is free in pieces of %d bytes, and NoSpaceError.Largest is %d", int64(piece), full.Largest)
	}
	if full.Requested != 2*piece {
		t.Errorf("NoSpaceError.Requested is %d for a request of %d", full.Requested, int64(2*piece))
	}
	if split(rest[0]) {
		m := p.alloc(t, poolCapacity/2, pages(poolCapacity/2))
		mustStore(t, m, 7)
		mustHold(t, m, 7)
		mustRefuse(t, p, 1, nil)
		p.freeAndWait(m)
	} else {
		mustRefuse(t, p, 2*piece, pages(2*piece))
		p.freeAndWait(p.alloc(t, piece, nil))
	}
	// With all of it back the holes are joined again.
	p.freeAndWait(rest...)
	p.free(p.alloc(t, poolCapacity, pages(poolCapacity)))
}

// byPlace sorts memories by where they start.
func byPlace(ms []tier.Memory) []tier.Memory {
	type placed struct {
		file string
		off  int64
	}
	at := func(m tier.Memory) placed {
		switch m := m.(type) {
		case tier.HostMemory:
			return placed{off: int64(address.Of(m.Extents()[0]))}
		case tier.DeviceMemory:
			return placed{off: int64(m.Addr())}
		case tier.FileMemory:
			_, file, off := m.Locate(0)
			return placed{file, off}
		}
		return placed{}
	}
	return slices.SortedFunc(slices.Values(ms), func(a, b tier.Memory) int {
		x, y := at(a), at(b)
		return cmp.Or(cmp.Compare(x.file, y.file), cmp.Compare(x.off, y.off))
	})
}

// testPoolCuts asks for memory in a pool full of holes with few cuts. Whether
// it is had depends on the pool; that it is split only at the cuts does not.
func testPoolCuts(t *testing.T, p *poolUnderTest) {
	r := rand.New(rand.NewPCG(2, 3))
	had := 0
	for range 10 {
		var held []tier.Memory
		for {
			m, err := p.Alloc(tier.Page*(1+r.Int64N(8)), nil)
			if err != nil {
				break
			}
			held = append(held, m)
		}
		r.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
		half := len(held) / 2
		p.freeAndWait(held[:half]...)
		held = held[half:]
		var fresh []tier.Memory
		var sizes []uint64 // of fresh, and the seeds of what they hold
		for range 20 {
			size := 1 + r.Int64N(poolCapacity/8)
			var cuts []int64
			for _, c := range pages(size) {
				if r.IntN(3) == 0 {
					cuts = append(cuts, c)
				}
			}
			m, err := p.Alloc(size, cuts)
			if err != nil {
				if !errors.Is(err, tier.ErrNoSpace) {
					t.Fatalf("Alloc(%d) with %d cuts: %v", size, len(cuts), err)
				}
				continue
			}
			had++
			checkShape(t, m, size, cuts)
			fresh, sizes = append(fresh, m), append(sizes, uint64(size))
		}
		mustStoreAll(t, fresh, sizes)
		mustHoldAll(t, fresh, sizes)
		p.freeAndWait(append(held, fresh...)...)
	}
	if had == 0 {
		t.Error("no request was had from a pool that was half free")
	}
}

// testPoolSmall fills the pool with small memory of one size, as its charges let
// it, makes holes and fills those: none of it is refused. In the end all of the
// pool can be had for something large.
func testPoolSmall(t *testing.T, p *poolUnderTest) {
	sizes, rounds := []int64{1000, 3000, 5000}, 2
	if testing.Short() {
		sizes, rounds = sizes[1:2], 1
	}
	for _, size := range sizes {
		r := rand.New(rand.NewPCG(3, uint64(size)))
		held := make([]tier.Memory, poolCapacity/2/p.Charge(size))
		seeds := make([]uint64, len(held))
		for i := range held {
			held[i], seeds[i] = p.alloc(t, size, nil), uint64(i)
		}
		mustStoreAll(t, held, seeds)
		for range rounds {
			r.Shuffle(len(held), func(i, j int) {
				held[i], held[j], seeds[i], seeds[j] = held[j], held[i], seeds[j], seeds[i]
			})
			half := len(held) / 2
			mustHoldAll(t, held[:half], seeds[:half])
			for i := range half {
				p.freeAndWait(held[i])
				held[i] = p.alloc(t, size, nil)
			}
			mustStoreAll(t, held[:half], seeds[:half])
		}
		mustHoldAll(t, held, seeds)
		p.freeAndWait(held...)
		p.freeAndWait(p.alloc(t, poolCapacity, pages(poolCapacity)))
	}
}

func testPoolReclaimedOnce(t *testing.T, p *poolUnderTest) {
	const n = 64
	var calls [n]atomic.Int64
	var wg sync.WaitGroup
	wg.Add(n)
	for i := range n {
		m := p.alloc(t, tier.Page, nil)
		go p.Free(m, func() {
			lockrank.AssertNone("reclaimed is called")
			if calls[i].Add(1) == 1 {
				wg.Done()
			}
		})
	}
	wg.Wait()
	p.close(t)
	for i := range calls {
		if c := calls[i].Load(); c != 1 {
			t.Errorf("reclaimed was called %d times for memory %d", c, i)
		}
	}
}

// testPoolAllocInReclaimed: reclaimed may use the pool, so it is not called
// under a lock of the pool's.
func testPoolAllocInReclaimed(t *testing.T, p *poolUnderTest) {
	m := p.alloc(t, poolCapacity, pages(poolCapacity))
	got := make(chan tier.Memory, 1)
	p.Free(m, func() {
		again, err := p.Alloc(poolCapacity, pages(poolCapacity))
		if err != nil {
			t.Errorf("allocating inside reclaimed: %v", err)
		}
		got <- again
	})
	if m := <-got; m != nil {
		p.free(m)
	}
}

func testPoolCloseWaits(t *testing.T, p *poolUnderTest) {
	var held []tier.Memory
	for range 32 {
		held = append(held, p.alloc(t, 4*tier.Page, nil))
	}
	for _, m := range held {
		p.free(m)
	}
	p.close(t) // checks that all is reclaimed by then
}

func testPoolAfterClose(t *testing.T, p *poolUnderTest) {
	a, b := p.alloc(t, 10000, nil), p.alloc(t, 10000, nil)
	mustStore(t, a, 1)
	p.free(b)
	p.close(t)
	if m, err := p.Alloc(1, nil); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("Alloc after Close gave %v, %v; want ErrClosed", m, err)
	}
	mustHold(t, a, 1) // what is handed out lives on
	mustStore(t, a, 2)
	mustHold(t, a, 2)
	done := make(chan struct{})
	p.Free(a, func() { close(done) })
	<-done
	if err := p.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("the second Close returned %v; want ErrClosed", err)
	}
}

// testPoolRandom runs random operations on one goroutine and checks every live
// memory's contents: no two overlap.
func testPoolRandom(t *testing.T, p *poolUnderTest) {
	type piece struct {
		m    tier.Memory
		seed uint64
	}
	r := rand.New(rand.NewPCG(4, 5))
	var held []piece
	var charged int64
	for step := range uint64(300) {
		if r.IntN(2) == 0 {
			size := 1 + r.Int64N(poolCapacity/8)
			cuts := pages(size)
			if p.Charge(size) > poolCapacity-charged {
				mustRefuse(t, p, size, cuts)
				continue
			}
			m, err := p.Alloc(size, cuts)
			if err != nil {
				var full *tier.NoSpaceError
				pinned := slices.ContainsFunc(held, func(h piece) bool { return !split(h.m) || shares(h.m) })
				if pinned && errors.As(err, &full) && full.Largest > 0 && full.Largest < p.Charge(size) {
					continue // fragmented
				}
				t.Fatalf("step %d: Alloc(%d) with %d of %d bytes charged: %v", step, size, charged, int64(poolCapacity), err)
			}
			checkShape(t, m, size, cuts)
			mustStore(t, m, step)
			charged += p.Charge(size)
			held = append(held, piece{m, step})
		} else if len(held) > 0 {
			i := r.IntN(len(held))
			mustHold(t, held[i].m, held[i].seed)
			charged -= p.Charge(held[i].m.Size())
			p.freeAndWait(held[i].m)
			held[i] = held[len(held)-1]
			held = held[:len(held)-1]
		}
	}
	for _, h := range held {
		mustHold(t, h.m, h.seed)
		p.freeAndWait(h.m)
	}
	p.free(p.alloc(t, poolCapacity, pages(poolCapacity)))
}

// testPoolConcurrent puts the pool behind a space and lets several goroutines
// draw from it: the space is never over its capacity and all comes back.
func testPoolConcurrent(t *testing.T, p *poolUnderTest) {
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID:        tier.ID{Kind: tier.Host},
		Capacity:  poolCapacity,
		Fractions: tier.Fractions{Limit: 1, Trigger: 0.9, Stop: 0.5},
		Pool:      p.Pool,
		Backend:   "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	p.closed.Store(true) // the space closes it
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(g, 9))
			for i := range uint64(40) {
				if err := drawAndCheck(space, 1+r.Int64N(poolCapacity/6), g<<16|i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	if err := space.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	u := space.Usage()
	if u.Used() != 0 {
		t.Errorf("after all was released: %+v", u)
	}
	if u.Peak > poolCapacity || u.Peak == 0 {
		t.Errorf("peak %d of a capacity of %d", u.Peak, int64(poolCapacity))
	}
	if l := space.Leaks(); len(l) != 0 {
		t.Errorf("%d buffers are still in the books", len(l))
	}
}

// drawAndCheck draws a buffer, if there is room, and checks that nothing else writes to it.
func drawAndCheck(space *tier.Space, size int64, seed uint64) error {
	charge := space.Charge(size)
	if err := space.Inside().Reserve(charge); err != nil {
		if errors.Is(err, tier.ErrNoSpace) {
			return nil
		}
		return err
	}
	b, err := space.Inside().Draw(size, pages(size), nil)
	if err != nil {
		space.Inside().Unreserve(charge)
		if errors.Is(err, tier.ErrNoSpace) { // a device's memory in pieces
			return nil
		}
		return err
	}
	want, got := pattern(size, seed), make([]byte, size)
	err = errors.Join(store(b.Memory(), want, 0), load(b.Memory(), got, 0), b.Release())
	if err == nil && !bytes.Equal(got, want) {
		return errors.New("two buffers overlap: one holds the other's bytes")
	}
	return err
}
