package contend

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"
)

// TestMain fails when a measurement leaves a goroutine behind.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > before && code == 0 {
		fmt.Fprintf(os.Stderr, "%d goroutines are left of %d\n", n, before)
		code = 1
	}
	os.Exit(code)
}

func small() Config {
	return Config{Goroutines: 4, Rounds: 3, Duration: time.Millisecond, Waiters: []int{1, 50}, Releases: 20}
}

// steps counts what a measurement tells, and can end it at a step.
type steps struct {
	begun    []string
	promised int64
	done     atomic.Int64
	at       int64
	then     func()
}

func (s *steps) Begin(phase string, n int64) {
	s.begun = append(s.begun, phase)
	s.promised += n
}

func (s *steps) Step() {
	if s.done.Add(1) == s.at {
		s.then()
	}
}

// TestRun: all figures are there, and all that was promised was done.
func TestRun(t *testing.T) {
	var s steps
	cfg := small()
	cfg.Progress = &s
	res, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"alone", "fits", "8-slots", "1-slot", "1 waiters", "50 waiters"}; !slices.Equal(s.begun, want) {
		t.Errorf("phases are %q; want %q", s.begun, want)
	}
	if s.done.Load() != s.promised {
		t.Errorf("%d steps of %d", s.done.Load(), s.promised)
	}
	if res.UncontendedNs <= 0 || res.SemaphoreUncontendedNs <= 0 || len(res.Contended) != 3 || len(res.Waiters) != 2 {
		t.Errorf("%+v", res)
	}
	for _, c := range res.Contended {
		if c.OpsPerS <= 0 || c.SemaphoreOpsPerS <= 0 || c.RatioMin > c.Ratio || c.Ratio > c.RatioMax || c.RatioMin <= 0 {
			t.Errorf("%+v", c)
		}
	}
	for i, w := range res.Waiters {
		if w.Waiters != cfg.Waiters[i] || w.NsPerRelease <= 0 || w.SemaphoreNsPerRelease <= 0 || w.NsPerTurn <= 0 || w.SemaphoreNsPerTurn <= 0 {
			t.Errorf("%+v", w)
		}
	}
}

// TestSenseless: what cannot be measured is an error, and not a hang.
func TestSenseless(t *testing.T) {
	for _, change := range []func(*Config){
		func(c *Config) { c.Goroutines = 0 },
		func(c *Config) { c.Goroutines = roomy/Unit + 1 },
		func(c *Config) { c.Rounds = 0 },
		func(c *Config) { c.Duration = 0 },
		func(c *Config) { c.Releases = 0 },
		func(c *Config) { c.Waiters = []int{0} },
	} {
		cfg := small()
		change(&cfg)
		if _, err := Run(t.Context(), cfg); err == nil {
			t.Errorf("%+v was measured", cfg)
		}
	}
}

// TestInterrupted: wherever it is cancelled it ends with the context's error; the
// rounds would take hours.
func TestInterrupted(t *testing.T) {
	cfg := small()
	cfg.Duration = 20 * time.Microsecond // most rounds only lead to the step
	all := int64(2 * cfg.Rounds * (1 + len(scenarios) + 2*len(cfg.Waiters)))
	for at := int64(0); at < all; at += 3 { // each phase more than once
		ctx, cancel := context.WithCancel(t.Context())
		s := steps{at: at, then: cancel}
		cfg.Progress = &s
		if at == 0 {
			cancel()
		}
		if _, err := Run(ctx, cfg); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled at step %d of %d: %v", at, all, err)
		}
		cancel()
	}
	ctx, cancel := context.WithCancel(t.Context())
	op := func(context.Context) error {
		cancel()
		return nil
	}
	if _, err := together(ctx, 2, time.Hour, op); !errors.Is(err, context.Canceled) {
		t.Errorf("a round of an hour: %v", err)
	}
}

// TestFailedOperation: a round ends with the first error, whoever had it.
func TestFailedOperation(t *testing.T) {
	cause := errors.New("no more")
	var n atomic.Int64
	_, err := together(t.Context(), 8, time.Hour, func(ctx context.Context) error {
		if n.Add(1) == 1000 {
			return cause
		}
		return ctx.Err() // the others', which must not hide it
	})
	if !errors.Is(err, cause) {
		t.Errorf("%v", err)
	}
	if _, _, err := alone(t.Context(), time.Hour, func(context.Context) error { return cause }); !errors.Is(err, cause) {
		t.Errorf("%v", err)
	}
}

// TestLostBytesAreFound: a bench whose books are not empty at the end says so.
func TestLostBytesAreFound(t *testing.T) {
	b, err := newBench(roomy)
	if err != nil {
		t.Fatal(err)
	}
	r, err := b.acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := b.close(); err == nil {
		t.Error("a unit was lost and nobody noticed")
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
}

// TestAllocationsAreCounted: those of the operation, and no others.
func TestAllocationsAreCounted(t *testing.T) {
	var keep []*[64]byte
	_, allocs, err := alone(t.Context(), 5*time.Millisecond, func(context.Context) error {
		keep = []*[64]byte{new([64]byte), new([64]byte)} // and the slice itself
		return nil
	})
	if err != nil || allocs < 3 || allocs > 3.5 {
		t.Errorf("%v allocations, %v", allocs, err)
	}
	runtime.KeepAlive(keep)
}

func TestMedian(t *testing.T) {
	for want, v := range map[float64][]float64{3: {3}, 2: {3, 1, 2}, 2.5: {4, 1, 3, 2}} {
		if got := median(v); got != want {
			t.Errorf("%v; want %v", got, want)
		}
	}
}
