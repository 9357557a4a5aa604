package batch

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// recorder notes what it was told of changes.
type recorder struct {
	mu    sync.Mutex
	infos []Info
}

func (r *recorder) BatchChanged(b *Batch, now Info) {
	lockrank.AssertNone("the observer runs")
	_ = b.Info() // would deadlock if the batch's lock were held
	r.mu.Lock()
	defer r.mu.Unlock()
	r.infos = append(r.infos, now)
}

func (r *recorder) take() []Info {
	r.mu.Lock()
	defer r.mu.Unlock()
	infos := r.infos
	r.infos = nil
	return infos
}

// TestOldestTask: Info.Task orders batches by which was first asked for by a task that is pending.
func TestOldestTask(t *testing.T) {
	s := newSpace(t, "host:0")
	a, b := newBatch(t, &form{space: s}, nil), newBatch(t, &form{space: s}, nil)
	task := func(b *Batch) uint64 { return b.Info().Task }
	for _, x := range []*Batch{b, a, b, b} {
		if err := x.TryCreateTask(); err != nil {
			t.Fatal(err)
		}
	}
	if task(b) >= task(a) {
		t.Errorf("the tasks are %d and %d; b's is older", task(a), task(b))
	}
	if err := b.CancelTask(); err != nil || task(b) >= task(a) {
		t.Errorf("after one was cancelled they are %d and %d, %v", task(a), task(b), err)
	}
	h, err := b.TryLock(s.ID())
	if err != nil || task(b) <= task(a) {
		t.Errorf("after the oldest has begun they are %d and %d, %v", task(a), task(b), err)
	}
	if err := errors.Join(h.Close(), b.CancelTask(), b.Drop(), a.Drop()); err != nil || task(b) != 0 {
		t.Errorf("in the end it is %d, %v", task(b), err)
	}
}

// observerFunc is an Observer.
type observerFunc func(now Info)

func (f observerFunc) BatchChanged(_ *Batch, now Info) { f(now) }

// TestCancelWithinTheObserver: an observer may call cancel again from the call that cancel makes.
func TestCancelWithinTheObserver(t *testing.T) {
	cancel, seen := func() {}, -1
	b := newBatch(t, &form{space: newSpace(t, "gpu:0"), desc: new(Descriptor)}, observerFunc(func(now Info) {
		seen = now.Subscribers
		cancel()
	}))
	end := b.Subscribe()
	if seen != 1 {
		t.Errorf("%d subscribers were seen, want 1", seen)
	}
	cancel = end
	end()
	if n := b.Info().Subscribers; seen != 0 || n != 0 {
		t.Errorf("%d subscribers were seen and %d are left, want none", seen, n)
	}
}

// TestObserverSeesEveryChange: each operation that changes something tells the
// observer once, and one that fails does not.
func TestObserverSeesEveryChange(t *testing.T) {
	gpu, host := newSpace(t, "gpu:0"), newSpace(t, "host:0")
	var seen recorder
	b := newBatch(t, &form{space: gpu, desc: &Descriptor{Rows: 3}}, &seen)
	var (
		h      *Handle
		tr     *Transit
		cancel func()
		err    error
	)
	steps := []struct {
		name string
		do   func() error
		want func(*Info) // nil: no change
	}{
		{"new", func() error { return nil }, func(i *Info) { i.Form, i.Space, i.Bytes, i.Rows = PlainImage, gpu.ID(), 100, 3 }},
		{
			"place", func() error { b.SetPlace(Place{Plan: 1, Rank: 2}); return nil },
			func(i *Info) { i.Place = Place{Plan: 1, Rank: 2} },
		},
		{"same place", func() error { b.SetPlace(Place{Plan: 1, Rank: 2}); return nil }, nil},
		{"subscribe", func() error { cancel = b.Subscribe(); return nil }, func(i *Info) { i.Subscribers = 1 }},
		{"unsubscribe", func() error { cancel(); return nil }, func(i *Info) { i.Subscribers = 0 }},
		{"unsubscribe again", func() error { cancel(); return nil }, nil},
		{"task", func() error { return b.TryCreateTask() }, func(i *Info) { i.State, i.Pending = TaskCreated, 1 }},
		{"cancel", func() error { return b.CancelTask() }, func(i *Info) { i.State, i.Pending = Idle, 0 }},
		{"transit", func() error { tr, err = b.TryTransit(); return err }, func(i *Info) { i.State = InTransit }},
		{"task while in transit", func() error { _ = b.TryCreateTask(); return nil }, nil},
		{"commit", func() error { return tr.Commit(&form{space: host, desc: &Descriptor{Rows: 3}}, true) },
			func(i *Info) { i.State, i.Pending, i.Form, i.Space = TaskCreated, 1, PlainImage, host.ID() }},
		{"commit again", func() error { _ = tr.Commit(&form{space: gpu}, true); return nil }, nil},
		{"mismatch", func() error { _, _ = b.TryLock(gpu.ID()); return nil }, nil},
		{"lock", func() error { h, err = b.TryLock(host.ID()); return err },
			func(i *Info) { i.State, i.Pending, i.Active = Processing, 0, 1 }},
		{"close", func() error { return h.Close() }, func(i *Info) { i.State, i.Active = Idle, 0 }},
		{"open", func() error { h, err = b.Open(t.Context(), host.ID(), false); return err },
			func(i *Info) { i.State, i.Active = Processing, 1 }},
		{"close what was opened", func() error { return h.Close() }, func(i *Info) { i.State, i.Active = Idle, 0 }},
		{"another task", b.TryCreateTask, func(i *Info) { i.State, i.Pending = TaskCreated, 1 }},
		{"read", func() error { h, err = b.Read(t.Context(), tier.ID{}); return err },
			func(i *Info) { i.State, i.Active = Processing, 1 }},
		{"close what was read", func() error { return h.Close() }, func(i *Info) { i.State, i.Active = TaskCreated, 0 }},
		{"cancel the other task", b.CancelTask, func(i *Info) { i.State, i.Pending = Idle, 0 }},
		{"transit again", func() error { tr, err = b.TryTransit(); return err }, func(i *Info) { i.State = InTransit }},
		{"commit open", func() error {
			h, err = commitAndOpen(t.Context(), tr, &form{space: gpu, desc: &Descriptor{Rows: 3}}, false)
			return err
		}, func(i *Info) { i.State, i.Active, i.Form, i.Space = Processing, 1, PlainImage, gpu.ID() }},
		{"drop", b.Drop, func(i *Info) { i.State = Released }},
		{"close the last", func() error { return h.Close() }, nil},
	}
	want, version := Info{ID: 1}, uint64(0)
	for _, s := range steps {
		if err := s.do(); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		got := seen.take()
		for i := range got {
			if got[i].Version <= version || got[i].Payload == nil {
				t.Errorf("%s: told of %+v after version %d", s.name, got[i], version)
			}
			version, got[i].Version = got[i].Version, 0
			if (got[i].Task > 0) != (got[i].Pending > 0) {
				t.Errorf("%s: %d tasks are pending, the oldest is %d", s.name, got[i].Pending, got[i].Task)
			}
			got[i].Payload, got[i].Descriptor, got[i].LastUse, got[i].NextUse, got[i].Uses, got[i].Task = nil, nil, 0, 0, 0, 0
			got[i].Why, got[i].Since, got[i].Unread = "", 0, false
		}
		if s.want == nil {
			if len(got) != 0 {
				t.Errorf("%s: told of %+v", s.name, got)
			}
			continue
		}
		s.want(&want)
		if !slices.Equal(got, []Info{want}) {
			t.Errorf("%s: told of\n%+v, want\n%+v", s.name, got, want)
		}
	}
}

// TestOpenForTheLastTime: opening a handle and dropping the batch is one change, in place or on
// arrival. The data goes with the handle.
func TestOpenForTheLastTime(t *testing.T) {
	gpu, host := newSpace(t, "gpu:0"), newSpace(t, "host:0")
	for _, arrives := range []bool{false, true} {
		var seen recorder
		p := &form{space: host}
		b := newBatch(t, p, &seen)
		if err := b.TryCreateTask(); err != nil {
			t.Fatal(err)
		}
		open := func() (*Handle, error) { return b.Open(t.Context(), tier.ID{}, true) }
		if arrives {
			tr, err := b.TryTransit()
			if err != nil {
				t.Fatal(err)
			}
			old := p
			p = &form{space: gpu}
			open = func() (*Handle, error) { return commitAndOpen(t.Context(), tr, p, true) }
			defer func() {
				if old.released.Load() != 1 {
					t.Error("the old form is there still")
				}
			}()
		}
		seen.take()
		h, err := open()
		if err != nil {
			t.Fatal(err)
		}
		told := seen.take()
		if len(told) != 1 || told[0].State != Released || told[0].Active != 1 || told[0].Pending != 0 {
			t.Errorf("arrives %v: told of %+v", arrives, told)
		}
		if p.released.Load() != 0 || h.Payload() != p {
			t.Errorf("arrives %v: the data is gone before the handle", arrives)
		}
		if err := h.Close(); err != nil || p.released.Load() != 1 || len(seen.take()) != 0 {
			t.Errorf("arrives %v: closed with %v, released %d times", arrives, err, p.released.Load())
		}
	}
}

// lastLook is a form that looks at its batch when it is released.
type lastLook struct {
	*form
	look func()
}

func (p lastLook) Release() error {
	p.look()
	return p.form.Release()
}

// TestOldFormGoesLast: a batch has its new form before the old one is released.
func TestOldFormGoesLast(t *testing.T) {
	old, next := lastLook{form: &form{space: newSpace(t, "gpu:0")}}, &form{space: newSpace(t, "host:0")}
	var b *Batch
	looks := 0
	old.look = func() {
		looks++
		if now := b.Info(); now.Payload != next || now.State != Idle {
			t.Errorf("the batch is %s, with the form %v", now.State, now.Payload)
		}
	}
	b, err := New(Options{ID: 1, Payload: &old})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(tr.Commit(next, false), b.Drop()); err != nil {
		t.Fatal(err)
	}
	if looks != 1 {
		t.Errorf("the old form was released %d times", looks)
	}
}

// TestHandleIsInTheAccountOfItsSpace: from when it is opened until it is closed.
func TestHandleIsInTheAccountOfItsSpace(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	b := newBatch(t, &form{space: gpu}, nil)
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(gpu.Books.Holds()); n != 1 {
		t.Errorf("%d holds while one handle is open", n)
	}
	if err := errors.Join(h.Close(), b.Drop()); err != nil {
		t.Fatal(err)
	}
	if n := len(gpu.Books.Holds()); n != 0 {
		t.Errorf("%d holds after the handle is closed", n)
	}
}

func TestOneStore(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	b := newBatch(t, &form{space: gpu}, nil)
	var first, second recorder
	one, two := Observer(&first), Observer(&second)
	tell, err := b.Attach(one, Place{Plan: 1})
	if now := b.Info(); err != nil || now.Place != (Place{Plan: 1}) {
		t.Fatal(now, err)
	}
	if n := len(first.take()); n != 0 {
		t.Errorf("the store was told %d times before tell", n)
	}
	tell()
	b.Detach(two) // not its
	if _, err := b.Attach(two, Place{Plan: 9}); !errors.Is(err, ErrStored) {
		t.Errorf("a place set by another store: %v", err)
	}
	if tell, err = b.Attach(one, Place{Plan: 1, Rank: 4}); err != nil {
		t.Fatal(err)
	}
	if n := len(first.take()); n != 1 {
		t.Errorf("the store was told %d times, want 1", n)
	}
	tell()
	tell, _ = b.Attach(one, Place{Plan: 1, Rank: 4}) // no change
	tell()
	if n := len(first.take()); n != 1 {
		t.Errorf("the store was told of its place %d times, want 1", n)
	}
	b.Detach(one)
	if got := b.Info().Place; got != (Place{Plan: 1, Rank: 4}) {
		t.Errorf("place afterwards %+v", got)
	}
	if tell, err = b.Attach(two, Place{Plan: 2}); err != nil {
		t.Fatal(err)
	}
	tell()
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
	if n := len(second.take()); n != 2 {
		t.Errorf("the second store was told %d times, want 2", n)
	}
	if len(first.take()) != 0 {
		t.Error("the first store was told of what came after it")
	}
}

func TestNewNeedsIDAndPayload(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	if _, err := New(Options{Payload: &form{space: gpu}}); err == nil {
		t.Error("no id is no error")
	}
	var se *StateError
	if _, err := New(Options{ID: 4}); !errors.As(err, &se) || se.Status != MissingData || se.Batch != 4 {
		t.Errorf("no payload: %v", err)
	}
}

// TestCommitRefusesWhatIsNotTheBatch: the transit stays open and the batch whole.
func TestCommitRefusesWhatIsNotTheBatch(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	first := &form{space: gpu, desc: &Descriptor{Rows: 3}}
	b := newBatch(t, first, nil)
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	for name, p := range map[string]Payload{"nil": nil, "other rows": &form{space: gpu, desc: &Descriptor{Rows: 4}}} {
		var se *StateError
		if err := tr.Commit(p, true); !errors.As(err, &se) || se.Status != MissingData {
			t.Errorf("%s: %v", name, err)
		}
	}
	if tr.Payload() != Payload(first) || b.Info().State != InTransit {
		t.Error("a refused commit changed something")
	}
	if err := tr.Commit(first, false); err != nil { // the form that it has: nothing is released
		t.Fatal(err)
	}
	if n := first.released.Load(); n != 0 || b.Info().State != Idle {
		t.Errorf("released %d times, state %s", n, b.Info().State)
	}
	if tr.Payload() != nil {
		t.Error("an ended transit still shows a payload")
	}
	if err := tr.Abort(); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("abort after commit: %v", err)
	}
	if err := b.Drop(); err != nil || first.released.Load() != 1 {
		t.Errorf("drop: %v, released %d times", err, first.released.Load())
	}
}

func TestHandleClosesOnce(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	f := &form{space: gpu}
	b := newBatch(t, f, nil)
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	h, err := b.TryLock(gpu.ID())
	if err != nil {
		t.Fatal(err)
	}
	if h.Batch() != b || h.Payload() != Payload(f) || h.Space() != gpu {
		t.Error("the handle is not the batch's")
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	if h.Payload() != nil {
		t.Error("a closed handle still shows a payload")
	}
	defer func() {
		if p := recover(); (p != nil) != invariants.Enabled {
			t.Errorf("second close: panic %v", p)
		}
		if got := b.Info(); got.State != Idle || got.Active != 0 {
			t.Errorf("a second close changed the batch: %+v", got)
		}
	}()
	if err := h.Close(); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("second close: %v", err)
	}
}

// TestNextUse: the next use is expected after as long as lay between those so far, or when a hint
// says. A use ends a hint, but not that the batch stays.
func TestNextUse(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	now := int64(100)
	rec := &recorder{}
	b, err := New(Options{ID: 1, Payload: &form{space: gpu}, Clock: func() int64 { return now }, Observer: rec})
	if err != nil {
		t.Fatal(err)
	}
	use := func(at, until int64) {
		t.Helper()
		now = at
		h, err := b.Open(t.Context(), gpu.ID(), false)
		if err != nil {
			t.Fatal(err)
		}
		again, err := b.Open(t.Context(), gpu.ID(), false) // is part of the same use
		if err != nil {
			t.Fatal(err)
		}
		now = until
		if err := errors.Join(h.Close(), again.Close()); err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, next int64) {
		t.Helper()
		if got := b.Info().NextUse; got != next {
			t.Errorf("%s: the next use is %d, want %d", what, got, next)
		}
	}
	want("made", 0)
	use(180, 200)
	want("used once", 0)
	use(240, 240)
	want("after 40", 240+40)
	b.Hint(1000)
	want("told", 1000)
	if told := rec.take(); told[len(told)-1].NextUse != 1000 {
		t.Errorf("observers were told of %d", told[len(told)-1].NextUse)
	}
	use(1000, 1000)
	want("used as told", 1000+220) // (3*40+760)/4
	b.Hint(Never)
	want("never", Never)
	use(1100, 1200)
	want("used all the same", 1200+190) // (3*220+100)/4
	b.Hint(Stay)
	use(1300, 1400)
	want("it stays", Stay)
	b.Hint(0)
	want("taken back", 1400+167) // (3*190+100)/4
	use(1300, 1300)              // by a clock that goes back
	if next := b.Info().NextUse; next <= 1400 || next > 1400+167 {
		t.Errorf("after a clock that went back the next use is %d", next)
	}
	if n := b.Info().Uses; n != 6 {
		t.Errorf("%d uses, want 6", n)
	}
	now = 1500
	h, err := b.Open(t.Context(), gpu.ID(), false)
	if err != nil {
		t.Fatal(err)
	}
	b.Hint(9000)
	now = 5000
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	want("told while it was used", 9000)
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
	rec.take()
	if b.Hint(5); len(rec.take()) > 0 {
		t.Error("a hint for a dropped batch was announced")
	}
}

// TestLastUse: opening and closing a handle is a use, a move is not.
func TestLastUse(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	now := int64(10)
	b, err := New(Options{ID: 1, Payload: &form{space: gpu}, Clock: func() int64 { return now }})
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, want int64) {
		t.Helper()
		if got := b.Info().LastUse; got != want {
			t.Errorf("%s: last use %d, want %d", what, got, want)
		}
	}
	check("made", 10)
	now = 20
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	if err := tr.Commit(&form{space: gpu}, false); err != nil {
		t.Fatal(err)
	}
	check("moved", 10)
	now = 30
	h, err := b.Open(context.Background(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	check("opened", 30)
	now = 40
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	check("closed", 40)
	now = 50
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
	check("dropped", 40)
}

// TestWaitersWake: everybody who waits for a transit's end goes on when it ends,
// and sees the new form.
func TestWaitersWake(t *testing.T) {
	for _, end := range []string{"commit", "abort"} {
		t.Run(end, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gpu, host := newSpace(t, "gpu:0"), newSpace(t, "host:0")
				b := newBatch(t, &form{space: gpu}, nil)
				for range 3 {
					if err := b.TryCreateTask(); err != nil {
						t.Fatal(err)
					}
				}
				tr, err := b.TryTransit()
				if err != nil {
					t.Fatal(err)
				}
				ctx := context.Background()
				var waiting sync.WaitGroup
				results := make(chan error, 3)
				waiting.Go(func() { results <- b.CreateTask(ctx) })
				waiting.Go(func() {
					_, err := b.Lock(ctx, tier.ID{Kind: tier.Disk})
					results <- err
				})
				waiting.Go(func() {
					h, err := b.Open(ctx, tier.ID{}, false)
					if err == nil {
						err = h.Close()
					}
					results <- err
				})
				synctest.Wait()
				if len(results) != 0 {
					t.Fatal("somebody did not wait")
				}
				if end == "commit" {
					err = tr.Commit(&form{space: host}, false)
				} else {
					err = tr.Abort()
				}
				if err != nil {
					t.Fatal(err)
				}
				waiting.Wait()
				close(results)
				mismatches := 0
				for err := range results {
					var se *StateError
					switch {
					case err == nil:
					case errors.As(err, &se) && se.Status == SpaceMismatch:
						mismatches++
						if want := map[string]tier.ID{"commit": host.ID(), "abort": gpu.ID()}[end]; se.Space != want {
							t.Errorf("the waiter saw the data in %s, want %s", se.Space, want)
						}
					default:
						t.Error(err)
					}
				}
				if mismatches != 1 {
					t.Errorf("%d waiters met a mismatch, want 1", mismatches)
				}
				if info := b.Info(); info.Pending != 3 || info.State != TaskCreated {
					t.Errorf("afterwards %+v", info)
				}
			})
		})
	}
}

// TestNoLostWakeUp hands a batch from one transit to the next through waiters
// alone; a lost wake-up hangs it.
func TestNoLostWakeUp(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	b := newBatch(t, &form{space: gpu}, nil)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 500 {
				tr, err := b.Transit(context.Background())
				if err != nil {
					t.Error(err)
					return
				}
				if err := tr.Abort(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

func TestChanged(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	b := newBatch(t, &form{space: gpu}, nil)
	ch := b.Changed()
	select {
	case <-ch:
		t.Fatal("changed before anything changed")
	default:
	}
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	<-ch
	if b.Changed() == ch {
		t.Error("the next change has the same channel")
	}
}

func TestIDs(t *testing.T) {
	var ids IDs
	var mu sync.Mutex
	seen := make(map[ID]bool)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			last := ID(0)
			for range 1000 {
				id := ids.Next()
				if id <= last {
					t.Errorf("%d after %d", id, last)
				}
				last = id
				mu.Lock()
				if seen[id] {
					t.Errorf("%d twice", id)
				}
				seen[id] = true
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if len(seen) != 8000 || seen[0] {
		t.Errorf("%d ids, 0 among them: %v", len(seen), seen[0])
	}
}

func BenchmarkLockClose(b *testing.B) {
	gpu := newSpace(b, "gpu:0")
	batch := newBatch(b, &form{space: gpu}, nil)
	b.ReportAllocs()
	for b.Loop() {
		if err := batch.TryCreateTask(); err != nil {
			b.Fatal(err)
		}
		h, err := batch.TryLock(gpu.ID())
		if err != nil {
			b.Fatal(err)
		}
		if err := h.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkMillion reports what a full collection costs with a million batches.
func BenchmarkMillion(b *testing.B) {
	gpu := newSpace(b, "gpu:0")
	var ids IDs
	d := &Descriptor{Rows: 1}
	batches := make([]*Batch, 1_000_000)
	for i := range batches {
		var err error
		if batches[i], err = New(Options{ID: ids.Next(), Payload: NewImage(d, nil, gpu)}); err != nil {
			b.Fatal(err)
		}
	}
	for b.Loop() {
		runtime.GC()
	}
	runtime.KeepAlive(batches)
}
