package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
)

// openPermits opens an engine with little memory and the given permits.
func openPermits(t *testing.T, cfg spillway.Config) *spillway.Engine {
	t.Helper()
	cfg.GPUs = []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}
	cfg.HostMemory = spillway.Bytes(1 << 20)
	cfg.Disks = []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}}
	cfg.MonitorPeriod = time.Millisecond
	cfg.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := eng.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
	})
	return eng
}

// takeAll takes all permits of a pool.
func takeAll(t *testing.T, p *permit.Pool) (release func()) {
	t.Helper()
	var held []*permit.Permit
	for _, b := range p.Stats().Budgets {
		got, err := p.TryAcquire(permit.Request{Bytes: map[string]int64{b.Name: b.Total}})
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, got)
	}
	for {
		got, err := p.TryAcquire(permit.Request{Spill: true})
		if err != nil {
			return func() {
				for _, h := range held {
					if err := h.Release(); err != nil {
						t.Error(err)
					}
				}
				held = nil
			}
		}
		held = append(held, got)
	}
}

// untilWaiting returns when n requests wait for a permit. It is an error if ended has a value
// before.
func untilWaiting(t *testing.T, p *permit.Pool, n int, ended <-chan error) {
	t.Helper()
	for p.Stats().Waiting < n {
		select {
		case err := <-ended:
			t.Fatalf("it did not wait: %v", err)
		default:
			runtime.Gosched()
		}
	}
}

// TestMonitorSpillsWhileUsersHoldAllPermits: a user takes all permits, each slot that was
// configured and the only one too, and waits for more. The monitor evicts nevertheless: batches of
// many times the memory are put, and come back.
func TestMonitorSpillsWhileUsersHoldAllPermits(t *testing.T) {
	t.Parallel()
	for _, slots := range []int{1, 2, 5} {
		eng := openPermits(t, spillway.Config{Limits: spillway.Limits{Permits: permit.Config{Slots: new(slots)}}})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		plan, err := eng.Plan("p")
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		words := wordList(1, 1500) // a dictionary that all of them share
		gpu := repository.WithPlacement(reservation.AnyInTier(tier.GPU))
		if err := repo.Put(ctx, 1, numberedRecord(0, 6000, words), gpu); err != nil {
			t.Fatal(err)
		}
		theirs, ok := repo.Peek(1)
		if !ok {
			t.Fatal("the batch is not there")
		}
		release := takeAll(t, eng.Permits())
		defer release()
		ended := make(chan error, 1)
		go func() {
			ended <- eng.Mover().Move(ctx, theirs, reservation.AnyInTier(tier.Disk))
		}()
		untilWaiting(t, eng.Permits(), 1, ended)
		const count = 60
		for i := range count {
			if err := repo.Put(ctx, 0, numberedRecord(int64(i), 6000, words), gpu); err != nil {
				t.Fatalf("%d slots, batch %d: %v", slots, i, err)
			}
		}
		spilled := int64(0)
		for _, e := range eng.Stats().Edges {
			if e.To.Kind == tier.Disk {
				spilled += e.Batches
			}
		}
		if spilled == 0 {
			t.Error("nothing was spilled")
		}
		if s := eng.Permits().Stats(); s.Slots != slots || s.HeldSlots != slots || s.FreeSlots != 0 {
			t.Errorf("the user does not hold all %d slots: %+v", slots, s)
		}
		release()
		if err := <-ended; err != nil {
			t.Errorf("the user's own move: %v", err)
		}
		back := 0
		for h, err := range repo.Drain(ctx, 0, tier.GPU) {
			if err := errors.Join(err, h.Close()); err != nil {
				t.Fatal(err)
			}
			back++
		}
		if back != count {
			t.Errorf("%d of %d came back", back, count)
		}
	}
}

// Close wakes the waiters for permits, and reports those that are held.
func TestCloseEndsWaitsForPermits(t *testing.T) {
	eng := openPermits(t, spillway.Config{})
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := repo.Put(t.Context(), 0, numberedRecord(0, 1000, wordList(1, 1))); err != nil {
		t.Fatal(err)
	}
	b, _ := repo.Peek(0)
	release := takeAll(t, eng.Permits())
	ended := make(chan error, 2)
	go func() {
		ended <- eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk))
	}()
	go func() {
		_, err := eng.Permits().Acquire(t.Context(), permit.Request{Spill: true})
		ended <- err
	}()
	untilWaiting(t, eng.Permits(), 2, ended)
	var leak *permit.LeakError
	if err := eng.Close(); !errors.As(err, &leak) || leak.Permits != 2+16 {
		t.Errorf("closing: %v", err)
	}
	for range 2 {
		if err := <-ended; !errors.Is(err, tier.ErrClosed) {
			t.Errorf("a wait ended with %v", err)
		}
	}
	release()
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// TestEnginesShareAPool: engines that share a pool share its limits, and leave it open.
func TestEnginesShareAPool(t *testing.T) {
	pool, err := permit.New(permit.Config{Slots: new(1)})
	if err != nil {
		t.Fatal(err)
	}
	one, two := openPermits(t, spillway.Config{Limits: spillway.Limits{PermitPool: pool}}), openPermits(t, spillway.Config{Limits: spillway.Limits{PermitPool: pool}})
	if one.Permits() != pool || two.Permits() != pool {
		t.Fatal("they have other pools")
	}
	release := takeAll(t, one.Permits())
	ended := make(chan error, 1)
	go func() {
		p, err := two.Mover().Ingest(t.Context(), numberedRecord(0, 1000, wordList(1, 1)), reservation.AnyInTier(tier.Disk))
		if err == nil {
			err = p.Release()
		}
		ended <- err
	}()
	untilWaiting(t, pool, 1, ended)
	if err := one.Close(); err != nil {
		t.Errorf("closing one: %v", err)
	}
	release()
	if err := <-ended; err != nil {
		t.Errorf("the other: %v", err)
	}
	if err := errors.Join(two.Close(), pool.Close()); err != nil {
		t.Errorf("closing the rest: %v", err)
	}
}

func TestOpenRefusesPermits(t *testing.T) {
	pools := make(map[string]*permit.Pool)
	for name, cfg := range map[string]permit.Config{
		"other budgets": {Budgets: []permit.Budget{{Name: "ram", Bytes: 1}}}, "good": {}, "closed": {},
	} {
		p, err := permit.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		pools[name] = p
	}
	if err := pools["closed"].Close(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		cfg  spillway.Config
		says string
	}{
		"a closed pool":         {spillway.Config{Limits: spillway.Limits{PermitPool: pools["closed"]}}, "closed"},
		"no host budget":        {spillway.Config{Limits: spillway.Limits{Permits: permit.Config{Budgets: []permit.Budget{{Name: "ram", Bytes: 1}}}}}, `no budget "host"`},
		"a pool without it":     {spillway.Config{Limits: spillway.Limits{PermitPool: pools["other budgets"]}}, `no budget "host"`},
		"zero slots":            {spillway.Config{Limits: spillway.Limits{Permits: permit.Config{Slots: new(0)}}}, "0 slots"},
		"both":                  {spillway.Config{Limits: spillway.Limits{PermitPool: pools["good"], Permits: permit.Config{Slots: new(4)}}}, "both a pool"},
		"a budget of zero size": {spillway.Config{Limits: spillway.Limits{Permits: permit.Config{Budgets: []permit.Budget{{Name: permit.Host}}}}}, "0 bytes"},
	} {
		if err := c.cfg.Validate(); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, cfg := range []spillway.Config{{}, {Limits: spillway.Limits{PermitPool: pools["good"]}}, {Limits: spillway.Limits{Permits: permit.Config{Slots: new(permit.Unlimited)}}}} {
		if err := cfg.Validate(); err != nil {
			t.Error(err)
		}
	}
}
