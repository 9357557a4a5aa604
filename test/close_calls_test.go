package test

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// hold is where a call of the engine's waits in a function of the program's.
type hold struct {
	armed   atomic.Bool
	reached chan struct{}
	goOn    chan struct{}
}

func newHold() *hold { return &hold{reached: make(chan struct{}), goOn: make(chan struct{})} }

// here waits once, when it is armed.
func (h *hold) here() {
	if h.armed.CompareAndSwap(true, false) {
		close(h.reached)
		<-h.goOn
	}
}

// heldRecord is a record that holds who asks for its schema once more than calls times.
type heldRecord struct {
	arrow.RecordBatch
	*hold
	calls int
}

func (r *heldRecord) Schema() *arrow.Schema {
	if r.calls--; r.calls < 0 {
		r.here()
	}
	return r.RecordBatch.Schema()
}

// heldRelease is a program's own form, whose release is held.
type heldRelease struct {
	*asIs
	*hold
}

func (heldRelease) Type() batch.PayloadType { return "held" }
func (p heldRelease) Release() error {
	p.here()
	return p.asIs.Release()
}

// heldFanOut calls FanOut, which waits in h when it has one of two copies in its hands.
func heldFanOut(t *testing.T, _ *spillway.Engine, plan *spillway.Plan, h *hold) (call func() error, end func()) {
	keys := []repository.Key{{Operator: "a"}, {Operator: "b"}}
	for _, k := range keys {
		if _, err := plan.Repository(k.Operator, k.Port); err != nil {
			t.Fatal(err)
		}
	}
	count := &heldRecord{RecordBatch: arrowgen.Ints(1, 1000, 1), hold: h}
	if err := plan.Manager().FanOut(t.Context(), count, 0, keys[0]); err != nil {
		t.Fatal(err)
	}
	rec := &heldRecord{RecordBatch: count.RecordBatch, hold: h, calls: -count.calls}
	h.armed.Store(true)
	return func() error { return plan.Manager().FanOut(t.Context(), rec, 0, keys...) }, rec.Release
}

// heldReader reads a batch, whose release waits in h.
func heldReader(t *testing.T, eng *spillway.Engine, plan *spillway.Plan, h *hold) (call func() error, end func()) {
	if err := eng.Registry().Register(convert.Form{Type: "held", Kind: tier.Host}, convert.ImageIn(tier.Host), func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
		return imageOf(ctx, src.(heldRelease).asIs, r)
	}); err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Manager().Create(repository.Key{Operator: "scan"}, repository.Options{Schema: numberedRecord(0, 1, wordList(1, 10)).Schema()})
	if err != nil {
		t.Fatal(err)
	}
	putAsIs(t, eng, repo, func(p *asIs) batch.Payload { return heldRelease{p, h} })
	rd, err := repo.Reader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	h.armed.Store(true)
	return func() error {
		rd.Next()
		return rd.Err()
	}, rd.Release
}

// TestCloseWaitsForCalls: Engine.Close takes no memory for a leak that a call has in its hands,
// also if the call's plan was closed before. Plan.Close does not wait for these calls.
func TestCloseWaitsForCalls(t *testing.T) {
	for name, make := range map[string]func(*testing.T, *spillway.Engine, *spillway.Plan, *hold) (call func() error, end func()){
		"FanOut": heldFanOut, "Reader": heldReader,
	} {
		for _, planFirst := range []bool{false, true} {
			t.Run(name+map[bool]string{true: " of a closed plan"}[planFirst], func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { closeDuringACall(t, make, planFirst) })
			})
		}
	}
}

func closeDuringACall(t *testing.T, prepare func(*testing.T, *spillway.Engine, *spillway.Plan, *hold) (call func() error, end func()), planFirst bool) {
	eng, _ := openSmall(t, 1<<20, 4<<20)
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	h := newHold()
	call, end := prepare(t, eng, plan, h)
	called := make(chan error, 1)
	go func() { called <- call() }()
	<-h.reached
	if planFirst {
		if _, err := plan.Close(); err != nil {
			t.Error(err)
		}
	}
	closed := make(chan error, 1)
	go func() { closed <- eng.Close() }()
	synctest.Wait()
	if len(closed) != 0 {
		t.Error("Close does not wait")
	}
	close(h.goOn)
	var leak *spillway.LeakError
	if err := <-closed; err != nil && !(errors.As(err, &leak) && !slices.ContainsFunc(leak.Leaks, notOfARecord)) {
		t.Error(err)
	}
	if err := <-called; err != nil && !errors.Is(err, tier.ErrClosed) {
		t.Error(err)
	}
	end()
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// notOfARecord reports whether a leak is no open record's: a record is the program's as soon as the
// Reader returns it.
func notOfARecord(l tier.Leak) bool { return len(l.Holders) != 1 || l.Holders[0].Kind != books.Record }

// TestCloseWaitsForATaskThatGivesBack: a task has handles, and a reservation, while it brings its
// inputs and while it gives them back. No function of the program's runs, so they are no leak.
func TestCloseWaitsForATaskThatGivesBack(t *testing.T) {
	for name, stuck := range map[string]bool{"when an input could not be brought": true, "when it has succeeded": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { closeDuringATask(t, stuck) })
		})
	}
}

// closeDuringATask closes an engine while a task closes its handle on the first input. The second
// is stuck in its converter until then, or is brought.
func closeDuringATask(t *testing.T, stuck bool) {
	eng, _ := openSmall(t, 1<<20, 4<<20)
	repo := scanOf(t, eng)
	h := newHold()
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	for i, k := range []tier.Kind{tier.GPU, tier.Host} {
		img, err := eng.Mover().Ingest(t.Context(), rec, reservation.AnyInTier(k))
		if err != nil {
			t.Fatal(err)
		}
		o := batch.Options{ID: batch.ID(1000 + i), Payload: img, Observer: eng.Observer()}
		if i == 0 {
			o.Clock = func() int64 { // a handle asks it when it is closed
				h.here()
				return 0
			}
		}
		b, err := batch.New(o)
		if err == nil {
			err = repo.PutBatch(0, b)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	brings := make(chan struct{})
	if err := eng.Registry().Wrap(convert.ImageIn(tier.Host), convert.ImageIn(tier.GPU), func(inner convert.Func) convert.Func {
		return func(ctx context.Context, src batch.Payload, r *reservation.Reservation) (batch.Payload, error) {
			h.armed.Store(true)
			close(brings)
			if !stuck {
				return inner(ctx, src, r)
			}
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
	}); err != nil {
		t.Fatal(err)
	}
	c, err := repo.Claim(t.Context(), 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	ran, closed := make(chan error, 1), make(chan error, 1)
	go func() {
		ran <- eng.RunTask(t.Context(), spillway.Task{Operator: "join", Inputs: []*repository.Claim{c}},
			func(context.Context, *spillway.Grant, []*spillway.Handle) error { return nil })
	}()
	<-brings
	if !stuck {
		<-h.reached
	}
	go func() { closed <- eng.Close() }()
	<-h.reached
	synctest.Wait()
	if len(closed) != 0 {
		t.Error("Close does not wait")
	}
	close(h.goOn)
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if err := <-ran; stuck != errors.Is(err, tier.ErrClosed) || !stuck && err != nil {
		t.Errorf("the task ended with %v", err)
	}
}

// TestCloseDoesNotWaitForATasksFunction: it may take for ever. What it holds is reported.
func TestCloseDoesNotWaitForATasksFunction(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, _ := openSmall(t, 1<<20, 4<<20)
		repo := scanOf(t, eng)
		rec := arrowgen.Ints(1, 1000, 1)
		defer rec.Release()
		if err := repo.Put(t.Context(), 0, rec); err != nil {
			t.Fatal(err)
		}
		c, err := repo.Claim(t.Context(), 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		err = eng.RunTask(t.Context(), spillway.Task{Operator: "join", Inputs: []*repository.Claim{c}},
			func(context.Context, *spillway.Grant, []*spillway.Handle) error {
				var leak *spillway.LeakError
				if err := eng.Close(); !errors.As(err, &leak) {
					t.Errorf("Close returned %v", err)
				}
				return nil
			})
		if err != nil {
			t.Error(err)
		}
		for _, s := range eng.Stats().Spaces {
			if s.Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID, s.Usage)
			}
		}
	})
}

// TestPlanClosedByAnEventOfPut: an event of a Put closes the plan, as a program does that gives up
// a query whose batches are too large.
func TestPlanClosedByAnEventOfPut(t *testing.T) {
	var plan atomic.Pointer[spillway.Plan]
	eng, err := callbackEngine(t, func(c *spillway.Config) {
		c.Events = on(events.Oversized, func(spillway.Event) {
			if _, err := plan.Load().Close(); err != nil {
				t.Error(err)
			}
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	p, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	plan.Store(p)
	repo, err := p.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	rec := arrowgen.Ints(1, 200_000, 1) // 1.6 MB; the GPU has one MiB
	defer rec.Release()
	put := make(chan error, 1)
	go func() {
		put <- repo.Put(context.Background(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU)))
	}()
	select {
	case err := <-put:
		if !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
		closeClean(t, eng)
	case <-time.After(10 * time.Second):
		t.Fatal("Put waits for Plan.Close, and that for Put")
	}
}
