package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/sim"
)

func newBudget(t *testing.T, limit int64) *quota.Budget {
	t.Helper()
	b, err := quota.NewBudget(limit, "the test's GPU budget")
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// openGPU opens an engine with one GPU, and a repository of it.
func openGPU(t *testing.T, gpu spillway.GPUConfig) (*spillway.Engine, *repository.Repository) {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:          []spillway.GPUConfig{gpu},
		HostMemory:    spillway.Bytes(1 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		MonitorPeriod: time.Millisecond,
		StallTimeout:  time.Second,
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	return eng, repo
}

// wrapIn returns a GPUConfig.Wrap that puts the device behind b.
func wrapIn(b *quota.Budget) func(tier.Device) (tier.Device, error) {
	return func(d tier.Device) (tier.Device, error) { return b.Wrap(d) }
}

func closeEngine(t *testing.T, eng *spillway.Engine) {
	t.Helper()
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
}

func gpuOf(t *testing.T, eng *spillway.Engine) *tier.Space {
	t.Helper()
	s, ok := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.GPU})
	if !ok {
		t.Fatal("there is no gpu:0")
	}
	return s
}

func noBytesLeft(t *testing.T, b *quota.Budget) {
	t.Helper()
	if s := b.Stats(); s.Reserved != 0 || s.Live != 0 || s.Retired != 0 || s.Promised != 0 {
		t.Errorf("the budget ends with %+v", s)
	}
}

// A budget below the GPU's space, in any order with logging: what finds no room is
// spilled, and everything comes back through the GPU.
func TestGPUBudgetBelowTheSpace(t *testing.T) {
	t.Parallel()
	const limit = 512 << 10
	log := slog.New(slog.NewTextHandler(io.Discard, &slog.HandlerOptions{Level: slog.LevelDebug}))
	for name, wrap := range map[string]func(*quota.Budget, tier.Device) (tier.Device, error){
		"budget": func(b *quota.Budget, d tier.Device) (tier.Device, error) { return b.Wrap(d) },
		"budget over logging": func(b *quota.Budget, d tier.Device) (tier.Device, error) {
			return b.Wrap(quota.Logged(d, log))
		},
		"logging over budget": func(b *quota.Budget, d tier.Device) (tier.Device, error) {
			w, err := b.Wrap(d)
			return quota.Logged(w, log), err
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBudget(t, limit)
			eng, repo := openGPU(t, spillway.GPUConfig{Memory: spillway.Bytes(8 << 20), Wrap: func(d tier.Device) (tier.Device, error) { return wrap(b, d) }})
			defer noBytesLeft(t, b)
			defer closeEngine(t, eng)
			if c := gpuOf(t, eng).Capacity; c != limit {
				t.Errorf("the space has %d bytes with a budget of %d", c, limit)
			}
			run := &randomRun{eng: eng, repo: repo, words: wordList(1, 500), sources: make(map[int64]*source)}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
			defer cancel()
			rng := rand.New(rand.NewPCG(1, 2))
			for range 40 {
				if err := run.put(ctx, rng, 0); err != nil {
					t.Fatal(err)
				}
			}
			_, err := eng.Reservations().TryReserve(reservation.AnyInTier(tier.GPU), limit+1, nil)
			if !errors.Is(err, reservation.ErrExceeded) {
				t.Errorf("more than the budget was asked for: %v", err)
			}
			drainAll(ctx, t, run, tier.GPU)
			if s := b.Stats(); s.Peak > limit || s.Peak < limit/2 {
				t.Errorf("the peak is %d with a limit of %d", s.Peak, limit)
			}
		})
	}
}

// drainAll takes everything out of a run, which must be what was put.
func drainAll(ctx context.Context, t *testing.T, run *randomRun, k tier.Kind) {
	t.Helper()
	for p := range randomPartitions {
		for h, err := range run.repo.Drain(ctx, p, k) {
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(run.compare(ctx, h, true), h.Close()); err != nil {
				t.Fatal(err)
			}
		}
	}
	for n, s := range run.sources {
		if !s.consumed {
			t.Errorf("batch number %d was lost", n)
		}
	}
}

// Two engines that share a budget do everything at once. Together they are never over it. A caller
// without room spills or gets an error; nothing is lost.
func TestTwoEnginesShareABudget(t *testing.T) {
	t.Parallel()
	seed := testseed.One(t)
	const limit = 1 << 20
	b := newBudget(t, limit)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // only a hang takes so long
	defer cancel()
	var runs []*randomRun
	for range 2 {
		eng, repo := openGPU(t, spillway.GPUConfig{Memory: spillway.Bytes(limit), Wrap: wrapIn(b)})
		runs = append(runs, &randomRun{eng: eng, repo: repo, words: wordList(1, 1500), sources: make(map[int64]*source)})
	}
	var wg sync.WaitGroup
	for i, run := range runs {
		for w := range 4 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(seed+uint64(i), uint64(w)))
				// They go on until they met, which a short run may end before.
				for op := 0; op < testseed.Rounds(120, 40) || b.Stats().Refused == 0 && ctx.Err() == nil; op++ {
					err := run.step(ctx, rng)
					// What the other engine keeps there, this one cannot make room for; and a
					// limit may fall below what was asked for.
					if err != nil && !errors.Is(err, tier.ErrNoSpace) && !errors.Is(err, reservation.ErrExceeded) {
						t.Errorf("engine %d, worker %d, operation %d: %v", i, w, op, err)
						cancel()
						return
					}
					if s := b.Stats(); s.Reserved > limit {
						t.Errorf("over the budget: %+v", s)
					}
				}
			})
		}
	}
	changing, stop := context.WithCancel(ctx)
	changed := make(chan struct{})
	go func() { // the limit moves meanwhile, and comes back
		defer close(changed)
		for n := int64(1); changing.Err() == nil; n++ {
			if err := b.SetLimit(limit / (1 + n%2)); err != nil {
				t.Error(err)
			}
		}
	}()
	wg.Wait()
	stop()
	<-changed
	if t.Failed() {
		return
	}
	if err := b.SetLimit(limit); err != nil {
		t.Fatal(err)
	}
	for _, run := range runs {
		drainAll(ctx, t, run, tier.Host)
	}
	for _, run := range runs {
		closeEngine(t, run.eng)
	}
	noBytesLeft(t, b)
	if s := b.Stats(); s.Refused == 0 {
		t.Errorf("the engines never met: %+v", s)
	}
}

// What one engine holds of a shared budget sends the other's batches to the next tier
// and ends its waits, and is there for it when it is released.
func TestBudgetHeldByAnotherEngine(t *testing.T) {
	t.Parallel()
	const limit = 512 << 10
	b := newBudget(t, limit)
	defer noBytesLeft(t, b)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	one, _ := openGPU(t, spillway.GPUConfig{Memory: spillway.Bytes(limit), Wrap: wrapIn(b)})
	defer closeEngine(t, one)
	two, repo := openGPU(t, spillway.GPUConfig{Memory: spillway.Bytes(limit), Wrap: wrapIn(b)})
	defer closeEngine(t, two)
	held, err := one.Reserve(ctx, reservation.AnyInTier(tier.GPU), gpuOf(t, one).State().Limit/tier.Page*tier.Page)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := held.Alloc(held.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	if err := repo.Put(ctx, 0, numberedRecord(1, 5000, wordList(1, 10))); err != nil {
		t.Fatal(err)
	}
	batch, _ := repo.Peek(0)
	if k := batch.Info().Space.Kind; k != tier.Host {
		t.Errorf("the batch lies in %s", k)
	}
	gpu := reservation.AnyInTier(tier.GPU)
	if _, err := two.Reservations().TryReserve(gpu, 300<<10, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("%v", err)
	}
	// The second engine has nothing there that it could move away. So its monitor refuses those
	// that would wait for ever.
	var full *tier.NoSpaceError
	if _, err := two.Mover().Acquire(ctx, batch, gpu); !errors.As(err, &full) || full.Space.Kind != tier.GPU {
		t.Fatalf("waiting for what another engine holds: %v", err)
	}
	if err := errors.Join(held.Release(), buf.Release()); err != nil {
		t.Fatal(err)
	}
	h, err := two.Mover().Acquire(ctx, batch, gpu)
	if err := errors.Join(err, h.Close()); err != nil {
		t.Fatal(err)
	}
}

// hidden hides what a device is Limited by, as a decorator without Unwrap does.
type hidden struct{ tier.Device }

// A budget that the space does not know of refuses at the allocation. The batch goes to the next
// space that it may go to, and a caller that wants only that one gets the reason.
func TestRefusedAlthoughTheSpaceHasRoom(t *testing.T) {
	b := newBudget(t, 256<<10)
	defer noBytesLeft(t, b)
	roomy := func(d tier.Device) (tier.Device, error) {
		w, err := b.Wrap(d)
		return withMemory{hidden{w}, 4 << 20}, err
	}
	eng, repo := openGPU(t, spillway.GPUConfig{Memory: spillway.Bytes(4 << 20), Wrap: roomy})
	defer closeEngine(t, eng)
	rec := numberedRecord(1, 10_000, wordList(1, 10))
	err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU)))
	var full *tier.OutOfBudgetError
	var space *tier.NoSpaceError
	if !errors.As(err, &full) || !errors.As(err, &space) || full.Budget != "the test's GPU budget" || full.Limit != 256<<10 || space.Space.Kind != tier.GPU {
		t.Fatalf("%v", err)
	}
	if !strings.Contains(err.Error(), "Budget.SetLimit") {
		t.Errorf("%q does not name the setting that would help", err)
	}
	if err := repo.Put(t.Context(), 0, rec); err != nil {
		t.Fatal(err)
	}
	batch, _ := repo.Peek(0)
	if k := batch.Info().Space.Kind; k != tier.Host {
		t.Errorf("the batch lies in %s", k)
	}
	if n := gpuOf(t, eng).State().Used(); n != 0 {
		t.Errorf("%d bytes of what was refused are in use", n)
	}
}

// withMemory says that a device has more memory than it has.
type withMemory struct {
	tier.Device
	bytes int64
}

func (d withMemory) MemInfo() (free, total int64, err error) { return d.bytes, d.bytes, nil }

// A program's factory makes the device; the engine closes it, with all its wrappers.
func TestDeviceFactory(t *testing.T) {
	var made tier.Device
	var asked int64
	b := newBudget(t, 1<<20)
	eng, repo := openGPU(t, spillway.GPUConfig{
		Open: func(_ context.Context, memory int64) (tier.Device, error) {
			asked = memory
			var err error
			made, err = sim.New(sim.Config{Memory: 2 << 20, Name: "the program's"})
			return made, err
		},
		Wrap: wrapIn(b),
	})
	if asked != 0 {
		t.Errorf("%d bytes were asked for", asked)
	}
	if c := gpuOf(t, eng).Capacity; c != 1<<20 {
		t.Errorf("the space has %d bytes", c)
	}
	if err := repo.Put(t.Context(), 0, numberedRecord(1, 5000, wordList(1, 10))); err != nil {
		t.Fatal(err)
	}
	if made.Outstanding() == 0 || b.Stats().Live != made.Outstanding() {
		t.Errorf("%d bytes are outstanding on the program's device: %+v", made.Outstanding(), b.Stats())
	}
	closeEngine(t, eng)
	if err := made.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("the engine has not closed the device: %v", err)
	}
	noBytesLeft(t, b)
}

// Two engines on one device of the program's, which stays open.
func TestTwoEnginesOnOneDevice(t *testing.T) {
	raw, err := sim.New(sim.Config{Memory: 4 << 20})
	if err != nil {
		t.Fatal(err)
	}
	b := newBudget(t, 1<<20)
	gpu := spillway.GPUConfig{Device: raw, Memory: spillway.Bytes(1 << 20), Wrap: wrapIn(b)}
	one, r1 := openGPU(t, gpu)
	two, r2 := openGPU(t, gpu)
	for i := range int64(10) {
		for _, r := range []*repository.Repository{r1, r2} {
			if err := r.Put(t.Context(), 0, numberedRecord(i, 5000, wordList(1, 10))); err != nil {
				t.Fatal(err)
			}
		}
	}
	if s := b.Stats(); s.Peak > 1<<20 || raw.Outstanding() > 1<<20 {
		t.Errorf("%+v with %d bytes outstanding", s, raw.Outstanding())
	}
	closeEngine(t, one)
	if err := r2.Put(t.Context(), 0, numberedRecord(99, 5000, wordList(1, 10))); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, two)
	noBytesLeft(t, b)
	if err := raw.Close(); err != nil {
		t.Errorf("the program's device was closed: %v", err)
	}
}

func TestDevicesThatCannotBeHad(t *testing.T) {
	raw, err := sim.New(sim.Config{Memory: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	spent := newBudget(t, 1<<20)
	dev, err := spent.Wrap(raw)
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dev.Alloc(s, 1<<20); err != nil {
		t.Fatal(err)
	}
	failure := errors.New("no such device today")
	var opened tier.Device
	open := func(context.Context, int64) (tier.Device, error) {
		var err error
		opened, err = sim.New(sim.Config{Memory: 1 << 20})
		return opened, err
	}
	for name, c := range map[string]struct {
		gpu  spillway.GPUConfig
		want error
		says string
	}{
		"two devices":  {spillway.GPUConfig{Device: raw, Open: open}, nil, "both set"},
		"an error":     {spillway.GPUConfig{Open: func(context.Context, int64) (tier.Device, error) { return nil, failure }}, failure, "gpu:0"},
		"nothing":      {spillway.GPUConfig{Open: func(context.Context, int64) (tier.Device, error) { return nil, nil }}, nil, "neither"},
		"wrap fails":   {spillway.GPUConfig{Open: open, Wrap: func(tier.Device) (tier.Device, error) { return nil, failure }}, failure, "gpu:0"},
		"wrap nothing": {spillway.GPUConfig{Open: open, Wrap: func(tier.Device) (tier.Device, error) { return nil, nil }}, nil, "neither"},
		"spent":        {spillway.GPUConfig{Open: open, Wrap: wrapIn(spent)}, tier.ErrNoSpace, "no memory free"},
	} {
		t.Run(name, func(t *testing.T) {
			opened = nil
			eng, err := spillway.Open(t.Context(), spillway.Config{
				GPUs: []spillway.GPUConfig{c.gpu}, Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)}},
			})
			if err == nil {
				t.Fatal(errors.Join(errors.New("opened"), eng.Close()))
			}
			if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v", err)
			}
			if opened != nil && !errors.Is(opened.Close(), tier.ErrClosed) {
				t.Error("the device that was opened is open still")
			}
		})
	}
}

// openBudgets opens an engine with two GPUs of 1 MiB, all of them under the budgets.
func openBudgets(t *testing.T, change func(*spillway.Config), budgets ...*quota.Budget) *spillway.Engine {
	t.Helper()
	cfg := plainConfig(t)
	cfg.GPUs = []spillway.GPUConfig{cfg.GPUs[0], cfg.GPUs[0]}
	cfg.Limits.Budgets = budgets
	if change != nil {
		change(&cfg)
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return eng
}

// TestLimitsBudget: a budget in the limits limits two GPUs together, and engines that share it.
// What finds no room in it goes to a slower tier.
func TestLimitsBudget(t *testing.T) {
	const limit, most = 1 << 20, 600 << 10 // of which there is room for one
	on := func(ordinal int) reservation.Strategy {
		return reservation.Specific(tier.ID{Kind: tier.GPU, Ordinal: ordinal})
	}
	for name, c := range map[string]struct {
		engines int
		at      reservation.Strategy // of the other one
	}{"two GPUs": {1, on(1)}, "two engines": {2, on(0)}} {
		t.Run(name, func(t *testing.T) {
			b := newBudget(t, limit)
			defer noBytesLeft(t, b)
			one := openBudgets(t, nil, b)
			defer closeClean(t, one)
			other := one
			if c.engines == 2 {
				other = openBudgets(t, nil, b)
				defer closeClean(t, other)
			}
			held, err := one.Reservations().TryReserve(on(0), most, nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := other.Reservations().TryReserve(c.at, most, nil); !errors.Is(err, tier.ErrNoSpace) {
				t.Errorf("beside what is held: %v", err)
			}
			p, err := other.Mover().Ingest(t.Context(), numberedRecord(1, 30_000, wordList(1, 10)), reservation.AnyInTiers(tier.GPU, tier.Host))
			if err != nil {
				t.Fatal(err)
			}
			if p.Space().Kind() != tier.Host {
				t.Errorf("what finds no room in the budget is in %s", p.Space().ID())
			}
			release(t, p, held)
			again, err := other.Reservations().TryReserve(c.at, most, nil)
			if err != nil {
				t.Fatalf("when it is free: %v", err)
			}
			release(t, again)
			if s := b.Stats(); s.Peak > limit {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestSecondEngineOfABudget: its space is as large as the budget, however much others hold of that
// while it opens.
func TestSecondEngineOfABudget(t *testing.T) {
	const limit = 1 << 20
	for _, held := range []int64{limit * 3 / 4, limit} {
		b := newBudget(t, limit)
		sized := func(c *spillway.Config) { // a size that nobody has set
			c.GPUMarks = tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5}
			for i := range c.GPUs {
				c.GPUs[i] = spillway.GPUConfig{Open: func(context.Context, int64) (tier.Device, error) { return openSim(t, 4*limit), nil }}
			}
		}
		one := openBudgets(t, sized, b)
		r, err := one.Reservations().TryReserve(reservation.AnyInTier(tier.GPU), held, nil)
		if err != nil {
			t.Fatal(err)
		}
		two := openBudgets(t, sized, b)
		if c := gpuOf(t, two).Capacity; c != limit {
			t.Errorf("beside %d bytes the space has %d for good", held, c)
		}
		release(t, r)
		if r, err = two.Reservations().TryReserve(reservation.AnyInTier(tier.GPU), limit, nil); err != nil {
			t.Fatal(err)
		}
		release(t, r)
		closeClean(t, two)
		closeClean(t, one)
		noBytesLeft(t, b)
	}
}

// TestQuotaBesideBudgets: a share is one of the GPUs, and a ledger has their sizes, whatever the
// budgets of a process are.
func TestQuotaBesideBudgets(t *testing.T) {
	ledger := t.TempDir()
	for _, limit := range []int64{4 << 20, 512 << 10} {
		eng := openBudgets(t, func(c *spillway.Config) {
			c.Limits.Quota.Limit, c.Limits.Quota.Ledger = spillway.Share(0.5), ledger
			c.Limits.Quota.Group = "both"
		}, newBudget(t, limit))
		defer closeClean(t, eng)
		if q := eng.Quota().Stats().Limit; q != 1<<20 {
			t.Errorf("with a budget of %d bytes, half of two GPUs of 1 MiB is %d", limit, q)
		}
		if c := gpuOf(t, eng).Capacity; c != min(limit, 1<<20) {
			t.Errorf("with a budget of %d bytes the space has %d", limit, c)
		}
	}
}

// TestEnginesInTurnOnOneDevice: engines leave a program's device without limits, so that others
// have it under other budgets, in another order, or behind other decorators.
func TestEnginesInTurnOnOneDevice(t *testing.T) {
	a, b := newBudget(t, 1<<20), newBudget(t, 1<<20)
	dev := openSim(t, 1<<20)
	s, err := dev.NewStream()
	if err == nil {
		_, err = dev.Alloc(s, 256<<10) // by the program, which no budget counts
	}
	if err != nil {
		t.Fatal(err)
	}
	logged := func(d tier.Device) (tier.Device, error) { return quota.Logged(d, slog.New(slog.DiscardHandler)), nil }
	for i, c := range []struct {
		budgets []*quota.Budget
		wrap    func(tier.Device) (tier.Device, error)
	}{
		{[]*quota.Budget{a, b}, nil}, {[]*quota.Budget{a, b}, nil}, {[]*quota.Budget{a, a, b}, nil},
		{[]*quota.Budget{b}, nil},
		{[]*quota.Budget{a}, nil}, {[]*quota.Budget{b, a}, nil}, {[]*quota.Budget{a, b}, logged},
		{[]*quota.Budget{a, b}, logged},
	} {
		open := func() *spillway.Engine {
			return openBudgets(t, func(cfg *spillway.Config) {
				cfg.GPUs = []spillway.GPUConfig{{Device: dev, Wrap: c.wrap}}
			}, c.budgets...)
		}
		eng := open()
		p, err := eng.Mover().Ingest(t.Context(), numberedRecord(1, 5_000, wordList(1, 10)), reservation.AnyInTier(tier.GPU))
		if err != nil {
			t.Fatal(i, err)
		}
		live := c.budgets[0].Stats().Live
		if live == 0 || live > 256<<10 {
			t.Errorf("%d: %d bytes are live", i, live)
		}
		if c.wrap == nil { // the device is the same for both
			other := open()
			closeClean(t, other)
			if got := c.budgets[0].Stats().Live; got != live {
				t.Errorf("%d: %d bytes are live when another engine has closed, and were %d", i, got, live)
			}
		}
		release(t, p)
		closeClean(t, eng)
		noBytesLeft(t, a)
		noBytesLeft(t, b)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// TestBudgetKeepsWhatAnEngineLeaks: what is held longer than the engine is charged until it is
// released.
func TestBudgetKeepsWhatAnEngineLeaks(t *testing.T) {
	b := newBudget(t, 1<<20)
	dev := openSim(t, 1<<20)
	eng := openBudgets(t, func(c *spillway.Config) { c.GPUs = []spillway.GPUConfig{{Device: dev}} }, b)
	p, err := eng.Mover().Ingest(t.Context(), numberedRecord(1, 5_000, wordList(1, 10)), reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	var leaks *spillway.LeakError
	if err := eng.Close(); !errors.As(err, &leaks) {
		t.Errorf("closing: %v", err)
	}
	if live := b.Stats().Live; live == 0 || live != dev.Outstanding() {
		t.Errorf("%d bytes are live of %d", live, dev.Outstanding())
	}
	release(t, p)
	noBytesLeft(t, b)
	if n := dev.Outstanding(); n != 0 {
		t.Errorf("the device has %d bytes still", n)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// TestLimitsNest: the quota is outermost, then come the budgets in their order, then what Wrap
// returns, which is given the plain device.
func TestLimitsNest(t *testing.T) {
	outer, inner := newBudget(t, 768<<10), newBudget(t, 512<<10)
	var wrapped []tier.Device
	eng := openBudgets(t, func(c *spillway.Config) {
		c.Limits.Quota.Limit = spillway.Bytes(256 << 10)
		for i := range c.GPUs {
			c.GPUs[i].Wrap = func(dev tier.Device) (tier.Device, error) {
				if dev.Info().Backend != "sim" || tier.QuotaOf(dev) != nil {
					t.Errorf("Wrap is given %T, which has limits", dev)
				}
				wrapped = append(wrapped, quota.Logged(dev, slog.New(slog.DiscardHandler)))
				return wrapped[len(wrapped)-1], nil
			}
		}
	}, outer, inner)
	under := func(dev tier.Device) tier.Device { return dev.(interface{ Unwrap() tier.Device }).Unwrap() }
	for i := range 2 {
		dev := deviceAt(eng, i)
		if _, total, _ := dev.MemInfo(); total != 256<<10 {
			t.Errorf("gpu:%d shows %d bytes", i, total)
		}
		for _, b := range []*quota.Budget{outer, inner} {
			dev = under(dev)
			if own, err := b.Wrap(dev); err != nil || own != dev { // a budget returns a device of its own as it is
				t.Errorf("gpu:%d: %T is not of the budget of %d bytes: %v", i, dev, b.Stats().Limit, err)
			}
		}
		if !wraps(under(dev), wrapped[i]) { // the engine guards what a program has wrapped
			t.Errorf("gpu:%d: below the budgets is %T", i, under(dev))
		}
	}
	for i, limit := range []func(int64) error{eng.Quota().SetLimit, outer.SetLimit, inner.SetLimit} { // each of them counts
		if err := limit(8 << 10); err != nil {
			t.Fatal(err)
		}
		if _, err := eng.Reservations().TryReserve(reservation.AnyInTier(tier.GPU), 16<<10, nil); !errors.Is(err, reservation.ErrExceeded) {
			t.Errorf("limit %d: %v", i, err)
		}
		if err := limit(1 << 20); err != nil {
			t.Fatal(err)
		}
	}
	closeClean(t, eng)
	noBytesLeft(t, outer)
	noBytesLeft(t, inner)
}
