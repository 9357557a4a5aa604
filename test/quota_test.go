package test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"math/big"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// quotaConfig configures an engine with one simulated GPU of 8 MiB.
func quotaConfig(t *testing.T, q *quota.Settings) spillway.Config {
	return spillway.Config{
		GPUs:          []spillway.GPUConfig{{Memory: spillway.Bytes(8 << 20)}},
		HostMemory:    spillway.Bytes(1 << 20),
		Disks:         []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		MonitorPeriod: time.Millisecond,
		Logger:        slog.New(slog.NewTextHandler(io.Discard, nil)),
		Limits:        spillway.Limits{Quota: q},
	}
}

func limitOf(t *testing.T, text string) tier.Amount {
	t.Helper()
	l, err := tier.ParseAmount(text)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func openRun(t *testing.T, cfg spillway.Config) *randomRun {
	t.Helper()
	eng, err := spillway.Open(t.Context(), cfg)
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
	return &randomRun{eng: eng, repo: repo, words: wordList(1, 500), sources: make(map[int64]*source)}
}

// TestLimitFromTheEnvironment: an engine without settings takes its limit from the environment,
// spills what is above it, and names the variable when that is in the way.
func TestLimitFromTheEnvironment(t *testing.T) {
	const limit = 512 << 10
	t.Setenv("SPILLWAY_GPU_MEMORY_LIMIT", "512Ki")
	run := openRun(t, quotaConfig(t, nil))
	defer closeEngine(t, run.eng)
	if c := gpuOf(t, run.eng).Capacity; c != limit {
		t.Errorf("the space has %d bytes with a limit of %d", c, limit)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	rng := rand.New(rand.NewPCG(1, 2))
	for range 40 {
		if err := run.put(ctx, rng, 0); err != nil {
			t.Fatal(err)
		}
	}
	_, err := run.eng.Reservations().TryReserve(reservation.AnyInTier(tier.GPU), limit+1, nil)
	if !errors.Is(err, reservation.ErrExceeded) || !strings.Contains(err.Error(), "SPILLWAY_GPU_MEMORY_LIMIT") {
		t.Errorf("more than the limit: %v", err)
	}
	drainAll(ctx, t, run, tier.GPU)
	if s := run.eng.Stats().Quota; s == nil || s.Peak > limit || s.Peak < limit/2 || s.Limit != limit ||
		s.Name != "SPILLWAY_GPU_MEMORY_LIMIT" {
		t.Errorf("%+v", s)
	}
}

// TestSizeUnderQuotas: what a space is opened with.
func TestSizeUnderQuotas(t *testing.T) {
	for name, c := range map[string]struct {
		settings quota.Settings
		gpus     int
		size     int64
		limit    int64 // 0: no quota
	}{
		"none": {gpus: 1, size: 8 * mib},
		"less than the GPU": {settings: quota.Settings{Limit: limitOf(t, "2Mi")}, gpus: 1, size: 2 * mib,
			limit: 2 * mib},
		"more than the GPU": {settings: quota.Settings{Limit: limitOf(t, "16Mi")}, gpus: 1, size: 8 * mib,
			limit: 16 * mib},
		"a share": {settings: quota.Settings{Limit: limitOf(t, "25%")}, gpus: 1, size: 2 * mib,
			limit: 2 * mib},
		"a share of two": {settings: quota.Settings{Limit: limitOf(t, "25%")}, gpus: 2, size: 4 * mib,
			limit: 4 * mib},
		"physical":           {settings: quota.Settings{Physical: 3 * mib}, gpus: 1, size: 3 * mib},
		"more than is there": {settings: quota.Settings{Physical: 100 * mib}, gpus: 1, size: 8 * mib},
		"a share of that": {settings: quota.Settings{Physical: 4 * mib, Limit: limitOf(t, "50%")}, gpus: 1,
			size: 2 * mib, limit: 2 * mib},
		"a ratio below 1": {settings: quota.Settings{Ratio: big.NewRat(1, 2)}, gpus: 1, size: 4 * mib,
			limit: 4 * mib},
		"a ratio above 1": {settings: quota.Settings{Ratio: big.NewRat(2, 1)}, gpus: 1, size: 8 * mib},
		"oversubscribed, limited": {settings: quota.Settings{Ratio: big.NewRat(2, 1), Limit: limitOf(t, "16Mi")}, gpus: 1,
			size: 8 * mib, limit: 16 * mib},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := quotaConfig(t, &c.settings)
			cfg.GPUs = nil
			for range c.gpus {
				cfg.GPUs = append(cfg.GPUs, spillway.GPUConfig{Memory: spillway.Bytes(8 * mib)})
			}
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer closeEngine(t, eng)
			if got := gpuOf(t, eng).Capacity; got != c.size {
				t.Errorf("the space has %d bytes; want %d", got, c.size)
			}
			limit := int64(0)
			if q := eng.Quota(); q != nil {
				limit = q.Stats().Limit
			}
			if limit != c.limit {
				t.Errorf("the limit is %d; want %d", limit, c.limit)
			}
			cut := slices.ContainsFunc(eng.Warnings(), func(w diag.Warning) bool { return w.Cause == causes.GPUSize })
			if want := c.size < 8*mib; cut != want {
				t.Errorf("a warning of the size is %v; want %v", cut, want)
			}
		})
	}
}

// coarseDevice is a device that allocates in multiples of granule.
type coarseDevice struct {
	tier.Device
	granule int64
}

func (d coarseDevice) Charge(n int64) int64 { return (n + d.granule - 1) / d.granule * d.granule }

// TestGPUSizeWarning: a size that is only rounded, to pages or to the device's granule, is not
// worth a warning; a size that is not granted is.
func TestGPUSizeWarning(t *testing.T) {
	const (
		mib     = 1 << 20
		granule = 64 << 10
	)
	coarse := func(memory int64) spillway.GPUConfig {
		return spillway.GPUConfig{Open: func(context.Context, int64) (tier.Device, error) {
			return coarseDevice{openSim(t, memory), granule}, nil
		}}
	}
	for name, c := range map[string]struct {
		gpu    spillway.GPUConfig
		asked  int64
		quota  int64 // 0: none
		budget int64 // 0: none
		size   int64
		warns  bool
	}{
		"simulated":               {asked: 8*mib + 255, size: 8 * mib},
		"whole pages":             {asked: 8 * mib, size: 8 * mib},
		"a quota below by a byte": {asked: 8 * mib, quota: 8*mib - 1, size: 8*mib - 1},
		"by less than a page":     {asked: 8 * mib, quota: 8*mib - tier.Page + 1, size: 8*mib - tier.Page + 1},
		"by a page":               {asked: 8 * mib, quota: 8*mib - tier.Page, size: 8*mib - tier.Page, warns: true},
		"a budget below by bytes": {asked: 8 * mib, budget: 8*mib - 100, size: 8*mib - 100},
		"a budget by a page":      {asked: 8 * mib, budget: 8*mib - tier.Page, size: 8*mib - tier.Page, warns: true},
		"less than a granule":     {gpu: coarse(8 * mib), asked: 8*mib + granule - 1, size: 8 * mib},
		"a granule":               {gpu: coarse(8 * mib), asked: 8*mib + granule, size: 8 * mib, warns: true},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := quotaConfig(t, &quota.Settings{Limit: spillway.Bytes(c.quota)})
			c.gpu.Memory = spillway.Bytes(c.asked)
			cfg.GPUs = []spillway.GPUConfig{c.gpu}
			if c.budget > 0 {
				b, err := quota.NewBudget(c.budget, "test")
				if err != nil {
					t.Fatal(err)
				}
				cfg.Limits.Budgets = []*quota.Budget{b}
			}
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer closeEngine(t, eng)
			if got := gpuOf(t, eng).Capacity; got != c.size {
				t.Errorf("the space has %d bytes; want %d", got, c.size)
			}
			if got := warningsOf(eng.Warnings(), causes.GPUSize) > 0; got != c.warns {
				t.Errorf("a warning of the size is %v; want %v: %v", got, c.warns, eng.Warnings())
			}
		})
	}
}

func TestOpenRefusesQuotas(t *testing.T) {
	shared, err := quota.New(quota.Config{Limit: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		env      string
		settings *quota.Settings
		shared   *quota.Quota
		says     string
	}{
		"environment":    {env: "SPILLWAY_GPU_MEMORY_LIMIT=5m", says: `"5m"`},
		"the other name": {env: "NVSHARE_GPU_MEMORY_OVERSUB_RATIO=NaN", says: `"NaN"`},
		"set to nothing": {env: "SPILLWAY_GPU_MEMORY_LIMIT=", says: "SPILLWAY_GPU_MEMORY_LIMIT"},
		"settings":       {settings: &quota.Settings{Physical: -1}, says: "negative"},
		"two limits":     {settings: &quota.Settings{Limit: limitOf(t, "1Mi")}, shared: shared, says: "both"},
		"more than advertised": {settings: &quota.Settings{Limit: limitOf(t, "5Mi"), Ratio: big.NewRat(1, 2)},
			says: "advertised"},
		"less than a byte": {settings: &quota.Settings{Ratio: big.NewRat(1, 1<<30)}, says: "less than a byte"},
		"less than a page": {settings: &quota.Settings{Limit: limitOf(t, "1")},
			says: "no memory free for a page of 4096 bytes"},
		"a share too small":  {settings: &quota.Settings{Limit: limitOf(t, "0.0000001%"), Source: "here"}, says: "here"},
		"a ledger in a file": {settings: &quota.Settings{Ledger: os.Args[0]}, says: "ledger"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.env != "" {
				variable, value, _ := strings.Cut(c.env, "=")
				t.Setenv(variable, value)
			}
			cfg := quotaConfig(t, c.settings)
			cfg.Limits.SharedQuota = c.shared
			eng, err := spillway.Open(t.Context(), cfg)
			if err == nil {
				closeEngine(t, eng)
				t.Fatal("want an error")
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v; want it to say %s", err, c.says)
			}
		})
	}
	t.Setenv("SPILLWAY_GPU_MEMORY_LIMIT", "nonsense")
	eng, err := spillway.Open(t.Context(), quotaConfig(t, &quota.Settings{}))
	if err != nil {
		t.Fatalf("a program that wants no limit is not to be told by the environment: %v", err)
	}
	if eng.Quota() != nil {
		t.Error("there is a limit")
	}
	closeEngine(t, eng)
}

// TestQuotaLoweredWhileRunning: nothing is revoked, what is new is refused, one event reports it,
// and the monitor moves down what is above, without a waiter.
func TestQuotaLoweredWhileRunning(t *testing.T) {
	var log bytes.Buffer
	var exceeded []spillway.Event
	var mu sync.Mutex
	cfg := quotaConfig(t, &quota.Settings{Limit: limitOf(t, "4Mi"), Source: "the test"})
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	cfg.HostMemory = spillway.Bytes(16 << 20)
	cfg.Events = on(events.QuotaExceeded, func(e spillway.Event) {
		mu.Lock()
		defer mu.Unlock()
		exceeded = append(exceeded, e)
	})
	run := openRun(t, cfg)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	rng := rand.New(rand.NewPCG(1, 2))
	gpu := gpuOf(t, run.eng)
	for gpu.State().Used() < 2<<20 {
		if err := run.put(ctx, rng, 0); err != nil {
			t.Fatal(err)
		}
	}
	before := gpu.State().Used()
	if err := run.eng.Quota().SetLimit(1 << 20); err != nil {
		t.Fatal(err)
	}
	for gpu.State().Used() > 1<<20 {
		if ctx.Err() != nil {
			t.Fatalf("%d bytes are in use still, with a limit of %d", gpu.State().Used(), 1<<20)
		}
		time.Sleep(time.Millisecond)
	}
	if gpu.State().Used() == 0 {
		t.Error("all was moved down, not what is above the limit")
	}
	drainAll(ctx, t, run, tier.GPU)
	closeEngine(t, run.eng)
	if len(exceeded) != 1 || exceeded[0].Limit != 1<<20 || exceeded[0].Bytes > before || exceeded[0].Bytes <= 1<<20 ||
		exceeded[0].To != gpu.ID() || exceeded[0].Text != "the test" {
		t.Errorf("events: %v", exceeded)
	}
	if n := strings.Count(log.String(), "more GPU memory is in use than its quota allows"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log.String())
	}
}

// sameNumbers reports whether two events are of the same kind and space, with the same numbers.
func sameNumbers(a, b spillway.Event) bool {
	return a.Kind == b.Kind && a.To == b.To && a.Bytes == b.Bytes && a.Limit == b.Limit
}

// TestExceededQuotaIsOneEvent: each time that a limit is lowered below the bytes in use is one
// event, of the engine's own quota and of one that engines share, in each of them. Lowering the
// limit again while it is exceeded is none. A closed engine emits none.
func TestExceededQuotaIsOneEvent(t *testing.T) {
	shared, err := quota.New(quota.Config{Limit: 1 << 20, Name: "shared"})
	if err != nil {
		t.Fatal(err)
	}
	for name, gpus := range map[string]int{"own": 1, "own, of two GPUs": 2, "shared": 1} {
		t.Run(name, func(t *testing.T) {
			var got []spillway.Event
			eng, err := callbackEngine(t, func(c *spillway.Config) {
				c.GPUs = slices.Repeat(c.GPUs, gpus)
				c.Limits.Quota = &quota.Settings{Limit: limitOf(t, "1Mi"), Source: "own"}
				if name == "shared" {
					c.Limits.Quota, c.Limits.SharedQuota = &quota.Settings{}, shared
				}
				c.Events = on(events.QuotaExceeded, func(e spillway.Event) { got = append(got, e) })
			})
			if err != nil {
				t.Fatal(err)
			}
			q := eng.Quota()
			set := func(limit int64) {
				t.Helper()
				if err := q.SetLimit(limit); err != nil {
					t.Fatal(err)
				}
			}
			// A reservation, which the monitor cannot move.
			gpu := tier.ID{Kind: tier.GPU}
			r, err := eng.Reserve(t.Context(), reservation.Specific(gpu), 256<<10)
			if err != nil {
				t.Fatal(err)
			}
			if gpus > 1 {
				gpu = tier.ID{}
			}
			used := q.Stats().Used
			for _, limit := range []int64{used, used - 1, used / 2, used, used / 4} {
				set(limit)
			}
			var want []spillway.Event
			for _, limit := range []int64{used - 1, used / 4} {
				want = append(want, spillway.Event{Kind: events.QuotaExceeded, To: gpu, Bytes: used, Limit: limit})
			}
			if !slices.EqualFunc(got, want, sameNumbers) {
				t.Errorf("the events are %v, want %v", got, want)
			}
			for _, e := range got {
				if e.Text != q.Stats().Name || e.Context == nil || e.At.IsZero() {
					t.Errorf("%+v lacks something", e)
				}
			}
			if err := r.Release(); err != nil {
				t.Error(err)
			}
			closeEngine(t, eng)
			member := q.Member()
			if err := member.Charge(1000); err != nil {
				t.Fatal(err)
			}
			set(1)
			member.Credit(1000)
			set(1 << 20)
			if len(got) != len(want) {
				t.Errorf("a closed engine emits %v", got[len(want):])
			}
		})
	}
}

// lines keeps what is logged, by several goroutines.
type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// TestRemovedLedgerIsTold: when the files of a ledger are removed under an engine it goes on, and
// warns of it once.
func TestRemovedLedgerIsTold(t *testing.T) {
	if runtime.GOOS != "linux" && runtime.GOOS != "darwin" {
		t.Skip("needs Linux or darwin, for locked files")
	}
	dir := filepath.Join(t.TempDir(), "ledger")
	var log lines
	cfg := quotaConfig(t, &quota.Settings{Ledger: dir})
	cfg.Logger = slog.New(slog.NewTextHandler(&log, nil))
	run := openRun(t, cfg)
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2 {
		files, err := filepath.Glob(filepath.Join(dir, "*", "*"))
		if err != nil || len(files) == 0 {
			t.Fatal(files, err)
		}
		for _, f := range files {
			if err := os.Remove(f); err != nil {
				t.Fatal(err)
			}
		}
		for lost := run.eng.Leases()[0].Lost(); run.eng.Leases()[0].Lost() == lost; {
			if err := run.put(t.Context(), rng, 0); err != nil {
				t.Fatal(err)
			}
		}
	}
	ledger := func(w diag.Warning) bool { return w.Cause == causes.Ledger && strings.HasPrefix(w.Space, "gpu:") }
	if w := run.eng.Warnings(); len(slices.DeleteFunc(w, func(w diag.Warning) bool { return !ledger(w) })) != 1 {
		t.Errorf("warnings: %v", run.eng.Warnings())
	}
	drainAll(t.Context(), t, run, tier.GPU)
	closeEngine(t, run.eng)
	if n := strings.Count(log.String(), "were removed while processes use it"); n != 1 {
		t.Errorf("%d warnings:\n%s", n, log.String())
	}
}

// TestEnginesShareALimit: engines under one quota, or in one group of a ledger, never
// take more than it together, and lose nothing.
func TestEnginesShareALimit(t *testing.T) {
	t.Parallel()
	seed := testseed.One(t)
	const limit = 1 << 20
	shared, err := quota.New(quota.Config{Limit: limit})
	if err != nil {
		t.Fatal(err)
	}
	ledger := filepath.Join(t.TempDir(), "ledger")
	for name, c := range map[string]struct {
		config func(*spillway.Config)
		held   func(runs []*randomRun) int64
	}{
		"a quota": {
			config: func(cfg *spillway.Config) { cfg.Limits.SharedQuota = shared },
			held:   func([]*randomRun) int64 { return shared.Stats().Used },
		},
		"a ledger": {
			config: func(cfg *spillway.Config) {
				cfg.Limits.Quota = &quota.Settings{Limit: limitOf(t, "1Mi"), Ledger: ledger, Group: "g"}
			},
			held: func(runs []*randomRun) int64 { return runs[0].eng.Leases()[0].Live() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // only a hang takes so long
			defer cancel()
			var runs []*randomRun
			for range 2 {
				cfg := quotaConfig(t, nil)
				c.config(&cfg)
				runs = append(runs, openRun(t, cfg))
			}
			var wg sync.WaitGroup
			for i, run := range runs {
				for w := range 4 {
					wg.Go(func() {
						rng := rand.New(rand.NewPCG(seed+uint64(i), uint64(w)))
						for op := range testseed.Rounds(100, 30) {
							err := run.step(ctx, rng)
							// What the other engine keeps there, this one cannot make room for.
							if err != nil && !errors.Is(err, tier.ErrNoSpace) {
								t.Errorf("engine %d, worker %d, operation %d: %v", i, w, op, err)
								cancel()
								return
							}
							if n := c.held(runs); n > limit {
								t.Errorf("%d bytes are held, of %d", n, limit)
							}
						}
					})
				}
			}
			wg.Wait()
			if t.Failed() {
				return
			}
			for _, run := range runs {
				drainAll(ctx, t, run, tier.Host)
			}
			for _, run := range runs {
				closeEngine(t, run.eng)
			}
		})
	}
	if n := shared.Stats(); n.Used != 0 || n.Peak > limit || n.Peak < limit/2 {
		t.Errorf("the quota ends with %+v", n)
	}
	if held, err := leases.Holders(ledger); err != nil || len(held) != 0 {
		t.Errorf("the ledger ends with %v, %v", held, err)
	}
}

// TestLedgerHeldByAnotherEngine: what one engine holds of a ledger is seen by others, is
// not there for them, and is when it closes.
func TestLedgerHeldByAnotherEngine(t *testing.T) {
	settings := &quota.Settings{Limit: limitOf(t, "1Mi"), Ledger: filepath.Join(t.TempDir(), "ledger"), Group: "g"}
	one := openRun(t, quotaConfig(t, settings))
	two := openRun(t, quotaConfig(t, settings))
	defer closeEngine(t, two.eng)
	gpu := reservation.AnyInTier(tier.GPU)
	r, err := one.eng.Reservations().TryReserve(gpu, 800<<10, nil)
	if err != nil {
		t.Fatal(err)
	}
	held, err := leases.Holders(settings.Ledger)
	if err != nil || len(held) != 2 || held[0].Live+held[1].Live != 800<<10 || held[0].Quota != 1<<20 ||
		held[0].PID != os.Getpid() {
		t.Fatalf("%+v, %v", held, err)
	}
	if _, err := two.eng.Reservations().TryReserve(gpu, 300<<10, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("%v", err)
	}
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	closeEngine(t, one.eng)
	if r, err = two.eng.Reservations().TryReserve(gpu, 900<<10, nil); err != nil {
		t.Fatal(err)
	}
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
}
