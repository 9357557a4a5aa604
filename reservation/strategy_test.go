package reservation_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// machine is two GPUs and two host arenas on two nodes, and three disks of
// which one is on an unknown node.
func machine(t testing.TB) (*reservation.Manager, map[string]*tier.Space) {
	spaces := map[string]*tier.Space{
		"gpu:0": spaceAt(t, "gpu:0", 1000, 1, 0), "gpu:1": spaceAt(t, "gpu:1", 1000, 1, 1),
		"host:0": spaceAt(t, "host:0", 2000, 1, 0), "host:1": spaceAt(t, "host:1", 2000, 1, 1),
		"disk:0": spaceAt(t, "disk:0", 9000, 1, 1), "disk:1": spaceAt(t, "disk:1", 9000, 1, 0),
		"disk:4": spaceAt(t, "disk:4", 9000, 1, -1),
	}
	cfg := reservation.Config{}
	for _, s := range spaces {
		cfg.Spaces = append(cfg.Spaces, s) // in any order
	}
	return managerOf(t, cfg), spaces
}

func idOf(t testing.TB, s string) tier.ID {
	t.Helper()
	var id tier.ID
	err := id.UnmarshalText([]byte(s))
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func TestStrategies(t *testing.T) {
	id := func(s string) tier.ID { return idOf(t, s) }
	for _, test := range []struct {
		name     string
		strategy reservation.Strategy
		used     string // spaces in which something is reserved
		want     string
		print    string
	}{
		{"AnyInTier/equal room", reservation.AnyInTier(tier.GPU), "", "gpu:0 gpu:1", "any gpu"},
		{"AnyInTier/most room first", reservation.AnyInTier(tier.GPU), "gpu:0", "gpu:1 gpu:0", "any gpu"},
		{"AnyInTier/three", reservation.AnyInTier(tier.Disk), "disk:0 disk:1", "disk:4 disk:0 disk:1", "any disk"},
		{"AnyInTier/invalid", reservation.AnyInTier(0), "", "", "any invalid"},
		{"AnyInTierPreferring", reservation.AnyInTierPreferring(tier.GPU, 1), "", "gpu:1 gpu:0", "any gpu, preferring 1"},
		{"AnyInTierPreferring/though used", reservation.AnyInTierPreferring(tier.Disk, 1), "disk:1 disk:0", "disk:1 disk:4 disk:0", "any disk, preferring 1"},
		{"AnyInTierPreferring/no such", reservation.AnyInTierPreferring(tier.GPU, 7), "", "gpu:0 gpu:1", "any gpu, preferring 7"},
		{"Specific", reservation.Specific(id("host:1")), "host:1", "host:1", "host:1"},
		{"Specific/after a gap", reservation.Specific(id("disk:4")), "", "disk:4", "disk:4"},
		{"Specific/in a gap", reservation.Specific(id("disk:2")), "", "", "disk:2"},
		{"Specific/unknown", reservation.Specific(id("gpu:2")), "", "", "gpu:2"},
		{"Specific/invalid", reservation.Specific(tier.ID{}), "", "", "invalid:0"},
		{"AnyInTiers", reservation.AnyInTiers(tier.Host, tier.GPU), "host:0", "host:1 host:0 gpu:0 gpu:1", "any host, then gpu"},
		{"AnyInTiers/none", reservation.AnyInTiers(), "", "", "any of no tiers"},
		{"ToDowngrade/near node first", reservation.ToDowngrade(id("gpu:1"), tier.Host), "host:1", "host:1 host:0", "down from gpu:1 to host"},
		{"ToDowngrade/then by room", reservation.ToDowngrade(id("gpu:0"), tier.Disk), "disk:0", "disk:1 disk:4 disk:0", "down from gpu:0 to disk"},
		{"ToDowngrade/from an unknown node", reservation.ToDowngrade(id("disk:4"), tier.Disk), "", "", "down from disk:4 to disk"},
		{"ToDowngrade/upwards", reservation.ToDowngrade(id("host:0"), tier.GPU), "", "", "down from host:0 to gpu"},
		{"ToDowngrade/from nowhere", reservation.ToDowngrade(id("gpu:9"), tier.Host), "", "", "down from gpu:9 to host"},
		{"ToDowngrade/to an invalid kind", reservation.ToDowngrade(id("gpu:0"), 9), "", "", "down from gpu:0 to invalid"},
		{"ToUpgrade", reservation.ToUpgrade(id("host:1"), tier.GPU), "gpu:1", "gpu:1 gpu:0", "up from host:1 to gpu"},
		{"ToUpgrade/from an unknown node", reservation.ToUpgrade(id("disk:4"), tier.Host), "host:0", "host:1 host:0", "up from disk:4 to host"},
		{"ToUpgrade/downwards", reservation.ToUpgrade(id("gpu:0"), tier.Host), "", "", "up from gpu:0 to host"},
	} {
		t.Run(test.name, func(t *testing.T) {
			m, _ := machine(t)
			for _, used := range strings.Fields(test.used) {
				r := mustTry(t, m, reservation.Specific(id(used)), 10, nil)
				defer release(t, r)
			}
			var got []string
			for _, s := range test.strategy.Candidates(m.Spaces(), nil) {
				got = append(got, s.ID().String())
			}
			if want := strings.Fields(test.want); !slices.Equal(got, want) {
				t.Errorf("candidates are %v; want %v", got, want)
			}
			if got := test.strategy.String(); got != test.print {
				t.Errorf("it is called %q; want %q", got, test.print)
			}
			r, err := m.TryReserve(test.strategy, 10, nil)
			if test.want == "" {
				if !errors.Is(err, reservation.ErrNoCandidate) || !strings.Contains(err.Error(), test.print) {
					t.Errorf("a request without candidates gave %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer release(t, r)
			if got := r.Space().ID().String(); got != strings.Fields(test.want)[0] {
				t.Errorf("it was put in %s", got)
			}
		})
	}
}

func TestDistanceIsTheConfigs(t *testing.T) {
	spaces := []*tier.Space{
		spaceAt(t, "gpu:0", 10, 1, 3), spaceAt(t, "host:0", 10, 1, 0), spaceAt(t, "host:1", 10, 1, 1), spaceAt(t, "host:2", 10, 1, 2),
	}
	m := managerOf(t, reservation.Config{Spaces: spaces, Distance: func(a, b int) int { return max(a-b, b-a) }})
	var got []int
	for _, s := range reservation.ToDowngrade(gpu0, tier.Host).Candidates(m.Spaces(), nil) {
		got = append(got, s.Node)
	}
	if want := []int{2, 1, 0}; !slices.Equal(got, want) {
		t.Errorf("from node 3 the order of nodes is %v; want %v", got, want)
	}
}

// TestPairedComesFirst: of spaces that are equally near the paired one is first, also when
// it is the fullest; one that is nearer goes before it.
func TestPairedComesFirst(t *testing.T) {
	id := func(s string) tier.ID { return idOf(t, s) }
	spaces := []*tier.Space{
		spaceAt(t, "gpu:0", 10, 1, 0), spaceAt(t, "gpu:1", 10, 1, 0), spaceAt(t, "gpu:2", 10, 1, 1),
		spaceAt(t, "host:0", 100, 1, 0), spaceAt(t, "host:1", 100, 1, 0), spaceAt(t, "host:2", 100, 1, 0),
	}
	m := managerOf(t, reservation.Config{Spaces: spaces, Paired: func(a, b tier.ID) bool {
		return a.Kind == tier.GPU && b.Kind == tier.Host && a.Ordinal == b.Ordinal || a.Kind == tier.Host && b.Kind == tier.GPU && b.Ordinal == a.Ordinal
	}})
	r := mustTry(t, m, reservation.Specific(id("host:1")), 50, nil)
	defer release(t, r)
	for from, want := range map[string]string{"gpu:0": "host:0", "gpu:1": "host:1", "gpu:2": "host:2"} {
		if got := reservation.ToDowngrade(id(from), tier.Host).Candidates(m.Spaces(), nil); got[0].ID() != id(want) || len(got) != 3 {
			t.Errorf("from %s first to %s, want %s", from, got[0].ID(), want)
		}
	}
	for from, want := range map[string]string{"host:0": "gpu:0", "host:1": "gpu:1", "host:2": "gpu:0"} { // gpu:2 is farther
		if got := reservation.ToUpgrade(id(from), tier.GPU).Candidates(m.Spaces(), nil); got[0].ID() != id(want) {
			t.Errorf("from %s first to %s, want %s", from, got[0].ID(), want)
		}
	}
}

// A request goes to the first space that stays below its trigger, or else to the first that has room.
func TestFirstBelowItsTrigger(t *testing.T) {
	a, b := spaceOf(t, "gpu:0", 100), spaceOf(t, "gpu:1", 100)
	for _, s := range []*tier.Space{a, b} {
		if err := s.SetMarks(tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}); err != nil {
			t.Fatal(err)
		}
	}
	m := managerOf(t, reservation.Config{Spaces: []*tier.Space{a, b, spaceOf(t, "host:0", 100)}})
	first := reservation.AnyInTierPreferring(tier.GPU, 0)
	for _, c := range []struct {
		bytes int64
		want  *tier.Space
	}{{60, a}, {30, b}, {19, a}, {49, b}, {19, a}} { // the last one reaches the trigger of both
		r := mustTry(t, m, first, c.bytes, nil)
		defer release(t, r)
		if r.Space() != c.want {
			t.Errorf("%d bytes were put in %s, want %s", c.bytes, r.Space().ID(), c.want.ID())
		}
	}
}

func TestStrategiesDoNotAllocate(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, whose checks of ranks allocate")
	}
	m, _ := machine(t)
	dst := make([]*tier.Space, 0, 16)
	for _, s := range []reservation.Strategy{
		reservation.AnyInTier(tier.Disk), reservation.AnyInTierPreferring(tier.Disk, 1), reservation.Specific(gpu0),
		reservation.AnyInTiers(tier.GPU, tier.Host), reservation.ToDowngrade(gpu0, tier.Disk), reservation.ToUpgrade(host, tier.GPU),
	} {
		if n := testing.AllocsPerRun(100, func() { s.Candidates(m.Spaces(), dst[:0]) }); n != 0 {
			t.Errorf("%s allocates %v times", s, n)
		}
	}
}

// custom is a strategy of a user's.
type custom []*tier.Space

func (c custom) Candidates(_ *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	return append(dst, c...)
}
func (c custom) String() string { return "custom" }

func TestCustomStrategy(t *testing.T) {
	m, spaces := machine(t)
	r := mustTry(t, m, custom{spaces["host:1"], spaces["host:1"], spaces["gpu:0"]}, 10, nil)
	if r.Space() != spaces["host:1"] {
		t.Errorf("it was put in %s", r.Space().ID())
	}
	release(t, r)
	for name, s := range map[string]custom{
		"nil": {nil}, "a stranger of a known name": {spaces["gpu:0"], spaceOf(t, "gpu:1", 1000)},
	} {
		if _, err := m.TryReserve(s, 10, nil); !errors.Is(err, reservation.ErrNoCandidate) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := m.TryReserve(nil, 10, nil); err == nil {
		t.Error("no strategy was taken for one")
	}
}

func TestSpaces(t *testing.T) {
	m, spaces := machine(t)
	var all []string
	for _, s := range m.Spaces().All() {
		all = append(all, s.ID().String())
		if got, ok := m.Spaces().ByID(s.ID()); !ok || got != s {
			t.Errorf("%s is not found by its id", s.ID())
		}
	}
	if want := strings.Fields("gpu:0 gpu:1 host:0 host:1 disk:0 disk:1 disk:4"); !slices.Equal(all, want) {
		t.Errorf("all spaces are %v; want %v", all, want)
	}
	if got := m.Spaces().InTier(tier.Host); len(got) != 2 || got[0] != spaces["host:0"] || got[1] != spaces["host:1"] {
		t.Errorf("host spaces are %v", got)
	}
	for _, id := range []tier.ID{{}, {Kind: 9}, {Kind: tier.GPU, Ordinal: -1}, {Kind: tier.GPU, Ordinal: 2}, {Kind: tier.Disk, Ordinal: 3}} {
		if s, ok := m.Spaces().ByID(id); ok {
			t.Errorf("%v is %s", id, s.ID())
		}
	}
	if got := m.Spaces().InTier(9); len(got) != 0 {
		t.Errorf("an invalid kind has spaces %v", got)
	}
}

func TestNewManagerRefuses(t *testing.T) {
	a, b := spaceOf(t, "gpu:0", 10), spaceOf(t, "gpu:0", 10)
	for name, cfg := range map[string]reservation.Config{
		"no spaces":     {},
		"a nil space":   {Spaces: []*tier.Space{a, nil}},
		"the same id":   {Spaces: []*tier.Space{a, b}},
		"a huge bypass": {Spaces: []*tier.Space{a}, Bypass: 1 << 30},
	} {
		if _, err := reservation.NewManager(cfg); err == nil {
			t.Errorf("%s: NewManager took it", name)
		}
	}
}

// TestSizedRequest: each candidate is asked for what the request takes there, also while it waits,
// when it can never fit, and when nothing else was requested.
func TestSizedRequest(t *testing.T) {
	onGPU := reservation.AnyInTier(tier.GPU)
	sized := func(first, second int64) *reservation.Options {
		return &reservation.Options{Sized: func(s *tier.Space) (int64, func()) {
			return map[tier.ID]int64{gpu0: first, gpu1: second}[s.ID()], nil
		}}
	}
	synctest.Test(t, func(t *testing.T) {
		m, spaces := machine(t)
		for _, test := range []struct {
			first, second, charged int64
			in                     string
		}{
			{100, 1000, 100, "gpu:0"},
			{1100, 100, 100, "gpu:1"}, // the first can never have so much
			{200, 0, 200, "gpu:0"},
			{0, 0, 0, "gpu:0"},
		} {
			r := mustTry(t, m, onGPU, 7, sized(test.first, test.second))
			if r.Bytes() != test.charged || r.Space() != spaces[test.in] {
				t.Errorf("%+v: %d bytes in %s", test, r.Bytes(), r.Space().ID())
			}
			wantUsage(t, spaces[test.in], 0, 0, test.charged)
			release(t, r)
		}
		held := mustTry(t, m, onGPU0, 800, nil)
		other := mustTry(t, m, reservation.Specific(gpu1), 800, nil)
		waits := start(func() (*reservation.Reservation, error) {
			return m.Reserve(t.Context(), onGPU, 200, sized(700, 300))
		})
		waits.waiting(t)
		if err := other.Shrink(100); err != nil { // 300 of the 300 that are needed there
			t.Fatal(err)
		}
		r := waits.served(t)
		if r.Bytes() != 300 || r.Space() != spaces["gpu:1"] {
			t.Errorf("%d bytes in %s", r.Bytes(), r.Space().ID())
		}
		release(t, r, held, other)

		var exceeded *reservation.ExceededError
		_, err := m.TryReserve(onGPU, 100, sized(1100, 2100))
		if !errors.As(err, &exceeded) || exceeded.Requested != 1100 || exceeded.Space != gpu0 {
			t.Errorf("what fits nowhere gave %v", err)
		}
		if _, err := m.TryReserve(onGPU, 100, sized(-100, 100)); err == nil {
			t.Error("a negative size was taken")
		}
		_, err = m.ReserveUpTo(t.Context(), onGPU, 1, 2, sized(1, 1))
		if err == nil || !strings.Contains(err.Error(), "a size of its own") {
			t.Errorf("a range of sizes gave %v", err)
		}
	})
}

// TestSizeChangesDuringTheWait: a request waits for the bytes that it needed when it last looked for
// room. Each look that fails calls release, and so does the release of the reservation. A request
// that has become too large fails, and does not block the requests behind it.
func TestSizeChangesDuringTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, _ := machine(t)
		var need, pins atomic.Int64
		sized := &reservation.Options{Sized: func(*tier.Space) (int64, func()) {
			pins.Add(1)
			return need.Load(), func() { pins.Add(-1) }
		}}
		begin := func() *call {
			return start(func() (*reservation.Reservation, error) { return m.Reserve(t.Context(), onGPU0, 0, sized) })
		}
		held := mustTry(t, m, onGPU0, 900, nil)
		need.Store(200)
		waits := begin()
		waits.waiting(t)
		if n := pins.Load(); n != 0 {
			t.Errorf("%d pins are held during the wait", n)
		}
		need.Store(300)
		if err := held.Shrink(100); err != nil {
			t.Fatal(err)
		}
		waits.waiting(t)
		if d := m.Demand(nil); len(d) != 1 || d[0].Bytes != 300 {
			t.Errorf("the demand is %+v, want 300 bytes", d)
		}
		if err := held.Shrink(100); err != nil {
			t.Fatal(err)
		}
		r := waits.served(t)
		if n := pins.Load(); r.Bytes() != 300 || n != 1 {
			t.Errorf("%d bytes are reserved, with %d pins", r.Bytes(), n)
		}
		release(t, r)
		if n := pins.Load(); n != 0 {
			t.Errorf("%d pins are left after the release", n)
		}

		need.Store(400)
		waits = begin()
		waits.waiting(t)
		behind := start(func() (*reservation.Reservation, error) { return m.Reserve(t.Context(), onGPU0, 350, nil) })
		behind.waiting(t)
		need.Store(5000)
		if err := held.Shrink(50); err != nil {
			t.Fatal(err)
		}
		release(t, behind.served(t), held)
		synctest.Wait()
		if !waits.over() || !errors.Is(waits.err, reservation.ErrExceeded) || pins.Load() != 0 {
			t.Errorf("a request that is too large now: %v, with %d pins", waits.err, pins.Load())
		}

		held = mustTry(t, m, onGPU0, 900, nil)
		need.Store(200)
		waits = begin()
		waits.waiting(t)
		need.Store(-1)
		release(t, held)
		synctest.Wait()
		if !waits.over() || waits.err == nil || pins.Load() != 0 {
			t.Errorf("a size below 0: %v, with %d pins", waits.err, pins.Load())
		}
	})
}

// TestSizedRequestLeavesALine: a request that has become too large for one of its spaces does not keep
// those that wait behind it there waiting, although it waits for the other space.
func TestSizedRequestLeavesALine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := managerOf(t, reservation.Config{
			Spaces: []*tier.Space{spaceAt(t, "gpu:0", 1000, 1, 0), spaceAt(t, "gpu:1", 1000, 1, 1)}, Bypass: -1,
		})
		first, second := mustTry(t, m, onGPU0, 900, nil), mustTry(t, m, reservation.Specific(gpu1), 900, nil)
		var need atomic.Int64
		need.Store(400)
		ahead := start(func() (*reservation.Reservation, error) {
			return m.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 0, &reservation.Options{Sized: func(s *tier.Space) (int64, func()) {
				if s.ID() == gpu1 {
					return 500, nil
				}
				return need.Load(), nil
			}})
		})
		ahead.waiting(t)
		behind := startReserve(t.Context(), m, onGPU0, 200)
		behind.waiting(t)
		need.Store(5000)
		if err := first.Shrink(100); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // the request at the head looks for room now and then
		r := behind.served(t)
		ahead.waiting(t)
		if err := second.Shrink(400); err != nil {
			t.Fatal(err)
		}
		release(t, ahead.served(t), r, first, second)
	})
}

// TestSizesChangeDuringALookForDeadlocks: the oldest waiter looks at all waits, also at those whose
// sizes change meanwhile. The race detector reports what it reads without the lock.
func TestSizesChangeDuringALookForDeadlocks(t *testing.T) {
	m := managerOf(t, reservation.Config{
		Spaces:       []*tier.Space{spaceAt(t, "gpu:0", 1000, 1, 0), spaceAt(t, "gpu:1", 1000, 1, 1)},
		StallTimeout: 300 * time.Millisecond,
	})
	first, second := mustTry(t, m, onGPU0, 900, nil), mustTry(t, m, reservation.Specific(gpu1), 900, nil)
	defer release(t, first, second)
	ctx, cancel := context.WithCancel(t.Context())
	const all = 200 // so that a look takes its time
	ended := make(chan error, all)
	begin := func(s reservation.Strategy, opts *reservation.Options) {
		before := m.Waits().Waiting
		go func() {
			_, err := m.Reserve(ctx, s, 200, opts)
			ended <- err
		}()
		for m.Waits().Waiting == before {
			m.Wake(gpu0)
		}
	}
	var need atomic.Int64
	begin(onGPU0, nil)
	begin(reservation.Specific(gpu1), &reservation.Options{Sized: func(*tier.Space) (int64, func()) {
		return 200 + need.Add(1)%100, nil // each change makes the request look again
	}})
	for range all - 2 {
		begin(onGPU0, nil)
	}
	if err := <-ended; !errors.Is(err, reservation.ErrDeadlock) {
		t.Errorf("the first wait ended with %v", err)
	}
	cancel()
	for range all - 1 {
		<-ended
	}
}
