package tier_test

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// fakePool charges in steps of 64 bytes, and frees when the test says so.
type fakePool struct {
	alloc func(size int64) (tier.Memory, error) // nil: passes

	mu     sync.Mutex
	keep   bool     // hold reclaimed back
	kept   []func() // held back
	frees  int
	closed bool
}

type fakeMemory int64

func (m fakeMemory) Size() int64 { return int64(m) }

func (p *fakePool) Charge(size int64) int64 { return (size + 63) / 64 * 64 }

func (p *fakePool) Alloc(size int64, _ []int64) (tier.Memory, error) {
	if p.alloc != nil {
		return p.alloc(size)
	}
	return fakeMemory(size), nil
}

func (p *fakePool) Free(_ tier.Memory, reclaimed func()) {
	p.mu.Lock()
	p.frees++
	keep := p.keep
	if keep {
		p.kept = append(p.kept, reclaimed)
	}
	p.mu.Unlock()
	if !keep {
		reclaimed()
	}
}

func (p *fakePool) Close() error {
	if p.closed {
		return tier.ErrClosed
	}
	p.closed = true
	return nil
}

// reclaim lets go of what was held back.
func (p *fakePool) reclaim() {
	p.mu.Lock()
	kept := p.kept
	p.kept = nil
	p.mu.Unlock()
	for _, f := range kept {
		f()
	}
}

func newSpace(t testing.TB, capacity int64, pool tier.Pool) *tier.Space {
	t.Helper()
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID:       tier.ID{Kind: tier.Host, Ordinal: 2},
		Capacity: capacity,
		Marks:    tier.Marks{Limit: 0.9, Trigger: 0.8, Stop: 0.5},
		Node:     1,
		Backend:  "fake",
		Pool:     pool,
		Hint:     "raise HostMemory",
	})
	ok(t, err)
	return s
}

func usage(t testing.TB, s *tier.Space, when string, live, retired, reserved int64) {
	t.Helper()
	u := s.State().Usage
	if u.Live != live || u.Retired != retired || u.Reserved != reserved {
		t.Errorf("%s: %+v; want live %d, retired %d, reserved %d", when, u, live, retired, reserved)
	}
}

func TestMarks(t *testing.T) {
	for _, k := range tier.Kinds() {
		if err := (tier.Marks{}).In(k).Validate(); err != nil {
			t.Errorf("the defaults of %v: %v", k, err)
		}
	}
	want := tier.Marks{Limit: 0.90, Trigger: 0.85, Stop: 0.65}
	if got := (tier.Marks{}).In(tier.GPU); got != want {
		t.Errorf("gpu: %+v, want %+v", got, want)
	}
	want = tier.Marks{Limit: 1, Trigger: 0.95, Stop: 0.85}
	if got := (tier.Marks{}).In(tier.Disk); got != want {
		t.Errorf("disk: %+v, want %+v", got, want)
	}
	nan := math.NaN()
	for _, c := range []struct {
		f    tier.Marks
		want string // part of the error; "" for none
	}{
		{tier.Marks{Limit: 1, Trigger: 1, Stop: 0.5}, ""},
		{tier.Marks{Limit: 0.9, Trigger: 0.9, Stop: 0.899}, ""},
		{tier.Marks{Limit: 1e-9, Trigger: 1e-9, Stop: 1e-10}, ""},
		{tier.Marks{}, "stop 0, trigger 0 and limit 0: want 0 < stop < trigger <= limit <= 1"},
		{tier.Marks{Limit: 0.9, Trigger: 0.8, Stop: -0.1}, "stop -0.1,"},
		{tier.Marks{Limit: 0.9, Trigger: 0.8, Stop: 0.8}, "stop 0.8, trigger 0.8"},
		{tier.Marks{Limit: 0.9, Trigger: 0.5, Stop: 0.6}, "stop 0.6, trigger 0.5"},
		{tier.Marks{Limit: 0.7, Trigger: 0.8, Stop: 0.5}, "trigger 0.8 and limit 0.7"},
		{tier.Marks{Limit: 1.01, Trigger: 0.8, Stop: 0.5}, "limit 1.01"},
		{tier.Marks{Limit: math.Inf(1), Trigger: 0.8, Stop: 0.5}, "limit +Inf"},
		{tier.Marks{Limit: nan, Trigger: 0.8, Stop: 0.5}, "limit NaN"},
		{tier.Marks{Limit: 0.9, Trigger: nan, Stop: 0.5}, "trigger NaN"},
		{tier.Marks{Limit: 0.9, Trigger: 0.8, Stop: nan}, "stop NaN"},
	} {
		err := c.f.Validate()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%+v: %v; want %q", c.f, err, c.want)
		}
	}
	for _, c := range []struct{ f, want tier.Marks }{
		{tier.Marks{}, tier.Marks{Limit: 1, Trigger: 0.95, Stop: 0.85}},
		{tier.Marks{Limit: 7}, tier.Marks{Limit: 7, Trigger: 0.95, Stop: 0.85}},
		{tier.Marks{Trigger: 7, Stop: 8}, tier.Marks{Limit: 1, Trigger: 7, Stop: 8}},
	} {
		if got := c.f.In(tier.Disk); got != c.want {
			t.Errorf("%+v.In(disk) = %+v, want %+v", c.f, got, c.want)
		}
	}
}

func TestNewSpaceRefuses(t *testing.T) {
	good := tier.SpaceConfig{ID: tier.ID{Kind: tier.GPU}, Capacity: 100, Pool: &fakePool{}}
	if _, err := tier.NewSpace(good); err != nil {
		t.Errorf("%+v: %v", good, err)
	}
	for name, spoil := range map[string]func(*tier.SpaceConfig){
		"no id":             func(c *tier.SpaceConfig) { c.ID = tier.ID{} },
		"a negative number": func(c *tier.SpaceConfig) { c.ID.Ordinal = -1 },
		"no capacity":       func(c *tier.SpaceConfig) { c.Capacity = 0 },
		"negative capacity": func(c *tier.SpaceConfig) { c.Capacity = -1 },
		"no pool":           func(c *tier.SpaceConfig) { c.Pool = nil },
		// only together with the default trigger of 0.85 is this stop too high
		"stop over trigger": func(c *tier.SpaceConfig) { c.Marks.Stop = 0.9 },
		"stop of no byte":   func(c *tier.SpaceConfig) { c.Marks.Stop = 0.009 },
		"marks of one byte": func(c *tier.SpaceConfig) { c.Capacity = 2 },
	} {
		cfg := good
		spoil(&cfg)
		if s, err := tier.NewSpace(cfg); err == nil || s != nil {
			t.Errorf("%s: a space, %v", name, err)
		}
	}
}

func TestSpaceTellsWhatItIs(t *testing.T) {
	p := &fakePool{}
	s := newSpace(t, 1000, p)
	got := fmt.Sprintln(s.ID(), s.Kind(), s.Node, s.Backend,
		s.Capacity, s.State().Limit, s.State().Trigger, s.State().Stop, s.State().Available, s.Charge(65))
	if want := "host:2 host 1 fake 1000 900 800 500 900 128\n"; got != want {
		t.Errorf("got %swant %s", got, want)
	}
	if s.Pool != tier.Pool(p) {
		t.Error("another pool")
	}
}

func TestSpaceLifeOfABuffer(t *testing.T) {
	p := &fakePool{keep: true}
	s := newSpace(t, 1000, p)
	r := promise(t, s, 300)
	usage(t, s, "reserved", 0, 0, 300)
	b, err := drawFrom(s, r, 100)
	ok(t, err)
	usage(t, s, "drawn", 128, 0, 172)
	if b.Size() != 100 || b.Charge() != 128 || b.Space() != s || b.Memory() != fakeMemory(100) {
		t.Errorf("the buffer has size %d, charge %d, memory %v", b.Size(), b.Charge(), b.Memory())
	}
	ok(t, s.Release(r))
	usage(t, s, "the promise released", 128, 0, 0)
	if err := s.Release(r); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("the second release: %v", err)
	}
	ok(t, b.Release())
	usage(t, s, "released", 0, 128, 0)
	if s.State().Used() != 128 || s.State().Available != 900-128 {
		t.Errorf("retired bytes do not count: used %d, available %d", s.State().Used(), s.State().Available)
	}
	p.reclaim()
	usage(t, s, "reclaimed", 0, 0, 0)
	if s.State().Peak != 300 {
		t.Errorf("peak %d", s.State().Peak)
	}
	s.ResetPeak()
	if s.State().Peak != 0 {
		t.Errorf("peak %d after a reset", s.State().Peak)
	}
	ok(t, s.Close())
	if err := s.Close(); !errors.Is(err, tier.ErrClosed) || !p.closed {
		t.Errorf("the second Close: %v; pool closed: %v", err, p.closed)
	}
}

func TestSpaceOfNothing(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	r := promise(t, s, 0)
	b, err := s.Draw(r, 0, nil)
	if b != nil || err != nil {
		t.Errorf("a buffer of 0 bytes is %v, %v; want nil and no error", b, err)
	}
	if b.Size() != 0 || b.Charge() != 0 || b.Memory() != nil || b.Space() != nil || b.Leased() != 0 ||
		b.Release() != nil || b.Release() != nil {
		t.Error("a nil buffer is not empty")
	}
	b.Lease()()
	b.OnReclaimed(func(int64) {})
	if _, err := s.Promise(-1); err == nil || errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("Promise(-1): %v", err)
	}
	if b, err := s.Draw(r, -1, nil); b != nil || err == nil {
		t.Errorf("Draw(-1) gave %v, %v", b, err)
	}
	// A limit below what is used refuses new bytes, but no bytes can always be had.
	all := promise(t, s, 500)
	ok(t, s.SetLimit(100))
	ok(t, s.Release(promise(t, s, 0)))
	ok(t, s.Release(all))
	ok(t, s.Release(r))
}

func TestSpaceRefuses(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	promise(t, s, 600)
	_, err := s.Promise(301)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || !errors.Is(err, tier.ErrNoSpace) {
		t.Fatalf("a promise over the limit: %v", err)
	}
	want := tier.NoSpaceError{Space: s.ID(), Requested: 301, Available: 300, Hint: "raise HostMemory"}
	if *full != want {
		t.Errorf("got %+v, want %+v", *full, want)
	}
	if got, want := err.Error(), "host:2 has no space for 301 bytes: 300 available (raise HostMemory)"; got != want {
		t.Errorf("the error is %q, want %q", got, want)
	}
	promise(t, s, 300)
	usage(t, s, "at the limit", 0, 0, 900)
}

// TestSpaceDrawFails: whatever goes wrong in a pool is an error, and leaves the
// promise as it was.
func TestSpaceDrawFails(t *testing.T) {
	boom := errors.New("boom")
	for _, c := range []struct {
		name  string
		alloc func(int64) (tier.Memory, error)
		is    error
		says  string
	}{
		{"error", func(int64) (tier.Memory, error) { return nil, boom }, boom, "boom"},
		{"no space", func(n int64) (tier.Memory, error) {
			return nil, &tier.NoSpaceError{Requested: n, Available: 700, Largest: 60}
		}, tier.ErrNoSpace,
			"host:2 has no space for 100 bytes: 700 available in pieces of at most 60 (raise HostMemory)"},
		{"wrapped no space", func(n int64) (tier.Memory, error) {
			return nil, fmt.Errorf("deep down: %w", &tier.NoSpaceError{Requested: n, Cause: boom})
		}, boom, "deep down: "},
		{"panic", func(int64) (tier.Memory, error) { panic("a pool's bug") }, nil, "a pool's bug"},
		{"panic with an error", func(int64) (tier.Memory, error) { panic(boom) }, nil, "boom"},
		{"nothing", func(int64) (tier.Memory, error) { return nil, nil }, nil, "no memory"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := &fakePool{alloc: c.alloc}
			s := newSpace(t, 1000, p)
			r := promise(t, s, 200)
			b, err := drawFrom(s, r, 100)
			if b != nil || err == nil || !strings.Contains(err.Error(), c.says) ||
				c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("Draw gave %v, %v", b, err)
			}
			var full *tier.NoSpaceError
			if errors.As(err, &full) && (full.Space != s.ID() || full.Hint != "raise HostMemory") {
				t.Errorf("the error names space %v and hint %q", full.Space, full.Hint)
			}
			usage(t, s, "after a failed draw", 0, 0, 200)
			p.alloc = nil // and the next one passes
			b, err = drawFrom(s, r, 100)
			ok(t, err)
			ok(t, b.Release())
			usage(t, s, "the bytes are promised again", 0, 0, 200)
			ok(t, s.Release(r))
			usage(t, s, "in the end", 0, 0, 0)
		})
	}
}

// TestSpaceDoesNotHideViolations: a lock order broken inside a pool is no
// failed allocation.
func TestSpaceDoesNotHideViolations(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{alloc: func(int64) (tier.Memory, error) { panic(lockrank.Violation("broken")) }})
	r := promise(t, s, 64)
	if p := mustPanic(t, func() { _, _ = s.Draw(r, 1, nil) }); p != lockrank.Violation("broken") {
		t.Errorf("it panicked with %v", p)
	}
}

// TestSpaceAdoptsOnlyWhatIsPromised: what is not in the promise cannot become a buffer.
func TestSpaceAdoptsOnlyWhatIsPromised(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	r := promise(t, s, 127)
	mustPanic(t, func() { s.Adopt(r, fakeMemory(100)) })
	usage(t, s, "after the panic", 0, 0, 127)
	ok(t, s.Release(r))
	mustPanic(t, func() { s.Adopt(r, fakeMemory(100)) })
}

// changes records a space's calls of a listener.
type changes struct {
	mu  sync.Mutex
	got []bool // pressed
}

func (c *changes) listen(aboveTrigger bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.got = append(c.got, aboveTrigger)
}

// expect compares the calls since the last time.
func (c *changes) expect(t *testing.T, after string, aboveTrigger ...bool) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	if fmt.Sprint(c.got) != fmt.Sprint(aboveTrigger) {
		t.Errorf("after %s listeners were told of pressure as %v, want %v", after, c.got, aboveTrigger)
	}
	c.got = nil
}

func TestSpaceCallsSubscribers(t *testing.T) {
	p := &fakePool{keep: true}
	s := newSpace(t, 1000, p) // limit 900, trigger 800
	var c changes
	cancel := s.Subscribe(c.listen)
	first := promise(t, s, 710)
	c.expect(t, "reserving below the trigger")
	rest := promise(t, s, 90)
	c.expect(t, "reserving up to the trigger", true)
	promise(t, s, 10)
	c.expect(t, "reserving above the trigger", true)
	if _, err := s.Promise(500); err == nil {
		t.Error("a reservation over the limit passed")
	}
	c.expect(t, "a refusal")
	ok(t, s.Release(first))
	c.expect(t, "releasing a promise", false)
	b, err := drawFrom(s, rest, 64)
	ok(t, err)
	c.expect(t, "drawing")
	if out := rest.Resize(-26); out.Freed != 26 {
		t.Fatalf("shrinking: %+v", out)
	}
	s.NotifyFreed(26)
	c.expect(t, "bytes freed in the books", false)
	ok(t, s.Release(rest))
	c.expect(t, "releasing a promise of no unused bytes")
	ok(t, b.Release())
	c.expect(t, "releasing what the device still has")
	p.reclaim()
	c.expect(t, "reclaiming", false)
	ok(t, s.SetLimit(850))
	c.expect(t, "lowering the limit", false)
	ok(t, s.SetLimit(9))
	c.expect(t, "a limit below what is used", false, true)
	ok(t, s.SetLimit(1000))
	c.expect(t, "raising the limit", false)
	s.SetExternal(789)
	c.expect(t, "external bytes below the trigger")
	s.SetExternal(790)
	c.expect(t, "external bytes that press", true)
	s.SetExternal(790)
	c.expect(t, "the same external bytes")
	if ok, _, _ := s.Books.Reserve(nil, 1, 0); !ok {
		t.Fatal("no room")
	}
	s.NotifyReserved(s.Books.Now())
	c.expect(t, "bytes reserved in the books", true)
	s.Books.Unreserve(1)
	s.SetExternal(0)
	c.expect(t, "no external bytes", false)
	if n := s.Subscribers(); n != 1 {
		t.Errorf("%d subscribers", n)
	}
	cancel()
	cancel()
	s.NotifyFreed(0)
	ok(t, s.SetLimit(900))
	c.expect(t, "the end of the subscription")
	if n := s.Subscribers(); n != 0 {
		t.Errorf("%d subscribers are left", n)
	}
}

// TestPanicOfASubscriber: the others are called, and the caller goes on.
func TestPanicOfASubscriber(t *testing.T) {
	var log strings.Builder
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Host}, Capacity: 1000, Pool: &fakePool{},
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	ok(t, err)
	var c changes
	s.Subscribe(func(bool) { panic("a program's bug") })
	s.Subscribe(c.listen)
	ok(t, draw(t, s, 10).Release())
	c.expect(t, "a release", false)
	if !strings.Contains(log.String(), "a program's bug") {
		t.Errorf("the log is %q", log.String())
	}
}

func TestSpaceForeign(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	promise(t, s, 100)
	s.SetExternal(300)
	if s.State().Pressure != 400 || s.State().External != 300 || s.State().Used() != 100 || s.State().Available != 800 {
		t.Errorf("pressure %d, foreign %d, used %d, available %d",
			s.State().Pressure, s.State().External, s.State().Used(), s.State().Available)
	}
	s.SetExternal(-5)
	if s.State().Pressure != 100 || s.State().External != 0 {
		t.Errorf("pressure %d with a negative sample", s.State().Pressure)
	}
	s.SetExternal(math.MaxInt64)
	if s.State().Pressure < s.Capacity {
		t.Errorf("pressure %d with a sample that is too large", s.State().Pressure)
	}
}

// TestSetMarks: all marks change at once, and listeners hear what follows from it.
func TestSetMarks(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	marks := func() [3]int64 { return [3]int64{s.State().Limit, s.State().Trigger, s.State().Stop} }
	for _, wrong := range []tier.Marks{
		{Limit: 0.5}, {Limit: 1.1}, {Limit: 0.9, Trigger: 0.8, Stop: 0.8}, {Stop: -1}, {Trigger: math.NaN()},
		// less than a byte, or less apart
		{Trigger: 2e-6, Stop: 1e-6}, {Trigger: 0.002, Stop: 1e-6}, {Trigger: 0.0019, Stop: 0.0018},
	} {
		if err := s.SetMarks(wrong); err == nil || marks() != [3]int64{900, 800, 500} {
			t.Errorf("%+v: %v, marks %v", wrong, err, marks())
		}
	}
	ok(t, s.SetMarks(tier.Marks{Limit: 0.9, Trigger: 0.0025, Stop: 0.0015}))
	if marks() != [3]int64{900, 2, 1} {
		t.Errorf("the least: marks %v", marks())
	}
	promise(t, s, 600)
	var heard []bool
	defer s.Subscribe(func(aboveTrigger bool) { heard = append(heard, aboveTrigger) })()
	ok(t, s.SetMarks(tier.Marks{Limit: 1, Trigger: 0.7, Stop: 0.1}))
	if marks() != [3]int64{1000, 700, 100} || !slices.Equal(heard, []bool{false}) {
		t.Errorf("marks %v, heard %v", marks(), heard)
	}
	heard = nil
	ok(t, s.SetMarks(tier.Marks{Limit: 0.7, Trigger: 0.6, Stop: 0.5}))
	if marks() != [3]int64{700, 600, 500} || !slices.Equal(heard, []bool{false, true}) {
		t.Errorf("at the trigger: marks %v, heard %v", marks(), heard)
	}
	ok(t, s.SetMarks(tier.Marks{}))
	if marks() != [3]int64{900, 850, 650} {
		t.Errorf("the defaults: marks %v", marks())
	}
}

func TestSpaceSetLimit(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	for _, n := range []int64{0, -1, 1001, math.MinInt64, math.MaxInt64} {
		if err := s.SetLimit(n); err == nil || s.State().Limit != 900 {
			t.Errorf("SetLimit(%d): %v, the limit is %d", n, err, s.State().Limit)
		}
	}
	promise(t, s, 500)
	ok(t, s.SetLimit(400)) // revokes nothing
	usage(t, s, "with a limit below what is used", 0, 0, 500)
	if s.State().Available != 0 {
		t.Errorf("available %d", s.State().Available)
	}
	if _, err := s.Promise(1); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("a promise over the limit: %v", err)
	}
	ok(t, s.SetLimit(1000))
	promise(t, s, 500)
}

// TestAvailableIsOfOneMoment: the limit is raised only while much is used, so that 100 bytes are
// available at most, whenever another goroutine asks.
func TestAvailableIsOfOneMoment(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	small := promise(t, s, 400)
	ok(t, s.SetLimit(500))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range rounds(20_000) {
			large, err := s.Occupy(400)
			err = errors.Join(err, s.SetLimit(900), s.SetLimit(500))
			if err = errors.Join(err, s.Release(large)); err != nil {
				t.Error(err)
			}
		}
	}()
	for going := true; going; {
		select {
		case <-done:
			going = false
		default:
		}
		if n := s.State().Available; n > 100 {
			t.Fatalf("%d bytes are available", n)
		}
	}
	ok(t, s.Release(small))
}

// TestSubscriberThatEndsItself: the others are called all the same.
func TestSubscriberThatEndsItself(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	var calls [3]int
	var cancel [3]func()
	for i := range calls {
		cancel[i] = s.Subscribe(func(bool) {
			calls[i]++
			cancel[i]()
		})
	}
	for range 2 {
		ok(t, s.Release(promise(t, s, 10)))
		if calls != [3]int{1, 1, 1} {
			t.Errorf("calls %v", calls)
		}
	}
}

// TestSubscribersMayDoAnything: they run without locks.
func TestSubscribersMayDoAnything(t *testing.T) {
	s := newSpace(t, 1000, &fakePool{})
	var calls int
	var cancel func()
	cancel = s.Subscribe(func(aboveTrigger bool) {
		lockrank.AssertNone("a subscriber is called")
		calls++
		cancel()
		s.Subscribe(func(bool) { calls += 10 })
		r := promise(t, s, 10)
		s.State()
		s.Leaks()
		ok(t, s.Release(r)) // which calls the new subscriber only
	})
	ok(t, s.Release(promise(t, s, 10)))
	if calls != 11 {
		t.Errorf("subscribers were called %d times, counted in their way; want 11", calls)
	}
}

func TestSpaceLeaks(t *testing.T) {
	s := newSpace(t, 10000, &fakePool{})
	a, b, c := draw(t, s, 100), draw(t, s, 1000), draw(t, s, 10)
	if l := s.Leaks(); len(l) != 1 || l[0].Bytes != 1024+128+64 || l[0].Space != s.ID() || l[0].Promise {
		t.Errorf("leaks: %+v; want %d bytes", l, 1024+128+64)
	}
	ok(t, s.Close())
	ok(t, b.Release()) // also after Close
	ok(t, a.Release())
	end := c.Lease()
	ok(t, c.Release())
	if l := s.Leaks(); len(l) != 1 || l[0].Bytes != 64 {
		t.Errorf("leaks with one lease open: %+v", l)
	}
	end()
	if l := s.Leaks(); len(l) != 0 {
		t.Errorf("leaks in the end: %+v", l)
	}
	usage(t, s, "in the end", 0, 0, 0)
}

// TestBytesReturnToAnOpenPromise: those of a buffer return to the promise that it was drawn from
// while that is open, and are free when it is released. The caller is notified just before.
func TestBytesReturnToAnOpenPromise(t *testing.T) {
	p := &fakePool{keep: true}
	s := newSpace(t, 1000, p)
	var c changes
	s.Subscribe(c.listen)
	r := promise(t, s, 200)
	for _, open := range []bool{true, false} {
		r.Draw(128, 0, false)
		var reclaimed, retired int64
		b, err := s.Draw(r, 100, nil)
		ok(t, err)
		b.OnReclaimed(func(n int64) {
			lockrank.AssertNone("the drawer is told")
			reclaimed, retired = n, s.State().Retired
		})
		if !open {
			ok(t, s.Release(r))
			c.expect(t, "the release of 72 bytes", false)
		}
		ok(t, b.Release())
		if s.State().Retired != 128 || reclaimed != 0 {
			t.Errorf("released: %+v, %d bytes reclaimed", s.State().Usage, reclaimed)
		}
		p.reclaim()
		if reclaimed != 128 || retired != 128 {
			t.Errorf("%d bytes were reclaimed while %d were retired; want 128", reclaimed, retired)
		}
		if open {
			usage(t, s, "with an open promise", 0, 0, 200)
			c.expect(t, "bytes that return to a promise: nothing is free")
		} else {
			usage(t, s, "without one", 0, 0, 0)
			c.expect(t, "bytes that are free", false)
		}
	}
}

// TestSpaceConcurrent draws and releases on several goroutines, over a pool that
// reclaims late: never over the limit, and nothing is left in the end.
func TestSpaceConcurrent(t *testing.T) {
	seed := testseed.One(t)
	tiertest.NoLeaks(t)
	p := &fakePool{keep: true}
	s := newSpace(t, 1<<20, p)
	var told atomic.Int64
	s.Subscribe(func(bool) { told.Add(1) })
	check := func(err error) {
		if err != nil {
			t.Error(err)
		}
	}
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, g))
			var held []*tier.Buffer
			var open *books.Promise
			for range rounds(3000) {
				switch rng.IntN(6) {
				case 0, 1:
					size := 1 + rng.Int64N(100_000)
					r, err := s.Promise(s.Charge(size))
					if errors.Is(err, tier.ErrNoSpace) {
						continue
					}
					check(err)
					b, err := drawFrom(s, r, size)
					check(err)
					if open == nil {
						open = r
					} else {
						check(s.Release(r))
					}
					held = append(held, b)
				case 2, 3:
					if len(held) > 0 {
						i := rng.IntN(len(held))
						check(held[i].Release())
						held[i] = held[len(held)-1]
						held = held[:len(held)-1]
					}
				case 4:
					p.reclaim()
				case 5:
					if open != nil {
						check(s.Release(open))
						open = nil
					}
				}
				if u := s.State().Usage; u.Used() > s.State().Limit || u.Peak > s.State().Limit {
					t.Errorf("%+v, the limit is %d", u, s.State().Limit)
				}
			}
			for _, b := range held {
				check(b.Release())
			}
			if open != nil {
				check(s.Release(open))
			}
		})
	}
	wg.Wait()
	p.reclaim()
	usage(t, s, "in the end", 0, 0, 0)
	if l := s.Leaks(); len(l) != 0 {
		t.Errorf("%d leaks", len(l))
	}
	if told.Load() == 0 {
		t.Error("listeners heard nothing")
	}
}
