package tier_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// tightPool has no more memory than its space, and refuses the rest.
type tightPool struct {
	adoptPool
	left atomic.Int64
}

func (p *tightPool) Alloc(n int64, _ []int64) (tier.Memory, error) {
	if p.left.Add(-n) < 0 {
		p.left.Add(n)
		return nil, &tier.NoSpaceError{Requested: n}
	}
	return fakeMemory(n), nil
}

func (p *tightPool) Free(m tier.Memory, reclaimed func()) {
	p.left.Add(m.Size())
	p.adoptPool.Free(m, reclaimed)
}

const page = tier.Page

func cleanSpace(t testing.TB, pages int64, quota tier.Quota) *tier.Space {
	t.Helper()
	pool := new(tightPool)
	pool.left.Store(pages * page)
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Disk}, Capacity: pages * page, Pool: pool, Quota: quota,
		Marks: tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9},
	})
	ok(t, err)
	return s
}

// keepClean makes a clean image of buffers, which is nil if the space does not keep it.
func keepClean(t testing.TB, s *tier.Space, bufs ...*tier.Buffer) *tier.Clean {
	return s.KeepClean(bufs, false, nil, func() {
		for _, b := range bufs {
			if err := b.Release(); err != nil {
				t.Error(err)
			}
		}
	})
}

// clean makes a clean image of so many pages.
func clean(t testing.TB, s *tier.Space, pages int64) *tier.Clean {
	t.Helper()
	c := keepClean(t, s, draw(t, s, pages*page))
	if c == nil {
		t.Fatal("the space does not keep a clean image")
	}
	return c
}

func wantUsage(t testing.TB, s *tier.Space, live, reserved, cached int64) {
	t.Helper()
	u := s.State().Usage
	if u.Live != live*page || u.Reserved != reserved*page || u.Cached != cached*page || u.Retired != 0 {
		t.Errorf("%+v, want %d pages live, %d reserved, %d cached", u, live, reserved, cached)
	}
}

// TestCleanImagesCountAsFree: their bytes can be promised, for which the oldest are dropped, and
// one that is taken becomes a buffer again.
func TestCleanImagesCountAsFree(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	old := keepClean(t, s, draw(t, s, 2*page), draw(t, s, 2*page))
	young := draw(t, s, 4*page)
	c := keepClean(t, s, young)
	wantUsage(t, s, 0, 0, 8)
	if n := s.State().Available; n != 10*page {
		t.Errorf("%d bytes are available", n)
	}
	small := promise(t, s, 2*page)
	if wantUsage(t, s, 0, 2, 8); !old.Listed() {
		t.Error("a promise beside the images dropped one")
	}
	large := promise(t, s, 4*page)
	if wantUsage(t, s, 0, 6, 4); old.Listed() || old.Take() {
		t.Error("the oldest image is there")
	}
	if _, err := s.Promise(5 * page); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("promised bytes that are in use: %v", err)
	}
	if wantUsage(t, s, 0, 6, 4); !c.Take() {
		t.Fatal("the image is not to be had")
	}
	if out := large.Draw(c.Bytes(), 0, false); out.Short > 0 || out.Released {
		t.Fatalf("%+v", out)
	}
	s.Promote(c, large)
	wantUsage(t, s, 4, 2, 0)
	ok(t, young.Release())
	wantUsage(t, s, 0, 6, 0) // large is open
	c.Drop()                 // it was used: nothing is dropped
	ok(t, errors.Join(s.Release(small), s.Release(large)))
	wantUsage(t, s, 0, 0, 0)
}

// TestCleanImagesAreDropped: for a lower limit, by an explicit call, and when the pool has no room
// for another reason.
func TestCleanImagesAreDropped(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	for range 4 {
		clean(t, s, 2)
	}
	told := 0
	defer s.Subscribe(func(bool) { told++ })()
	ok(t, s.SetLimit(5*page))
	if wantUsage(t, s, 0, 0, 4); told == 0 {
		t.Error("no subscriber was called")
	}
	ok(t, s.SetLimit(10*page))
	s.Pool.(*tightPool).left.Add(-5 * page) // others have it
	before := s.Evicted()
	b := draw(t, s, 3*page)
	if n := s.State().Cached; n >= 4*page || s.Evicted() != before+4*page-n {
		t.Errorf("%d bytes are cached, %d were evicted", n, s.Evicted()-before)
	}
	s.DropAllClean()
	wantUsage(t, s, 3, 0, 0)
	keepClean(t, s, b).Drop()
	wantUsage(t, s, 0, 0, 0)
	if n := len(s.Leaks()); n != 0 {
		t.Errorf("%d leaks", n)
	}
}

// TestLimitFallsWhileAnImageIsKept: no image stays above it.
func TestLimitFallsWhileAnImageIsKept(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	clean(t, s, 2)
	r := promise(t, s, 3*page)
	r.Draw(3*page, 0, false)
	b, err := s.Draw(r, 3*page, nil)
	ok(t, err)
	b.OnReclaimed(func(int64) { ok(t, s.SetLimit(2*page)) }) // called while it is kept
	ok(t, s.Release(r))
	keepClean(t, s, b)
	wantUsage(t, s, 0, 0, 0)
}

// TestDrawDropsImagesByDoubling: a pool that has no room for another reason is not asked once for
// each image.
func TestDrawDropsImagesByDoubling(t *testing.T) {
	const images = 100
	asked := 0
	pool := &fakePool{}
	s := newSpace(t, 100*64*images, pool)
	for range images {
		keepClean(t, s, draw(t, s, 64))
	}
	pool.alloc = func(n int64) (tier.Memory, error) {
		if asked++; pool.frees < images {
			return nil, &tier.NoSpaceError{Requested: n, Largest: 1}
		}
		return fakeMemory(n), nil
	}
	if b := draw(t, s, 64); b.Size() != 64 || asked > 10 {
		t.Errorf("a buffer of %d bytes after %d requests", b.Size(), asked)
	}
}

// TestImageThatIsFreedLate: its bytes are cached until the pool is done with them. Then subscribers
// are called, because a waiter may fit.
func TestImageThatIsFreedLate(t *testing.T) {
	pool := &fakePool{}
	s := newSpace(t, 1000, pool)
	ok(t, s.SetLimit(640))
	keepClean(t, s, draw(t, s, 320))
	var c changes
	defer s.Subscribe(c.listen)()
	pool.keep = true
	if _, err := s.Promise(640); !errors.Is(err, tier.ErrNoSpace) || s.State().Cached != 320 {
		t.Errorf("promised bytes that are not back: %v, %+v", err, s.State().Usage)
	}
	c.expect(t, "a refusal")
	pool.reclaim()
	c.expect(t, "the image's end", false)
	ok(t, s.Release(promise(t, s, 640)))
}

// TestDropOldest reports whether it makes sense to try again.
func TestDropOldest(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	if s.DropOldest(page, s.State().CleanChanges) {
		t.Error("there is nothing to drop")
	}
	clean(t, s, 2)
	clean(t, s, 2)
	clean(t, s, 2)
	seen := s.State().CleanChanges
	if !s.DropOldest(3*page, s.State().CleanChanges) {
		t.Error("nothing was dropped")
	}
	wantUsage(t, s, 0, 0, 2)
	s.DropAllClean()
	if s.DropOldest(page, s.State().CleanChanges) || !s.DropOldest(page, seen) {
		t.Error("want true only if an image was dropped since the changes were seen")
	}
}

// TestWhatIsNotKept: memory under a lease, memory of an open reservation, which would have the
// bytes back, memory under a quota, which others wait for, and memory of a lost space.
func TestWhatIsNotKept(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	a, b := draw(t, s, page), draw(t, s, page)
	end := b.Lease()
	if keepClean(t, s, a, b) != nil {
		t.Error("leased memory is a clean image")
	}
	end()
	wantUsage(t, s, 2, 0, 0)
	r := promise(t, s, page)
	d, err := drawFrom(s, r, page)
	ok(t, err)
	if keepClean(t, s, a, d) != nil {
		t.Error("memory of an open reservation is a clean image")
	}
	wantUsage(t, s, 3, 0, 0)
	if end, ok := a.TryLease(); !ok {
		t.Error("no lease on a buffer that stays one")
	} else {
		end()
	}
	ok(t, s.Release(r))
	c := keepClean(t, s, a, b, d)
	if c == nil {
		t.Fatal("no clean image")
	}
	wantUsage(t, s, 0, 0, 3)
	c.Drop()
	wantUsage(t, s, 0, 0, 0)
	if n := s.Pool.(*tightPool).left.Load(); n != 10*page {
		t.Errorf("%d bytes are left", n)
	}
	limited := cleanSpace(t, 10, &counter{limit: 10 * page})
	e := draw(t, limited, page)
	if keepClean(t, limited, e) != nil {
		t.Error("a clean image under a quota")
	}
	ok(t, e.Release())
	gone, dev := losable(t, 1<<20)
	f := draw(t, gone, page)
	dev.Lose(errGone)
	if keepClean(t, gone, f) != nil {
		t.Error("a clean image of a lost space")
	}
	ok(t, f.Release())
}

// TestDrawerIsToldOfACleanImage: its bytes are free then, and when it is dropped they are free
// already.
func TestDrawerIsToldOfACleanImage(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	r := promise(t, s, page)
	r.Draw(page, 0, false)
	var told []int64
	b, err := s.Draw(r, page, nil)
	ok(t, err)
	b.OnReclaimed(func(n int64) { told = append(told, n) })
	ok(t, s.Release(r))
	c := keepClean(t, s, b)
	if len(told) != 1 || told[0] != page {
		t.Errorf("told %v", told)
	}
	if c.Drop(); len(told) != 1 {
		t.Errorf("after the drop: told %v", told)
	}
}

// TestLeasedImage: a lease keeps the memory of a clean image. If the image is dropped meanwhile,
// its bytes are cached until the lease ends; then subscribers are called, because a waiter may fit.
// If it is promoted, they are its batch's, and the lease is one on that.
func TestLeasedImage(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	b := draw(t, s, 6*page)
	c := keepClean(t, s, b)
	end, leased := b.TryLease()
	if !leased || !c.Listed() {
		t.Fatal("no lease on a clean image")
	}
	if _, err := s.Promise(10 * page); !errors.Is(err, tier.ErrNoSpace) || c.Listed() {
		t.Errorf("promised bytes that a lease keeps: %v", err)
	}
	wantUsage(t, s, 0, 0, 6)
	told := 0
	defer s.Subscribe(func(bool) { told++ })()
	end()
	if wantUsage(t, s, 0, 0, 0); told == 0 {
		t.Error("no subscriber was called when the memory came back")
	}
	if _, leased := b.TryLease(); leased {
		t.Error("a lease on memory that is gone")
	}
	b = draw(t, s, 2*page)
	c = keepClean(t, s, b)
	end = b.Lease()
	p := promise(t, s, 2*page)
	p.Draw(2*page, 0, false)
	if !c.Take() {
		t.Fatal("not taken")
	}
	s.Promote(c, p)
	ok(t, s.Release(p))
	wantUsage(t, s, 2, 0, 0)
	if n := b.Leased(); n != 1 {
		t.Errorf("%d leases on what was promoted", n)
	}
	ok(t, b.Release())
	wantUsage(t, s, 2, 0, 0)
	end()
	wantUsage(t, s, 0, 0, 0)
}

// TestPromiseWaitsForAnImageThatIsDropped: while another drops the last image, the room is nearly
// there.
func TestPromiseWaitsForAnImageThatIsDropped(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	c := clean(t, s, 10)
	if !c.Take() {
		t.Fatal("not taken")
	}
	started := make(chan struct{})
	got := make(chan error)
	go func() {
		close(started)
		r, err := s.Promise(10 * page)
		if err == nil {
			err = s.Release(r)
		}
		got <- err
	}()
	<-started
	c.Release()
	if err := <-got; err != nil {
		t.Error(err)
	}
}

// TestSharingImagesAreDroppedFirst: where shared memory fills the space.
func TestSharingImagesAreDroppedFirst(t *testing.T) {
	s := cleanSpace(t, 10, nil)
	clean(t, s, 1)
	shared, own := draw(t, s, 3*page), draw(t, s, page)
	s.KeepClean([]*tier.Buffer{own}, true, nil, func() {
		if err := errors.Join(own.Release(), shared.Release()); err != nil {
			t.Error(err)
		}
	})
	wantUsage(t, s, 3, 0, 2)
	s.DropSharing(0)
	wantUsage(t, s, 3, 0, 2)
	s.DropSharing(1)
	wantUsage(t, s, 0, 0, 1)
	s.DropSharing(1)
	wantUsage(t, s, 0, 0, 1)
	s.DropAllClean()
	wantUsage(t, s, 0, 0, 0)
}

// TestPromisesAtOnceDropWhatTheyNeed: together, and not each as much as all.
func TestPromisesAtOnceDropWhatTheyNeed(t *testing.T) {
	const drawers, held = 8, 400
	for range rounds(100) {
		s := cleanSpace(t, held, nil)
		for range held {
			clean(t, s, 1)
		}
		var all sync.WaitGroup
		start := make(chan struct{})
		bufs := make([]*tier.Buffer, drawers)
		for i := range drawers {
			all.Go(func() {
				<-start
				bufs[i], _ = s.DrawNew(4 * page)
			})
		}
		close(start)
		all.Wait()
		wantUsage(t, s, drawers*4, 0, held-drawers*4)
		for _, b := range bufs {
			ok(t, b.Release())
		}
		s.DropAllClean()
	}
}

// TestPromisesAreKeptBesideImages: goroutines promise, draw, keep, promote and free at random.
// Promised bytes can be drawn, whatever is kept, and the books are right whenever they are read.
func TestPromisesAreKeptBesideImages(t *testing.T) {
	const pages = 64
	for seed := range testseed.Each(t, 3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := cleanSpace(t, pages, nil)
			check := func(err error) {
				if err != nil {
					t.Error(err)
				}
			}
			var all sync.WaitGroup
			var promoted, gone atomic.Int64
			for g := range 6 {
				all.Go(func() {
					rng := rand.New(rand.NewPCG(seed, uint64(g)))
					var kept []*tier.Clean
					var of [][]*tier.Buffer
					for range rounds(2000) {
						n := 1 + rng.Int64N(pages/8)
						if len(kept) > 0 && rng.IntN(2) == 0 {
							k := rng.IntN(len(kept))
							c, bufs := kept[k], of[k]
							if end, leased := bufs[0].TryLease(); leased && rng.IntN(4) == 0 {
								defer end()
							} else if leased {
								runtime.Gosched()
								end()
							}
							kept, of = append(kept[:k:k], kept[k+1:]...), append(of[:k:k], of[k+1:]...)
							if rng.IntN(3) == 0 {
								c.Drop()
								continue
							}
							r, err := s.Promise(c.Bytes())
							switch {
							case err != nil:
								c.Drop()
								continue
							case c.Take():
								promoted.Add(1)
								r.Draw(c.Bytes(), 0, false)
								s.Promote(c, r)
								for _, b := range bufs {
									check(b.Release())
								}
							default:
								gone.Add(1)
							}
							check(s.Release(r))
							continue
						}
						r, err := s.Promise(2 * n * page)
						if err != nil {
							continue
						}
						var bufs []*tier.Buffer
						for range 2 {
							b, err := drawFrom(s, r, n*page)
							if err != nil {
								t.Errorf("promised and not there: %v (%+v)", err, s.State().Usage)
								return
							}
							bufs = append(bufs, b)
						}
						check(s.Release(r))
						if u := s.State().Usage; u.Used()+u.Cached > pages*page {
							t.Errorf("%+v", u)
						}
						kept, of = append(kept, keepClean(t, s, bufs...)), append(of, bufs)
					}
					for _, c := range kept {
						c.Drop()
					}
				})
			}
			all.Wait()
			wantUsage(t, s, 0, 0, 0)
			if n := s.Pool.(*tightPool).left.Load(); n != pages*page {
				t.Errorf("%d bytes are left", n)
			}
			if promoted.Load() == 0 || gone.Load() == 0 {
				t.Errorf("%d promoted, %d were gone: the test is too easy", promoted.Load(), gone.Load())
			}
		})
	}
}

// TestCleanImagesAreNoLeaks: an image's batch is what leaks, elsewhere.
func TestCleanImagesAreNoLeaks(t *testing.T) {
	s := cleanSpace(t, 2, nil)
	own := draw(t, s, page)
	clean(t, s, 1)
	if n := len(s.Leaks()); n != 1 {
		t.Errorf("%d leaks, want 1", n)
	}
	ok(t, own.Release())
	s.DropAllClean()
}
