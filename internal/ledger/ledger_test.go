package ledger_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/ledger"
	"github.com/spillway-db/spillway/internal/testseed"
)

func TestLedgerAccounts(t *testing.T) {
	l := ledger.New(100)
	check := func(step string, want ledger.Usage) {
		t.Helper()
		if got := l.Snapshot(); got != want {
			t.Errorf("after %s: %+v, want %+v", step, got, want)
		}
		if l.Used() != want.Used() {
			t.Errorf("after %s: Used is %d, want %d", step, l.Used(), want.Used())
		}
	}
	reserve := func(n, limit int64, want bool) {
		t.Helper()
		if got := l.Reserve(n, limit); got != want {
			t.Errorf("Reserve(%d, %d) with %d used is %v", n, limit, l.Used(), got)
		}
	}
	reserve(101, math.MaxInt64, false)
	reserve(math.MaxInt64, math.MaxInt64, false)
	reserve(80, 90, true)
	check("reserving 80", ledger.Usage{Reserved: 80, Peak: 80})
	reserve(11, 90, false)
	reserve(math.MaxInt64, 90, false) // n + used would overflow
	reserve(10, 90, true)
	reserve(10, math.MaxInt64, true) // the limit may be anything; the capacity holds
	reserve(1, math.MaxInt64, false)
	check("filling up", ledger.Usage{Reserved: 100, Peak: 100})
	l.Draw(70)
	check("drawing 70", ledger.Usage{Live: 70, Reserved: 30, Peak: 100})
	l.Undraw(20)
	check("undrawing 20", ledger.Usage{Live: 50, Reserved: 50, Peak: 100})
	l.Unreserve(40)
	check("unreserving 40", ledger.Usage{Live: 50, Reserved: 10, Peak: 100})
	l.ResetPeak()
	check("resetting the peak", ledger.Usage{Live: 50, Reserved: 10, Peak: 60})
	l.Retire(30)
	check("retiring 30", ledger.Usage{Live: 20, Retired: 30, Reserved: 10, Peak: 60})
	l.Recall(10)
	check("recalling 10", ledger.Usage{Live: 20, Retired: 20, Reserved: 20, Peak: 60})
	l.Reap(20)
	check("reaping 20", ledger.Usage{Live: 20, Reserved: 20, Peak: 60})
	reserve(1, 10, false) // a limit that was lowered below what is used
	reserve(1, -5, false)
	reserve(0, 40, true)
	check("no more", ledger.Usage{Live: 20, Reserved: 20, Peak: 60})
	l.Retire(15)
	l.Cache(15)
	check("caching 15", ledger.Usage{Live: 5, Reserved: 20, Cached: 15, Peak: 60})
	reserve(75, 100, true) // what is cached counts as free
	l.Unreserve(75)
	l.Revive(8)
	check("reviving 8", ledger.Usage{Live: 13, Reserved: 12, Cached: 7, Peak: 100})
	l.Forget(7)
	check("forgetting 7", ledger.Usage{Live: 13, Reserved: 12, Peak: 100})
	l.Retire(3)
	l.Recall(3)
	l.CacheRecalled(3)
	check("caching what a promise got back", ledger.Usage{Live: 10, Reserved: 15, Cached: 3, Peak: 100})
}

// TestLedgerRefusesToLie: what would take an account below zero panics, leaves
// the books as they were, and leaves them usable.
func TestLedgerRefusesToLie(t *testing.T) {
	for name, f := range map[string]func(*ledger.Ledger){
		"unreserve":          func(l *ledger.Ledger) { l.Unreserve(11) },
		"draw":               func(l *ledger.Ledger) { l.Draw(11) },
		"undraw":             func(l *ledger.Ledger) { l.Undraw(21) },
		"retire":             func(l *ledger.Ledger) { l.Retire(21) },
		"reap":               func(l *ledger.Ledger) { l.Reap(31) },
		"recall":             func(l *ledger.Ledger) { l.Recall(31) },
		"cache":              func(l *ledger.Ledger) { l.Cache(31) },
		"revive":             func(l *ledger.Ledger) { l.Revive(1) },
		"forget":             func(l *ledger.Ledger) { l.Forget(1) },
		"negative cache":     func(l *ledger.Ledger) { l.CacheRecalled(-1) },
		"negative reserve":   func(l *ledger.Ledger) { l.Reserve(-1, 100) },
		"negative unreserve": func(l *ledger.Ledger) { l.Unreserve(-1) },
		"negative draw":      func(l *ledger.Ledger) { l.Draw(-1) },
		"negative reap":      func(l *ledger.Ledger) { l.Reap(math.MinInt64) },
	} {
		t.Run(name, func(t *testing.T) {
			l := ledger.New(100)
			l.Reserve(60, 100)
			l.Draw(50)
			l.Retire(30)
			want := ledger.Usage{Live: 20, Retired: 30, Reserved: 10, Peak: 60}
			func() {
				defer func() {
					if recover() == nil {
						t.Error("no panic")
					}
				}()
				f(l)
			}()
			if got := l.Snapshot(); got != want {
				t.Errorf("the books are %+v, and were %+v", got, want)
			}
			l.Retire(20)
			l.Reap(50)
			l.Unreserve(10)
			if l.Used() != 0 {
				t.Errorf("%d bytes are left", l.Used())
			}
		})
	}
	defer func() {
		if recover() == nil {
			t.Error("a ledger with a negative capacity")
		}
	}()
	ledger.New(-1)
}

// TestLedgerSnapshotIsNeverTorn moves a fixed sum between the accounts while
// others read: every cut must show that sum.
func TestLedgerSnapshotIsNeverTorn(t *testing.T) {
	const sum = 1000
	l := ledger.New(sum)
	l.Reserve(sum, sum)
	var writers, readers sync.WaitGroup
	var stop atomic.Bool
	var cuts atomic.Int64
	for range 2 {
		writers.Go(func() {
			for range rounds(20000) {
				l.Draw(500)
				l.Undraw(100)
				l.Retire(400)
				l.Recall(400)
			}
		})
	}
	for range 2 {
		readers.Go(func() {
			for !stop.Load() {
				cuts.Add(1)
				if u := l.Snapshot(); u.Used() != sum || u.Live < 0 || u.Retired < 0 || u.Reserved < 0 || u.Peak != sum {
					t.Errorf("a cut shows %+v: %d bytes, want %d", u, u.Used(), sum)
					return
				}
				if used := l.Used(); used != sum {
					t.Errorf("Used is %d, want %d", used, sum)
					return
				}
			}
		})
	}
	writers.Wait()
	stop.Store(true)
	readers.Wait()
	if cuts.Load() == 0 {
		t.Error("no cut was taken")
	}
}

// TestLedgerRandom lets goroutines do random operations within what they hold:
// the ledger is never over the limit, no byte is lost, and the refusals are
// right.
func TestLedgerRandom(t *testing.T) {
	seed := testseed.One(t)
	const capacity, limit = 1 << 20, 900 << 10
	l := ledger.New(capacity)
	var writers, readers sync.WaitGroup
	var stop atomic.Bool
	var refused, granted atomic.Int64
	type holding struct{ live, retired, reserved, cached int64 }
	held := make([]holding, 4)
	for g := range held {
		writers.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(g)))
			h := &held[g]
			for range rounds(20000) {
				switch part := func(n int64) int64 { return r.Int64N(n + 1) }; r.IntN(11) {
				case 0, 1:
					if n := part(limit / 3); l.Reserve(n, limit) {
						h.reserved += n
						granted.Add(1)
					} else {
						refused.Add(1)
					}
				case 2:
					n := part(h.reserved)
					l.Unreserve(n)
					h.reserved -= n
				case 3:
					n := part(h.reserved)
					l.Draw(n)
					h.reserved, h.live = h.reserved-n, h.live+n
				case 4:
					n := part(h.live)
					l.Undraw(n)
					h.reserved, h.live = h.reserved+n, h.live-n
				case 5:
					n := part(h.live)
					l.Retire(n)
					h.live, h.retired = h.live-n, h.retired+n
				case 6:
					n := part(h.retired)
					l.Reap(n)
					h.retired -= n
				case 7:
					n := part(h.retired)
					l.Recall(n)
					h.retired, h.reserved = h.retired-n, h.reserved+n
				case 8:
					n := part(h.retired)
					l.Cache(n)
					h.retired, h.cached = h.retired-n, h.cached+n
				case 9:
					n := part(min(h.cached, h.reserved))
					l.Revive(n)
					h.reserved, h.cached, h.live = h.reserved-n, h.cached-n, h.live+n
				case 10:
					n := part(h.cached)
					l.Forget(n)
					h.cached -= n
				}
			}
		})
	}
	readers.Go(func() {
		for !stop.Load() {
			if used := l.Used(); used > limit || used < 0 {
				t.Errorf("Used is %d, the limit %d", used, limit)
			}
			if u := l.Snapshot(); u.Used() > limit || u.Live < 0 || u.Retired < 0 || u.Reserved < 0 || u.Cached < 0 || u.Peak < u.Used() || u.Peak > limit {
				t.Errorf("a cut shows %+v, the limit is %d", u, limit)
			}
			if t.Failed() {
				return
			}
		}
	})
	writers.Wait()
	stop.Store(true)
	readers.Wait()
	var want ledger.Usage
	for _, h := range held {
		want.Live += h.live
		want.Retired += h.retired
		want.Reserved += h.reserved
		want.Cached += h.cached
	}
	got := l.Snapshot()
	want.Peak = got.Peak
	if got != want || l.Used() != want.Used() {
		t.Errorf("the books are %+v, %d used; what is held is %+v", got, l.Used(), want)
	}
	if refused.Load() == 0 || granted.Load() == 0 {
		t.Errorf("%d reservations were granted, %d refused: the test is too easy", granted.Load(), refused.Load())
	}
}

func TestLedgerDoesNotAllocate(t *testing.T) {
	l := ledger.New(1 << 30)
	if n := testing.AllocsPerRun(1000, func() {
		l.Reserve(100, 1<<30)
		l.Unreserve(100)
		l.Snapshot()
	}); n != 0 && !invariants.Enabled {
		t.Errorf("Reserve, Unreserve and Snapshot allocate %v times", n)
	}
}

func BenchmarkLedger(b *testing.B) {
	b.Run("ReserveUnreserve", func(b *testing.B) {
		l := ledger.New(1 << 40)
		b.ReportAllocs()
		for b.Loop() {
			l.Reserve(4096, 1<<40)
			l.Unreserve(4096)
		}
	})
	b.Run("Snapshot", func(b *testing.B) {
		l := ledger.New(1 << 40)
		b.ReportAllocs()
		for b.Loop() {
			l.Snapshot()
		}
	})
	b.Run("Life", func(b *testing.B) { // of a buffer
		l := ledger.New(1 << 40)
		b.ReportAllocs()
		for b.Loop() {
			l.Reserve(4096, 1<<40)
			l.Draw(4096)
			l.Retire(4096)
			l.Reap(4096)
		}
	})
	for _, writers := range []int{1, 2} {
		b.Run(fmt.Sprintf("SnapshotBesideWriters=%d", writers), func(b *testing.B) {
			l := ledger.New(1 << 40)
			var wg sync.WaitGroup
			var stop atomic.Bool
			for range writers {
				wg.Go(func() {
					for !stop.Load() {
						l.Reserve(4096, 1<<40)
						l.Unreserve(4096)
					}
				})
			}
			for b.Loop() {
				l.Snapshot()
			}
			stop.Store(true)
			wg.Wait()
		})
	}
	b.Run("ReserveUnreserveParallel", func(b *testing.B) {
		l := ledger.New(1 << 40)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				l.Reserve(4096, 1<<40)
				l.Unreserve(4096)
			}
		})
	})
}

// rounds is how often a test that works the locks does so: in an invariants
// build, where each lock looks at the goroutine's stack, a tenth of n.
func rounds(n int) int {
	if invariants.Enabled {
		return n / 10
	}
	return n
}

func TestLeft(t *testing.T) {
	for _, c := range []struct{ limit, used, mine, want int64 }{
		{100, 60, 10, 40}, {100, 100, 100, 0}, {100, 0, 0, 100}, {100, 150, 0, 0},
		{100, 150, 150, -50}, {100, 150, 100, -34}, {100, 150, 50, -17}, {100, 101, 1, -1}, {100, 101, 100, -1},
		{1, math.MaxInt64, math.MaxInt64, -(math.MaxInt64 - 1)}, {1, math.MaxInt64, 1, -1},
	} {
		if got := ledger.Left(c.limit, c.used, c.mine); got != c.want {
			t.Errorf("Left(%d, %d, %d) = %d, want %d", c.limit, c.used, c.mine, got, c.want)
		}
	}
}
