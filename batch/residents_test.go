package batch

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// ledger counts the events of clean images and of prefetches.
type ledger struct {
	t    *testing.T
	mu   sync.Mutex
	made map[events.Kind]int
}

func (l *ledger) add(k events.Kind) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.made[k]++
}

// retained returns a new CommitOptions.Retained. It fails unless the image is made first, and ends
// once.
func (l *ledger) retained() func(events.Kind) {
	var mu sync.Mutex
	var got []events.Kind
	return func(k events.Kind) {
		mu.Lock()
		defer mu.Unlock()
		if got = append(got, k); len(got) > 2 || (k == events.CopyMade) != (len(got) == 1) {
			l.t.Errorf("a clean image's events are %v", got)
		}
		l.add(k)
	}
}

// ahead returns a new CommitOptions.Ahead. It fails if the prefetch ends twice.
func (l *ledger) ahead() func(events.Kind) {
	l.add(events.MoveBegun) // stands for the prefetch
	var once sync.Once
	return func(k events.Kind) {
		ended := false
		once.Do(func() { ended = true })
		if !ended || k != events.AheadUsed && k != events.AheadWasted {
			l.t.Errorf("a prefetch ended with %v, the first time: %t", k, ended)
		}
		l.add(k)
	}
}

// TestResidents moves a batch at random between five spaces of three tiers, while other goroutines
// pre-clean it, lease its images, and drop clean images. The batch has at most one image in each
// tier, the books have the current image as live and the others as cached, and every clean image
// and every prefetch ends once.
func TestResidents(t *testing.T) {
	const body = 2 * tier.Page
	for seed := range testseed.Each(t, 3) {
		rng := rand.New(rand.NewPCG(seed, 0))
		var spaces []*tier.Space
		for _, id := range []string{"gpu:0", "host:0", "host:1", "disk:0", "disk:1"} {
			spaces = append(spaces, newSpace(t, id))
		}
		room, err := reservation.NewManager(reservation.Config{Spaces: spaces})
		if err != nil {
			t.Fatal(err)
		}
		desc := &Descriptor{Rows: 1, Body: body}
		image := func(s *tier.Space) *Image { return NewImage(desc, draw(t, s, body), s) }
		all := &ledger{t: t, made: make(map[events.Kind]int)}
		b := newBatch(t, image(spaces[0]), nil)
		move := func(rng *rand.Rand) {
			to := spaces[rng.IntN(len(spaces))]
			tr, err := b.TryTransit()
			if err != nil {
				return // another goroutine moves it
			}
			r, err := room.TryReserve(reservation.Specific(to.ID()), body, nil)
			if err != nil {
				t.Error(err)
				return
			}
			from := tr.Payload().Space()
			out := b.Promote("", r)
			if out == nil {
				out = image(to)
			}
			o := CommitOptions{Reason: "test", Slower: to.Kind() > from.Kind(), Retained: all.retained()}
			if rng.IntN(3) == 0 && to.Kind() < from.Kind() {
				o.Ahead = all.ahead()
			}
			o.Open = o.Ahead == nil && rng.IntN(4) == 0
			h, err := b.Commit(t.Context(), tr, out, o)
			if err == nil && h != nil {
				err = h.Close()
			}
			if err != nil {
				t.Error(err)
			}
			if err := r.Release(); err != nil {
				t.Error(err)
			}
		}
		work := []func(rng *rand.Rand){move, move, func(rng *rand.Rand) {
			p := image(spaces[1+rng.IntN(4)])
			if !b.AddClean(p, desc, all.retained()) {
				t.Error("the space did not keep an image")
			}
		}, func(rng *rand.Rand) {
			if rng.IntN(4) == 0 {
				spaces[1+rng.IntN(4)].DropAllClean()
			}
			b.EachClean(func(p Payload) {
				if end, ok := p.(*Image).Hold(); ok {
					end()
				}
			})
		}}
		for range testseed.Rounds(40, 15) {
			var workers sync.WaitGroup
			for _, do := range work {
				own := rand.New(rand.NewPCG(rng.Uint64(), 1))
				workers.Go(func() {
					for range 30 {
						do(own)
					}
				})
			}
			workers.Wait()
			now := b.Info()
			live, cached := map[tier.ID]int64{now.Space: now.Bytes}, make(map[tier.ID]int64)
			tiers := []tier.Kind{now.Space.Kind}
			b.EachClean(func(p Payload) {
				cached[p.Space().ID()] += p.Bytes()
				tiers = append(tiers, p.Space().Kind())
			})
			slices.Sort(tiers)
			if len(slices.Compact(slices.Clone(tiers))) != len(tiers) {
				t.Fatalf("seed %d: the images are in %v", seed, tiers)
			}
			for _, s := range spaces {
				if u := s.State().Usage; u.Live != live[s.ID()] || u.Cached != cached[s.ID()] || u.Reserved != 0 {
					t.Fatalf("seed %d: %s holds %+v, want %d live, %d cached",
						seed, s.ID(), u, live[s.ID()], cached[s.ID()])
				}
			}
		}
		if err := b.Drop(); err != nil {
			t.Fatal(err)
		}
		for _, s := range spaces {
			if u := s.State().Usage; u.Used()+u.Cached != 0 {
				t.Errorf("seed %d: after the drop %s holds %+v", seed, s.ID(), u)
			}
		}
		m := all.made
		if m[events.CopyMade] == 0 || m[events.CopyUsed] == 0 || m[events.CopyDropped] == 0 ||
			m[events.CopyMade] != m[events.CopyUsed]+m[events.CopyDropped] {
			t.Errorf("seed %d: %d clean images were made, %d used, %d dropped", seed,
				m[events.CopyMade], m[events.CopyUsed], m[events.CopyDropped])
		}
		if m[events.MoveBegun] == 0 || m[events.MoveBegun] != m[events.AheadUsed]+m[events.AheadWasted] {
			t.Errorf("seed %d: %d prefetches, %d used, %d wasted", seed,
				m[events.MoveBegun], m[events.AheadUsed], m[events.AheadWasted])
		}
		if err := room.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestCleanImagesOfABatch: a batch takes no clean image in the tier where it is current, of other
// bytes, or after its end, and gives up the ones of other bytes.
func TestCleanImagesOfABatch(t *testing.T) {
	host, disk, other := newSpace(t, "host:0"), newSpace(t, "disk:0"), newSpace(t, "disk:1")
	desc := &Descriptor{Rows: 1, Body: tier.Page}
	image := func(s *tier.Space, d *Descriptor) *Image { return NewImage(d, draw(t, s, d.Body), s) }
	b := newBatch(t, image(host, desc), nil)
	all := &ledger{t: t, made: make(map[events.Kind]int)}
	add := func(s *tier.Space, d *Descriptor, want ...tier.ID) {
		t.Helper()
		b.AddClean(image(s, d), d, all.retained())
		if got := b.Copies(); !slices.Equal(got, want) {
			t.Errorf("clean images are in %v, want %v", got, want)
		}
	}
	add(host, desc)
	add(disk, &Descriptor{Rows: 1, Body: tier.Page})
	add(disk, desc, disk.ID())
	add(other, desc, other.ID()) // in place of the one in the same tier
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	add(disk, desc, disk.ID()) // also while it moves
	moveTo := func(p Payload) {
		t.Helper()
		if _, err := b.Commit(t.Context(), tr, p, CommitOptions{Retained: all.retained()}); err != nil {
			t.Fatal(err)
		}
		if got := b.Copies(); len(got) != 0 {
			t.Errorf("of other bytes clean images are in %v", got)
		}
	}
	moveTo(image(disk, &Descriptor{Rows: 1, Body: tier.Page}))
	if tr, err = b.TryTransit(); err != nil {
		t.Fatal(err)
	}
	last := &Descriptor{Rows: 1, Body: tier.Page}
	moveTo(image(host, last)) // the image on disk has other bytes
	add(disk, last, disk.ID())
	if tr, err = b.TryTransit(); err != nil {
		t.Fatal(err)
	}
	last = &Descriptor{Rows: 1, Body: tier.Page}
	moveTo(image(host, last)) // the clean image on disk has other bytes
	h, err := b.Open(t.Context(), host.ID(), true)
	if err != nil {
		t.Fatal(err)
	}
	add(disk, last) // the batch is dropped, and its payload is still there
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	add(disk, last)
	for _, s := range []*tier.Space{host, disk, other} {
		if u := s.State().Usage; u.Used()+u.Cached != 0 {
			t.Errorf("%s holds %+v", s.ID(), u)
		}
	}
	if m := all.made; m[events.CopyMade] != 8 || m[events.CopyDropped] != 8 {
		t.Errorf("the events are %v, want 8 images made and dropped", m)
	}
}

// TestLastMove: a move that also drops the batch drops all clean images: the one that it replaces in
// its tier, and those of other tiers.
func TestLastMove(t *testing.T) {
	gpu, host, other, disk := newSpace(t, "gpu:0"), newSpace(t, "host:0"), newSpace(t, "host:1"), newSpace(t, "disk:0")
	desc := &Descriptor{Rows: 1, Body: tier.Page}
	image := func(s *tier.Space) *Image { return NewImage(desc, draw(t, s, desc.Body), s) }
	b := newBatch(t, image(gpu), nil)
	all := &ledger{t: t, made: make(map[events.Kind]int)}
	for _, s := range []*tier.Space{host, disk} {
		if !b.AddClean(image(s), desc, all.retained()) {
			t.Fatalf("%s did not keep an image", s.ID())
		}
	}
	tr, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	h, err := commitAndOpen(t.Context(), tr, image(other), true)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*tier.Space{gpu, host, other, disk} {
		if u := s.State().Usage; u.Used()+u.Cached != 0 {
			t.Errorf("%s holds %+v", s.ID(), u)
		}
	}
	if n := all.made[events.CopyDropped]; n != 2 {
		t.Errorf("%d clean images were dropped, want 2", n)
	}
}

// TestEndsOfAhead: a prefetch is used when the batch is, or when it is moved ahead again, and
// wasted when the batch is dropped or evicted first. A clean image without room is dropped.
func TestEndsOfAhead(t *testing.T) {
	host, disk := newSpace(t, "host:0"), newSpace(t, "disk:0")
	room, err := reservation.NewManager(reservation.Config{Spaces: []*tier.Space{host, disk}})
	if err != nil {
		t.Fatal(err)
	}
	desc := &Descriptor{Rows: 1, Body: tier.Page}
	image := func(s *tier.Space) *Image { return NewImage(desc, draw(t, s, desc.Body), s) }
	move := func(b *Batch, p Payload, o CommitOptions) {
		t.Helper()
		tr, err := b.TryTransit()
		var h *Handle
		if err == nil {
			h, err = b.Commit(t.Context(), tr, p, o)
		}
		if err == nil && h != nil {
			err = h.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		end  func(b *Batch)
		want []events.Kind
	}{
		"dropped": {func(*Batch) {}, []events.Kind{events.AheadWasted}},
		"evicted": {func(b *Batch) { move(b, image(disk), CommitOptions{Slower: true}) },
			[]events.Kind{events.AheadWasted}},
		"opened in a slower tier": {func(b *Batch) { move(b, image(disk), CommitOptions{Slower: true, Open: true}) },
			[]events.Kind{events.AheadUsed}},
		"ahead again": {func(b *Batch) { move(b, image(host), CommitOptions{Ahead: func(events.Kind) {}}) },
			[]events.Kind{events.AheadUsed}},
		"opened": {func(b *Batch) {
			h, err := b.Open(t.Context(), tier.ID{}, false)
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
		}, []events.Kind{events.AheadUsed}},
	} {
		b := newBatch(t, image(disk), nil)
		var got, clean []events.Kind
		move(b, image(host), CommitOptions{
			Ahead:    func(k events.Kind) { got = append(got, k) },
			Retained: func(k events.Kind) { clean = append(clean, k) },
		})
		r, err := room.TryReserve(reservation.Specific(disk.ID()), tier.Page-1, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Shrink(r.Unused()); err != nil {
			t.Fatal(err)
		}
		if p := b.Promote("", r); p != nil || disk.State().Cached != 0 {
			t.Errorf("%s: promoted %v without room: %+v", name, p, disk.State().Usage)
		}
		if want := []events.Kind{events.CopyMade, events.CopyDropped}; !slices.Equal(clean, want) {
			t.Errorf("%s: the clean image's events are %v, want %v", name, clean, want)
		}
		c.end(b)
		if err := b.Drop(); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: the prefetch ended with %v, want %v; %v", name, got, c.want, err)
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
	}
	if err := room.Close(); err != nil {
		t.Error(err)
	}
}
