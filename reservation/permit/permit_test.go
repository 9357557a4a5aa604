package permit_test

import (
	"errors"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// TestGrantTable is the table of what a request for a slot is granted.
func TestGrantTable(t *testing.T) {
	for _, row := range []struct {
		name             string
		slots            int
		asked            bool
		held             int // granted of the pool's count
		canSpill         bool
		limited          bool
		availableBetween int
	}{
		{"n configured, asked: one of n", 4, true, 1, true, true, 3},
		{"n configured, not asked: none", 4, false, 0, false, false, 4},
		{"unlimited, asked: unlimited", permit.Unlimited, true, 1, true, false, 0},
		{"unlimited, not asked: none", permit.Unlimited, false, 0, false, false, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			p := newPool(t, abc(row.slots))
			r := of(t, "b", 7)
			r.Spill = row.asked
			got := try(t, p, r)
			if got.CanSpill() != row.canSpill || got.Limited() != row.limited {
				t.Errorf("CanSpill %v, Limited %v", got.CanSpill(), got.Limited())
			}
			if s := p.Stats(); s.HeldSlots != row.held || s.FreeSlots != row.availableBetween {
				t.Errorf("the slots are %+v", s)
			}
			release(t, got)
			if got.CanSpill() || got.Limited() {
				t.Error("a released permit can spill")
			}
		})
	}
}

// TestEverySlotIsGranted: a pool of n slots grants n, and shows n.
func TestEverySlotIsGranted(t *testing.T) {
	for _, n := range []int{1, 2, 3, 16} {
		p := newPool(t, abc(n))
		if s := p.Stats(); s.Slots != n || s.FreeSlots != n {
			t.Errorf("a pool of %d slots has %+v", n, s)
		}
		var held []*permit.Permit
		for i := range n {
			got, err := p.TryAcquire(slot())
			if err != nil {
				t.Fatalf("slot %d of %d: %v", i+1, n, err)
			}
			held = append(held, got)
		}
		if s := p.Stats(); s.Slots != n || s.HeldSlots != n || s.FreeSlots != 0 {
			t.Errorf("with all %d slots held it has %+v", n, s)
		}
		_, err := p.TryAcquire(slot())
		if !errors.Is(err, tier.ErrOutOfBudget) || errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("slot %d of %d: %v", n+1, n, err)
		}
		release(t, held...)
	}
}

func TestDefaults(t *testing.T) {
	budgets := []permit.Budget{{permit.Device, 256 << 20}, {permit.Host, 512 << 20}}
	for _, cfg := range []permit.Config{{}, {Budgets: budgets, Slots: new(16), Bypass: 16}} {
		p := newPool(t, cfg)
		device, _ := p.Total(permit.Device)
		host, _ := p.Total(permit.Host)
		s := p.Stats()
		if device != 256<<20 || host != 512<<20 || s.Slots != 16 || s.FreeSlots != 16 || len(s.Budgets) != 2 {
			t.Errorf("%+v makes %+v", cfg, s)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	budgets := func(b ...permit.Budget) permit.Config { return permit.Config{Budgets: b} }
	for _, c := range []struct {
		name, want string
		cfg        permit.Config
	}{
		{"no budgets", "needs a budget", permit.Config{Budgets: []permit.Budget{}}},
		{"a zero budget", "0 bytes", budgets(permit.Budget{"a", 1}, permit.Budget{"b", 0})},
		{"a negative budget", "-1 bytes", budgets(permit.Budget{"a", -1})},
		{"an empty name", "want a name", budgets(permit.Budget{"", 1})},
		{"the same name twice", `budget "a" of 2 bytes: want a name of its own`,
			budgets(permit.Budget{"a", 1}, permit.Budget{"b", 1}, permit.Budget{"a", 2})},
		{"zero slots", "0 slots", permit.Config{Slots: new(0)}},
		{"negative slots", "-3 slots", permit.Config{Slots: new(-3)}},
	} {
		p, err := permit.New(c.cfg)
		if p != nil || err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestRequests(t *testing.T) {
	p := newPool(t, permit.Config{})
	both := try(t, p, of(t, permit.Device, 3<<20, permit.Host, 5<<20))
	host := try(t, p, of(t, permit.Host, 12345))
	for _, c := range []struct {
		p                   *permit.Permit
		device, host, total int64
	}{{both, 3 << 20, 5 << 20, 8 << 20}, {host, 0, 12345, 12345}} {
		total, err := c.p.TotalBytes()
		if c.p.Bytes(permit.Device) != c.device || c.p.Bytes(permit.Host) != c.host || total != c.total || err != nil ||
			c.p.Bytes("nobody") != 0 || c.p.Bytes("") != 0 {
			t.Errorf("%d, %d, %d, %v", c.p.Bytes(permit.Device), c.p.Bytes(permit.Host), total, err)
		}
	}
	if n := available(p, permit.Host); n != 507<<20-12345 {
		t.Errorf("%d available", n)
	}
	release(t, both, host)
	if _, err := both.TotalBytes(); !errors.Is(err, tier.ErrReleased) || both.Bytes(permit.Device) != 0 {
		t.Errorf("a released permit has bytes: %v", err)
	}
	if n, ok := p.Total("nobody"); n != 0 || ok {
		t.Error("an unknown budget has a total")
	}

	if _, err := p.TryAcquire(of(t, permit.Host, -1)); err == nil || !strings.Contains(err.Error(), "-1 bytes") {
		t.Errorf("negative bytes: %v", err)
	}
}

func TestZeroRequest(t *testing.T) {
	p := newPool(t, abc(1))
	all := try(t, p, of(t, "a", 100, "b", 100, "c", 100))
	zero := try(t, p, permit.Request{})
	named := try(t, p, of(t, "a", 0))
	if n, err := zero.TotalBytes(); n != 0 || err != nil || zero == nil {
		t.Errorf("it has %d bytes, %v", n, err)
	}
	release(t, zero, named, all)
	releasedTwice(t, zero)
	release(t, nil, nil) // no permit at all
}

func TestSpillOnlyTakesASlot(t *testing.T) {
	p := newPool(t, abc(2))
	x, y := try(t, p, slot()), try(t, p, slot())
	if n, _ := x.TotalBytes(); n != 0 || !x.CanSpill() {
		t.Errorf("it has %d bytes, can spill: %v", n, x.CanSpill())
	}
	_, err := p.TryAcquire(slot())
	if !errors.Is(err, tier.ErrOutOfBudget) || errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("a third: %v", err)
	}
	if !strings.Contains(err.Error(), "2 of 2 are taken") || !strings.Contains(err.Error(), "SetSlots") {
		t.Errorf("%q does not tell enough", err)
	}
	release(t, x, y)
}

// A request that fails at its n-th resource leaves all the others as they were,
// at each n.
func TestAllOrNothing(t *testing.T) {
	p := newPool(t, abc(1))
	for n, name := range []string{"a", "b", "c", ""} {
		var hold *permit.Permit
		if name == "" {
			hold = try(t, p, slot())
		} else {
			hold = try(t, p, of(t, name, 60))
		}
		before := p.Stats()
		_, err := p.TryAcquire(spill(of(t, "a", 41, "b", 41, "c", 41)))
		if !errors.Is(err, tier.ErrOutOfBudget) {
			t.Fatalf("at %d: %v", n, err)
		}
		var out *tier.OutOfBudgetError
		if name != "" && (!errors.As(err, &out) || !strings.Contains(out.Budget, `"`+name+`"`) ||
			out.Requested != 41 || out.Remaining != 40 || out.Current != 60 || out.Limit != 100) {
			t.Errorf("at %d: %v", n, err)
		}
		if now := p.Stats(); !reflect.DeepEqual(now, before) {
			t.Errorf("at %d: %+v, was %+v", n, now, before)
		}
		release(t, hold)
	}
}

// While others fail at each n, an observer sees nothing of what they did not get.
func TestFailuresAreInvisible(t *testing.T) {
	p := newPool(t, abc(2))
	for _, name := range []string{"a", "b", "c"} {
		hold := try(t, p, of(t, name, 60))
		large := spill(of(t, "a", 41, "b", 41, "c", 41))
		var failing, looking sync.WaitGroup
		stop := make(chan struct{})
		for range 3 {
			failing.Go(func() {
				for range 2000 {
					if got, err := p.TryAcquire(large); err == nil {
						t.Errorf("it was granted %+v", got)
						return
					}
				}
			})
		}
		looking.Go(func() {
			for {
				for _, b := range p.Stats().Budgets {
					want := int64(100)
					if b.Name == name {
						want = 40
					}
					if n := available(p, b.Name); n != want {
						t.Errorf("%d of %s are available, want %d", n, b.Name, want)
						return
					}
				}
				if s := p.Stats(); s.HeldSlots != 0 {
					t.Errorf("the slots are %+v", s)
					return
				}
				select {
				case <-stop:
					return
				default:
				}
			}
		})
		failing.Wait()
		close(stop)
		looking.Wait()
		release(t, hold)
	}
}

func TestUnknownAndTooLarge(t *testing.T) {
	p := newPool(t, abc(2))
	for _, acquire := range []func(permit.Request) (*permit.Permit, error){
		p.TryAcquire,
		func(r permit.Request) (*permit.Permit, error) { return p.Acquire(t.Context(), r) },
	} {
		_, err := acquire(of(t, "a", 1, "d", 1))
		if !errors.Is(err, permit.ErrNoBudget) || !strings.Contains(err.Error(), `"d"`) {
			t.Errorf("an unknown budget: %v", err)
		}
		_, err = acquire(of(t, "a", 1, "b", 101))
		if !errors.Is(err, reservation.ErrExceeded) || errors.Is(err, tier.ErrOutOfBudget) ||
			!strings.Contains(err.Error(), `101 bytes of budget "b", which has 100 in all (SetTotal`) {
			t.Errorf("more than there is: %v", err)
		}
	}
	got := try(t, p, capped(of(t, "a", 1, "b", 101)))
	if got.Bytes("a") != 1 || got.Bytes("b") != 100 {
		t.Errorf("capped: %d and %d", got.Bytes("a"), got.Bytes("b"))
	}
	release(t, got)
}

// Of ten goroutines some are refused all the time; in the end the pool is exactly
// full.
func TestTenGoroutinesLeaveItFull(t *testing.T) {
	p := newPool(t, abc(4))
	var wg sync.WaitGroup
	for g := range 10 {
		wg.Go(func() {
			for i := range 3000 {
				r := of(t, []string{"a", "b", "c"}[i%3], 1+(g*7+i)%40, []string{"a", "b", "c"}[(i+g)%3], 1+i%20)
				r.Spill = i%2 == 0
				got, err := p.TryAcquire(r)
				if err != nil {
					if !errors.Is(err, tier.ErrOutOfBudget) {
						t.Error(err)
						return
					}
					continue
				}
				for _, b := range p.Stats().Budgets {
					if n := available(p, b.Name); n < 0 {
						t.Errorf("%d of %s are available", n, b.Name)
					}
				}
				release(t, got)
			}
		})
	}
	wg.Wait()
	full(t, p)
}

func TestReleasedTwice(t *testing.T) {
	p := newPool(t, abc(3))
	first := try(t, p, spill(of(t, "a", 10)))
	release(t, first)
	releasedTwice(t, first)
	full(t, p)
	// Nothing of a later permit is given back.
	for range 3 {
		next := try(t, p, spill(of(t, "a", 30)))
		releasedTwice(t, first)
		if n := available(p, "a"); n != 70 || p.Stats().HeldSlots != 1 || first.Bytes("a") != 0 || next.Bytes("a") != 30 {
			t.Errorf("the second release took the other permit's %d", n)
		}
		release(t, next)
		releasedTwice(t, next)
	}
}

// Of many releases of the same permit one succeeds.
func TestReleasedByManyAtOnce(t *testing.T) {
	p := newPool(t, abc(3))
	for range 200 {
		got := try(t, p, spill(of(t, "a", 10)))
		var wg sync.WaitGroup
		errs := make([]error, 4)
		for i := range errs {
			wg.Go(func() { errs[i] = got.Release() })
		}
		wg.Wait()
		done := 0
		for _, err := range errs {
			switch {
			case err == nil:
				done++
			case !errors.Is(err, tier.ErrReleased):
				t.Error(err)
			}
		}
		if done != 1 {
			t.Fatalf("%d released it", done)
		}
		full(t, p)
	}
}

func TestCloseReportsLeaks(t *testing.T) {
	p := newPool(t, abc(3))
	release(t, try(t, p, of(t, "c", 1)))
	var held []*permit.Permit
	for range 40 {
		held = append(held, try(t, p, of(t, "a", 2)))
	}
	held = append(held, try(t, p, spill(of(t, "b", 7))), try(t, p, slot()))
	err := p.Close()
	var leak *permit.LeakError
	if !errors.As(err, &leak) || leak.Permits != 42 || !strings.Contains(err.Error(), "42 permits") {
		t.Fatalf("closing: %v", err)
	}
	if s := p.Stats(); s.HeldSlots != 2 || s.Budgets[0].Held != 80 || s.Budgets[1].Held != 7 || s.Budgets[2].Held != 0 {
		t.Errorf("after Close: %+v", s)
	}
	if _, err := p.TryAcquire(permit.Request{}); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if _, err := p.Acquire(t.Context(), permit.Request{}); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
	if err := p.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a second Close: %v", err)
	}
	release(t, held...) // they stay valid
	if s := p.Stats(); s.HeldSlots != 0 || s.Budgets[0].Held != 0 || s.Budgets[1].Held != 0 {
		t.Errorf("in the end it says %+v", s)
	}
}
