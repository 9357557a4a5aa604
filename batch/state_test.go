package batch

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// A situation is a state together with what makes a difference within it.
type situation struct {
	name    string
	state   State
	pending int
	active  int
}

var situations = []situation{
	{"idle", Idle, 0, 0},
	{"task created", TaskCreated, 1, 0},
	{"two tasks created", TaskCreated, 2, 0},
	{"processing", Processing, 0, 1},
	{"processing twice", Processing, 0, 2},
	{"processing, task pending", Processing, 1, 1},
	{"in transit", InTransit, 0, 0},
	{"in transit, task pending", InTransit, 1, 0},
	{"dropped", Released, 0, 0},
	{"dropped, handle open", Released, 0, 1},
}

// rig is a batch in some situation with all that is open on it.
type rig struct {
	b       *Batch
	forms   []*form
	handles []*Handle
	transit *Transit
}

func (s situation) build(t *testing.T, gpu *tier.Space) *rig {
	t.Helper()
	r := &rig{}
	r.form(gpu)
	r.b = newBatch(t, r.forms[0], nil)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for range s.active {
		must(r.b.TryCreateTask())
		h, err := r.b.TryLock(gpu.ID())
		must(err)
		r.handles = append(r.handles, h)
	}
	for range s.pending {
		must(r.b.TryCreateTask())
	}
	switch s.state {
	case InTransit:
		var err error
		r.transit, err = r.b.TryTransit()
		must(err)
	case Released:
		must(r.b.Drop())
	}
	if got := (situation{s.name, r.b.Info().State, r.b.Info().Pending, r.b.Info().Active}); got != s {
		t.Fatalf("built %+v, want %+v", got, s)
	}
	return r
}

func (r *rig) form(s *tier.Space) *form {
	f := &form{space: s, desc: &Descriptor{Rows: 7}}
	r.forms = append(r.forms, f)
	return f
}

// finish ends everything and checks that each form was released exactly once.
func (r *rig) finish(t *testing.T) {
	t.Helper()
	for _, h := range r.handles {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	}
	if r.transit != nil {
		_ = r.transit.Abort() // may have ended
	}
	if err := r.b.Drop(); err != nil && !errors.Is(err, tier.ErrReleased) {
		t.Error(err)
	}
	for i, f := range r.forms {
		if n := f.released.Load(); n != 1 {
			t.Errorf("form %d was released %d times", i, n)
		}
	}
}

// outcome is a situation afterwards, or the status of the error.
type outcome struct {
	status          Status
	state           State
	pending, active int
}

func ok(s State, pending, active int) outcome { return outcome{0, s, pending, active} }
func fails(s Status) outcome                  { return outcome{status: s} }

// TestTransitions goes through every pair of situation and operation.
func TestTransitions(t *testing.T) {
	gpu, host := newSpace(t, "gpu:0"), newSpace(t, "host:0")
	operations := []struct {
		name string
		do   func(r *rig) error
		want []outcome // in the order of situations
	}{
		{"create task", func(r *rig) error { return r.b.TryCreateTask() }, []outcome{
			ok(TaskCreated, 1, 0), ok(TaskCreated, 2, 0), ok(TaskCreated, 3, 0),
			ok(Processing, 1, 1), ok(Processing, 1, 2), ok(Processing, 2, 1),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"cancel task", func(r *rig) error { return r.b.CancelTask() }, []outcome{
			fails(TaskNotCreated), ok(Idle, 0, 0), ok(TaskCreated, 1, 0),
			fails(TaskNotCreated), fails(TaskNotCreated), ok(Processing, 0, 1),
			fails(TaskNotCreated), ok(InTransit, 0, 0), fails(MissingData), fails(MissingData),
		}},
		{"lock", func(r *rig) error { return r.lock(gpu.ID()) }, []outcome{
			fails(TaskNotCreated), ok(Processing, 0, 1), ok(Processing, 1, 1),
			fails(TaskNotCreated), fails(TaskNotCreated), ok(Processing, 0, 2),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"lock elsewhere", func(r *rig) error { return r.lock(host.ID()) }, []outcome{
			fails(TaskNotCreated), fails(SpaceMismatch), fails(SpaceMismatch),
			fails(TaskNotCreated), fails(TaskNotCreated), fails(SpaceMismatch),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"lock on another GPU", func(r *rig) error { return r.lock(tier.ID{Kind: tier.GPU, Ordinal: 1}) }, []outcome{
			fails(TaskNotCreated), fails(SpaceMismatch), fails(SpaceMismatch),
			fails(TaskNotCreated), fails(TaskNotCreated), fails(SpaceMismatch),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"close a handle", func(r *rig) error {
			if len(r.handles) == 0 {
				return errNone
			}
			h := r.handles[0]
			r.handles = r.handles[1:]
			return h.Close()
		}, []outcome{
			none, none, none,
			ok(Idle, 0, 0), ok(Processing, 0, 1), ok(TaskCreated, 1, 0),
			none, none, none, ok(Released, 0, 0),
		}},
		{"transit", func(r *rig) (err error) {
			transit, err := r.b.TryTransit()
			if err == nil {
				r.transit = transit
			}
			return err
		}, []outcome{
			ok(InTransit, 0, 0), ok(InTransit, 1, 0), ok(InTransit, 2, 0),
			fails(InvalidState), fails(InvalidState), fails(InvalidState),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"commit", func(r *rig) error { return r.commit(host, false) }, []outcome{
			none, none, none, none, none, none,
			ok(Idle, 0, 0), ok(TaskCreated, 1, 0), none, none,
		}},
		{"commit and create task", func(r *rig) error { return r.commit(host, true) }, []outcome{
			none, none, none, none, none, none,
			ok(TaskCreated, 1, 0), ok(TaskCreated, 2, 0), none, none,
		}},
		{"abort", func(r *rig) error {
			if r.transit == nil {
				return errNone
			}
			return r.transit.Abort()
		}, []outcome{
			none, none, none, none, none, none,
			ok(Idle, 0, 0), ok(TaskCreated, 1, 0), none, none,
		}},
		{"open", func(r *rig) error { return r.opened(r.b.lock(opening{own: true})) }, []outcome{
			ok(Processing, 0, 1), ok(Processing, 0, 1), ok(Processing, 1, 1),
			ok(Processing, 0, 2), ok(Processing, 0, 3), ok(Processing, 0, 2),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"open for the last time", func(r *rig) error {
			return r.opened(r.b.lock(opening{space: gpu.ID(), own: true, last: true}))
		}, []outcome{
			ok(Released, 0, 1), ok(Released, 0, 1), ok(Released, 0, 1),
			ok(Released, 0, 2), ok(Released, 0, 3), ok(Released, 0, 2),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"commit and open", func(r *rig) error {
			if r.transit == nil {
				return errNone
			}
			return r.opened(commitAndOpen(t.Context(), r.transit, r.form(host), false))
		}, []outcome{
			none, none, none, none, none, none,
			ok(Processing, 0, 1), ok(Processing, 0, 1), none, none,
		}},
		{"drop", func(r *rig) error { return r.b.Drop() }, []outcome{
			ok(Released, 0, 0), ok(Released, 0, 0), ok(Released, 0, 0),
			ok(Released, 0, 1), ok(Released, 0, 2), ok(Released, 0, 1),
			fails(InvalidState), fails(InvalidState), fails(MissingData), fails(MissingData),
		}},
		{"store", func(r *rig) error {
			_, err := r.b.Attach(new(recorder), Place{Plan: 1})
			return err
		}, []outcome{
			ok(Idle, 0, 0), ok(TaskCreated, 1, 0), ok(TaskCreated, 2, 0),
			ok(Processing, 0, 1), ok(Processing, 0, 2), ok(Processing, 1, 1),
			ok(InTransit, 0, 0), ok(InTransit, 1, 0), fails(MissingData), fails(MissingData),
		}},
	}
	for _, op := range operations {
		for i, s := range situations {
			t.Run(fmt.Sprintf("%s/%s", s.name, op.name), func(t *testing.T) {
				r := s.build(t, gpu)
				defer r.finish(t)
				err := op.do(r)
				want := op.want[i]
				if want == none {
					if !errors.Is(err, errNone) {
						t.Fatalf("there is something to do it with: %v", err)
					}
					return
				}
				if want.status == 0 {
					if err != nil {
						t.Fatal(err)
					}
				} else {
					var se *StateError
					if !errors.As(err, &se) || !errors.Is(err, ErrState) {
						t.Fatalf("%v is not a StateError", err)
					}
					if se.Status != want.status || se.State != s.state || se.Batch != r.b.ID() {
						t.Fatalf("%+v, want status %s in state %s", se, want.status, s.state)
					}
					if errors.Is(err, tier.ErrReleased) != (s.state == Released) {
						t.Errorf("%v in state %s: matches ErrReleased %v", err, s.state, errors.Is(err, tier.ErrReleased))
					}
					want = ok(s.state, s.pending, s.active) // nothing changed
				}
				info := r.b.Info()
				if got := ok(info.State, info.Pending, info.Active); got != want {
					t.Errorf("afterwards %+v, want %+v", got, want)
				}
				for i, f := range r.forms {
					current := i == len(r.forms)-1
					gone := want.state == Released && want.active == 0
					if released := f.released.Load() > 0; released != (!current || gone) {
						t.Errorf("form %d of %d: released %v", i, len(r.forms), released)
					}
				}
			})
		}
	}
}

var (
	errNone = errors.New("there is nothing open to do it with")
	none    = outcome{status: 255}
)

func (r *rig) lock(id tier.ID) error {
	return r.opened(r.b.TryLock(id))
}

func (r *rig) opened(h *Handle, err error) error {
	if err == nil {
		r.handles = append(r.handles, h)
	} else if h != nil {
		return errors.New("a handle beside an error")
	}
	return err
}

func (r *rig) commit(s *tier.Space, createTask bool) error {
	if r.transit == nil {
		return errNone
	}
	return r.transit.Commit(r.form(s), createTask)
}

// TestOnlyTransitIsWaitedFor: with an ended context, what waits returns its cause,
// and what does not wait returns as if there were none.
func TestOnlyTransitIsWaitedFor(t *testing.T) {
	gpu := newSpace(t, "gpu:0")
	cause := errors.New("the query was cancelled")
	ctx, cancel := context.WithCancelCause(context.Background())
	cancel(cause)
	operations := map[string]func(r *rig) error{
		"create task": func(r *rig) error { return r.b.CreateTask(ctx) },
		"lock": func(r *rig) error {
			h, err := r.b.Lock(ctx, gpu.ID())
			if err == nil {
				r.handles = append(r.handles, h)
			}
			return err
		},
		"open": func(r *rig) error {
			h, err := r.b.Open(ctx, tier.ID{}, false)
			if err == nil {
				r.handles = append(r.handles, h)
			}
			return err
		},
		"read": func(r *rig) error {
			h, err := r.b.Read(ctx, tier.ID{})
			if err == nil {
				r.handles = append(r.handles, h)
			}
			return err
		},
		"transit": func(r *rig) error {
			transit, err := r.b.Transit(ctx)
			if err == nil {
				r.transit = transit
			}
			return err
		},
	}
	for name, do := range operations {
		for _, s := range situations {
			t.Run(s.name+"/"+name, func(t *testing.T) {
				r := s.build(t, gpu)
				defer r.finish(t)
				if err := do(r); errors.Is(err, cause) != (s.state == InTransit) {
					t.Errorf("in state %s: %v", s.state, err)
				}
			})
		}
	}
}

func TestErrorTexts(t *testing.T) {
	err := &StateError{Batch: 3, State: TaskCreated, Op: "lock", Status: SpaceMismatch,
		Space: tier.ID{Kind: tier.Host}, Want: tier.ID{Kind: tier.GPU, Ordinal: 1}}
	want := "batch 3, task-created: lock failed: space-mismatch: it is in host:0, not in gpu:1"
	if err.Error() != want {
		t.Errorf("%q, want %q", err, want)
	}
	var names []string
	for s := Idle; s <= Released+1; s++ {
		names = append(names, s.String())
	}
	for s := TaskNotCreated; s <= MissingData+1; s++ {
		names = append(names, s.String())
	}
	const all = "idle task-created processing in-transit released invalid " +
		"task-not-created invalid-state space-mismatch missing-data unknown"
	if got := strings.Join(names, " "); got != all {
		t.Errorf("%q, want %q", got, all)
	}
}

// Discard waits for a transit to end, and no longer than its context.
func TestDiscardWaitsForTransit(t *testing.T) {
	b := newBatch(t, &form{space: newSpace(t, "host:0")}, nil)
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	why := errors.New("why")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	if err := b.Discard(ctx); !errors.Is(err, why) {
		t.Fatalf("with an ended context: %v", err)
	}
	done := make(chan error)
	go func() { done <- b.Discard(t.Context()) }()
	if err := tr.Abort(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if b.Info().State != Released {
		t.Errorf("the batch is %s", b.Info().State)
	}
	if err := b.Discard(t.Context()); !errors.Is(err, ErrState) {
		t.Errorf("again: %v", err)
	}
}

// TestArrival: a batch notes why and when it came to where it is, and whether that is slower, until it
// is used. A move that does not say why changes nothing.
func TestArrival(t *testing.T) {
	gpu, now := newSpace(t, "gpu:0"), int64(100)
	b, err := New(Options{ID: 1, Payload: &form{space: gpu}, Clock: func() int64 { return now }})
	if err != nil {
		t.Fatal(err)
	}
	want := func(what, why string, since int64, unread bool) {
		t.Helper()
		if i := b.Info(); i.Why != why || i.Since != since || i.Unread != unread {
			t.Errorf("%s: %q at %d, unread %t; want %q at %d, %t", what, i.Why, i.Since, i.Unread, why, since, unread)
		}
	}
	move := func(o CommitOptions) {
		t.Helper()
		now += 10
		tr, err := b.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.Commit(t.Context(), tr, &form{space: gpu}, o); err != nil {
			t.Fatal(err)
		}
	}
	want("new", "put", 100, false)
	move(CommitOptions{})
	want("moved by a program", "put", 100, false)
	move(CommitOptions{Reason: "trigger", Slower: true})
	want("moved down", "trigger", 120, true)
	move(CommitOptions{Reason: "demand"})
	want("moved up", "demand", 130, true)
	h, err := b.Open(t.Context(), tier.ID{}, false)
	if err != nil {
		t.Fatal(err)
	}
	want("in use", "demand", 130, false)
	if err := errors.Join(h.Close(), b.Drop()); err != nil {
		t.Error(err)
	}
}
