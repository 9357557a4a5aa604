package tiertest

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// poolCapacity is the capacity of the pools under test: 256 pages, enough for every pattern of
// fragmentation here and small enough for a slow disk.
const poolCapacity = 256 * tier.Page

// RunPool checks that a pool keeps the contract of tier.Pool. open returns an empty pool of
// capacity bytes, a multiple of 64 pages. RunPool closes the pool. open registers a t.Cleanup for
// what the pool uses besides, such as a directory or a device.
//
// The suite allocates pieces of up to a sixteenth of the capacity without cuts from an empty pool.
// So a pool of several segments passes if its segments hold that much.
func RunPool(t *testing.T, open func(t *testing.T, capacity int64) tier.Pool, traits ...Trait) {
	for _, c := range []struct {
		name string
		run  func(t *testing.T, p *pool)
	}{
		{"Charge", func(t *testing.T, p *pool) { checkCharge(t, p.Charge, poolCapacity) }},
		{"Shape", testPoolShape},
		{"Contents", testPoolContents},
		{"Exhaustion", testPoolExhaustion},
		{"Fragmentation", testPoolFragmentation},
		{"Cuts", testPoolCuts},
		{"Small", testPoolSmall},
		{"Shrink", testPoolShrink},
		{"ReclaimedOnce", testPoolReclaimedOnce},
		{"AllocInReclaimed", testPoolAllocInReclaimed},
		{"CloseWaits", testPoolCloseWaits},
		{"AfterClose", testPoolAfterClose},
		{"Random", testPoolRandom},
		{"Concurrent", testPoolConcurrent},
	} {
		t.Run(c.name, func(t *testing.T) {
			// open registers its cleanups after this one, so they run before it.
			NoLeaks(t)
			p := &pool{Pool: open(t, poolCapacity), t: t, holesUnknown: slices.Contains(traits, HolesUnknown)}
			t.Cleanup(func() {
				if !p.closed {
					p.close()
				}
			})
			c.run(t, p)
		})
	}
}

// Trait is a property that a pool may have.
type Trait int

// HolesUnknown is the trait of a pool that may have space where others would be fragmented: another
// component, such as a driver, places its memory, or the pool maps its free pages elsewhere. It may
// find out only that its longest piece is too short.
const HolesUnknown Trait = iota

// pool is a pool under test. Its own methods end the test if they fail.
type pool struct {
	tier.Pool
	t            *testing.T
	holesUnknown bool
	closed       bool
	pieces       uint64       // adopted so far
	freed        int64        // by free
	reclaimed    atomic.Int64 // calls of reclaimed for those
}

// alloc allocates memory, which must succeed, and checks its shape.
func (p *pool) alloc(size int64, cuts []int64) piece {
	p.t.Helper()
	m, err := p.Alloc(size, cuts)
	if err != nil {
		p.t.Fatalf("Alloc(%d) with %d cuts: %v", size, len(cuts), err)
	}
	return p.adopt(m, size, cuts)
}

// allocAll allocates the whole capacity.
func (p *pool) allocAll() piece {
	p.t.Helper()
	return p.alloc(poolCapacity, pages(poolCapacity))
}

// adopt checks memory that Alloc(size, cuts) returned and gives it a seed of its own.
func (p *pool) adopt(m tier.Memory, size int64, cuts []int64) piece {
	p.t.Helper()
	p.pieces++
	adopted := piece{m, p.pieces}
	adopted.checkShape(p.t, size, cuts)
	return adopted
}

// store fills pieces with their patterns.
func (p *pool) store(pieces ...piece) {
	p.t.Helper()
	data := make([][]byte, len(pieces))
	for i, m := range pieces {
		data[i] = pattern(m.Size(), m.seed)
	}
	if err := transfer(true, 0, pieces, data...); err != nil {
		p.t.Fatalf("writing %d pieces: %v", len(pieces), err)
	}
}

// verify checks that pieces hold their patterns.
func (p *pool) verify(pieces ...piece) {
	p.t.Helper()
	data := make([][]byte, len(pieces))
	for i, m := range pieces {
		data[i] = make([]byte, m.Size())
	}
	if err := transfer(false, 0, pieces, data...); err != nil {
		p.t.Fatalf("reading %d pieces: %v", len(pieces), err)
	}
	for i, m := range pieces {
		equal(p.t, data[i], pattern(m.Size(), m.seed), "stored memory")
	}
}

// free frees m and counts the call of reclaimed.
func (p *pool) free(m piece) {
	p.freed++
	p.Free(m.Memory, func() {
		lockrank.AssertNone("reclaimed is called")
		p.reclaimed.Add(1)
	})
}

// freeAndWait frees pieces and waits until all of them are reclaimed.
func (p *pool) freeAndWait(pieces ...piece) {
	var wg sync.WaitGroup
	wg.Add(len(pieces))
	for _, m := range pieces {
		p.Free(m.Memory, wg.Done)
	}
	wg.Wait()
}

// close closes the pool and checks that all freed pieces are reclaimed by then, each once.
func (p *pool) close() {
	p.t.Helper()
	p.closed = true
	if err := p.Close(); err != nil {
		p.t.Errorf("Close: %v", err)
	}
	if r := p.reclaimed.Load(); p.freed != r {
		p.t.Errorf("after Close: %d freed, reclaimed was called %d times", p.freed, r)
	}
}

func testPoolShape(t *testing.T, p *pool) {
	for _, size := range []int64{1, 2, 63, 64, 65, 4095, 4096, 4097, 8192, 10000, poolCapacity / 16} {
		m := p.alloc(size, nil)
		p.store(m)
		p.verify(m)
		p.freeAndWait(m)
	}
	m := p.allocAll()
	p.store(m)
	p.verify(m)
	p.free(m)
}

// testPoolContents writes and reads at unaligned offsets and checks the bytes around them. Memory in
// files may refuse to change a part of what was written, with tier.ErrNotSupported; then it must be
// unchanged.
func testPoolContents(t *testing.T, p *pool) {
	const size = 3*tier.Page + 100
	m := p.alloc(size, pages(size))
	model := pattern(size, m.seed)
	p.store(m)
	r := rand.New(rand.NewPCG(1, 1))
	for range 60 {
		off := r.Int64N(size)
		part := pattern(r.Int64N(size-off+1), r.Uint64())
		err := transfer(true, off, []piece{m}, part)
		if _, ok := m.Memory.(tier.FileMemory); !ok || !errors.Is(err, tier.ErrNotSupported) {
			if err != nil {
				t.Fatalf("writing %d bytes at %d: %v", len(part), off, err)
			}
			copy(model[off:], part)
		}
		off = r.Int64N(size)
		got := make([]byte, r.Int64N(size-off+1))
		if err := transfer(false, off, []piece{m}, got); err != nil {
			t.Fatalf("reading %d bytes at %d: %v", len(got), off, err)
		}
		equal(t, got, model[off:][:len(got)], fmt.Sprintf("reading %d bytes at %d", len(got), off))
	}
	p.free(m)
}

// mustRefuse checks that a request fails as the contract demands if there is no space.
func (p *pool) mustRefuse(size int64, cuts []int64) {
	p.t.Helper()
	m, err := p.Alloc(size, cuts)
	p.checkRefusal(m, err, size, cuts)
}

// checkRefusal checks what Alloc(size, cuts) returned without space for it.
func (p *pool) checkRefusal(m tier.Memory, err error, size int64, cuts []int64) *tier.NoSpaceError {
	p.t.Helper()
	var full *tier.NoSpaceError
	switch {
	case err == nil:
		p.t.Fatalf("Alloc(%d) with %d cuts returned %d bytes of a pool without that space", size, len(cuts), m.Size())
	case !errors.As(err, &full) || !errors.Is(err, tier.ErrNoSpace):
		p.t.Fatalf("Alloc(%d) with %d cuts: %v; want a NoSpaceError", size, len(cuts), err)
	}
	return full
}

// testPoolShrink checks pools that can take the end of a memory back: what stays keeps its bytes, and
// the rest can be allocated.
func testPoolShrink(t *testing.T, p *pool) {
	s, ok := p.Pool.(interface {
		Shrink(m tier.Memory, size int64)
	})
	if !ok {
		t.Skip("needs a pool that can shrink a memory: one with the method Shrink(tier.Memory, int64)")
	}
	held := p.fill()
	for i, size := range []int64{sixteenth, sixteenth - 1, 5*tier.Page + 1, 1} {
		m := held[i]
		p.store(m)
		before := p.bytes(m, sixteenth)
		s.Shrink(m.Memory, size)
		kept := m.Size()
		if kept < size || kept > sixteenth || kept%tier.Page != 0 {
			t.Fatalf("%d of %d bytes are left, want %d", kept, int64(sixteenth), size)
		}
		if after := p.bytes(m, kept); !bytes.Equal(after, before[:kept]) {
			t.Errorf("shrunk to %d bytes, the memory has others", kept)
		}
		if kept < sixteenth {
			held = append(held, p.alloc(sixteenth-kept, nil))
			p.store(held[len(held)-1])
			if after := p.bytes(m, kept); !bytes.Equal(after, before[:kept]) {
				t.Errorf("what another wrote is in a memory shrunk to %d bytes", kept)
			}
		}
		p.mustRefuse(1, nil)
	}
	p.freeAndWait(held...)
	p.free(p.allocAll())
}

// bytes returns the first n bytes of a memory.
func (p *pool) bytes(m piece, n int64) (all []byte) {
	p.t.Helper()
	switch m := m.Memory.(type) {
	case tier.HostMemory:
		for _, e := range m.Extents() {
			all = append(all, e...)
		}
	case tier.FileMemory:
		all = make([]byte, n)
		if err := m.ReadAt(p.t.Context(), all, 0); err != nil {
			p.t.Fatal(err)
		}
	}
	return all[:n]
}

const sixteenth = poolCapacity / 16

// fill allocates all of an empty pool in sixteen pieces.
func (p *pool) fill() (held []piece) {
	p.t.Helper()
	for range 16 {
		held = append(held, p.alloc(sixteenth, nil))
	}
	return held
}

func testPoolExhaustion(t *testing.T, p *pool) {
	p.mustRefuse(poolCapacity+1, pages(poolCapacity+1))
	for round := range 3 { // freed memory can be allocated again
		held := p.fill()
		p.store(held...)
		p.mustRefuse(1, nil)
		p.mustRefuse(sixteenth, pages(sixteenth))
		p.verify(held...)
		if round == 0 { // a hole of exactly the right size is used
			p.freeAndWait(held[5])
			held[5] = p.alloc(sixteenth, nil)
		}
		p.freeAndWait(held...)
	}
}

func testPoolFragmentation(t *testing.T, p *pool) {
	const half, double = poolCapacity / 2, 2 * sixteenth
	// Every other piece is freed, in the order of their addresses, so no two holes touch.
	var holes, rest []piece
	for i, m := range byAddress(p.fill()) {
		if i%2 == 0 {
			holes = append(holes, m)
		} else {
			rest = append(rest, m)
		}
	}
	p.freeAndWait(holes...)
	if m, err := p.Alloc(double, nil); err == nil && p.holesUnknown {
		whole := p.adopt(m, double, nil)
		p.store(whole)
		p.verify(whole)
		rest = append(rest, whole)
	} else {
		full := p.checkRefusal(m, err, double, nil)
		if full.Largest != sixteenth && !(p.holesUnknown && full.Largest >= sixteenth && full.Largest < double) {
			t.Errorf("half of the pool is free in pieces of %d bytes, and NoSpaceError.Largest is %d",
				int64(sixteenth), full.Largest)
		}
		if full.Requested != double {
			t.Errorf("NoSpaceError.Requested is %d for a request of %d", full.Requested, int64(double))
		}
		if rest[0].canSplit() {
			m := p.alloc(half, pages(half))
			p.store(m)
			p.verify(m)
			p.mustRefuse(1, nil)
			p.freeAndWait(m)
		} else {
			p.mustRefuse(double, pages(double))
			p.freeAndWait(p.alloc(sixteenth, nil))
		}
	}
	// Once all of it is free, the holes are joined again.
	p.freeAndWait(rest...)
	p.free(p.allocAll())
}

// byAddress sorts pieces by where they start.
func byAddress(pieces []piece) []piece {
	start := func(p piece) (file string, off int64) {
		switch m := p.Memory.(type) {
		case tier.HostMemory:
			off = int64(extent.Address(m.Extents()[0]))
		case tier.DeviceMemory:
			off = int64(m.Addr())
		case tier.FileMemory:
			_, file, off = m.Locate(0)
		}
		return file, off
	}
	slices.SortFunc(pieces, func(a, b piece) int {
		fileA, offA := start(a)
		fileB, offB := start(b)
		return cmp.Or(cmp.Compare(fileA, fileB), cmp.Compare(offA, offB))
	})
	return pieces
}

// testPoolCuts allocates memory with few cuts from a pool full of holes. Whether a request succeeds
// depends on the pool. In each case, memory may be split at the cuts only.
func testPoolCuts(t *testing.T, p *pool) {
	r := rand.New(rand.NewPCG(2, 3))
	succeeded := 0
	for range 10 {
		var held []piece
		for {
			size := tier.Page * (1 + r.Int64N(8))
			m, err := p.Alloc(size, nil)
			if err != nil {
				break
			}
			held = append(held, p.adopt(m, size, nil))
		}
		r.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
		half := len(held) / 2
		p.freeAndWait(held[:half]...)
		held = held[half:]
		var added []piece
		for range 20 {
			size := 1 + r.Int64N(poolCapacity/8)
			cuts := slices.DeleteFunc(pages(size), func(int64) bool { return r.IntN(3) > 0 })
			m, err := p.Alloc(size, cuts)
			if err == nil {
				succeeded++
				added = append(added, p.adopt(m, size, cuts))
			} else if !errors.Is(err, tier.ErrNoSpace) {
				t.Fatalf("Alloc(%d) with %d cuts: %v", size, len(cuts), err)
			}
		}
		p.store(added...)
		p.verify(added...)
		p.freeAndWait(append(held, added...)...)
	}
	if succeeded == 0 {
		t.Error("no request succeeded in a pool that was half free")
	}
}

// testPoolSmall fills half of the pool, as its charges count, with small pieces of one size. It
// then repeatedly frees some and allocates as many: no request fails. In the end the whole pool can
// be allocated as one.
func testPoolSmall(t *testing.T, p *pool) {
	sizes, rounds := []int64{1000, 3000, 5000}, 2
	if testing.Short() {
		sizes, rounds = sizes[1:2], 1
	}
	for _, size := range sizes {
		r := rand.New(rand.NewPCG(3, uint64(size)))
		held := make([]piece, poolCapacity/2/p.Charge(size))
		for i := range held {
			held[i] = p.alloc(size, nil)
		}
		p.store(held...)
		for range rounds {
			r.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
			some := held[:len(held)/2]
			p.verify(some...)
			for i, m := range some {
				p.freeAndWait(m)
				some[i] = p.alloc(size, nil)
			}
			p.store(some...)
		}
		p.verify(held...)
		p.freeAndWait(held...)
		p.freeAndWait(p.allocAll())
	}
}

func testPoolReclaimedOnce(t *testing.T, p *pool) {
	const n = 64
	var calls [n]atomic.Int64
	var wg sync.WaitGroup
	wg.Add(n)
	for i := range n {
		m := p.alloc(tier.Page, nil)
		go p.Free(m.Memory, func() {
			lockrank.AssertNone("reclaimed is called")
			if calls[i].Add(1) == 1 {
				wg.Done()
			}
		})
	}
	wg.Wait()
	p.close()
	for i := range calls {
		if c := calls[i].Load(); c != 1 {
			t.Errorf("reclaimed was called %d times for memory %d", c, i)
		}
	}
}

// testPoolAllocInReclaimed allocates within reclaimed, which the pool must not call with a lock
// held.
func testPoolAllocInReclaimed(t *testing.T, p *pool) {
	again := make(chan tier.Memory, 1)
	p.Free(p.allocAll().Memory, func() {
		m, err := p.Alloc(poolCapacity, pages(poolCapacity))
		if err != nil {
			t.Errorf("allocating inside reclaimed: %v", err)
		}
		again <- m
	})
	if m := <-again; m != nil {
		p.free(piece{Memory: m})
	}
}

func testPoolCloseWaits(t *testing.T, p *pool) {
	var held []piece
	for range 32 {
		held = append(held, p.alloc(4*tier.Page, nil))
	}
	for _, m := range held {
		p.free(m)
	}
	p.close() // checks that all pieces are reclaimed by then
}

func testPoolAfterClose(t *testing.T, p *pool) {
	a, b := p.alloc(10000, nil), p.alloc(10000, nil)
	p.store(a)
	p.free(b)
	p.close()
	mustFail(t, tier.ErrClosed, map[string]error{"Alloc after Close": second(p.Alloc(1, nil))})
	p.verify(a) // memory stays valid until it is freed
	a.seed++
	p.store(a)
	p.verify(a)
	p.freeAndWait(a)
	mustFail(t, tier.ErrClosed, map[string]error{"the second Close": p.Close()})
}

// testPoolRandom runs random operations on one goroutine and checks the contents of every piece, so
// that no two overlap.
func testPoolRandom(t *testing.T, p *pool) {
	r := rand.New(rand.NewPCG(4, 5))
	var held []piece
	var charged int64
	for step := range 300 {
		if r.IntN(2) > 0 {
			if len(held) > 0 {
				i := r.IntN(len(held))
				p.verify(held[i])
				charged -= p.Charge(held[i].Size())
				p.freeAndWait(held[i])
				held = slices.Delete(held, i, i+1)
			}
			continue
		}
		size := 1 + r.Int64N(poolCapacity/8)
		cuts := pages(size)
		if p.Charge(size) > poolCapacity-charged {
			p.mustRefuse(size, cuts)
			continue
		}
		m, err := p.Alloc(size, cuts)
		if err != nil {
			var full *tier.NoSpaceError
			mayFragment := slices.ContainsFunc(held, func(h piece) bool { return !h.canSplit() || h.sharesPage() })
			if mayFragment && errors.As(err, &full) && full.Largest > 0 && full.Largest < p.Charge(size) {
				continue
			}
			t.Fatalf("step %d: Alloc(%d) with %d of %d bytes charged: %v",
				step, size, charged, int64(poolCapacity), err)
		}
		added := p.adopt(m, size, cuts)
		p.store(added)
		charged += p.Charge(size)
		held = append(held, added)
	}
	p.verify(held...)
	p.freeAndWait(held...)
	p.free(p.allocAll())
}

// testPoolConcurrent puts the pool behind a space and draws from it on several goroutines. The
// space never exceeds its capacity, and all memory returns to it.
func testPoolConcurrent(t *testing.T, p *pool) {
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID:       tier.ID{Kind: tier.Host},
		Capacity: poolCapacity,
		Marks:    tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
		Pool:     p.Pool,
		Backend:  "test",
	})
	if err != nil {
		t.Fatal(err)
	}
	p.closed = true // by the space
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
	u := space.State().Usage
	if u.Used() != 0 {
		t.Errorf("after all was released: %+v", u)
	}
	if u.Peak > poolCapacity || u.Peak == 0 {
		t.Errorf("peak %d of a capacity of %d", u.Peak, int64(poolCapacity))
	}
	if l := space.Leaks(); len(l) != 0 {
		t.Errorf("%d buffers have leaked", len(l))
	}
}

// drawAndCheck draws a buffer, unless the space is full, and checks that no other goroutine writes
// to it.
func drawAndCheck(space *tier.Space, size int64, seed uint64) error {
	b, err := space.DrawNew(size, pages(size)...)
	if errors.Is(err, tier.ErrNoSpace) { // the space is full, or a device's memory is fragmented
		return nil
	}
	if err != nil {
		return err
	}
	want, got, drawn := pattern(size, seed), make([]byte, size), []piece{{b.Memory(), seed}}
	err = errors.Join(transfer(true, 0, drawn, want), transfer(false, 0, drawn, got), b.Release())
	return cmp.Or(err, difference(got, want))
}
