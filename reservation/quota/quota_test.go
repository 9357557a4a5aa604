package quota_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

func newQuota(t *testing.T, limit int64) *quota.Quota {
	t.Helper()
	return quotaOf(t, quota.Config{Limit: limit})
}

func quotaOf(t *testing.T, cfg quota.Config) *quota.Quota {
	t.Helper()
	q, err := quota.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// wantRefusal checks that err is a refusal with those numbers.
func wantRefusal(t *testing.T, err error, requested, remaining, current, limit int64) *tier.OutOfBudgetError {
	t.Helper()
	var e *tier.OutOfBudgetError
	if !errors.As(err, &e) || !errors.Is(err, tier.ErrOutOfBudget) || !errors.Is(err, tier.ErrNoSpace) {
		t.Fatalf("%v; want a refusal", err)
	}
	if e.Requested != requested || e.Remaining != remaining || e.Current != current || e.Limit != limit {
		t.Fatalf("%+v; want requested %d, remaining %d, current %d, limit %d", *e, requested, remaining, current, limit)
	}
	return e
}

// counting counts what reaches a device.
type counting struct {
	tier.Device
	allocs atomic.Int64
}

func (d *counting) Unwrap() tier.Device { return d.Device }

func (d *counting) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	d.allocs.Add(1)
	return d.Device.Alloc(s, size)
}

// spaceUnder returns a space of a simulated GPU of memory bytes that is under q.
func spaceUnder(t *testing.T, ordinal int, memory int64, q *quota.Quota) (*tier.Space, *counting) {
	t.Helper()
	gpu, err := sim.New(sim.Config{Memory: memory})
	if err != nil {
		t.Fatal(err)
	}
	c := &counting{Device: gpu}
	dev := quota.Under(c, q.Member())
	pool, err := devpool.NewMemory(dev)
	if err != nil {
		t.Fatal(err)
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.GPU, Ordinal: ordinal}, Capacity: memory,
		Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
		Pool:  pool, Quota: tier.QuotaOf(dev),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(space.Close(), gpu.Close()); err != nil {
			t.Error(err)
		}
	})
	return space, c
}

// TestEqualIsFine: what comes to the limit exactly is charged, a byte more is not, and
// the refusal names the quota and its numbers.
func TestEqualIsFine(t *testing.T) {
	q := quotaOf(t, quota.Config{Limit: 1000, Name: "SPILLWAY_GPU_MEMORY_LIMIT"})
	if err := q.Member().Charge(600); err != nil {
		t.Fatal(err)
	}
	if err := q.Member().Charge(400); err != nil {
		t.Fatal(err)
	}
	e := wantRefusal(t, q.Member().Charge(1), 1, 0, 1000, 1000)
	if e.Budget != "SPILLWAY_GPU_MEMORY_LIMIT" {
		t.Errorf("%q does not name the quota", e.Budget)
	}
	q.Member().Credit(1)
	wantRefusal(t, q.Member().Charge(2), 2, 1, 999, 1000)
	wantRefusal(t, q.Member().Charge(math.MaxInt64), math.MaxInt64, 1, 999, 1000)
	if s := q.Stats(); s.Used != 999 || s.Peak != 1000 || s.Limit != 1000 {
		t.Errorf("%+v", s)
	}
	for _, n := range []int64{0, -1, math.MinInt64} {
		if q.Member().Charge(n) == nil {
			t.Errorf("Charge(%d): want an error", n)
		}
	}
	for _, n := range []int64{0, -1} {
		if _, err := quota.New(quota.Config{Limit: n}); err == nil || q.SetLimit(n) == nil {
			t.Errorf("a limit of %d: want an error", n)
		}
	}
}

// TestTheDeviceIsNotAsked: what a quota refuses is refused when it is reserved; the
// device never hears of it.
func TestTheDeviceIsNotAsked(t *testing.T) {
	q := newQuota(t, 64<<10)
	space, dev := spaceUnder(t, 0, 1<<20, q)
	promise, err := space.Promise(64 << 10)
	if err != nil {
		t.Fatal(err)
	}
	_, err = space.Promise(4096)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Space.Kind != tier.GPU {
		t.Fatalf("%v; want an error that names the space", err)
	}
	wantRefusal(t, err, 4096, 0, 64<<10, 64<<10)
	if space.State().Available != 0 || space.State().Room != 64<<10 {
		t.Errorf("available %d, room %d", space.State().Available, space.State().Room)
	}
	if dev.allocs.Load() != 0 {
		t.Errorf("the device was asked %d times", dev.allocs.Load())
	}
	promise.Draw(64<<10, 0, false)
	b, err := space.Draw(promise, 64<<10, nil)
	if err != nil {
		t.Fatal(err)
	}
	if q.Stats().Used != 64<<10 {
		t.Errorf("%+v", q.Stats())
	}
	if err := errors.Join(space.Release(promise), b.Release()); err != nil {
		t.Fatal(err)
	}
	if q.Stats().Used != 0 {
		t.Errorf("after the release: %+v", q.Stats())
	}
}

func TestMemInfo(t *testing.T) {
	gpu, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer gpu.Close()
	for _, c := range []struct{ limit, charged, free, total int64 }{
		{1 << 19, 0, 1 << 19, 1 << 19}, {1 << 19, 1 << 18, 1 << 18, 1 << 19}, {1 << 19, 1 << 19, 0, 1 << 19},
		{1 << 30, 0, 1 << 20, 1 << 20}, {1 << 30, 1<<30 - 100, 100, 1 << 20},
	} {
		q := newQuota(t, c.limit)
		if c.charged > 0 {
			if err := q.Member().Charge(c.charged); err != nil {
				t.Fatal(err)
			}
		}
		if free, total, _ := quota.Under(gpu, q.Member()).MemInfo(); free != c.free || total != c.total {
			t.Errorf("%+v: free %d of %d", c, free, total)
		}
	}
	if free, total, _ := quota.Under(gpu).MemInfo(); free != 1<<20 || total != 1<<20 {
		t.Errorf("under no quota: free %d of %d", free, total)
	}
	q := newQuota(t, 1<<18)
	if err := q.Member().Charge(1 << 18); err != nil {
		t.Fatal(err)
	}
	if err := q.SetLimit(1); err != nil {
		t.Fatal(err)
	}
	if free, total, _ := quota.Under(gpu, q.Member()).MemInfo(); free != 0 || total != 1 {
		t.Errorf("above a lowered limit: free %d of %d", free, total)
	}
}

// TestLoweredLimit: it revokes nothing, refuses what is new, and tells each space how
// much of the excess is its own.
func TestLoweredLimit(t *testing.T) {
	q := newQuota(t, 100<<10)
	a, _ := spaceUnder(t, 0, 1<<20, q)
	b, _ := spaceUnder(t, 1, 1<<20, q)
	inA, errA := a.Promise(60 << 10)
	inB, errB := b.Promise(20 << 10)
	if err := errors.Join(errA, errB); err != nil {
		t.Fatal(err)
	}
	told := 0
	defer q.Member().Subscribe(func() { told++ })()
	if err := q.SetLimit(40 << 10); err != nil {
		t.Fatal(err)
	}
	if told != 1 {
		t.Errorf("subscribers were told %d times", told)
	}
	if a.State().Used() != 60<<10 || b.State().Used() != 20<<10 || q.Stats().Used != 80<<10 {
		t.Errorf("used %d and %d, %+v", a.State().Used(), b.State().Used(), q.Stats())
	}
	_, err := a.Promise(4096)
	wantRefusal(t, err, 4096, 0, 80<<10, 40<<10)
	if got := a.State().Ceiling; got != 30<<10 {
		t.Errorf("the first should come down to %d, not %d", 30<<10, got)
	}
	if got := b.State().Ceiling; got != 10<<10 {
		t.Errorf("the second should come down to %d, not %d", 10<<10, got)
	}
	if q.Stats().Limit-q.Stats().Used != -(40<<10) || a.State().Available != 0 {
		t.Errorf("remaining %d, available %d", q.Stats().Limit-q.Stats().Used, a.State().Available)
	}
	if err := a.Release(inA); err != nil {
		t.Fatal(err)
	}
	inA, err = a.Promise(20 << 10)
	if err != nil {
		t.Fatalf("with room again: %v", err)
	}
	if err := errors.Join(a.Release(inA), b.Release(inB)); err != nil {
		t.Error(err)
	}
}

// TestRemaining: a member's Remaining is what is left, or its share of the excess over a lowered limit. The
// shares of all members add up to at least the excess.
func TestRemaining(t *testing.T) {
	for _, c := range []struct{ limit, used, own, want int64 }{
		{100, 60, 10, 40}, {100, 100, 100, 0}, {100, 0, 0, 100}, {100, 150, 0, 0},
		{100, 150, 150, -50}, {100, 150, 100, -34}, {100, 150, 50, -17}, {100, 101, 1, -1}, {100, 101, 100, -1},
		{1, math.MaxInt64, math.MaxInt64, -(math.MaxInt64 - 1)}, {1, math.MaxInt64, 1, -1},
	} {
		q := newQuota(t, math.MaxInt64)
		own, other := q.Member(), q.Member()
		if err := own.Charge(10); err != nil {
			t.Fatal(err)
		}
		own.Credit(10) // which are not its own any more
		for m, n := range map[tier.Quota]int64{own: c.own, other: c.used - c.own} {
			if n > 0 && m.Charge(n) != nil {
				t.Fatalf("%d bytes are refused", n)
			}
		}
		if err := q.SetLimit(c.limit); err != nil {
			t.Fatal(err)
		}
		if got := own.Remaining(); got != c.want {
			t.Errorf("limit %d, %d used, %d of them own: remaining %d, want %d", c.limit, c.used, c.own, got, c.want)
		}
	}
}

// TestOverIsReportedOnce: use above a limit is one event with the numbers, until it has been within
// the limit again.
func TestOverIsReportedOnce(t *testing.T) {
	var events []quota.Over
	q := quotaOf(t, quota.Config{Limit: 1000, Name: "q"})
	q.OnOver(func(quota.Over) { panic("a watcher") }) // keeps no other from being called
	q.OnOver(func(o quota.Over) {
		_ = q.Stats() // no lock is held
		events = append(events, o)
	})
	q.OnOver(func(o quota.Over) { t.Errorf("a watcher is called after its cancel: %+v", o) })()
	if err := q.Member().Charge(900); err != nil {
		t.Fatal(err)
	}
	want := func(n int, last quota.Over) {
		t.Helper()
		if len(events) != n || n > 0 && events[n-1] != last {
			t.Fatalf("events %+v; want %d, the last %+v", events, n, last)
		}
	}
	for _, step := range []struct {
		limit, credit int64
		events        int
	}{
		{limit: 900, events: 0}, {limit: 899, events: 1}, {limit: 500, events: 1}, {credit: 100, events: 1},
		{limit: 700, events: 1},
		{limit: 800, events: 1}, {limit: 799, events: 2}, {credit: 1, events: 2}, {limit: 798, events: 3},
	} {
		if step.limit > 0 {
			if err := q.SetLimit(step.limit); err != nil {
				t.Fatal(err)
			}
		} else {
			q.Member().Credit(step.credit)
		}
		last := quota.Over{}
		if step.events > 0 {
			last = []quota.Over{{"q", 900, 899}, {"q", 800, 799}, {"q", 799, 798}}[step.events-1]
		}
		want(step.events, last)
	}
}

// TestOverIsReportedOfARacingCharge: a charge that passes while the limit is lowered, and is above
// the new one, is reported once.
func TestOverIsReportedOfARacingCharge(t *testing.T) {
	for range 5000 {
		var events atomic.Int64
		q := newQuota(t, 1000)
		q.OnOver(func(quota.Over) { events.Add(1) })
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := q.SetLimit(500); err != nil {
				t.Error(err)
			}
		})
		err := q.Member().Charge(800)
		wg.Wait()
		want := int64(0)
		if err == nil {
			want = 1
		}
		if got := events.Load(); got != want {
			t.Fatalf("the charge: %v; %d events, want %d", err, got, want)
		}
	}
}

// TestCreditOfWhatWasNotCharged: it is a panic, and changes nothing.
func TestCreditOfWhatWasNotCharged(t *testing.T) {
	q := newQuota(t, 1000)
	m := q.Member()
	if err := m.Charge(10); err != nil {
		t.Fatal(err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
		}()
		m.Credit(11)
	}()
	if s := q.Stats(); s.Used != 10 {
		t.Errorf("%+v", s)
	}
	m.Credit(10)
}

// TestQuotaUnderRaces: whatever many goroutines do, no moment has more in use than the
// limit allowed when it was charged, and in the end nothing is.
func TestQuotaUnderRaces(t *testing.T) {
	seed := testseed.One(t)
	const limit = 1000
	var over atomic.Int64
	q := newQuota(t, limit)
	q.OnOver(func(o quota.Over) {
		if o.Used <= o.Limit {
			t.Errorf("an event of use within the limit: %+v", o)
		}
		over.Add(1)
	})
	var held atomic.Int64 // never more than is charged
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(g)))
			var mine []int64
			for range 20000 {
				if n := rng.Int64N(300) + 1; rng.IntN(2) == 0 {
					if q.Member().Charge(n) == nil {
						if held.Add(n) > limit {
							t.Error("more is held than the limit")
						}
						mine = append(mine, n)
					}
				} else if len(mine) > 0 {
					held.Add(-mine[0])
					q.Member().Credit(mine[0])
					mine = mine[1:]
				}
				if g == 0 && rng.IntN(16) == 0 {
					_ = q.SetLimit(rng.Int64N(limit) + 1)
				}
			}
			for _, n := range mine {
				held.Add(-n)
				q.Member().Credit(n)
			}
		})
	}
	wg.Wait()
	if s := q.Stats(); s.Used != 0 || s.Peak > limit {
		t.Errorf("in the end: %+v", s)
	}
	if over.Load() == 0 {
		t.Error("no limit was ever lowered below what was in use: the test is none")
	}
}
