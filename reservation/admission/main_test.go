package admission_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/tier"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	for end := time.Now().Add(5 * time.Second); code == 0 && runtime.NumGoroutine() > before; runtime.Gosched() {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<20)
			fmt.Fprintf(os.Stderr, "goroutines were left behind:\n%s\n", stacks[:runtime.Stack(stacks, true)])
			code = 1
		}
	}
	os.Exit(code)
}

// pool is memory that is only counted, in units of grain bytes, and may be lost.
type pool struct {
	grain int64
	*devpool.Loss
	charging func(n int64) // may be nil
}

type mem int64

func (m mem) Size() int64 { return int64(m) }

func (p pool) Charge(n int64) int64 {
	if p.charging != nil {
		p.charging(n)
	}
	return (n + p.grain - 1) / p.grain * p.grain
}

func (p pool) Alloc(n int64, _ []int64) (tier.Memory, error) { return mem(n), nil }
func (p pool) Free(_ tier.Memory, reclaimed func())          { reclaimed() }
func (p pool) Close() error                                  { return nil }

// world is an admitter over GPUs of some capacity. Limits are the capacities.
type world struct {
	*admission.Admitter
	t    testing.TB
	m    *reservation.Manager
	gpus []*tier.Space
}

type setup struct {
	gpus  int
	cap   int64 // of each
	limit float64
	grain int64
	host  bool // a slower space, as large

	charging func(n int64) // is called each time that a size's charge is requested
	admission.Config
	manager reservation.Config
	changed func() // is called after a space's release, by it, before the admitter's listener
}

func newWorld(t testing.TB, c setup) *world {
	t.Helper()
	w := &world{t: t}
	if c.limit == 0 {
		c.limit = 1
	}
	for i := range max(1, c.gpus) {
		s, err := tier.NewSpace(tier.SpaceConfig{
			ID: tier.ID{Kind: tier.GPU, Ordinal: i}, Capacity: c.cap, Node: -1,
			Pool:  pool{max(1, c.grain), new(devpool.Loss), c.charging},
			Marks: tier.Marks{Limit: c.limit, Trigger: c.limit, Stop: c.limit / 2}, Hint: "a larger GPU",
		})
		if err != nil {
			t.Fatal(err)
		}
		w.gpus = append(w.gpus, s)
	}
	c.manager.Spaces = slices.Clone(w.gpus)
	if c.host {
		host, err := tier.NewSpace(tier.SpaceConfig{
			ID: tier.ID{Kind: tier.Host}, Capacity: c.cap, Node: -1, Pool: pool{1, new(devpool.Loss), nil},
		})
		if err != nil {
			t.Fatal(err)
		}
		c.manager.Spaces = append(c.manager.Spaces, host)
	}
	var err error
	if w.m, err = reservation.NewManager(c.manager); err != nil {
		t.Fatal(err)
	}
	for _, s := range w.gpus {
		if c.changed != nil {
			t.Cleanup(onRelease(s, c.changed))
		}
	}
	c.Reservations = w.m
	if c.Rules.Threads == 0 {
		c.Rules.Threads = 100
	}
	if w.Admitter, err = admission.New(c.Config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
		if err := w.m.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
		if s := w.Stats(); s.Running != 0 || s.Waiting != 0 {
			t.Errorf("at the end: %+v", s)
		}
		for _, s := range w.gpus {
			if s.State().Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID(), s.State().Usage)
			}
		}
	})
	return w
}

// onRelease calls f after each release of the space's bytes and each change of its limit.
func onRelease(s *tier.Space, f func()) (cancel func()) {
	return s.Subscribe(func(aboveTrigger bool) {
		if !aboveTrigger {
			f()
		}
	})
}

// with is a configuration with rules.
func with(r admission.Rules) admission.Config { return admission.Config{Rules: r} }

// exactly is a guess of n bytes.
func exactly(n int64) admission.Estimate {
	return admission.Estimate{Output: admission.None, Overhead: admission.None, Least: n}
}

// call is an Admit under way.
type call struct {
	t      testing.TB
	cancel context.CancelCauseFunc
	done   chan struct{}
	g      *admission.Grant
	err    error
}

func (w *world) admit(e admission.Estimate) *call {
	ctx, cancel := context.WithCancelCause(context.Background())
	c := &call{t: w.t, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.g, c.err = w.Admit(ctx, e)
	}()
	return c
}

func (c *call) over() bool {
	synctest.Wait()
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *call) waits() {
	c.t.Helper()
	if c.over() {
		c.t.Fatalf("the task does not wait: %+v, %v", c.g, c.err)
	}
}

func (c *call) runs() *admission.Grant {
	c.t.Helper()
	if !c.over() {
		c.t.Fatal("the task waits still")
	}
	if c.err != nil {
		c.t.Fatal(c.err)
	}
	return c.g
}

func (c *call) fails(want error) error {
	c.t.Helper()
	if !c.over() {
		c.t.Fatal("the task waits still")
	}
	if !errors.Is(c.err, want) {
		c.t.Fatalf("the task ended with %v, want %v", c.err, want)
	}
	return c.err
}

func (w *world) end(gs ...*admission.Grant) {
	w.t.Helper()
	for _, g := range gs {
		if err := g.Release(); err != nil {
			w.t.Error(err)
		}
	}
}

func (w *world) used(want int64) {
	w.t.Helper()
	synctest.Wait()
	if got := w.gpus[0].State().Used(); got != want {
		w.t.Errorf("%d bytes are used, want %d", got, want)
	}
}

// inputs are inputs of which some bytes are in each GPU.
type inputs struct {
	bytes int64
	there map[tier.ID]int64
	look  func() // called by in; may be nil
}

// in is an Estimate's Inputs.
func (in *inputs) in(s *tier.Space) (there, missing int64) {
	if in.look != nil {
		in.look()
	}
	there = in.there[s.ID()]
	return there, in.bytes - there
}

// of is e with the inputs.
func (in *inputs) of(e admission.Estimate) admission.Estimate {
	e.Input, e.Inputs = in.bytes, in.in
	return e
}

// whenUsed returns a function that calls f once, when at least so many bytes of the first GPU are
// used: for a task that looks at its inputs, when its bytes are reserved but it has not started.
func (w *world) whenUsed(bytes int64, f func()) func() {
	var once sync.Once
	return func() {
		if w.gpus[0].State().Used() >= bytes {
			once.Do(f)
		}
	}
}

// outOfAttempts reports whether a task ran out of memory as often as it may.
func outOfAttempts(err error) bool {
	_, is := errors.AsType[*admission.AttemptsError](err)
	return is
}
