package monitor

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

func (w *world) index(id tier.ID) summary { return w.mon.sums(w.mon.byID[id]) }

// shortlist returns the longest shortlist of the i-th space.
func (w *world) shortlist(i int, fit byKind) []Victim {
	s := w.mon.spaces[i]
	v, _ := w.mon.victims(s, s.below(w.mon), fit, shortlistMax, time.Now())
	return v
}

// firstVictims returns a shortlist of the first space as a list of moves begins with it.
func (w *world) firstVictims(limit int) []Victim {
	s := w.mon.spaces[0]
	list, _ := w.mon.victims(s, s.below(w.mon), byKind{}, limit, time.Now())
	return list
}

// inEach returns n bytes for each tier.
func inEach(n int64) (all byKind) {
	for k := range all {
		all[k] = n
	}
	return all
}

// exclude keeps a batch from being a victim, or ends that.
func (w *world) exclude(b *batch.Batch, is bool) {
	w.mon.mu.Lock()
	defer w.mon.mu.Unlock()
	not := decide.Kinds(0)
	if is {
		not = not.With(tier.Host).With(tier.Disk)
	}
	if e := w.mon.entryLocked(b); e != nil {
		e.excludeLocked(not)
	}
}

func (w *world) victims(id tier.ID, fit int64) []batch.ID {
	var ids []batch.ID
	for _, v := range w.shortlist(w.mon.byID[id].place, inEach(fit)) {
		ids = append(ids, v.ID)
	}
	return ids
}

func TestIndexFollowsABatch(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 100 * kib}, nil)
	a := w.put(gpu0, 10*kib, seq(1))
	b := w.put(gpu0, 20*kib, seq(2))
	low := w.put(disk0, 30*kib, seq(3))
	victim := func(what string, want bool, rest int64) {
		t.Helper()
		if got := slices.Contains(w.victims(gpu0, 0), b.ID()); got != want {
			t.Errorf("%s: victim is %v", what, got)
		}
		if got := w.index(gpu0).rest; got != rest*kib {
			t.Errorf("%s: %d bytes at rest, want %d", what, got, rest*kib)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	victim("idle", true, 30)
	if got := w.victims(gpu0, 0); !slices.Equal(got, []batch.ID{b.ID(), a.ID()}) {
		t.Errorf("the order is %v", got)
	}
	if s := w.index(disk0); s.rest != 30*kib || len(w.victims(disk0, 1<<40)) != 0 {
		t.Errorf("the lowest tier has %+v and victims %v", s, w.victims(disk0, 1<<40))
	}
	cancel := b.Subscribe()
	victim("subscribed", false, 30)
	cancel()
	victim("no more", true, 30)
	must(b.TryCreateTask())
	victim("task created", true, 30)
	h, err := b.TryLock(gpu0)
	must(err)
	victim("processing", false, 10)
	must(h.Close())
	victim("closed", true, 30)

	end := b.Info().Descriptor // the buffer is leased behind the batch's back
	img := imageOf(t, b)
	lease := img.Buffer().Lease()
	b.SetPlace(seq(9))
	victim("leased", false, 10)
	lease()
	victim("the lease has ended", true, 30)

	tr, err := b.TryTransit()
	must(err)
	victim("in transit", false, 10)
	r, err := w.res.TryReserve(specific(disk0), 20*kib, nil)
	must(err)
	buf, err := r.Alloc(20 * kib)
	must(err)
	must(r.Release())
	must(tr.Commit(batch.NewImage(end, buf, w.spaces[disk0]), false))
	victim("moved", false, 10)
	if s := w.index(disk0); s.rest != 50*kib || s.count != 2 {
		t.Errorf("the lowest tier has %+v", s)
	}
	w.end(a, b, low)
}

// asking is an image that calls back when it is asked for its form or its leases.
type asking struct {
	*batch.Image
	asked func()
}

func (p *asking) Type() batch.PayloadType { p.asked(); return p.Image.Type() }
func (p *asking) Leased() int             { p.asked(); return p.Image.Leased() }

// TestPayloadIsAskedWithoutTheLock: a program's own payload may call what locks the index.
func TestPayloadIsAskedWithoutTheLock(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 100 * kib}, nil)
	x, asked := w.mon, 0
	r, err := w.res.TryReserve(specific(gpu0), kib, nil)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(kib)
	if err != nil {
		t.Fatal(err)
	}
	r.Release()
	p := &asking{batch.NewImage(&batch.Descriptor{Rows: 1, Body: kib}, buf, r.Space()), func() {
		asked++
		if !x.mu.TryLock() {
			t.Error("the payload is asked under the index's lock")
			return
		}
		x.mu.Unlock()
	}}
	b, err := batch.New(batch.Options{ID: 1, Payload: p, Observer: hiding{w.mon}}) // first seen by a change
	if err != nil {
		t.Fatal(err)
	}
	b.SetPlace(seq(1))
	now := time.Now()
	from, to := w.mon.byID[gpu0], w.mon.byID[disk0]
	w.mon.noted(Victim{Batch: b, ID: 1}, from, to, batch.ErrUnmovable)
	if len(w.victims(gpu0, 0)) != 0 {
		t.Error("a batch that cannot be converted is still a victim")
	}
	w.mon.putBack(now.Add(time.Hour))
	if asked == 0 || len(x.mu.faults) != 1 {
		t.Errorf("asked %d times; %d failures are noted", asked, len(x.mu.faults))
	}
	w.end(b)
}

// The shortlist is short however many batches there are, and holds small ones if
// the policy's first ones are too large for the tiers below.
func TestIndexShortlist(t *testing.T) {
	n := int64(fewer(6000))
	w := newWorld(t, sizes{gpu0: 20 * n * kib, disk0: 20 * n * kib}, nil)
	var all []*batch.Batch
	for i := range int(n) {
		size := int64(10 * kib)
		if i < 2 {
			size = int64(i+1) * kib
		}
		all = append(all, w.put(gpu0, size, seq(i)))
	}
	cancel := all[0].Subscribe()
	got := w.victims(gpu0, 5*kib)
	if len(got) > shortlistMax {
		t.Fatalf("%d victims are listed", len(got))
	}
	if got[0] != all[n-1].ID() || got[1] != all[n-2].ID() {
		t.Errorf("the first are %v", got[:2])
	}
	if last := got[len(got)-1]; last != all[1].ID() {
		t.Errorf("the last is %d, want the small one", last)
	}
	if slices.Contains(got, all[0].ID()) {
		t.Error("a batch that is subscribed to is listed for its size")
	}
	if got := w.victims(gpu0, 20*kib); slices.Contains(got, all[1].ID()) {
		t.Error("a small one is listed although others fit")
	}
	cancel()
	w.end(all...)
}

// TestSmallVictimsInOrder: of many that fit, the policy's first are listed, not the largest.
func TestSmallVictimsInOrder(t *testing.T) {
	const n = shortlistMax + 200
	w := newWorld(t, sizes{gpu0: 20 * n * kib, disk0: 20 * n * kib}, func(c *Config, _ *world) { c.Policy = PlanOrder() })
	var all []*batch.Batch
	for i := range n {
		size := int64(10 * kib)
		if i < 200 {
			size = int64(2-i/100) * kib // the last in the policy's order are larger
		}
		all = append(all, w.put(gpu0, size, seq(i)))
	}
	w.exclude(all[199], true)
	got, room := []batch.ID{}, byKind{tier.GPU: 8 * kib, tier.Disk: 4 * kib}
	for _, v := range w.shortlist(0, room) {
		if v.Bytes < 10*kib {
			got = append(got, v.ID)
		}
	}
	var want []batch.ID
	for i := range smallMax {
		want = append(want, all[198-i].ID())
	}
	if !slices.Equal(got, want) {
		t.Errorf("the small victims are %v, want %v", got, want)
	}
	w.end(all...)
}

// Notifications that overlap and come out of order end with the truth.
func TestIndexConverges(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 1000 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) {
		c.Policy = PlanOrder() // whose Order changes nothing
	})
	var all []*batch.Batch
	for i := range 8 {
		all = append(all, w.put(gpu0, 4*kib, seq(i)))
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 3))
			for range fewer(2000) {
				b := all[r.IntN(len(all))]
				switch r.IntN(5) {
				case 0:
					b.SetPlace(seq(r.IntN(100)))
				case 1:
					b.Subscribe()()
				case 2:
					if b.TryCreateTask() == nil {
						if h, err := b.TryLock(gpu0); err == nil {
							h.Close()
						} else {
							b.CancelTask()
						}
					}
				case 3:
					if tr, err := b.TryTransit(); err == nil {
						tr.Abort()
					}
				case 4:
					w.mon.BatchChanged(b, b.Info())
				}
			}
		})
	}
	wg.Wait()
	for _, b := range all {
		for b.CancelTask() == nil {
		}
	}
	var keys []Key
	for _, v := range w.shortlist(w.mon.byID[gpu0].place, inEach(1<<40)) {
		if want := w.mon.cfg.Policy.Key(v.Batch.Info()); v.Key != want {
			t.Errorf("batch %d is listed with %v, want %v", v.ID, v.Key, want)
		}
		keys = append(keys, v.Key)
	}
	if len(keys) != len(all) || !slices.IsSortedFunc(keys, compareKeys) {
		t.Errorf("the index lists %v", keys)
	}
	if s := w.index(gpu0); s.rest != 32*kib || s.bytes != 32*kib || s.count != 8 {
		t.Errorf("the sums are %+v", s)
	}
	w.end(all...)
}

// TestIndexOfFewOfMany checks that the index still lists a batch, skipped or not, after most others
// have left.
func TestIndexOfFewOfMany(t *testing.T) {
	const n = 2000
	w := newWorld(t, sizes{gpu0: n * 10 * kib, disk0: n * 10 * kib}, nil)
	x := w.mon
	r := rand.New(rand.NewPCG(1, 4))
	var all, left []*batch.Batch
	aside := make(map[*batch.Batch]bool)
	for i := range n {
		b := w.put(gpu0, int64(1+r.IntN(3))*kib, seq(i))
		all = append(all, b)
		if r.IntN(10) == 0 {
			w.exclude(b, true)
			aside[b] = true
		}
	}
	for _, i := range r.Perm(n) {
		if b := all[i]; r.IntN(20) == 0 {
			left = append(left, b)
		} else if err := b.Drop(); err != nil {
			t.Fatal(err)
		}
	}
	slices.SortFunc(left, func(a, b *batch.Batch) int { return cmp.Compare(b.Info().Place.Seq, a.Info().Place.Seq) })
	check := func(what string) {
		t.Helper()
		var want []batch.ID
		bytes := int64(0)
		for _, b := range left {
			if bytes += b.Info().Bytes; !aside[b] {
				want = append(want, b.ID())
			}
			if !x.Knows(b) {
				t.Errorf("%s: batch %d is not known", what, b.ID())
			}
		}
		want = want[:min(len(want), shortlistMax-smallMax-staleMax)]
		if got := w.victims(gpu0, 1<<40); !slices.Equal(got, want) {
			t.Errorf("%s: the victims are %v, want %v", what, got, want)
		}
		if s := w.index(gpu0); s.count != len(left) || s.bytes != bytes {
			t.Errorf("%s: the sums are %+v of %d batches of %d bytes", what, s, len(left), bytes)
		}
	}
	check("few are left")
	for b := range aside {
		w.exclude(b, false)
		delete(aside, b)
	}
	check("none is aside")
	w.end(left...)
}

// meddling is a policy that changes the batch while it is called, as other code may.
type meddling struct {
	Policy
	meddle func()
}

func (p *meddling) Key(info batch.Info) Key {
	if f := p.meddle; f != nil {
		p.meddle = nil
		f()
	}
	return p.Policy.Key(info)
}

func TestIndexDropsWhatIsOutdated(t *testing.T) {
	p := &meddling{Policy: PlanOrder()}
	w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 100 * kib}, func(c *Config, _ *world) { c.Policy = p })
	b := w.put(gpu0, 4*kib, seq(1))
	p.meddle = func() { b.SetPlace(seq(3)) }
	b.SetPlace(seq(2)) // noted after seq(3)
	v := w.shortlist(w.mon.byID[gpu0].place, inEach(0))
	if len(v) != 1 || v[0].Key != PlanOrder().Key(b.Info()) {
		t.Errorf("the index has %+v of a batch at %+v", v, b.Info().Place)
	}
	w.end(b)
}

// hiding is an observer around the index that refuses no batch.
type hiding struct{ batch.Observer }

// TestIndexRefusesASecondBatchOfAnID, while the first is not dropped. Of two that it cannot
// refuse, it lists the first.
func TestIndexRefusesASecondBatchOfAnID(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 100 * kib}, nil)
	first := w.put(gpu0, 10*kib, seq(1))
	same := func(o batch.Observer) (*batch.Batch, error) {
		r, err := w.res.TryReserve(specific(gpu0), 10*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Release()
		buf, err := r.Alloc(10 * kib)
		if err != nil {
			t.Fatal(err)
		}
		p := batch.NewImage(&batch.Descriptor{Rows: 1, Body: 10 * kib}, buf, r.Space())
		b, err := batch.New(batch.Options{ID: first.ID(), Payload: p, Observer: o, Place: seq(1)})
		if err != nil {
			if err := p.Release(); err != nil {
				t.Fatal(err)
			}
		}
		return b, err
	}
	if _, err := same(w.mon); !errors.Is(err, batch.ErrDuplicateID) {
		t.Errorf("a second batch of id %d: %v", first.ID(), err)
	}
	if s := w.index(gpu0); s.count != 1 || s.rest != 10*kib {
		t.Errorf("with the refused one there is %+v", s)
	}
	second, err := same(hiding{w.mon})
	if err != nil {
		t.Fatal(err)
	}
	for _, fit := range []int64{0, 100 * kib} { // by key, and by size
		if n := len(w.victims(gpu0, fit)); n != 1 || !w.mon.Knows(first) || w.mon.Knows(second) {
			t.Errorf("%d victims, want the first batch alone", n)
		}
	}
	if err := second.Drop(); err != nil {
		t.Fatal(err)
	}
	if _, err := same(w.mon); !errors.Is(err, batch.ErrDuplicateID) {
		t.Errorf("another one of id %d: %v", first.ID(), err)
	}
	if err := first.Drop(); err != nil {
		t.Fatal(err)
	}
	third, err := same(w.mon)
	if err != nil {
		t.Errorf("when the first is gone: %v", err)
	}
	if got := w.victims(gpu0, 0); len(got) != 1 {
		t.Errorf("victims are %v", got)
	}
	if err := third.Drop(); err != nil {
		t.Fatal(err)
	}
	if s := w.index(gpu0); s.count != 0 || s.bytes != 0 {
		t.Errorf("all are gone, and there is %+v", s)
	}
}

// both announces batches to two indexes.
type both struct{ one, other *Monitor }

func (o both) BatchChanged(b *batch.Batch, now batch.Info) {
	o.one.BatchChanged(b, now)
	o.other.BatchChanged(b, now)
}

// TestBatchInTwoIndexes: a program's observer may announce a batch to two engines. Each has its own
// record of it.
func TestBatchInTwoIndexes(t *testing.T) {
	w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 100 * kib}, nil)
	other := newWorld(t, sizes{gpu0: 100 * kib, disk0: 100 * kib}, nil)
	b, err := batch.New(batch.Options{
		ID: w.ids.Next(), Payload: w.image(gpu0, kib), Observer: both{w.mon, other.mon}, Place: seq(1),
	})
	if err != nil {
		t.Fatal(err)
	}
	w.exclude(b, true)
	w.use(b)
	if here, there := w.victims(gpu0, 0), other.victims(gpu0, 0); len(here) != 0 || len(there) != 1 {
		t.Errorf("the victims are %v and %v, want the batch in the other index alone", here, there)
	}
	w.end(b)
	other.end()
}
