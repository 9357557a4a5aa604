package convert

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// What is written ahead is told when it is there, and when it was used or was in vain, to the byte.
func TestAheadIsTold(t *testing.T) {
	var mu sync.Mutex
	var all []events.Event
	m := newMachine(t, machineConfig{copies: true, events: func(e events.Event) {
		mu.Lock()
		defer mu.Unlock()
		switch e.Kind {
		case events.CopyMade, events.CopyUsed, events.CopyDropped, events.AheadUsed, events.AheadWasted:
			all = append(all, e)
		}
	}})
	b := m.put(t, numbered(1, 10_000), tier.Host)
	body := b.Info().Descriptor.Body
	write := func() {
		t.Helper()
		if n, err := m.ahead(t.Context(), b); n != body || err != nil {
			t.Fatal(n, err)
		}
	}
	told := func(what string, want ...events.Kind) {
		t.Helper()
		mu.Lock()
		defer mu.Unlock()
		var kinds []events.Kind
		for _, e := range all {
			kinds = append(kinds, e.Kind)
			if e.Batch != uint64(b.ID()) || e.Bytes != body || e.To.Kind != tier.Disk || e.From.Kind != tier.Host {
				t.Errorf("%s: %+v", what, e)
			}
		}
		if !slices.Equal(kinds, want) {
			t.Errorf("%s: %v, want %v", what, kinds, want)
		}
		all = nil
	}
	write()
	told("written", events.CopyMade)
	m.spaces[tier.Disk].DropAllClean()
	told("dropped", events.AheadWasted, events.CopyDropped)
	write()
	told("written again", events.CopyMade)
	if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	told("used", events.AheadUsed, events.CopyUsed)
}

// TestAheadOntoACopyMovesNothing: a prefetch that uses a clean image has moved no bytes ahead.
func TestAheadOntoACopyMovesNothing(t *testing.T) {
	m := newMachine(t, machineConfig{copies: true})
	b := m.put(t, numbered(1, 10_000), tier.Host)
	for _, k := range []tier.Kind{tier.GPU, tier.Disk} {
		m.move(t, b, k)
	}
	if in := b.Copies(); len(in) != 1 || in[0].Kind != tier.Host {
		t.Fatalf("clean images are in %v", in)
	}
	err := m.mover.Ahead(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil || b.Info().Space.Kind != tier.Host {
		t.Fatalf("in %s: %v", b.Info().Space, err)
	}
	drop(t, b)
	m.wantAhead(t, 0, 0, 0)
}

// observing calls a function for each change of a batch.
type observing func(b *batch.Batch, now batch.Info)

func (f observing) BatchChanged(b *batch.Batch, now batch.Info) { f(b, now) }

// A copy that is freed as it is made, or found by a move before it is told, is told as made first:
// what becomes of it is told when that call has returned.
func TestCopyIsMadeBeforeItEnds(t *testing.T) {
	for name, want := range map[string]events.Kind{"freed as it is made": events.CopyDropped, "used before it is told": events.CopyUsed, "freed while it is told": events.CopyDropped} {
		t.Run(name, func(t *testing.T) {
			var m *machine
			var mu sync.Mutex
			var kinds []events.Kind
			m = newMachine(t, machineConfig{copies: true, events: func(e events.Event) {
				disk := m.spaces[tier.Disk]
				switch e.Kind {
				case events.MoveBegun:
					if name == "freed as it is made" && e.From == disk.ID() {
						if err := disk.SetLimit(1); err != nil {
							t.Error(err)
						}
					}
					return
				case events.CopyMade:
					if name == "freed while it is told" {
						disk.DropAllClean()
						if n := disk.State().Cached; n != 0 {
							t.Errorf("copies have %d bytes", n)
						}
					}
				case events.CopyUsed, events.CopyDropped:
				default:
					return
				}
				mu.Lock()
				defer mu.Unlock()
				kinds = append(kinds, e.Kind)
			}})
			rec := numbered(1, 10_000)
			p, err := m.mover.Ingest(t.Context(), rec, reservation.AnyInTier(tier.Disk))
			if err != nil {
				t.Fatal(err)
			}
			var once sync.Once
			b, err := batch.New(batch.Options{ID: m.ids.Next(), Payload: p, Observer: observing(func(b *batch.Batch, now batch.Info) {
				if name == "used before it is told" && now.State == batch.Idle && now.Space.Kind == tier.GPU {
					once.Do(func() {
						moved := make(chan error)
						go func() { moved <- m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.Disk)) }()
						if err := <-moved; err != nil {
							t.Error(err)
						}
					})
				}
			})})
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(m.mover.Move(t.Context(), b, reservation.AnyInTier(tier.GPU)), b.Drop()); err != nil {
				t.Error(err)
			}
			if !slices.Equal(kinds, []events.Kind{events.CopyMade, want}) {
				t.Errorf("%v", kinds)
			}
		})
	}
}

// Batches go up and down again while others free what they leave behind. At no moment have more
// copies of a batch ended than were made, and in the end as many have.
func TestCopiesAreMadeBeforeTheyEnd(t *testing.T) {
	var mu sync.Mutex
	open, kinds := map[uint64]int{}, map[events.Kind]int{}
	m := newMachine(t, machineConfig{copies: true, events: func(e events.Event) {
		mu.Lock()
		defer mu.Unlock()
		switch e.Kind {
		case events.CopyMade:
			open[e.Batch]++
		case events.CopyUsed, events.CopyDropped:
			if open[e.Batch]--; open[e.Batch] < 0 {
				t.Errorf("before it is made: %s", e)
			}
		default:
			return
		}
		kinds[e.Kind]++
	}})
	over, freed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(freed)
		for {
			select {
			case <-over:
				return
			default:
				m.mover.DropCopies()
			}
		}
	}()
	var movers sync.WaitGroup
	var all []*batch.Batch
	for range 2 {
		b := m.put(t, numbered(1, 100), tier.Host)
		all = append(all, b)
		movers.Go(func() {
			for round := range testseed.Rounds(500, 150) {
				for _, k := range []tier.Kind{tier.GPU, tier.Host} {
					if err := m.mover.Move(t.Context(), b, reservation.AnyInTier(k)); err != nil {
						t.Error(err)
						return
					}
					if k == tier.GPU && round%10 == 9 { // also where the other goroutine is never in time
						m.mover.DropCopies()
					}
				}
			}
		})
	}
	movers.Wait()
	close(over)
	<-freed
	for _, b := range all {
		if err := b.Drop(); err != nil {
			t.Error(err)
		}
	}
	if n := kinds[events.CopyMade]; n == 0 || kinds[events.CopyDropped] == 0 || kinds[events.CopyUsed]+kinds[events.CopyDropped] != n {
		t.Errorf("%v", kinds)
	}
}
