package monitor

import (
	"cmp"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// verify compares the sums, orders and maps of an index with its entries, and these with the batches.
func (x *Monitor) verify(t *testing.T, batches []*batch.Batch) {
	t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	if len(x.mu.entries) != len(batches) {
		t.Errorf("%d entries of %d batches", len(x.mu.entries), len(batches))
	}
	for _, s := range x.spaces {
		var sum summary
		var victims, small, all []listed
		for _, b := range batches {
			e, now := x.mu.entries[b.ID()], b.Snapshot()
			if e == nil || e.b != b || e.in == nil || e.in.ID() != now.Space {
				t.Fatalf("batch %d in %s has the entry %+v", b.ID(), now.Space, e)
			}
			if e.in != s {
				continue
			}
			if !e.victim && e.key != (Key{}) {
				t.Errorf("batch %d is no victim and has the key %v", b.ID(), e.key)
			}
			if e.bytes != now.Bytes || e.size != now.Descriptor.Body || e.version != now.Version {
				t.Errorf("the entry of %+v is %+v", now, e)
			}
			sum.count++
			sum.bytes += e.bytes
			if e.rest {
				sum.rest += e.bytes
			}
			if e.idle {
				sum.idle += e.bytes
			}
			if e.moving {
				sum.moving += e.bytes
			}
			all = append(all, listed{Key{e.size}, e.id, e})
			if e.victim && e.not&s.lower != s.lower {
				victims = append(victims, listed{e.key, e.id, e})
				small = append(small, listed{Key{e.bytes}, e.id, e})
			}
		}
		if sum.changes = s.changes; s.summary != sum {
			t.Errorf("%s: the sums are %+v, want %+v", s.ID(), s.summary, sum)
		}
		verifyTree(t, "victims", s.victims, victims)
		verifyTree(t, "victims by bytes", s.small, small)
		verifyTree(t, "batches by size", s.sizes, all)
	}
}

// verifyTree checks that a tree lists just these batches, in their order.
func verifyTree(t *testing.T, what string, tree *btree.BTreeG[listed], want []listed) {
	t.Helper()
	var got []listed
	tree.Ascend(func(l listed) bool {
		got = append(got, l)
		return true
	})
	slices.SortFunc(want, func(a, b listed) int {
		return cmp.Or(slices.Compare(a.key[:], b.key[:]), cmp.Compare(a.id, b.id))
	})
	if !slices.Equal(got, want) {
		t.Errorf("the %s are %v, want %v", what, got, want)
	}
}

// TestIndexModel changes batches at random, in the ways in which programs and the monitor do.
func TestIndexModel(t *testing.T) {
	for seed := range testseed.Each(t, testseed.Rounds(20, 6)) {
		w := newWorld(t, sizes{gpu0: 4000 * kib, host0: 4000 * kib, disk0: 4000 * kib}, nil)
		x, r := w.mon, rand.New(rand.NewPCG(seed, 5))
		var all []*batch.Batch
		ends := make(map[*batch.Batch][]func()) // of subscriptions and leases
		for range 300 {
			if len(all) < 4 || r.IntN(5) == 0 && len(all) < 30 {
				at := []tier.ID{gpu0, host0, disk0}[r.IntN(3)]
				b, err := batch.New(batch.Options{
					ID: w.ids.Next(), Payload: w.image(at, r.Int64N(5)*kib), Place: seq(r.IntN(100)),
					Observer: []batch.Observer{w.mon, overtaken{w.mon}}[r.IntN(2)],
				})
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, b)
			}
			i := r.IntN(len(all))
			b := all[i]
			switch r.IntN(10) {
			case 0:
				b.SetPlace(seq(r.IntN(100)))
			case 1:
				ends[b] = append(ends[b], b.Subscribe())
			case 2:
				if buf := imageOf(t, b).Buffer(); buf != nil {
					ends[b] = append(ends[b], buf.Lease())
				}
				b.SetPlace(seq(r.IntN(100)))
			case 3:
				w.use(b)
			case 4: // also to where it is, in another size
				w.replace(b, w.image([]tier.ID{gpu0, host0, disk0}[r.IntN(3)], r.Int64N(5)*kib))
			case 5:
				x.mu.Lock()
				x.entryLocked(b).excludeLocked(0)
				x.mu.Unlock()
			case 6:
				x.mu.Lock()
				x.entryLocked(b).excludeLocked(decide.Kinds(0).With(tier.Host).With(tier.Disk))
				x.mu.Unlock()
			case 7:
				x.mu.Lock()
				x.entryLocked(b).excludeLocked(decide.Kinds(0).With(tier.Disk))
				x.mu.Unlock()
			default:
				for _, end := range ends[b] {
					end()
				}
				delete(ends, b)
				if old := b.Info(); r.IntN(2) == 0 {
					if err := b.Drop(); err != nil {
						t.Fatal(err)
					}
					x.BatchChanged(b, old) // an announcement that comes late
					all = slices.Delete(all, i, i+1)
				}
			}
			if list := x.from(Victim{}, x.spaces[0], 1000); len(list) > 0 { // the next page begins after the first
				next := x.from(list[0], x.spaces[0], 1000)
				if !slices.EqualFunc(next, list[1:], func(a, b Victim) bool { return a.ID == b.ID }) {
					t.Errorf("after the first of %v come %v", list, next)
				}
				few, more := x.victims(x.spaces[0], x.spaces[1:], byKind{}, 2, time.Now())
				if more != (len(list) > len(few)) {
					t.Errorf("%d of %d victims are listed, and more is %t", len(few), len(list), more)
				}
			}
			if x.verify(t, all); t.Failed() {
				t.FailNow()
			}
		}
		for _, end := range slices.Concat(slices.Collect(maps.Values(ends))...) {
			end()
		}
		w.end(all...)
	}
}

// overtaken is an index that gets no announcement of a batch in transit, because the next one comes
// before it.
type overtaken struct{ *Monitor }

func (o overtaken) BatchChanged(b *batch.Batch, now batch.Info) {
	if now.State != batch.InTransit {
		o.Monitor.BatchChanged(b, now)
	}
}

// gaining counts how often its batch becomes a victim. If overtaken, it passes no announcement of a
// batch in transit on.
type gaining struct {
	*Monitor
	overtaken bool
	n         int
}

func (g *gaining) BatchChanged(b *batch.Batch, now batch.Info) {
	if g.overtaken && now.State == batch.InTransit {
		return
	}
	if s, _ := g.note(b, now); s != nil {
		g.n++
	}
}

// image returns an image of n bytes, which may be 0.
func (w *world) image(id tier.ID, n int64) *batch.Image {
	w.t.Helper()
	d := &batch.Descriptor{Rows: 1, Body: n}
	if n == 0 {
		return batch.NewImage(d, nil, w.spaces[id])
	}
	r, err := w.res.TryReserve(specific(id), n, nil)
	if err != nil {
		w.t.Fatal(err)
	}
	defer r.Release()
	buf, err := r.Alloc(n)
	if err != nil {
		w.t.Fatal(err)
	}
	return batch.NewImage(d, buf, r.Space())
}

// replace gives a batch another image.
func (w *world) replace(b *batch.Batch, p *batch.Image) {
	w.t.Helper()
	tr, err := b.TryTransit()
	if err == nil {
		err = tr.Commit(p, false)
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// TestIndexNotesWhereSomethingChanged: waiters go by the changes of spaces.
func TestIndexNotesWhereSomethingChanged(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 100 * kib}, nil)
	other, gains := w.put(gpu0, kib, seq(2)), &gaining{Monitor: w.mon, overtaken: true}
	b, err := batch.New(batch.Options{
		ID: w.ids.Next(), Payload: w.image(gpu0, kib), Observer: gains, Place: seq(1),
	})
	if err != nil {
		t.Fatal(err)
	}
	changes := func(what string, in []tier.ID, f func()) {
		t.Helper()
		before := make(map[tier.ID]summary)
		for id := range w.spaces {
			before[id] = w.index(id)
		}
		f()
		for id := range w.spaces {
			now := w.index(id)
			if got := now.changes != before[id].changes; got != slices.Contains(in, id) {
				t.Errorf("%s: a change of %s is %t", what, id, got)
			}
		}
	}
	gpu, both, none := []tier.ID{gpu0}, []tier.ID{gpu0, host0}, []tier.ID(nil)
	changes("a place", gpu, func() { b.SetPlace(seq(3)) })
	changes("the same", none, func() { w.mon.BatchChanged(b, b.Info()) })
	changes("a use", gpu, func() { w.use(b) })
	changes("a move", both, func() { w.replace(b, w.image(host0, kib)) })
	skip := func(b *batch.Batch) {
		w.mon.mu.Lock()
		defer w.mon.mu.Unlock()
		w.mon.entryLocked(b).excludeLocked(decide.Kinds(0).With(tier.Host).With(tier.Disk))
	}
	skip(other)
	changes("a use of a batch that is skipped", gpu, func() { w.use(other) })
	skip(b)
	gains.n = 0
	changes("a move of a batch that was skipped", both, func() { w.replace(b, w.image(gpu0, kib)) })
	if gains.n != 1 {
		t.Errorf("a batch that is skipped no more was announced %d times as a victim", gains.n)
	}
	changes("a drop", gpu, func() {
		if err := b.Drop(); err != nil {
			t.Fatal(err)
		}
	})
	w.end(other)
}

// TestIndexRemembersFailures: what was noted after a failed move ends with the form that failed, and
// does not end a move.
func TestIndexRemembersFailures(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 100 * kib}, nil)
	b, larger := w.put(gpu0, kib, seq(1)), w.put(gpu0, 2*kib, seq(2))
	x := w.mon
	disk := decide.Kinds(0).With(tier.Disk)
	fail := func(not decide.Kinds) {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.entryLocked(b).excludeLocked(not)
	}
	now := func() standing {
		x.mu.Lock()
		defer x.mu.Unlock()
		return x.entryLocked(b).standing
	}
	fail(disk)
	if e := now(); e.not != disk || !slices.Contains(w.victims(gpu0, 0), b.ID()) || !e.victim {
		t.Errorf("after a failure the entry is %+v", e)
	}
	fail(disk.With(tier.Host))
	if slices.Contains(w.victims(gpu0, 0), b.ID()) {
		t.Error("it is a victim that can go nowhere")
	}
	w.replace(b, w.image(host0, kib))
	if e := now(); e.not != 0 {
		t.Errorf("after a move the entry is %+v", e)
	}
	fail(disk)
	w.replace(b, w.image(host0, 3*kib))
	if e := now(); e.not != 0 {
		t.Errorf("in its new form the entry is %+v", e)
	}
	w.end(b, larger)
}

// TestFaultsEndWithAMove: a batch that was moved has no failures, and the counts are right.
func TestFaultsEndWithAMove(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 100 * kib}, nil)
	b, m := w.put(host0, kib, seq(1)), w.mon
	end := func(err error, want outcome) {
		t.Helper()
		v := Victim{Batch: b, ID: b.ID(), Bytes: kib}
		if got, _ := m.noted(v, m.byID[host0], m.byID[disk0], err); got != want {
			t.Errorf("%v means %d, want %d", err, got, want)
		}
	}
	end(errors.New("the disk is broken"), failed)
	end(&batch.StateError{Batch: b.ID()}, busy)
	end(&batch.UnmovableError{Batch: b.ID()}, unmovable)
	if len(m.mu.faults) != 1 || len(w.victims(host0, 0)) != 0 {
		t.Errorf("%d faults, and the batch is a victim: %v", len(m.mu.faults), w.victims(host0, 0))
	}
	end(nil, moved)
	if len(m.mu.faults) != 0 {
		t.Errorf("%d faults after a move", len(m.mu.faults))
	}
	if s := m.Stats(); s != (Stats{Moves: 1, Bytes: kib, Busy: 1, Failed: 1, Unmovable: 1}) {
		t.Errorf("the stats are %+v", s)
	}
	w.end(b)
}

// TestEachHoldsNoLock: a function that is called for each batch may use the index, and drop batches.
func TestEachHoldsNoLock(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 100 * kib}, nil)
	for i := range 10 {
		w.put(gpu0, kib, seq(i))
	}
	n := 0
	w.mon.Each(func(b *batch.Batch) {
		n++
		if !w.mon.mu.TryLock() {
			t.Fatal("called under the lock")
		}
		w.mon.mu.Unlock()
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
	})
	if n != 10 {
		t.Errorf("%d of 10 batches", n)
	}
	w.end()
}

// TestVictimsGoToSlowerTiers: the victims of a target are looked at with the spaces below the source,
// among which is the target itself.
func TestVictimsGoToSlowerTiers(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 100 * kib}, func(c *Config, _ *world) {
		c.Speed = func(from, to tier.ID) int64 {
			if from == to {
				t.Errorf("the speed from %s to itself is asked for", from)
			}
			return 1 << 30
		}
	})
	b, other := w.put(host0, 10*kib, seq(1)), w.put(host0, kib, seq(2))
	host, disk, below := w.mon.byID[host0], w.mon.byID[disk0], w.mon.byID[gpu0].below(w.mon)
	if list, _ := w.mon.victims(host, below, byKind{}, 10, time.Now()); len(list) != 2 {
		t.Errorf("the victims are %v", list)
	}
	for range 2 {
		w.mon.noted(Victim{Batch: other, ID: other.ID(), Bytes: kib}, host, disk, errors.New("broken"))
	}
	if list, _ := w.mon.victims(host, below, byKind{}, 10, time.Now()); len(list) != 0 {
		t.Errorf("the victims are %v, though all moves to the disk fail", list)
	}
	w.end(b, other)
}

// TestUseEndsNoPause: a batch that is found in use is left alone for a period. Conversions that have
// failed are not tried again sooner because of that, and failures of a disk do not keep it from other tiers.
func TestUseEndsNoPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 100 * kib}, nil)
		b, other := w.put(gpu0, kib, seq(1)), w.put(gpu0, kib, seq(2))
		fail := func(b *batch.Batch, to tier.ID, err error) {
			w.mon.noted(Victim{Batch: b, ID: b.ID(), Bytes: kib}, w.mon.byID[gpu0], w.mon.byID[to], err)
		}
		want := func(what string, not decide.Kinds) {
			t.Helper()
			w.mon.putBack(time.Now())
			w.mon.mu.Lock()
			defer w.mon.mu.Unlock()
			if got := w.mon.entryLocked(b).not; got != not {
				t.Errorf("%s: it is excluded from %b, want %b", what, got, not)
			}
		}
		disk := decide.Kinds(0).With(tier.Disk)
		fail(b, host0, &batch.StateError{Batch: b.ID()})
		want("in use", disk.With(tier.Host))
		fail(other, disk0, errors.New("broken"))
		time.Sleep(w.mon.cfg.Period)
		want("a period after a use, while the disk fails", 0)
		fail(b, disk0, &batch.UnmovableError{Batch: b.ID()})
		fail(b, host0, &batch.StateError{Batch: b.ID()})
		want("in use again", disk.With(tier.Host))
		time.Sleep(w.mon.cfg.Period)
		want("a period later", disk)
		w.end(b, other)
	})
}
