package batch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// model is the reference: the table at State, written down a second time as a
// value that is cheap to copy and compare.
type model struct {
	transit, released bool
	pending, active   int
	space             int // index into the test's spaces
}

func (m model) state() State {
	switch {
	case m.released:
		return Released
	case m.transit:
		return InTransit
	case m.active > 0:
		return Processing
	case m.pending > 0:
		return TaskCreated
	}
	return Idle
}

// kind is an operation of the random test.
type kind uint8

const (
	createTask kind = iota
	cancelTask
	lockIn
	openIn
	openLast
	read
	readIn
	closeHandle
	beginTransit
	commitTo
	commitTaskTo
	commitOpen
	commitRead
	abortTransit
	drop
	look
	kinds
)

var kindNames = [...]string{"create task", "cancel task", "lock in", "open in", "open last", "read", "read in", "close", "transit", "commit to", "commit with task to", "commit open", "commit read", "abort", "drop", "look"}

// event is an operation that was done, when it began and ended, and its result.
type event struct {
	kind       kind
	space      int
	begin, end int64
	status     Status // 0: it worked
	info       Info   // of look
}

func (e event) String() string {
	s := fmt.Sprintf("[%d,%d] %s %d: ", e.begin, e.end, kindNames[e.kind], e.space)
	if e.kind == look {
		return s + fmt.Sprintf("%s pending %d active %d in %s", e.info.State, e.info.Pending, e.info.Active, e.info.Space)
	}
	if e.status == 0 {
		return s + "ok"
	}
	return s + e.status.String()
}

// apply does e on m and says whether the reference allows e's result.
func (m model) apply(e event, ids []tier.ID) (model, bool) {
	want := Status(0)
	gone := func() bool {
		if m.released {
			want = MissingData
		}
		return m.released
	}
	switch e.kind {
	case createTask:
		if !gone() && m.transit {
			want = InvalidState
		}
		if want == 0 {
			m.pending++
		}
	case cancelTask:
		if !gone() && m.pending == 0 {
			want = TaskNotCreated
		}
		if want == 0 {
			m.pending--
		}
	case lockIn:
		switch {
		case gone():
		case m.transit:
			want = InvalidState
		case m.pending == 0:
			want = TaskNotCreated
		case m.space != e.space:
			want = SpaceMismatch
		default:
			m.pending--
			m.active++
		}
	case openIn, openLast:
		switch {
		case gone():
		case m.transit:
			want = InvalidState
		case m.space != e.space:
			want = SpaceMismatch
		default:
			m.pending, m.active = max(0, m.pending-1), m.active+1
			if e.kind == openLast {
				m.released, m.pending = true, 0
			}
		}
	case read:
		if !gone() && m.transit {
			want = InvalidState
		}
		if want == 0 {
			m.active++
		}
	case readIn:
		switch {
		case gone():
		case m.transit:
			want = InvalidState
		case m.space != e.space:
			want = SpaceMismatch
		default:
			m.active++
		}
	case commitOpen:
		m.transit, m.space = false, e.space
		m.pending, m.active = max(0, m.pending-1), m.active+1
	case commitRead:
		m.transit, m.space = false, e.space
		m.active++
	case closeHandle:
		m.active--
	case beginTransit:
		if !gone() && (m.transit || m.active > 0) {
			want = InvalidState
		}
		if want == 0 {
			m.transit = true
		}
	case commitTo, commitTaskTo:
		m.transit, m.space = false, e.space
		if e.kind == commitTaskTo {
			m.pending++
		}
	case abortTransit:
		m.transit = false
	case drop:
		if !gone() && m.transit {
			want = InvalidState
		}
		if want == 0 {
			m.released, m.pending = true, 0
		}
	case look:
		space := ids[m.space]
		if m.released && m.active == 0 {
			space = tier.ID{}
		}
		return m, e.info.State == m.state() && e.info.Pending == m.pending && e.info.Active == m.active && e.info.Space == space
	}
	return m, e.status == want
}

// linearizable looks for an order of the events, within what their times allow,
// that the reference agrees with (Wing and Gong, with states visited before
// passed over). There may be at most 64 events.
func linearizable(events []event, start model, ids []tier.ID) bool {
	type node struct {
		done uint64
		m    model
	}
	seen := make(map[node]bool)
	var search func(n node) bool
	search = func(n node) bool {
		if n.done == 1<<len(events)-1 {
			return true
		}
		if seen[n] {
			return false
		}
		seen[n] = true
		firstEnd := int64(1 << 62) // who begins after it cannot be next
		for i, e := range events {
			if n.done&(1<<i) == 0 {
				firstEnd = min(firstEnd, e.end)
			}
		}
		for i, e := range events {
			if n.done&(1<<i) != 0 || e.begin > firstEnd {
				continue
			}
			if next, ok := n.m.apply(e, ids); ok && search(node{n.done | 1<<i, next}) {
				return true
			}
		}
		return false
	}
	return search(node{m: start})
}

// player is one goroutine of the random test, with what it has open.
type player struct {
	b       *Batch
	spaces  []*tier.Space
	rnd     *rand.Rand
	clock   *atomic.Int64
	fresh   func(space int) *form
	events  []event
	handles []*Handle
	transit *Transit
}

func (p *player) done(k kind, space int, begin int64, err error) {
	e := event{kind: k, space: space, begin: begin, end: p.clock.Add(1)}
	if err != nil {
		var se *StateError
		if !errors.As(err, &se) {
			panic(err) // no other error may come out of these
		}
		e.status = se.Status
	}
	p.events = append(p.events, e)
}

// opened notes what opened a handle.
func (p *player) opened(k kind, space int, begin int64, h *Handle, err error) {
	p.done(k, space, begin, err)
	if err == nil {
		h.Payload().(*form).readers.Add(1)
		p.handles = append(p.handles, h)
	}
}

// play does one random operation that p can do.
func (p *player) play() {
	k := kind(p.rnd.IntN(int(kinds)))
	if (k == drop || k == openLast) && p.rnd.IntN(3) != 0 {
		k = createTask // a dropped batch is dull
	}
	p.do(k, p.rnd.IntN(len(p.spaces)))
}

func (p *player) do(k kind, space int) {
	begin := p.clock.Add(1)
	switch k {
	case createTask:
		p.done(k, space, begin, p.b.TryCreateTask())
	case cancelTask:
		p.done(k, space, begin, p.b.CancelTask())
	case lockIn:
		h, err := p.b.TryLock(p.spaces[space].ID())
		p.opened(k, space, begin, h, err)
	case openIn, openLast:
		h, err := p.b.lock(opening{space: p.spaces[space].ID(), own: true, last: k == openLast})
		p.opened(k, space, begin, h, err)
	case read:
		h, err := p.b.TryRead(tier.ID{})
		p.opened(k, space, begin, h, err)
	case readIn:
		h, err := p.b.TryRead(p.spaces[space].ID())
		p.opened(k, space, begin, h, err)
	case closeHandle:
		if len(p.handles) == 0 {
			return
		}
		h := p.handles[0]
		p.handles = p.handles[1:]
		h.Payload().(*form).readers.Add(-1)
		p.done(k, space, begin, h.Close())
	case beginTransit:
		t, err := p.b.TryTransit()
		p.done(k, space, begin, err)
		if err == nil {
			t.Payload().(*form).readers.Add(1)
			p.transit = t
		}
	case commitTo, commitTaskTo, commitOpen, commitRead, abortTransit:
		t := p.transit
		if t == nil {
			return
		}
		p.transit = nil
		t.Payload().(*form).readers.Add(-1)
		if k == abortTransit {
			p.done(k, space, begin, t.Abort())
			return
		}
		switch k {
		case commitOpen:
			h, err := commitAndOpen(context.Background(), t, p.fresh(space), false)
			p.opened(k, space, begin, h, err)
			return
		case commitRead:
			o := CommitOptions{Open: true, KeepPending: true}
			h, err := p.b.Commit(context.Background(), t, p.fresh(space), o)
			p.opened(k, space, begin, h, err)
			return
		}
		p.done(k, space, begin, t.Commit(p.fresh(space), k == commitTaskTo))
	case drop:
		p.done(k, space, begin, p.b.Drop())
	case look:
		info := p.b.Info()
		p.events = append(p.events, event{kind: k, begin: begin, end: p.clock.Add(1), info: info})
	}
}

func (p *player) finish() {
	for len(p.handles) > 0 {
		p.do(closeHandle, 0)
	}
	if p.transit != nil {
		p.do(abortTransit, 0)
	}
}

// TestModel lets many goroutines do random operations on one batch, and checks
// that their results, in some order that their times allow, are those of the
// reference, and that each form is released once and never under a reader.
func TestModel(t *testing.T) {
	const players, operations, rounds = 4, 9, 1500
	spaces := []*tier.Space{newSpace(t, "gpu:0"), newSpace(t, "host:0")}
	ids := []tier.ID{spaces[0].ID(), spaces[1].ID()}
	seed := testseed.One(t)
	for round := range rounds {
		var (
			clock atomic.Int64
			mu    sync.Mutex
			forms []*form
			all   sync.WaitGroup
		)
		fresh := func(space int) *form {
			f := &form{space: spaces[space]}
			mu.Lock()
			defer mu.Unlock()
			forms = append(forms, f)
			return f
		}
		var seen recorder
		start := make(chan struct{})
		b := newBatch(t, fresh(0), &seen)
		team := make([]*player, players)
		for i := range team {
			p := &player{b: b, spaces: spaces, clock: &clock, fresh: fresh, rnd: rand.New(rand.NewPCG(seed, uint64(round*players+i)))}
			team[i] = p
			all.Go(func() {
				<-start
				for range operations {
					if p.rnd.IntN(3) == 0 {
						runtime.Gosched() // two cores would interleave too little otherwise
					}
					p.play()
				}
				p.finish()
			})
		}
		close(start)
		all.Wait()
		var events []event
		for _, p := range team {
			events = append(events, p.events...)
		}
		if len(events) > 63 {
			events = events[:0] // too many for the search; the checks below still count
		}
		if !linearizable(events, model{}, ids) {
			var b strings.Builder
			for _, e := range events {
				fmt.Fprintln(&b, e)
			}
			t.Fatalf("round %d: the reference allows no order of\n%s", round, &b)
		}
		if err := b.Drop(); err != nil && !errors.Is(err, tier.ErrReleased) {
			t.Fatal(err)
		}
		for i, f := range forms {
			if n := f.released.Load(); n != 1 || f.broken.Load() {
				t.Fatalf("round %d: form %d was released %d times, under a reader: %v", round, i, n, f.broken.Load())
			}
		}
		infos := seen.take()
		newest := slices.MaxFunc(infos, func(a, b Info) int { return cmp.Compare(a.Version, b.Version) })
		if newest.State != Released {
			t.Fatalf("round %d: the observer last saw %+v", round, newest)
		}
	}
}

// TestTheCheckerCanFail: results that no order explains are found.
func TestTheCheckerCanFail(t *testing.T) {
	ids := []tier.ID{{Kind: tier.GPU}, {Kind: tier.Host}}
	wrong := map[string][]event{
		"a lock without a task": {{kind: lockIn, begin: 1, end: 2}},
		"two transits at once":  {{kind: beginTransit, begin: 1, end: 3}, {kind: beginTransit, begin: 2, end: 4}},
		"an order against time": {
			{kind: beginTransit, begin: 1, end: 2},
			{kind: createTask, begin: 3, end: 4},
			{kind: abortTransit, begin: 5, end: 6},
		},
		"a stale look": {
			{kind: createTask, begin: 1, end: 2},
			{kind: look, begin: 3, end: 4, info: Info{State: Idle, Space: ids[0]}},
		},
	}
	for name, events := range wrong {
		if linearizable(events, model{}, ids) {
			t.Errorf("%s passes", name)
		}
	}
	right := []event{ // the create task overlaps the abort, so it may come after it
		{kind: beginTransit, begin: 1, end: 2},
		{kind: createTask, begin: 3, end: 6},
		{kind: abortTransit, begin: 4, end: 5},
	}
	if !linearizable(right, model{}, ids) {
		t.Error("an overlap that is right fails")
	}
}
