package repository

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

func TestKeys(t *testing.T) {
	plan := newPlan(t, nil)
	r, err := plan.Create(Key{"join", 1}, Options{})
	check(t, err)
	if r.Key() != (Key{"join", 1}) || r.Key().String() != "join:1" {
		t.Errorf("the key is %s", r.Key())
	}
	_, err = plan.Create(Key{"join", 1}, Options{})
	wantError(t, err, ErrDuplicate)
	_, err = plan.Lookup(Key{"join", 0})
	wantError(t, err, ErrUnknown)
	wantError(t, plan.Order(Key{"scan", 0}), ErrUnknown)
	wantError(t, plan.FanOut(background, record(1), 0, Key{"scan", 0}), ErrUnknown)
	finds := map[string]func(Key) (*Repository, error){"lookup": plan.Lookup, "ensure": plan.Ensure}
	for name, find := range finds {
		if got, err := find(Key{"join", 1}); got != r || err != nil {
			t.Errorf("%s: %p, %v", name, got, err)
		}
	}
	for _, key := range []Key{{"", 0}, {"join", -1}} {
		if _, err := plan.Ensure(key); err == nil {
			t.Errorf("the key %v is no error", key)
		}
	}
	if plan.name != "test" || plan.plan != 7 {
		t.Errorf("plan %d, %q", plan.plan, plan.name)
	}
}

// TestPlansDoNotCollide: two plans have the same keys, ids of one source, and
// places of their own.
func TestPlansDoNotCollide(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	var ids batch.IDs
	seen := make(map[batch.ID]bool)
	for plan := range uint64(2) {
		p := NewManager("plan", plan+1, Config{Mover: m, IDs: &ids})
		r := ensure(t, p, "join")
		for n := range int64(3) {
			check(t, r.Put(background, 0, record(n)))
		}
		seq := uint64(0)
		for b := range r.Batches(0) {
			place := b.Info().Place
			if seen[b.ID()] || place.Plan != plan+1 || place.Seq <= seq {
				t.Errorf("plan %d: batch %d at %+v", plan+1, b.ID(), place)
			}
			seen[b.ID()], seq = true, place.Seq
		}
		defer func() { check(t, closeAll(background, p)) }()
	}
	if len(seen) != 6 {
		t.Errorf("%d batches", len(seen))
	}
}

func places(r *Repository) (rank int, last bool, same bool) {
	same = true
	first := true
	for b := range r.Batches(0) {
		p := b.Info().Place
		if !first {
			same = same && p.Rank == rank && p.Last == last
		}
		rank, last, first = p.Rank, p.Last, false
	}
	return rank, last, same
}

// TestOrder: batches know where they stand, also when that changes.
func TestOrder(t *testing.T) {
	m := newMover(t, 100, 100, 100)
	plan := newPlan(t, m)
	named := make(map[string]*Repository)
	add := func(name string) {
		named[name] = ensure(t, plan, name)
		for n := range int64(3) {
			check(t, named[name].Put(background, 0, record(n)))
		}
	}
	check := func(want ...string) {
		t.Helper()
		var got []string
		for _, r := range plan.Repositories() {
			got = append(got, r.Key().Operator)
		}
		if !slices.Equal(got, want) {
			t.Errorf("order %q, want %q", got, want)
		}
		for i, name := range want {
			if rank, last, same := places(named[name]); rank != i || last != (i == len(want)-1) || !same {
				t.Errorf("%s: rank %d, last %v, all the same %v; want rank %d of %d",
					name, rank, last, same, i, len(want))
			}
		}
	}
	for _, name := range []string{"a", "b", "c"} {
		add(name)
	}
	check("a", "b", "c") // as they were made
	key := func(name string) Key { return Key{Operator: name} }
	if err := plan.Order(key("c"), key("a"), key("b")); err != nil {
		t.Fatal(err)
	}
	check("c", "a", "b")
	if err := plan.Order(key("a"), key("c")); err != nil {
		t.Fatal(err)
	}
	check("b", "a", "c") // b is not named
	add("d")
	check("b", "a", "c", "d")
	if err := plan.Order(key("a"), key("a")); err == nil {
		t.Error("a key twice is no error")
	}
	check("b", "a", "c", "d")
}

// TestCreateLooksAtItsNeighbour: a new repository changes the place of the one before it,
// and no other is even looked at, so that a plan's cost is linear in its repositories.
func TestCreateLooksAtItsNeighbour(t *testing.T) {
	plan := newPlan(t, nil)
	first := ensure(t, plan, "first")
	ensure(t, plan, "second")
	held, release, released := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(released)
		first.mu.Lock()
		close(held)
		<-release
		first.mu.Unlock()
	}()
	<-held
	made := make(chan error, 1)
	go func() {
		_, err := plan.Create(Key{Operator: "third"}, Options{})
		made <- err
	}()
	select {
	case err := <-made:
		check(t, err)
	case <-time.After(20 * time.Second): // only a waiter for the first takes so long
		t.Error("the first was looked at")
	}
	close(release)
	<-released
}

// BenchmarkPlan makes a plan of so many repositories, orders them, and closes it. What one
// repository takes should not depend on how many there are.
func BenchmarkPlan(b *testing.B) {
	for _, n := range []int{1_000, 20_000} {
		b.Run(fmt.Sprintf("repositories=%d", n), func(b *testing.B) {
			keys := make([]Key, n)
			for i := range keys {
				keys[i] = Key{Operator: "operator", Port: i}
			}
			for b.Loop() {
				plan := NewManager("test", 1, Config{})
				for _, key := range keys {
					if _, err := plan.Create(key, Options{}); err != nil {
						b.Fatal(err)
					}
				}
				if err := errors.Join(plan.Order(keys...), closeAll(background, plan)); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/repository")
		})
	}
}

// TestOrderRacesPut: however puts, moves between repositories and new orders interleave, in the end
// every batch has the right place.
func TestOrderRacesPut(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	keys := []Key{{"a", 0}, {"b", 0}, {"c", 0}}
	var all []*Repository
	for _, key := range keys {
		r, err := plan.Ensure(key)
		check(t, err)
		all = append(all, r)
	}
	for id := range batch.ID(30) {
		check(t, all[id%3].PutBatch(0, newBatch(t, id+1, m.space(tier.GPU))))
	}
	seed := testseed.One(t)
	var group sync.WaitGroup
	for i := range 2 {
		group.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			for range 100 {
				order := slices.Clone(keys)
				rnd.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
				if err := plan.Order(order...); err != nil {
					t.Error(err)
				}
			}
		})
		group.Go(func() {
			rnd := rand.New(rand.NewPCG(seed, uint64(2+i)))
			for range 400 {
				b, err := all[rnd.IntN(3)].Take(background, 0, batch.Idle, NoWait())
				if err != nil {
					t.Error(err)
				}
				if b == nil {
					continue
				}
				if err := all[rnd.IntN(3)].PutBatch(0, b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
	total := 0
	for i, r := range plan.Repositories() {
		total += r.Total()
		for b := range r.Batches(0) {
			if p := b.Info().Place; p.Rank != i || p.Last != (i == 2) || p.Plan != 7 {
				t.Errorf("%s: batch %d at %+v", r.Key(), b.ID(), p)
			}
		}
	}
	if total != 30 {
		t.Errorf("%d batches, want 30", total)
	}
}

// TestOrdersRace: of two orders at once one is the last, for the batches too.
func TestOrdersRace(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	a, b := Key{"a", 0}, Key{"b", 0}
	for i, key := range []Key{a, b} {
		r, err := plan.Ensure(key)
		check(t, err)
		for n := range 4 {
			check(t, r.PutBatch(0, newBatch(t, batch.ID(10*i+n+1), m.space(tier.GPU))))
		}
	}
	for round := range 400 {
		var both sync.WaitGroup
		start := make(chan struct{})
		for _, order := range [][]Key{{a, b}, {b, a}} {
			both.Go(func() {
				<-start
				if err := plan.Order(order...); err != nil {
					t.Error(err)
				}
			})
		}
		close(start)
		both.Wait()
		for i, r := range plan.Repositories() {
			if rank, last, same := places(r); rank != i || last != (i == 1) || !same {
				t.Fatalf("round %d: %s is at %d, and its batches at %d, all the same: %v",
					round, r.Key(), i, rank, same)
			}
		}
	}
}

// TestFanOut: each port has the record, in memory of its own.
func TestFanOut(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	keys := []Key{{"a", 0}, {"a", 1}, {"b", 0}}
	for _, key := range keys {
		_, err := plan.Ensure(key)
		check(t, err)
	}
	check(t, plan.FanOut(background, record(3), 2, keys...))
	ids := make(map[batch.ID]bool)
	for _, key := range keys {
		r, err := plan.Lookup(key)
		check(t, err)
		b, err := r.Take(background, 2, batch.Idle, NoWait())
		check(t, err)
		if b == nil || m.numberOf(b) != 3 {
			t.Fatalf("%s: %v", key, b)
		}
		ids[b.ID()] = true
		check(t, b.Drop())
	}
	if len(ids) != 3 {
		t.Errorf("%d ids, want 3", len(ids))
	}
	if err := plan.FanOut(background, record(3), 2, keys[0], keys[0]); err == nil {
		t.Error("a port twice is no error")
	}
}

// TestFanOutIsAllOrNothing: whichever port fails, and however.
func TestFanOutIsAllOrNothing(t *testing.T) {
	broken := errors.New("broken")
	for bad := range 3 {
		for _, how := range []string{"ingest", "schema", "closed before", "closed meanwhile"} {
			t.Run(fmt.Sprintf("%s, port %d", how, bad), func(t *testing.T) {
				m := newMover(t, 10, 10, 10)
				plan := newPlan(t, m)
				var keys []Key
				var all []*Repository
				for i := range 3 {
					keys = append(keys, Key{"join", i})
					o := Options{}
					if how == "schema" && i == bad {
						o.Schema = schemaB
					}
					r, err := plan.Create(keys[i], o)
					check(t, err)
					all = append(all, r)
				}
				want := broken
				calls := 0
				switch how {
				case "schema":
					want = ErrSchema
				case "closed before":
					want = tier.ErrClosed
					check(t, all[bad].Close(background))
				case "closed meanwhile":
					want = tier.ErrClosed
				}
				m.setFault(func(string) error {
					calls++
					switch {
					case how == "ingest" && calls == bad+1:
						return broken
					case how == "closed meanwhile" && calls == 3:
						all[bad].CloseInput()
					}
					return nil
				})
				wantError(t, plan.FanOut(background, record(1), 0, keys...), want)
				for _, r := range all {
					if r.Total() != 0 {
						t.Errorf("%s has kept its batch", r.Key())
					}
				}
			})
		}
	}
}

// TestFailedFanOutLeavesConsumers: what a consumer has, or is just bringing to its
// tier, stays with it when another port fails.
func TestFailedFanOutLeavesConsumers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 1, 10, 10)
		plan := newPlan(t, m)
		var keys []Key
		var all []*Repository
		for i := range 3 {
			keys = append(keys, Key{"join", i})
			r, err := plan.Ensure(keys[i])
			check(t, err)
			all = append(all, r)
		}
		full, err := m.reservations.TryReserve(reservation.AnyInTier(tier.GPU), bodySize, nil)
		check(t, err)
		take := taken(func() (*batch.Batch, error) { return all[0].Take(background, 0, batch.Idle) })
		drained := make(chan error, 1)
		go func() {
			for h, err := range all[1].Drain(background, 0, tier.GPU, WaitInput()) {
				if err == nil {
					err = h.Close()
				}
				drained <- err
			}
		}()
		synctest.Wait()
		calls := 0
		m.setFault(func(op string) error {
			if op == "ingest" {
				if calls++; calls == 3 {
					all[2].CloseInput()
				}
			}
			return nil
		})
		wantError(t, plan.FanOut(background, record(1), 0, keys...), tier.ErrClosed)
		got := <-take
		if got.err != nil || got.b.Info().State != batch.Idle {
			t.Errorf("what was taken is gone: %v, %s", got.err, got.b.Info().State)
		}
		check(t, full.Release())
		check(t, <-drained)
		all[1].CloseInput()
		check(t, got.b.Drop())
	})
}

// TestClearMeetsTransit: a batch that is in transit before its repository has noticed is dropped
// afterwards.
func TestClearMeetsTransit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMover(t, 10, 10, 10)
		plan := newPlan(t, m)
		r := ensure(t, plan, "join")
		p := &hooked{form: form{m.space(tier.Host)}}
		b, err := batch.New(batch.Options{ID: 1, Payload: p})
		check(t, err)
		check(t, r.PutBatch(0, b))
		announce := make(chan struct{})
		p.hook = func() { <-announce } // the repository is told after this
		transits := make(chan *batch.Transit, 1)
		go func() {
			transit, err := b.TryTransit()
			if err != nil {
				t.Error(err)
			}
			transits <- transit
		}()
		synctest.Wait()
		done := make(chan []Leftover, 1)
		go func() {
			report, err := plan.Clear(background)
			if err != nil {
				t.Error(err)
			}
			done <- report
		}()
		synctest.Wait()
		if len(done) != 0 || r.Total() != 1 || b.Snapshot().State != batch.InTransit {
			t.Fatalf("%d are left, the batch is %s", r.Total(), b.Snapshot().State)
		}
		close(announce)
		check(t, (<-transits).Abort())
		if report := <-done; len(report) != 1 || b.Info().State != batch.Released {
			t.Errorf("%+v, the batch is %s", report, b.Info().State)
		}
	})
}

// TestRepositoryIgnoresOldNews: announcements of one batch may come out of order.
func TestRepositoryIgnoresOldNews(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	fill(t, r, 1)
	b, _ := r.Peek(0)
	old := b.Info()
	transit, err := b.TryTransit()
	check(t, err)
	r.mu.entries[b.ID()].BatchChanged(b, old)
	if got, err := r.Take(background, 0, batch.Idle, NoWait()); got != nil || err != nil {
		t.Errorf("took %v, %v from a batch in transit", got, err)
	}
	moving := b.Info()
	check(t, transit.Abort())
	r.mu.entries[b.ID()].BatchChanged(b, moving)
	if got, err := r.Take(background, 0, batch.Idle, NoWait()); got != b || err != nil {
		t.Errorf("took %v, %v after the transit", got, err)
	}
	check(t, r.PutBatch(0, b))
	loose := newBatch(t, b.ID()+1, m.space(tier.Host))
	old = loose.Info()
	check(t, loose.CreateTask(background))
	check(t, r.PutBatch(0, loose))
	r.mu.entries[loose.ID()].BatchChanged(loose, old) // from before it was put
	if got, err := r.Take(background, 0, batch.Idle, NoWait(), Unordered()); got != b || err != nil {
		t.Errorf("took %v, %v", got, err)
	}
	check(t, b.Drop())
	if got, err := r.Take(background, 0, batch.Idle, NoWait()); got != nil || err != nil {
		t.Errorf("took %v, %v, although a task is pending", got, err)
	}
}

// TestRepositoryIgnoresAnotherBatch: an announcement may come late, when another batch of the same id
// is in the repository.
func TestRepositoryIgnoresAnotherBatch(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "join")
	first, second := newBatch(t, 1, m.space(tier.GPU)), newBatch(t, 1, m.space(tier.Host))
	check(t, r.PutBatch(0, first))
	left := r.mu.entries[first.ID()]
	_, err := r.Take(background, 0, batch.Idle)
	check(t, err)
	check(t, r.PutBatch(0, second))
	check(t, first.CreateTask(background))
	check(t, first.Drop())
	left.BatchChanged(first, first.Info())
	if dropped, _, err := r.drop(background, left, false); dropped || err != nil {
		t.Errorf("the first was dropped as if it were there: %v", err)
	}
	if r.Len(0) != 1 || r.Bytes(tier.Host) != 10 {
		t.Errorf("the repository has %d batches of %d bytes", r.Len(0), r.Bytes(tier.Host))
	}
	b, err := r.Take(background, 0, batch.Idle, NoWait())
	if check(t, err); b != second {
		t.Errorf("took %p, want %p", b, second)
	}
	check(t, second.Drop())
}

// hooked is a form that calls back when its leases are counted, as each cut through its batch does.
type hooked struct {
	form
	hook func()
}

func (h *hooked) Leased() int {
	if h.hook != nil {
		h.hook()
	}
	return 0
}

func (h *hooked) OnUnleased(func()) {}

// TestPayloadIsAskedWithoutTheLock: a program's own form may call the repository when it is asked
// for its leases.
func TestPayloadIsAskedWithoutTheLock(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	r := ensure(t, plan, "join")
	p := &hooked{form: form{m.space(tier.Host)}}
	asked := 0
	p.hook = func() {
		asked++
		if !r.mu.TryLock() {
			t.Error("the payload is asked under the repository's lock")
			return
		}
		r.mu.Unlock()
	}
	b, err := batch.New(batch.Options{ID: 1, Payload: p})
	check(t, err)
	check(t, r.PutBatch(0, b))
	check(t, mustClaim(t, r, 1).Restore())
	c, err := r.ClaimAll(background, 0)
	check(t, err)
	check(t, c.Restore())
	h, err := m.Acquire(background, b, reservation.AnyInTier(tier.Host))
	check(t, err)
	open, err := r.Take(background, 0, batch.Idle, NoWait())
	if open != nil || err != nil {
		t.Errorf("took %v, %v with a handle open", open, err)
	}
	check(t, h.Close())
	c = mustClaim(t, r, 1)
	check(t, b.Drop()) // in place
	check(t, c.Restore())
	if asked == 0 || r.Total() != 0 {
		t.Errorf("asked %d times, %d batches are left", asked, r.Total())
	}
}

// TestOrderWhilePutting: an order that changes after a batch has been given its
// place and before it is in the repository, and one that changes afterwards.
func TestOrderWhilePutting(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	r := ensure(t, plan, "a")
	ensure(t, plan, "b")
	var told batch.Place
	var reorder changing = func(b *batch.Batch) {
		first := told.Plan == 0
		if told = b.Info().Place; first && told.Plan == 7 {
			check(t, plan.Order(Key{"b", 0}, Key{"a", 0}))
		}
	}
	b, err := batch.New(batch.Options{ID: 1, Payload: form{m.space(tier.Host)}, Observer: reorder})
	check(t, err)
	check(t, r.PutBatch(0, b))
	if p := b.Info().Place; p.Rank != 1 || !p.Last || p != told {
		t.Errorf("the batch is at %+v, and its observer was told of %+v", p, told)
	}
	check(t, plan.Order(Key{"a", 0}, Key{"b", 0}))
	if p := b.Info().Place; p.Rank != 0 || p.Last || p != told {
		t.Errorf("the batch is at %+v, and its observer was told of %+v", p, told)
	}
}

// TestObserversFindTheRepositoryRight: the repository has recorded a change before the batch's
// observer is called, which may take the batch.
func TestObserversFindTheRepositoryRight(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	r := ensure(t, newPlan(t, m), "a")
	var taken *batch.Batch
	aborted := false
	var take changing = func(*batch.Batch) {
		if aborted && taken == nil {
			var err error
			taken, err = r.Take(background, 0, batch.Idle, NoWait())
			check(t, err)
		}
	}
	b, err := batch.New(batch.Options{ID: 1, Payload: form{m.space(tier.Host)}, Observer: take})
	check(t, err)
	check(t, r.PutBatch(0, b))
	transit := mustTransit(t, b)
	aborted = true
	check(t, transit.Abort())
	if taken != b {
		t.Error("the observer was told first")
	}
}

type changing func(*batch.Batch)

func (f changing) BatchChanged(b *batch.Batch, _ batch.Info) { f(b) }

// TestClearReportsLeftovers by key, in the plan's order, and leaves the
// repositories open.
func TestClearReportsLeftovers(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	plan := newPlan(t, m)
	for i, name := range []string{"scan", "empty", "join"} {
		r := ensure(t, plan, name)
		for n := range int64(2 * i % 4) {
			check(t, r.Put(background, int(n), record(n)))
		}
	}
	scan := ensure(t, plan, "scan")
	check(t, scan.Put(background, 0, record(1)))
	check(t, plan.Order(Key{"empty", 0}, Key{"scan", 0}))
	report, err := plan.Clear(background)
	check(t, err)
	want := []Leftover{{Key{"empty", 0}, 2, 2 * bodySize}, {Key{"scan", 0}, 1, bodySize}}
	if !slices.Equal(report, want) {
		t.Errorf("%+v, want %+v", report, want)
	}
	if report, err := plan.Clear(background); len(report) != 0 || err != nil {
		t.Errorf("a second time: %+v, %v", report, err)
	}
	check(t, scan.Put(background, 0, record(1)))
}

// TestObserverSeesThePlace: the first that an observer sees of a batch that is put
// is its place.
func TestObserverSeesThePlace(t *testing.T) {
	m := newMover(t, 10, 10, 10)
	var seen observer
	plan := NewManager("test", 3, Config{Mover: m, Observer: &seen, Clock: func() int64 { return 42 }})
	r := ensure(t, plan, "join")
	check(t, r.Put(background, 0, record(1)))
	place := batch.Place{Plan: 3, Name: "test", Last: true, Seq: 1, Operator: "join"}
	if len(seen.infos) != 1 || seen.infos[0].Place != place || seen.infos[0].LastUse != 42 {
		t.Errorf("%+v", seen.infos)
	}
	check(t, closeAll(background, plan))
	if last := seen.infos[len(seen.infos)-1]; last.State != batch.Released {
		t.Errorf("%+v", last)
	}
}

type observer struct{ infos []batch.Info }

func (o *observer) BatchChanged(_ *batch.Batch, now batch.Info) { o.infos = append(o.infos, now) }
