package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// on calls f for events of a kind.
func on(kind events.Kind, f func(spillway.Event)) func(spillway.Event) {
	return func(e spillway.Event) {
		if e.Kind == kind {
			f(e)
		}
	}
}

// badPolicy panics at each call.
type badPolicy struct{ monitor.Policy }

func (badPolicy) Key(batch.Info) monitor.Key    { panic("no key") }
func (badPolicy) Order(int64, []monitor.Victim) { panic("no order") }

func callbackEngine(t *testing.T, change func(*spillway.Config)) (*spillway.Engine, error) {
	cfg := spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(2 << 20),
		Disks:  []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	change(&cfg)
	return spillway.Open(t.Context(), cfg)
}

// TestPanickingCallbacks: policies and events that panic lose no byte and no batch: more
// than the GPU holds is put, moved down and dropped.
func TestPanickingCallbacks(t *testing.T) {
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.Policy = badPolicy{monitor.PlanOrder()}
		c.Events = func(e spillway.Event) { panic(e.Kind) }
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
	rec := arrowgen.Ints(1, 10000, 1)
	defer rec.Release()
	for range 30 {
		if err := repo.Put(t.Context(), 0, rec); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for h, err := range repo.Drain(t.Context(), 0, tier.GPU) {
		if err != nil {
			t.Fatal(err)
		}
		n++
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if n != 30 {
		t.Errorf("%d of 30 batches came back", n)
	}
	closeEngine(t, eng)
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// badEstimator panics in Observe.
type badEstimator struct{}

func (badEstimator) Estimate(string, int64) (output, overhead int64) { return 0, 0 }

func (badEstimator) Observe(string, admission.Measured) { panic("no estimate") }

// TestPanicsAreInTheConfiguredLog: whichever part of the engine called the function.
func TestPanicsAreInTheConfiguredLog(t *testing.T) {
	log := new(syncBuffer)
	pressed := make(chan struct{})
	var waits atomic.Pointer[context.CancelFunc]
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.Policy = badPolicy{monitor.PlanOrder()}
		c.Events = func(e spillway.Event) {
			if e.Kind == events.PressureRose {
				close(pressed)
			}
			if cancel := waits.Load(); cancel != nil && e.Kind == events.WaitBegun {
				(*cancel)()
			}
			panic(e.Kind)
		}
		c.Limits.Quota = &quota.Settings{Limit: limitOf(t, "1Mi")}
		c.Limits.Admission = admission.Rules{Estimator: badEstimator{}}
		c.Logger = slog.New(slog.NewTextHandler(log, nil))
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"Policy.Key", "Config.Events", "Estimator.Observe"}
	nothing := func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil }
	if err := eng.RunTask(t.Context(), spillway.Task{Operator: "sort", Output: 4096}, nothing); err != nil {
		t.Error(err)
	}
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	p, err := eng.Mover().Ingest(t.Context(), rec, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	b, err := eng.NewBatch(p)
	if err == nil {
		err = eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.GPU))
	}
	if err := errors.Join(err, b.Drop()); err != nil {
		t.Fatal(err)
	}
	gpu := gpuOf(t, eng)
	all, err := eng.Reservations().TryReserve(reservation.Specific(gpu.ID()), gpu.State().Room/4096*4096, nil)
	if err != nil {
		t.Fatal(err)
	}
	<-pressed
	ctx, cancel := context.WithCancel(t.Context())
	waits.Store(&cancel)
	if _, err := eng.Reserve(ctx, reservation.Specific(gpu.ID()), 4096); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that its own subscriber ends: %v", err)
	}
	if err := errors.Join(eng.Quota().SetLimit(4096), all.Release()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng) // which waits for the monitor
	for _, what := range want {
		if !strings.Contains(log.String(), what) {
			t.Errorf("%s is not in the log:\n%s", what, log)
		}
	}
}

// TestPanickingListenersAreInTheConfiguredLog: those of spaces, too.
func TestPanickingListenersAreInTheConfiguredLog(t *testing.T) {
	log := new(syncBuffer)
	eng, err := callbackEngine(t, func(c *spillway.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) })
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range eng.Spaces() {
		cancel := s.Subscribe(func(bool) { panic("told by " + s.ID().String()) })
		free := s.State().Room - s.State().Used()
		r, err := eng.Reservations().TryReserve(reservation.Specific(s.ID()), free/tier.Page*tier.Page, nil)
		if err == nil {
			err = r.Release()
		}
		if err != nil {
			t.Error(err)
		}
		cancel()
		if !strings.Contains(log.String(), "told by "+s.ID().String()) {
			t.Errorf("%s does not write to the log", s.ID())
		}
	}
	closeClean(t, eng)
}

// TestPanickingDeviceFactory: it is an error of Open.
func TestPanickingDeviceFactory(t *testing.T) {
	_, err := callbackEngine(t, func(c *spillway.Config) {
		c.GPUs = []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20), Open: func(context.Context, int64) (tier.Device, error) { panic("no device") }}}
	})
	if err == nil || !strings.Contains(err.Error(), "GPUConfig.Open panicked: no device") {
		t.Errorf("it failed with %v", err)
	}
}

// TestCloseWhileAnEventWaits: an event of the monitor's that waits for room does not hang
// Close, which ends the wait first.
func TestCloseWhileAnEventWaits(t *testing.T) {
	var eng *spillway.Engine
	opened, waits, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	first := true
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.Events = func(e spillway.Event) { // on the monitor's goroutine
			if e.Kind == events.WaitBegun {
				close(waits)
			}
			if e.Kind != events.PressureRose || !first {
				return
			}
			first = false
			<-opened
			full, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.GPU})
			r, err := eng.Reserve(context.Background(), reservation.Specific(full.ID()), full.State().Room/4096*4096)
			ended <- errors.Join(err, r.Release())
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	gpu := gpuOf(t, eng)
	r, err := eng.Reservations().TryReserve(reservation.Specific(gpu.ID()), gpu.State().Room/4096*4096, nil) // over the trigger
	if err != nil {
		t.Fatal(err)
	}
	close(opened)
	<-waits
	var leak *spillway.LeakError
	if err := eng.Close(); !errors.As(err, &leak) {
		t.Errorf("closing: %v", err)
	}
	if err := <-ended; !errors.Is(err, tier.ErrClosed) {
		t.Errorf("the event's wait ended with %v", err)
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
}

// panickyLeases is a program's own form, which panics when it is asked for its leases.
type panickyLeases struct{ ownForm }

func (panickyLeases) Leased() int       { panic("leases") }
func (panickyLeases) OnUnleased(func()) {}

// inItsPlace observes batches in the place of the engine's observer, which it calls.
type inItsPlace struct{ batch.Registrar }

func (o inItsPlace) Unwrap() batch.Observer { return o.Registrar }

// TestPanicsOfPayloadsAreInTheConfiguredLog: also for a batch that the program has made.
func TestPanicsOfPayloadsAreInTheConfiguredLog(t *testing.T) {
	for name, make := range map[string]func(*spillway.Engine, batch.Payload) (*batch.Batch, error){
		"of the engine": (*spillway.Engine).NewBatch,
		"of the program": func(e *spillway.Engine, p batch.Payload) (*batch.Batch, error) {
			return batch.New(batch.Options{ID: 1, Payload: p, Observer: e.Observer()})
		},
		"of the program, behind an observer of its own": func(e *spillway.Engine, p batch.Payload) (*batch.Batch, error) {
			return batch.New(batch.Options{ID: 1, Payload: p, Observer: inItsPlace{e.Observer().(batch.Registrar)}})
		},
	} {
		t.Run(name, func(t *testing.T) {
			log := new(syncBuffer)
			eng, err := callbackEngine(t, func(c *spillway.Config) { c.Logger = slog.New(slog.NewTextHandler(log, nil)) })
			if err != nil {
				t.Fatal(err)
			}
			buf := drawn(t, eng, tier.Host, 4096)
			b, err := make(eng, panickyLeases{ownForm{buf}})
			if err == nil {
				err = b.Drop()
			}
			if err != nil {
				t.Error(err)
			}
			closeClean(t, eng)
			if !strings.Contains(log.String(), `function=Payload.Leased panic=leases`) {
				t.Errorf("the engine's log has %q", log)
			}
		})
	}
}

// TestExplainAsksNoPayload: where a batch lies is known since its payload came.
func TestExplainAsksNoPayload(t *testing.T) {
	eng, err := callbackEngine(t, func(*spillway.Config) {})
	if err != nil {
		t.Fatal(err)
	}
	buf := drawn(t, eng, tier.Host, 4096)
	p := &panickySpace{asIs: &asIs{nil, buf}}
	b, err := eng.NewBatch(p)
	if err != nil {
		t.Fatal(err)
	}
	p.armed.Store(true)
	if x := eng.Explain(b); x.Foreign || x.Space != buf.Space().ID() || len(x.Ways) == 0 {
		t.Errorf("%+v", x)
	}
	p.armed.Store(false)
	if err := b.Drop(); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}
