package reservation_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

func TestReserveLeavesOtherTiersUntouched(t *testing.T) {
	m, spaces := machine(t)
	r := mustTry(t, m, reservation.AnyInTier(tier.GPU), 1000, nil)
	b := mustAlloc(t, r, 700)
	wantUsage(t, spaces["gpu:0"], 700, 0, 300)
	release(t, b, r)
	for id, s := range spaces {
		if id != "gpu:0" && s.State().Peak != 0 {
			t.Errorf("%s was touched: %+v", id, s.State().Usage)
		}
	}
}

// A request that fits no candidate even when empty must not wait, whatever is held.
func TestImpossibleRequestsAreRefusedAtOnce(t *testing.T) {
	m, spaces := machine(t)
	if err := spaces["gpu:1"].SetLimit(600); err != nil {
		t.Fatal(err)
	}
	held := mustTry(t, m, onGPU0, 300, nil)
	defer release(t, held)
	ctx := context.Background()
	for _, test := range []struct {
		name     string
		strategy reservation.Strategy
		bytes    int64
		space    tier.ID
		avail    int64
		limit    int64
	}{
		{"over the capacity", onGPU0, 1001, gpu0, 700, 1000},
		{"over the limit", reservation.Specific(gpu1), 601, gpu1, 600, 600},
		{"the candidate with the highest limit is named", reservation.AnyInTier(tier.GPU), 1001, gpu0, 700, 1000},
		{"no overflow", onGPU0, math.MaxInt64, gpu0, 700, 1000},
	} {
		t.Run(test.name, func(t *testing.T) {
			for how, f := range map[string]func() (*reservation.Reservation, error){
				"Reserve":    func() (*reservation.Reservation, error) { return m.Reserve(ctx, test.strategy, test.bytes, nil) },
				"TryReserve": func() (*reservation.Reservation, error) { return m.TryReserve(test.strategy, test.bytes, nil) },
				"ReserveUpTo": func() (*reservation.Reservation, error) {
					return m.ReserveUpTo(ctx, test.strategy, test.bytes, math.MaxInt64, nil)
				},
				"with padding": func() (*reservation.Reservation, error) {
					return m.Reserve(ctx, test.strategy, test.bytes, &reservation.Options{Policy: reservation.Increase(2)})
				},
			} {
				_, err := f()
				var e *reservation.ExceededError
				if !errors.As(err, &e) || !errors.Is(err, reservation.ErrExceeded) || errors.Is(err, tier.ErrNoSpace) {
					t.Fatalf("%s: %v", how, err)
				}
				want := reservation.ExceededError{
					Space: test.space, Requested: test.bytes, Available: test.avail, Limit: test.limit, Hint: "enlarge " + test.space.String(),
				}
				if *e != want {
					t.Errorf("%s: %+v; want %+v", how, *e, want)
				}
			}
		})
	}
	if n := len(m.Demand(nil)); n != 0 {
		t.Errorf("%d spaces have demand", n)
	}
}

func TestRoundingCanMakeARequestImpossible(t *testing.T) {
	s := spaceAt(t, "gpu:0", 1000, 256, 0)
	m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}})
	_, err := m.TryReserve(onGPU0, 900, nil) // 1024 as charged
	var e *reservation.ExceededError
	if !errors.As(err, &e) || e.Requested != 1024 || e.Limit != 1000 {
		t.Errorf("%v", err)
	}
	r := mustTry(t, m, onGPU0, 700, nil)
	wantReservation(t, r, 768, 768)
	b := mustAlloc(t, r, 700) // what was asked for always fits
	wantReservation(t, r, 768, 0)
	release(t, b, r)
}

func TestTryReserveWithoutRoom(t *testing.T) {
	m, spaces := machine(t)
	a, b := mustTry(t, m, onGPU0, 990, nil), mustTry(t, m, reservation.Specific(gpu1), 950, nil)
	defer release(t, a, b)
	_, err := m.TryReserve(reservation.AnyInTierPreferring(tier.GPU, 0), 60, nil)
	var e *tier.NoSpaceError
	if !errors.As(err, &e) || errors.Is(err, reservation.ErrExceeded) {
		t.Fatalf("%v", err)
	}
	if e.Space != gpu0 || e.Requested != 60 || e.Available != 10 || e.Hint != "enlarge gpu:0" {
		t.Errorf("%+v", *e)
	}
	r := mustTry(t, m, reservation.AnyInTierPreferring(tier.GPU, 0), 50, nil) // the other has that
	if r.Space() != spaces["gpu:1"] {
		t.Errorf("it was put in %s", r.Space().ID())
	}
	release(t, r)
}

func TestSenselessRequests(t *testing.T) {
	m, s := one(t, 100, 0)
	ctx := context.Background()
	for name, f := range map[string]func() (*reservation.Reservation, error){
		"negative":      func() (*reservation.Reservation, error) { return m.Reserve(ctx, onGPU0, -1, nil) },
		"very negative": func() (*reservation.Reservation, error) { return m.TryReserve(onGPU0, math.MinInt64, nil) },
		"up to less":    func() (*reservation.Reservation, error) { return m.ReserveUpTo(ctx, onGPU0, 2, 1, nil) },
		"padding below 1": func() (*reservation.Reservation, error) {
			return m.TryReserve(onGPU0, 1, &reservation.Options{Policy: reservation.Increase(0.9)})
		},
		"padding not a number": func() (*reservation.Reservation, error) {
			return m.TryReserve(onGPU0, 1, &reservation.Options{Policy: reservation.Increase(math.NaN())})
		},
		"padding without bound": func() (*reservation.Reservation, error) {
			return m.TryReserve(onGPU0, 1, &reservation.Options{Policy: reservation.Increase(math.Inf(1))})
		},
	} {
		r, err := f()
		if err == nil || r != nil {
			t.Errorf("%s: %v, %v", name, r, err)
		}
		if errors.Is(err, tier.ErrNoSpace) || errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("%s: %v is about room", name, err)
		}
	}
	wantUsage(t, s, 0, 0, 0)
}

// Nothing can be had even from a space that is full, and grows later.
func TestReserveOfNothing(t *testing.T) {
	m, s := one(t, 100, 0)
	all := mustTry(t, m, onGPU0, 100, nil)
	r, err := m.Reserve(context.Background(), onGPU0, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	wantReservation(t, r, 0, 0)
	if b, err := r.Alloc(0); b != nil || err != nil {
		t.Errorf("no bytes are %v, %v", b, err)
	}
	if _, err := r.Alloc(1); !errors.Is(err, reservation.ErrExceeded) {
		t.Errorf("a byte of nothing: %v", err)
	}
	release(t, all)
	if err := r.TryGrow(100); err != nil {
		t.Error(err)
	}
	wantUsage(t, s, 0, 0, 100)
	release(t, r)
}

func TestReserveUpTo(t *testing.T) {
	for _, test := range []struct {
		name            string
		granule, held   int64
		least, most     int64
		want            int64
		wantUnavailable bool
	}{
		{"all", 1, 0, 10, 50, 50, false},
		{"what there is", 1, 70, 10, 50, 30, false},
		{"no more than there could be", 1, 0, 10, math.MaxInt64, 100, false},
		{"just the least", 1, 90, 10, 50, 10, false},
		{"not even the least", 1, 91, 10, 50, 0, true},
		{"from nothing", 1, 60, 0, 50, 40, false},
		{"nothing", 1, 100, 0, 50, 0, false},
		{"rounded down to what fits", 16, 64, 1, 50, 32, false}, // 36 are free
		{"rounded up", 16, 0, 1, 50, 64, false},
		{"a granule that divides nothing", 7, 70, 1, 50, 28, false}, // 30 are free
	} {
		t.Run(test.name, func(t *testing.T) {
			s := spaceAt(t, "gpu:0", 100, test.granule, 0)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			m := managerOf(t, reservation.Config{Spaces: []*tier.Space{s}, Events: func(events.Event) { cancel() }}) // it waits
			held := mustTry(t, m, onGPU0, test.held, nil)
			defer release(t, held)
			r, err := m.ReserveUpTo(ctx, onGPU0, test.least, test.most, nil)
			if test.wantUnavailable {
				if !errors.Is(err, context.Canceled) {
					t.Errorf("%v, %v", r, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			wantReservation(t, r, test.want, test.want)
			wantUsage(t, s, 0, 0, test.want+s.Charge(test.held))
			release(t, r)
		})
	}
}

// ReserveUpTo chooses a space as Reserve does, and takes no less than a byte where there is one.
func TestReserveUpToChoosesASpace(t *testing.T) {
	m, spaces := machine(t)
	held := mustTry(t, m, onGPU0, 950, nil)
	for _, c := range []struct {
		least, most int64
		in          string
		want        int64
	}{{20, 500, "gpu:1", 500}, {0, 500, "gpu:1", 500}, {0, 0, "gpu:1", 0}} {
		r, err := m.ReserveUpTo(t.Context(), reservation.AnyInTierPreferring(tier.GPU, 0), c.least, c.most, nil)
		if err != nil || r.Space() != spaces[c.in] || r.Bytes() != c.want {
			t.Fatalf("from %d to %d: %d bytes in %s: %v", c.least, c.most, r.Bytes(), r.Space().ID(), err)
		}
		release(t, r)
	}
	full := mustTry(t, m, reservation.Specific(gpu1), 1000, nil)
	for _, most := range []int64{500, 30} {
		r, err := m.ReserveUpTo(t.Context(), reservation.AnyInTierPreferring(tier.GPU, 1), 0, most, nil)
		if err != nil || r.Space() != spaces["gpu:0"] || r.Bytes() != min(most, 50) {
			t.Fatalf("beside a full space: %d bytes in %s: %v", r.Bytes(), r.Space().ID(), err)
		}
		release(t, r)
	}
	release(t, held, full)

	tiny := spaceAt(t, "gpu:0", 64, 16, 0)
	small := managerOf(t, reservation.Config{Spaces: []*tier.Space{tiny}})
	if err := tiny.SetLimit(8); err != nil { // less than any byte takes
		t.Fatal(err)
	}
	r, err := small.ReserveUpTo(t.Context(), onGPU0, 0, 50, nil)
	if err != nil || r.Bytes() != 0 {
		t.Errorf("where not even a byte fits: %d bytes: %v", r.Bytes(), err)
	}
	release(t, r)
}

func TestErrorsSayWhatToDo(t *testing.T) {
	m, _ := one(t, 100, 0)
	_, exceeded := m.TryReserve(onGPU0, 101, nil)
	r := mustTry(t, m, onGPU0, 60, nil)
	defer release(t, r)
	_, full := m.TryReserve(onGPU0, 41, nil)
	_, broken := r.Alloc(61)
	for _, test := range []struct {
		err  error
		want string
	}{
		{exceeded, "gpu:0: 101 bytes exceed what may be had: 100 available of 100 (enlarge gpu:0)"},
		{full, "gpu:0 has no space for 41 bytes: 40 available (enlarge gpu:0)"},
		{broken, "gpu:0: 61 bytes exceed what may be had: 60 available of 60 (reserve more, or with the policy Increase or Ignore)"},
		{&reservation.DeadlockError{Space: gpu0, Requested: 60, Available: 10, Owner: "join", Held: 40, Waiters: 3, Hint: "enlarge gpu:0"},
			`gpu:0 has no space for 60 bytes: 10 available, and all 3 waiters wait for each other: "join" should release the 40 bytes that it holds and begin again (enlarge gpu:0)`},
	} {
		if test.err == nil || test.err.Error() != test.want {
			t.Errorf("got  %v\nwant %s", test.err, test.want)
		}
	}
	if !errors.Is(&reservation.DeadlockError{}, reservation.ErrDeadlock) {
		t.Error("a DeadlockError does not match ErrDeadlock")
	}
}

func TestPanicsOfDistanceAndPaired(t *testing.T) {
	boom := errors.New("boom")
	for name, cfg := range map[string]reservation.Config{
		"Distance": {Distance: func(int, int) int { panic(boom) }},
		"Paired":   {Paired: func(tier.ID, tier.ID) bool { panic(boom) }},
	} {
		cfg.Spaces = []*tier.Space{spaceOf(t, "gpu:0", 100), spaceOf(t, "host:0", 100)}
		if _, err := reservation.NewManager(cfg); !errors.Is(err, boom) || !strings.Contains(err.Error(), "Config."+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClosedManagerRefuses(t *testing.T) {
	s := spaceOf(t, "gpu:0", 100)
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		t.Fatal(err)
	}
	r := mustTry(t, m, onGPU0, 60, nil)
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
	if _, err := m.TryReserve(onGPU0, 1, nil); !errors.Is(err, tier.ErrClosed) || !strings.Contains(err.Error(), "manager") {
		t.Errorf("TryReserve: %v", err)
	}
	if _, err := m.Reserve(context.Background(), onGPU0, 1, nil); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("Reserve: %v", err)
	}
	if err := r.TryGrow(1); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("TryGrow: %v", err)
	}
	b := mustAlloc(t, r, 10) // what was promised is good still
	release(t, r, b)
	wantUsage(t, s, 0, 0, 0)
}

// A request whose bytes reach the trigger, together with those of others, calls the space's subscribers.
func TestReservePresses(t *testing.T) {
	for foreign, want := range map[int64]int64{0: 80, 30: 50} {
		m, s := one(t, 100, 0)
		if err := s.SetMarks(tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}); err != nil {
			t.Fatal(err)
		}
		s.SetExternal(foreign)
		pressed := 0
		defer s.Subscribe(func(p bool) {
			if p {
				pressed++
			}
		})()
		below := mustTry(t, m, onGPU0, want-1, nil)
		if pressed != 0 {
			t.Errorf("%d bytes below the trigger press", want-1)
		}
		at := mustTry(t, m, onGPU0, 1, nil)
		if pressed != 1 {
			t.Errorf("%d bytes, which reach the trigger, press %d times", want, pressed)
		}
		release(t, below, at)
	}
}

// A reservation that need not wait takes one allocation.
func TestReserveAllocatesOnce(t *testing.T) {
	if invariants.Enabled {
		t.Skip("needs a build without -tags invariants, which records stacks")
	}
	m, _ := one(t, 1000, 0)
	n := testing.AllocsPerRun(100, func() {
		r, err := m.Reserve(context.Background(), onGPU0, 100, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
	})
	if n > 1 {
		t.Errorf("%v allocations, want 1", n)
	}
}
