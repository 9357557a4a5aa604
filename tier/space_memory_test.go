package tier_test

import (
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/tier"
)

// TestAdoptedMemoryIsChargedAsDrawn: what was in use before the space is promised even above
// the limit, never above the capacity, and its buffers are as any others.
func TestAdoptedMemoryIsChargedAsDrawn(t *testing.T) {
	pool := &adoptPool{}
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Disk}, Capacity: 10 * page, Pool: pool,
		Marks: tier.Marks{Limit: 0.5, Trigger: 0.5, Stop: 0.4},
	})
	ok(t, err)
	r, err := s.Occupy(8 * page)
	ok(t, err)
	if _, err := s.Occupy(3 * page); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("more than the capacity is in use: %v", err)
	}
	if _, err := s.Promise(page); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("reserved above the limit: %v", err)
	}
	b := s.Adopt(r, fakeMemory(3*page))
	if u := s.State().Usage; u.Live != 3*page || u.Reserved != 5*page || b.Size() != 3*page {
		t.Errorf("%+v, a buffer of %d", u, b.Size())
	}
	end, leased := b.TryLease()
	if !leased {
		t.Fatal("no lease on a buffer that is held")
	}
	if err := b.Release(); err != nil || pool.freed != 0 {
		t.Errorf("released with a lease: %v, %d freed", err, pool.freed)
	}
	again, leased := b.TryLease()
	if !leased {
		t.Fatal("no lease while there is one")
	}
	end()
	again()
	if _, leased := b.TryLease(); leased || pool.freed != 1 {
		t.Errorf("a lease on memory that is gone; %d freed", pool.freed)
	}
	if _, leased := (*tier.Buffer)(nil).TryLease(); !leased {
		t.Error("no lease on no bytes")
	}
	ok(t, s.Release(r))
	if s.State().Used() != 0 {
		t.Errorf("%+v", s.State().Usage)
	}
}

// TestAdoptedMemoryMayBePutBack: while the promise is open, the bytes of its buffers return to it.
func TestAdoptedMemoryMayBePutBack(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	r, err := s.Occupy(8 * page)
	ok(t, err)
	ok(t, s.Adopt(r, fakeMemory(8*page)).Release())
	wantUsage(t, s, 0, 8, 0)
	ok(t, s.Release(r))
	wantUsage(t, s, 0, 0, 0)
}

// TestTryLeaseBesideRelease: the memory goes once, and never under a lease.
func TestTryLeaseBesideRelease(t *testing.T) {
	pool := &adoptPool{}
	s := newSpace(t, 10*page, pool)
	for round := range rounds(500) {
		b := draw(t, s, page)
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
		if pool.count() != round+1 || s.State().Used() != 0 {
			t.Fatalf("round %d: %d freed, %+v", round, pool.count(), s.State().Usage)
		}
	}
}

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

func (p *adoptPool) Charge(n int64) int64 { return (n + page - 1) / page * page }

func (p *adoptPool) Alloc(n int64, _ []int64) (tier.Memory, error) { return fakeMemory(n), nil }

func (p *adoptPool) Free(_ tier.Memory, reclaimed func()) {
	p.mu.Lock()
	p.freed++
	p.mu.Unlock()
	reclaimed()
}

func (p *adoptPool) Close() error { return nil }

// lent counts how often it was given back.
type lent struct {
	fakeMemory
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
	s := newSpace(t, 4*page, pool)
	r, err := s.Occupy(2 * page)
	ok(t, err)
	back := 0
	b := s.Adopt(r, lent{2 * page, &back})
	ok(t, s.Release(r))
	usage(t, s, "adopted", 2*page, 0, 0)
	end := b.Lease()
	ok(t, b.Release())
	if back != 0 {
		t.Error("given back under a lease")
	}
	end()
	if back != 1 || pool.count() != 0 || s.State().Used() != 0 {
		t.Errorf("given back %d times, to the pool %d times, %+v", back, pool.count(), s.State().Usage)
	}
}

// splitPool splits memory.
type splitPool struct {
	fakePool
	refuse bool
}

func (p *splitPool) Together() int64 { return 512 }

func (p *splitPool) Split(_ tier.Memory, sizes []int64) (all []tier.Memory) {
	if p.refuse {
		return nil
	}
	for _, n := range sizes {
		all = append(all, fakeMemory(n))
	}
	return all
}

// TestSplit: the parts are charged as much as the whole was, and each is released by itself. A
// buffer that the pool does not split stays as it was.
func TestSplit(t *testing.T) {
	if n := newSpace(t, 1000, &fakePool{}).Together(); n != 0 {
		t.Errorf("of a pool that does not split, %d bytes are drawn together", n)
	}
	pool := &splitPool{refuse: true}
	s := newSpace(t, 1000, pool)
	r := promise(t, s, 512)
	r.Draw(512, 0, false)
	var reclaimed []int64
	b, err := s.Draw(r, 512, nil)
	ok(t, err)
	b.OnReclaimed(func(n int64) { reclaimed = append(reclaimed, n) })
	if s.Together() != 512 || s.Split(b, []int64{256, 256}) != nil || b.Leased() != 0 || b.Memory() == nil {
		t.Error("a refused split has changed the buffer")
	}
	pool.refuse = false
	parts := s.Split(b, []int64{128, 384})
	usage(t, s, "split", 512, 0, 0)
	if len(parts) != 2 || parts[1].Charge() != 384 {
		t.Fatalf("%d parts", len(parts))
	}
	if _, leased := b.TryLease(); leased {
		t.Error("a lease on the buffer that was split")
	}
	ok(t, parts[0].Release())
	usage(t, s, "with one part", 384, 0, 128)
	ok(t, s.Release(r))
	ok(t, parts[1].Release())
	usage(t, s, "in the end", 0, 0, 0)
	if !slices.Equal(reclaimed, []int64{128, 384}) {
		t.Errorf("reclaimed %v", reclaimed)
	}
}

// cutPool takes the ends of memories back, in multiples of 128 bytes.
type cutPool struct{ fakePool }

type cutMemory struct{ size int64 }

func (m *cutMemory) Size() int64 { return m.size }

func (p *cutPool) Alloc(size int64, _ []int64) (tier.Memory, error) { return &cutMemory{size}, nil }

func (p *cutPool) Shrink(m tier.Memory, size int64) { m.(*cutMemory).size = (size + 127) / 128 * 128 }

// TestShrink: what the pool has cut off returns to the promise or is free, and is reclaimed.
func TestShrink(t *testing.T) {
	s := newSpace(t, 1000, &cutPool{})
	r := promise(t, s, 512)
	r.Draw(512, 0, false)
	var reclaimed []int64
	b, err := s.Draw(r, 512, nil)
	ok(t, err)
	b.OnReclaimed(func(n int64) { reclaimed = append(reclaimed, n) })
	b.Shrink(500)
	usage(t, s, "where the pool cannot cut", 512, 0, 0)
	b.Shrink(200)
	usage(t, s, "with an open promise", 256, 0, 256)
	ok(t, s.Release(r))
	b.Shrink(100)
	usage(t, s, "without one", 128, 0, 0)
	ok(t, b.Release())
	usage(t, s, "in the end", 0, 0, 0)
	if want := []int64{256, 128, 128}; !slices.Equal(reclaimed, want) {
		t.Errorf("reclaimed %v, want %v", reclaimed, want)
	}
}

// pacedPool is one of several that are written side by side.
type pacedPool struct {
	fakePool
	promised []int64
}

func (p *pacedPool) Pace() books.Pace {
	return books.Pace{Lead: time.Second, Bandwidth: 100}
}

func (p *pacedPool) Promised(n int64) { p.promised = append(p.promised, n) }

// TestPace: bytes that are promised and not drawn count as if they were being written, also for the
// pool, before each allocation.
func TestPace(t *testing.T) {
	if p := newSpace(t, 1000, &fakePool{}).Pace(); p != (books.Pace{}) {
		t.Errorf("a space alone has the pace %+v", p)
	}
	pool := &pacedPool{}
	s := newSpace(t, 1000, pool)
	r := promise(t, s, 400)
	if p := s.Pace(); p.Lead != 5*time.Second || p.Bandwidth != 100 {
		t.Errorf("%+v", p)
	}
	_, err := drawFrom(s, r, 128)
	ok(t, err)
	if !slices.Equal(pool.promised, []int64{272}) {
		t.Errorf("promised %v", pool.promised)
	}
}

// TestHeldBytes: the engine's own, and those that are retired for good, are not in Room.
func TestHeldBytes(t *testing.T) {
	pool := &unsurePool{}
	s := newSpace(t, 1000, pool)
	b, c := draw(t, s, 64), draw(t, s, 128)
	s.Hold(b.Charge())
	s.Hold(6)
	if s.State().Held != 70 || s.State().Room != 830 || s.State().Used() != 192 {
		t.Errorf("%d bytes are held, the room is %d", s.State().Held, s.State().Room)
	}
	s.Hold(-6)
	told := 0
	defer s.Subscribe(func(bool) { told++ })()
	pool.fail = true
	ok(t, c.Release())
	if s.State().Unsure != 128 || s.State().Held != 192 || s.State().Room != 708 || told != 1 {
		t.Errorf("%d bytes are unsure, %d held, the room is %d; %d calls",
			s.State().Unsure, s.State().Held, s.State().Room, told)
	}
}

// unsurePool may fail to find out what became of memory.
type unsurePool struct {
	fakePool
	fail   bool
	unsure int64
}

func (p *unsurePool) Unsure() int64 { return p.unsure }

func (p *unsurePool) Free(m tier.Memory, reclaimed func()) {
	if p.fail {
		p.unsure += m.Size()
		return
	}
	p.fakePool.Free(m, reclaimed)
}
