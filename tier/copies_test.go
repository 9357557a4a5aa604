package tier

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/copies"
	"github.com/spillway-db/spillway/internal/testseed"
)

// tightPool has no more memory than its space, and says so.
type tightPool struct {
	adoptPool
	left atomic.Int64
}

func (p *tightPool) Alloc(n int64, _ []int64) (Memory, error) {
	if p.left.Add(-n) < 0 {
		p.left.Add(n)
		return nil, &NoSpaceError{Requested: n}
	}
	return adoptMemory(n), nil
}

func (p *tightPool) Free(m Memory, reclaimed func()) {
	p.left.Add(m.Size())
	p.adoptPool.Free(m, reclaimed)
}

// noQuota is a quota that refuses nothing.
type noQuota struct{}

func (noQuota) Charge(int64) error            { return nil }
func (noQuota) Credit(int64)                  {}
func (noQuota) Remaining() int64              { return 1 << 40 }
func (noQuota) Limit() int64                  { return 1 << 40 }
func (noQuota) Subscribe(func()) (end func()) { return func() {} }

func copySpace(t *testing.T, pages int64, quota Quota) *Space {
	t.Helper()
	pool := new(tightPool)
	pool.left.Store(pages * Page)
	s, err := NewSpace(SpaceConfig{ID: ID{Kind: Disk}, Capacity: pages * Page, Fractions: Fractions{Limit: 1, Trigger: 1, Stop: 0.9}, Pool: pool, Quota: quota})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// drawn returns a buffer of so many pages.
func drawn(t *testing.T, s *Space, pages int64) *Buffer {
	t.Helper()
	if err := s.Inside().Reserve(pages * Page); err != nil {
		t.Fatal(err)
	}
	b, err := s.Inside().Draw(pages*Page, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func copied(t *testing.T, s *Space, shares bool, bufs ...*Buffer) *copies.Copy {
	t.Helper()
	return s.Inside().KeepCopy(bufs, shares, func() {
		for _, b := range bufs {
			if err := b.Release(); err != nil {
				t.Error(err)
			}
		}
	})
}

func wantUsage(t *testing.T, s *Space, live, reserved, cached int64) {
	t.Helper()
	if u := s.Usage(); u.Live != live*Page || u.Reserved != reserved*Page || u.Cached != cached*Page || u.Retired != 0 {
		t.Errorf("%+v, want %d pages live, %d reserved, %d cached", u, live, reserved, cached)
	}
}

// TestCopyCountsAsFree: what is copied can be promised, the oldest goes when promised bytes become
// memory, and one that is taken is memory again.
func TestCopyCountsAsFree(t *testing.T) {
	s := copySpace(t, 10, nil)
	old := copied(t, s, false, drawn(t, s, 2), drawn(t, s, 2))
	young := drawn(t, s, 4)
	c := copied(t, s, false, young)
	wantUsage(t, s, 0, 0, 8)
	if n := s.Available(); n != 10*Page {
		t.Errorf("%d bytes can be promised", n)
	}
	if err := s.Inside().Reserve(6 * Page); err != nil {
		t.Fatal(err)
	}
	if wantUsage(t, s, 0, 6, 8); !old.Listed() {
		t.Error("a promise frees a copy")
	}
	b, err := s.Inside().Draw(6*Page, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if wantUsage(t, s, 6, 0, 4); old.Listed() || old.Take() {
		t.Error("the oldest copy is there")
	}
	if err := s.Inside().Reserve(5 * Page); !errors.Is(err, ErrNoSpace) {
		t.Errorf("promised what is in use: %v", err)
	}
	if err := s.Inside().Reserve(4 * Page); err != nil || !c.Take() {
		t.Fatalf("the copy is not to be had: %v", err)
	}
	s.Inside().Revive(c, []*Buffer{young}, nil, 0)
	wantUsage(t, s, 10, 0, 0)
	if err := errors.Join(young.Release(), b.Release()); err != nil {
		t.Error(err)
	}
	wantUsage(t, s, 0, 0, 0)
	c.Drop() // is another's by now
}

// TestCopyGoesWithItsRoom: a lower limit takes copies, and so do the end of the batch, an explicit
// call, and a pool that has no room for another reason.
func TestCopyGoesWithItsRoom(t *testing.T) {
	s := copySpace(t, 10, nil)
	for range 4 {
		copied(t, s, false, drawn(t, s, 2))
	}
	if err := s.SetLimit(5 * Page); err != nil {
		t.Fatal(err)
	}
	wantUsage(t, s, 0, 0, 4)
	if err := s.SetLimit(10 * Page); err != nil {
		t.Fatal(err)
	}
	s.Pool().(*tightPool).left.Add(-5 * Page) // others have it
	b := drawn(t, s, 3)
	if s.Usage().Cached >= 4*Page {
		t.Errorf("%+v", s.Usage())
	}
	s.Inside().DropCopies()
	wantUsage(t, s, 3, 0, 0)
	c := copied(t, s, false, b)
	c.Drop()
	wantUsage(t, s, 0, 0, 0)
	if n := len(s.Leaks()); n != 0 {
		t.Errorf("%d leaks", n)
	}
}

// TestWhatIsNotCopied: memory under a lease, and memory under a quota, which others wait for.
func TestWhatIsNotCopied(t *testing.T) {
	s := copySpace(t, 10, nil)
	a, b := drawn(t, s, 1), drawn(t, s, 1)
	end := b.Lease()
	if copied(t, s, false, a, b) != nil {
		t.Error("leased memory is a copy")
	}
	end()
	wantUsage(t, s, 2, 0, 0)
	c := copied(t, s, false, a, b)
	if _, ok := b.TryLease(); c == nil || ok {
		t.Fatal("no copy, or a lease on it")
	}
	c.Drop()
	wantUsage(t, s, 0, 0, 0)
	if n := s.Pool().(*tightPool).left.Load(); n != 10*Page {
		t.Errorf("%d bytes are left", n)
	}
	limited := copySpace(t, 10, noQuota{})
	d := drawn(t, limited, 1)
	if copied(t, limited, false, d) != nil {
		t.Error("a copy under a quota")
	}
	if err := d.Release(); err != nil {
		t.Error(err)
	}
}

// TestHeldCopy: who was promised the bytes of a copy that is held waits for them. A copy that is
// dropped meanwhile goes when it is held no more.
func TestHeldCopy(t *testing.T) {
	s := copySpace(t, 10, nil)
	c := copied(t, s, false, drawn(t, s, 6))
	if !c.Hold() || c.Hold() || c.Take() || !c.Listed() {
		t.Fatal("a copy that is held is one still, and nobody takes it")
	}
	time.AfterFunc(100*time.Millisecond, c.Unhold)
	b := drawn(t, s, 10)
	if c.Listed() || c.Hold() {
		t.Error("the copy is there, and its memory is another's")
	}
	if err := b.Release(); err != nil {
		t.Error(err)
	}
	c = copied(t, s, false, drawn(t, s, 6))
	if !c.Hold() {
		t.Fatal("not held")
	}
	c.Drop()
	if wantUsage(t, s, 0, 0, 6); c.Listed() {
		t.Error("a dropped copy is listed")
	}
	c.Unhold()
	wantUsage(t, s, 0, 0, 0)
	c = copied(t, s, false, drawn(t, s, 6))
	if !c.Hold() {
		t.Fatal("not held")
	}
	c.Unhold()
	if !c.Take() {
		t.Fatal("not there after a hold")
	}
	c.Release()
	wantUsage(t, s, 0, 0, 0)
}

// TestSharingCopiesGoFirst: where shared memory is what fills the space.
func TestSharingCopiesGoFirst(t *testing.T) {
	s := copySpace(t, 10, nil)
	copied(t, s, false, drawn(t, s, 1))
	shared := drawn(t, s, 3)
	own := drawn(t, s, 1)
	s.Inside().KeepCopy([]*Buffer{own}, true, func() {
		if err := errors.Join(own.Release(), shared.Release()); err != nil {
			t.Error(err)
		}
	})
	wantUsage(t, s, 3, 0, 2)
	s.Inside().DropSharing(0)
	wantUsage(t, s, 3, 0, 2)
	s.Inside().DropSharing(1)
	wantUsage(t, s, 0, 0, 1)
	s.Inside().DropSharing(1)
	wantUsage(t, s, 0, 0, 1)
	s.Inside().DropCopies()
}

// TestSharingCopiesAreFoundAtOnce: the monitor frees them on its own goroutine, so it must not look
// at all other copies for each.
func TestSharingCopiesAreFoundAtOnce(t *testing.T) {
	const plain, sharing = 50_000, 3000
	s := copySpace(t, plain+sharing+10, nil)
	for i := range plain + sharing {
		b := drawn(t, s, 1)
		s.Inside().KeepCopy([]*Buffer{b}, i >= plain, func() { _ = b.Release() })
	}
	runtime.GC()
	start := time.Now()
	s.Inside().DropSharing(1) // what they share has other users, too: nothing gets free
	took := time.Since(start)
	wantUsage(t, s, 0, 0, plain)
	start = time.Now()
	s.Inside().DropCopies()
	if all := time.Since(start); took > 20*all {
		t.Errorf("%v for %d copies, and %v for the %d others", took, sharing, all, plain)
	}
}

// TestDrawersAtOnceFreeWhatTheyNeed: together, and not each as much as all.
func TestDrawersAtOnceFreeWhatTheyNeed(t *testing.T) {
	const drawers, held = 8, 400
	for range 300 {
		s := copySpace(t, held, nil)
		for range held {
			copied(t, s, false, drawn(t, s, 1))
		}
		var all sync.WaitGroup
		start := make(chan struct{})
		bufs := make([]*Buffer, drawers)
		for i := range drawers {
			if err := s.Inside().Reserve(4 * Page); err != nil {
				t.Fatal(err)
			}
			all.Go(func() {
				<-start
				bufs[i], _ = s.Inside().Draw(4*Page, nil, nil)
			})
		}
		close(start)
		all.Wait()
		wantUsage(t, s, drawers*4, 0, held-drawers*4)
		for _, b := range bufs {
			_ = b.Release()
		}
		s.Inside().DropCopies()
	}
}

// recalling is a reservation that is open still: it takes the bytes back, and its holder, on
// another goroutine, draws them at once.
type recalling struct {
	s    *Space
	draw func()
}

func (a *recalling) Credit(_ uint64, n int64) bool {
	a.s.Inside().Recall(n)
	a.draw()
	return true
}

// TestDrawWhileACopyIsMade: an open reservation gets the bytes of memory that becomes a copy. They
// can be drawn before the copy is listed.
func TestDrawWhileACopyIsMade(t *testing.T) {
	s := copySpace(t, 10, nil)
	if err := s.Inside().Reserve(10 * Page); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	a := &recalling{s: s, draw: func() {
		go func() {
			b, err := s.Inside().Draw(10*Page, nil, nil)
			done <- errors.Join(err, b.Release())
		}()
		for range 1000 { // the other goroutine gets the processor first
			if len(done) > 0 {
				return
			}
			runtime.Gosched()
		}
	}}
	b, err := s.Inside().Draw(10*Page, nil, a)
	if err != nil {
		t.Fatal(err)
	}
	copied(t, s, false, b)
	if err := <-done; err != nil {
		t.Errorf("promised and not there: %v", err)
	}
	wantUsage(t, s, 0, 0, 0)
}

// TestPromisesAreKeptBesideCopies: goroutines promise, draw, copy, revive and free at random. Who
// was promised bytes gets them, whatever is copied, and the books are right whenever they are read.
func TestPromisesAreKeptBesideCopies(t *testing.T) {
	const pages = 64
	for seed := range testseed.Each(t, 3) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			s := copySpace(t, pages, nil)
			var all sync.WaitGroup
			var revived, gone atomic.Int64
			for g := range 6 {
				all.Go(func() {
					r := rand.New(rand.NewPCG(seed, uint64(g)))
					var kept []*copies.Copy
					var of [][]*Buffer
					for range 2000 {
						n := 1 + r.Int64N(pages/8)
						if len(kept) > 0 && r.IntN(2) == 0 {
							k := r.IntN(len(kept))
							c, bufs := kept[k], of[k]
							kept, of = append(kept[:k:k], kept[k+1:]...), append(of[:k:k], of[k+1:]...)
							switch {
							case r.IntN(3) == 0:
								c.Drop()
							case s.Inside().Reserve(c.Bytes()) != nil:
								c.Drop()
							case c.Take():
								revived.Add(1)
								s.Inside().Revive(c, bufs, nil, 0)
								for _, b := range bufs {
									if err := b.Release(); err != nil {
										t.Error(err)
									}
								}
							default:
								gone.Add(1)
								s.Inside().Unreserve(c.Bytes())
							}
							continue
						}
						if s.Inside().Reserve(2*n*Page) != nil {
							continue
						}
						var bufs []*Buffer
						for range 2 {
							b, err := s.Inside().Draw(n*Page, nil, nil)
							if err != nil {
								t.Errorf("promised and not there: %v (%+v)", err, s.Usage())
								return
							}
							bufs = append(bufs, b)
						}
						if u := s.Usage(); u.Cached < 0 || u.Used() > pages*Page {
							t.Errorf("%+v", u)
						}
						kept, of = append(kept, copied(t, s, false, bufs...)), append(of, bufs)
					}
					for _, c := range kept {
						c.Drop()
					}
				})
			}
			all.Wait()
			wantUsage(t, s, 0, 0, 0)
			if n := s.Pool().(*tightPool).left.Load(); n != pages*Page {
				t.Errorf("%d bytes are left", n)
			}
			if revived.Load() == 0 || gone.Load() == 0 {
				t.Errorf("%d revived, %d were gone: the test is too easy", revived.Load(), gone.Load())
			}
		})
	}
}

// TestCopiesAreNoLeaks: what leaks is a copy's batch, elsewhere.
func TestCopiesAreNoLeaks(t *testing.T) {
	t.Parallel()
	s := copySpace(t, 2, nil)
	own, copied := drawn(t, s, 1), drawn(t, s, 1)
	s.Inside().KeepCopy([]*Buffer{copied}, false, func() { _ = copied.Release() })
	if n := len(s.Leaks()); n != 1 {
		t.Errorf("%d leaks, want 1", n)
	}
	if err := own.Release(); err != nil {
		t.Error(err)
	}
	s.Inside().DropCopies()
}
