// Package contend is what spillbench reserve does: it measures how fast bytes are
// reserved and released, by one goroutine and by many, beside what a program
// would use that has no manager, golang.org/x/sync's weighted semaphore.
//
//	Run ── alone        one goroutine, nobody in its way
//	    ── contended    goroutines × scenarios, pairs of rounds: manager, semaphore, semaphore, manager, …
//	    ── waiters      what a release takes while a crowd waits
//
// Both sides do the same: each goroutine acquires one unit and releases it at once.
// The bytes are of a space whose pool allocates nothing, so the manager and its
// ledger are measured, and no memory. Run owns all goroutines that it starts and
// returns when they have ended. The package takes no locks.
package contend

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/racemark"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// Unit is what a request takes: a page of a large image, as moves ask for.
const Unit = 64 << 10

// Crowd returns the most waiters that spillbench measures, and how many releases a round of a
// crowd has: long against a clock's step, and short beside the coming of the largest crowd. A
// build with checks is no measurement, and the race detector ends a program with more than 8128
// goroutines, so it has less of both.
func Crowd() (largest, releases int) {
	if invariants.Enabled || racemark.Enabled {
		return 1000, 50
	}
	return 100_000, 1000
}

// roomy is a space in which all fit at once, with room to spare.
const roomy = 1 << 30

// Config says what is measured; all fields but Progress are required, and above 0.
type Config struct {
	Goroutines int           // that contend; at most roomy/Unit fit at once
	Rounds     int           // pairs of rounds in each scenario
	Duration   time.Duration // of a round
	Waiters    []int         // sizes of the crowds
	Releases   int           // in a round of a crowd
	Progress   Progress      // may be nil
}

// Progress is called as the measurement advances.
type Progress interface {
	Begin(phase string, steps int64)
	Step()
}

type silent struct{}

func (silent) Begin(string, int64) {}
func (silent) Step()               {}

// Result is what was measured: figures, and the samples that they are made of, one a round in the
// order of the rounds.
type Result struct {
	UncontendedNs          float64 // reserve and release, by one goroutine
	SemaphoreUncontendedNs float64
	AllocsPerOp            float64 // of the manager's, on the Go heap
	Contended              []Contended
	Waiters                []Waiters
	Samples                Samples
}

// Samples are what one goroutine took, in ns.
type Samples struct{ UncontendedNs, SemaphoreUncontendedNs []float64 }

// ContendedSamples are rates.
type ContendedSamples struct{ OpsPerS, SemaphoreOpsPerS []float64 }

// WaitersSamples are times in ns. Calls and turns are measured in rounds of their own.
type WaitersSamples struct{ NsPerRelease, SemaphoreNsPerRelease, NsPerTurn, SemaphoreNsPerTurn []float64 }

// Contended is one scenario. Rates are medians; the ratio is the median of the
// pairs' ratios, so that what disturbs the machine for a while disturbs both sides.
type Contended struct {
	Scenario           string
	OpsPerS            float64
	SemaphoreOpsPerS   float64
	Ratio              float64
	RatioMin, RatioMax float64 // of the pairs
	Samples            ContendedSamples
}

// Waiters is a crowd: what the call that releases takes, and what a whole turn does:
// until the next one has what is released.
type Waiters struct {
	Waiters               int
	NsPerRelease          float64
	SemaphoreNsPerRelease float64
	NsPerTurn             float64
	SemaphoreNsPerTurn    float64
	Samples               WaitersSamples
}

// scenarios are how many fit at once; 0 is all.
var scenarios = []struct {
	name  string
	slots int64
}{{"fits", 0}, {"8-slots", 8}, {"1-slot", 1}}

// Run measures. It ends soon after ctx does, with its error.
func Run(ctx context.Context, cfg Config) (res Result, err error) {
	if cfg.Progress == nil {
		cfg.Progress = silent{}
	}
	if err := cfg.validate(); err != nil {
		return res, err
	}
	if err := measureAlone(ctx, cfg, &res); err != nil {
		return res, err
	}
	for _, s := range scenarios {
		capacity := s.slots * Unit
		if s.slots == 0 {
			capacity = roomy
		}
		cfg.Progress.Begin(s.name, int64(2*cfg.Rounds))
		c, err := measureContended(ctx, cfg, capacity)
		if err != nil {
			return res, fmt.Errorf("%s: %w", s.name, err)
		}
		c.Scenario = s.name
		res.Contended = append(res.Contended, c)
	}
	for _, n := range cfg.Waiters {
		cfg.Progress.Begin(fmt.Sprintf("%d waiters", n), int64(4*cfg.Rounds))
		w, err := measureWaiters(ctx, cfg, n)
		if err != nil {
			return res, fmt.Errorf("%d waiters: %w", n, err)
		}
		res.Waiters = append(res.Waiters, w)
	}
	return res, nil
}

func (c Config) validate() error {
	if c.Goroutines < 1 || c.Goroutines > roomy/Unit || c.Rounds < 1 || c.Duration <= 0 || c.Releases < 1 {
		return fmt.Errorf("contend: cannot measure %d goroutines in %d rounds of %v or %d releases", c.Goroutines, c.Rounds, c.Duration, c.Releases)
	}
	for _, n := range c.Waiters {
		if n < 1 {
			return fmt.Errorf("contend: a crowd of %d", n)
		}
	}
	return nil
}

// gpu is where the bytes are: any space is like any other here. The strategy is
// made once, as a program makes its own.
var gpu = tier.ID{Kind: tier.GPU}

// bench is a manager of one space.
type bench struct {
	space    *tier.Space
	manager  *reservation.Manager
	strategy reservation.Strategy
}

func newBench(capacity int64) (*bench, error) {
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: gpu, Capacity: capacity, Node: -1, Backend: "none", Pool: numbers{}, Fractions: tier.Fractions{Limit: 1},
	})
	if err != nil {
		return nil, err
	}
	m, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{s}})
	if err != nil {
		return nil, err
	}
	return &bench{s, m, reservation.Specific(gpu)}, nil
}

func (b *bench) acquire(ctx context.Context) (reservation.Reservation, error) {
	return b.manager.Reserve(ctx, b.strategy, Unit)
}

// once reserves and releases.
func (b *bench) once(ctx context.Context) error {
	r, err := b.acquire(ctx)
	if err != nil {
		return err
	}
	return r.Release()
}

// close checks that all was given back: a fast ledger that loses bytes is none.
func (b *bench) close() error {
	err := errors.Join(b.manager.Close(), b.space.Close())
	if u := b.space.Usage(); u.Used() != 0 {
		err = errors.Join(err, fmt.Errorf("%s: %d bytes are left of what was reserved", b.space.ID(), u.Used()))
	}
	return err
}

// onSemaphore is the same work on a semaphore.
func onSemaphore(sem *semaphore.Weighted) func(context.Context) error {
	return func(ctx context.Context) error {
		if err := sem.Acquire(ctx, Unit); err != nil {
			return err
		}
		sem.Release(Unit)
		return nil
	}
}

// numbers is a tier.Pool that has no memory.
type numbers struct{}

func (numbers) Charge(size int64) int64 { return size }

func (numbers) Alloc(size int64, _ []int64) (tier.Memory, error) {
	return nil, fmt.Errorf("contend: %d bytes of a pool without memory: %w", size, tier.ErrNotSupported)
}

func (numbers) Free(_ tier.Memory, reclaimed func()) { reclaimed() }

func (numbers) Close() error { return nil }

// median returns the middle of v, which stays as it is.
func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	if n := len(v); n%2 == 0 {
		return (v[n/2-1] + v[n/2]) / 2
	}
	return v[len(v)/2]
}
