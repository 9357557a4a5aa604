package monitor

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/tier"
)

// unmovables make moves of all batches above an id fail for the batch's own sake.
func unmovables(w *world, above batch.ID) {
	w.mover.fault = func(b *batch.Batch, _, _ tier.ID) error {
		if b.ID() > above {
			return &batch.UnmovableError{Batch: b.ID(), Err: errors.New("no converter")}
		}
		return nil
	}
}

// TestUnmovable: batches that cannot be converted are set apart, and all others go as if they
// were not there.
func TestUnmovable(t *testing.T) {
	told := func(c *Config) *[]events.Event {
		var all []events.Event
		var mu sync.Mutex
		c.Events = func(e events.Event) {
			mu.Lock()
			defer mu.Unlock()
			if e.Kind == events.Unmovable {
				all = append(all, e)
			}
		}
		return &all
	}
	for _, bad := range []int{1, 2, 20} {
		bubble(t, fmt.Sprintf("the newest %d", bad), func(t *testing.T) {
			var cannot *[]events.Event
			w := newWorld(t, sizes{host0: 64 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) { cannot = told(c) })
			unmovables(w, batch.ID(32-bad))
			all := w.fillSpace(host0, 32, kib)
			w.start()
			settle(time.Second)
			begin := time.Now()
			o := <-w.reserve(t.Context(), host0, 44*kib)
			if o.err != nil {
				t.Fatal(o.err)
			}
			if d := time.Since(begin); d > 2*defaultPeriod {
				t.Errorf("the waiter was served after %v", d)
			}
			synctest.Wait()
			if n := w.moved(); n != 12*kib {
				t.Errorf("%d bytes were moved, want the 12 KiB that are lacking", n)
			}
			if len(*cannot) != bad {
				t.Errorf("told of %d batches, want %d: %+v", len(*cannot), bad, *cannot)
			}
			o.r.Release()
			w.end(all...)
		})
	}
	bubble(t, "and again, with growing pauses", func(t *testing.T) {
		var cannot *[]events.Event
		w := newWorld(t, sizes{host0: 100 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) { cannot = told(c) })
		unmovables(w, 0)
		all := w.fillSpace(host0, 85, kib)
		w.start()
		settle(10 * time.Minute)
		// Each is tried after 2, 4, 8 … 1024 periods, and then every 1024 of 50 ms or twice that.
		if n := w.failures(); n < 85*12 || n > 85*25 {
			t.Errorf("%d tries of 85 batches in ten minutes", n)
		}
		if len(*cannot) != 85 {
			t.Errorf("told of %d batches, want each once", len(*cannot))
		}
		w.mover.heal()
		settle(3 * time.Minute)
		w.mustBeRelieved(host0)
		w.end(all...)
	})
	bubble(t, "nothing else is left", func(t *testing.T) {
		for _, n := range []int{1, 64} {
			w := newWorld(t, sizes{host0: 64 * kib, disk0: 1000 * kib}, nil)
			unmovables(w, 0)
			all := w.fillSpace(host0, n, 64*kib/int64(n))
			w.start()
			o := <-w.reserve(t.Context(), host0, kib)
			var full *tier.NoSpaceError
			want := "no converter"
			if n > 1 {
				want = fmt.Sprintf("%d batches of %d bytes cannot be converted", n, 64*kib)
			}
			if !errors.As(o.err, &full) ||
				!strings.Contains(full.Error(), want) || strings.Contains(full.Error(), "larger") {
				t.Errorf("%d batches: the outcome is %v", n, o.err)
			}
			w.end(all...)
		}
	})
	bubble(t, "a batch in use may still be released", func(t *testing.T) {
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 1000 * kib}, nil)
		unmovables(w, 1)
		all := w.fillSpace(host0, 2, 32*kib)
		release := lockOne(t, all[0])
		w.start()
		out := w.reserve(t.Context(), host0, kib)
		settle(15 * time.Second)
		if len(out) != 0 {
			t.Fatalf("the wait has ended: %v", (<-out).err)
		}
		release()
		o := <-out
		if o.err != nil {
			t.Fatal(o.err)
		}
		o.r.Release()
		w.end(all...)
	})
	bubble(t, "another form is tried at once", func(t *testing.T) {
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 1000 * kib}, nil)
		unmovables(w, 0)
		b := w.put(host0, 56*kib, seq(1))
		w.start()
		settle(time.Minute)
		w.mover.heal()
		tries := w.failures()
		r, err := w.res.TryReserve(specific(host0), 2*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		tr, err := b.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		buf, err := r.Alloc(2 * kib)
		if err != nil {
			t.Fatal(err)
		}
		image := batch.NewImage(&batch.Descriptor{Rows: 1, Body: 2 * kib}, buf, r.Space())
		if err := tr.Commit(image, false); err != nil {
			t.Fatal(err)
		}
		r.Release()
		o := <-w.reserve(t.Context(), host0, 63*kib)
		if o.err != nil || w.failures() != tries {
			t.Errorf("the outcome is %v, with %d failures more", o.err, w.failures()-tries)
		} else {
			o.r.Release()
		}
		w.end(b)
	})
	bubble(t, "dropped meanwhile", func(t *testing.T) {
		var cannot *[]events.Event
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 64 * kib}, func(c *Config, _ *world) { cannot = told(c) })
		for _, dropped := range []bool{false, true} {
			b := w.put(host0, 4*kib, seq(1))
			fail := func() {
				w.mon.noted(Victim{Batch: b, ID: b.ID()}, w.mon.spaces[0], w.mon.spaces[1], batch.ErrUnmovable)
			}
			if dropped {
				if err := b.Drop(); err != nil {
					t.Fatal(err)
				}
				fail()
				continue
			}
			fail()
			defer w.end(b)
		}
		if len(*cannot) != 1 {
			t.Errorf("told of %+v, want the batch that was there alone", *cannot)
		}
	})
	bubble(t, "a new converter is tried at once", func(t *testing.T) {
		var changes atomic.Uint64
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) {
			c.Changes = changes.Load
		})
		unmovables(w, 0)
		all := w.fillSpace(host0, 2, 28*kib)
		w.start()
		settle(time.Minute)
		w.mover.heal()
		changes.Add(1)
		begin := time.Now()
		o := <-w.reserve(t.Context(), host0, 60*kib)
		if d := time.Since(begin); o.err != nil || d > 2*defaultPeriod {
			t.Errorf("the outcome is %v after %v", o.err, d)
		} else {
			o.r.Release()
		}
		w.end(all...)
	})
}

// TestUnknownErrors: an error may be a batch's or a volume's. After some the volume is tried
// with another batch first, and those that have failed do not keep it from all others.
func TestUnknownErrors(t *testing.T) {
	bubble(t, "two bad batches", func(t *testing.T) {
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 1000 * kib}, nil)
		w.mover.fault = func(b *batch.Batch, _, _ tier.ID) error {
			if b.ID() > 30 {
				return errors.New("strange")
			}
			return nil
		}
		all := w.fillSpace(host0, 32, kib)
		w.start()
		for range 10 {
			o := <-w.reserve(t.Context(), host0, 33*kib)
			if o.err != nil {
				t.Fatal(o.err)
			}
			o.r.Release()
			all = append(all, w.fillSpace(host0, 1, kib)...)
			settle(time.Second)
		}
		w.end(all...)
	})
	// The file system's word is not the monitor's context.
	bubble(t, "a foreign cancellation", func(t *testing.T) {
		w := newWorld(t, sizes{host0: 64 * kib, disk0: 1000 * kib}, nil)
		w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error {
			return fmt.Errorf("writing: %w", context.Canceled)
		}
		all := w.fillSpace(host0, 60, kib)
		w.start()
		settle(time.Minute)
		s := w.mon.Stats()
		if n := w.failures(); n < 10 || n > 100 || s.Failed != int64(n) || s.Steps > 61*20+200 {
			t.Errorf("%d tries in a minute; %+v", n, s)
		}
		w.end(all...)
	})
}

// TestEndOfMoves: a move that the end of Run breaks off is no failure.
func TestEndOfMoves(t *testing.T) {
	bubble(t, "Run ends", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(_ *Config, w *world) {
			w.mover.bytesA = time.Hour
		})
		all := w.fillSpace(gpu0, 85, kib)
		w.start()
		synctest.Wait()
		w.stop()
		w.stop = nil
		if w.failures() == 0 {
			t.Error("no move was under way")
		}
		if s := w.mon.Stats(); s.Failed != 0 || s.Busy != 0 {
			t.Errorf("%+v", s)
		}
		w.end(all...)
	})
}

// unmovableTo makes moves of the batches above an id to one tier fail for the batch's own sake,
// and counts all moves by their target.
func unmovableTo(w *world, kind tier.Kind, above batch.ID) map[tier.Kind]int {
	tries := make(map[tier.Kind]int)
	w.mover.fault = func(b *batch.Batch, _, to tier.ID) error {
		w.mu.Lock()
		defer w.mu.Unlock()
		tries[to.Kind]++
		if to.Kind == kind && b.ID() > above {
			return &batch.UnmovableError{Batch: b.ID(), Err: errors.New("no converter")}
		}
		return nil
	}
	return tries
}

// TestUnmovableToATier: a batch that cannot be converted for the next tier goes past it.
func TestUnmovableToATier(t *testing.T) {
	note, told := count(events.Unmovable)
	count := func(c *Config, _ *world) {
		told.Store(0)
		c.Events = note
	}
	bubble(t, "it goes to the one below", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, count)
		tries := unmovableTo(w, tier.Host, 0)
		all := w.fillSpace(gpu0, 8, 4*kib)
		w.start()
		settle(time.Second)
		o := <-w.reserve(t.Context(), gpu0, 44*kib)
		if o.err != nil {
			t.Fatal(o.err)
		}
		o.r.Release()
		synctest.Wait()
		if n := len(left(all, disk0)); n != 3 || tries[tier.Disk] != n || tries[tier.Host] != n || told.Load() != 0 {
			t.Errorf("%d batches are on disk, want 3; tries %v, %d events", n, tries, told.Load())
		}
		w.end(all...)
	})
	// Full must not take host memory, which has room, for a way out.
	bubble(t, "that is full", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 256 * kib, disk0: 4 * kib}, func(c *Config, w *world) {
			count(c, w)
			w.stall = refusedAfter
		})
		tries := unmovableTo(w, tier.Host, 0)
		all := w.fillSpace(gpu0, 12, 4*kib)
		w.start()
		o := <-w.reserve(t.Context(), gpu0, 40*kib)
		var full *tier.NoSpaceError
		if !errors.As(o.err, &full) ||
			!strings.Contains(full.Error(), "11 batches of 45056 bytes cannot be converted") {
			t.Errorf("the outcome is %v", o.err)
		}
		settle(time.Minute)
		if n := tries[tier.Host]; n > 12*8 || told.Load() != 0 {
			t.Errorf("%d tries with nobody waiting, %d events", n, told.Load())
		}
		out := w.reserve(t.Context(), gpu0, 40*kib)
		synctest.Wait()
		w.mover.heal()
		if o := <-out; o.err != nil {
			t.Errorf("when they can be converted: %v", o.err)
		} else {
			o.r.Release()
		}
		w.end(all...)
	})
	bubble(t, "nor for that one", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, count)
		unmovables(w, 0)
		all := w.fillSpace(gpu0, 8, 8*kib)
		w.start()
		o := <-w.reserve(t.Context(), gpu0, kib)
		var full *tier.NoSpaceError
		if !errors.As(o.err, &full) ||
			!strings.Contains(full.Error(), "all that is left there at rest cannot be moved: 8 batches") {
			t.Errorf("the outcome is %v", o.err)
		}
		settle(10 * time.Minute)
		// Each is tried for both tiers after 2, 4, 8 … 1024 periods, and then every 1024.
		if n := w.failures(); n < 2*8*12 || n > 2*8*25 || told.Load() != 8 {
			t.Errorf("%d tries of 8 batches in ten minutes, %d events", n, told.Load())
		}
		w.end(all...)
	})
	bubble(t, "more of them than a step looks at", func(t *testing.T) {
		const many = shortlistMax + 100
		w := newWorld(t, sizes{gpu0: 2 * many * kib, host0: 2 * many * kib, disk0: kib}, count)
		unmovableTo(w, tier.Host, 8)
		all := w.fillSpace(gpu0, 8, 2*kib) // the last to go
		all = append(all, w.fillSpace(gpu0, many, kib)...)
		w.start()
		o := <-w.reserve(t.Context(), gpu0, w.spaces[gpu0].State().Available+12*kib)
		if o.err != nil {
			t.Error(o.err)
		} else {
			o.r.Release()
		}
		w.end(all...)
	})
	bubble(t, "in another form it may be", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, nil)
		tries := unmovableTo(w, tier.Host, 0)
		b := w.put(gpu0, 4*kib, seq(1))
		v := Victim{Batch: b, ID: b.ID(), Bytes: 4 * kib}
		w.mon.noted(v, w.mon.spaces[0], w.mon.spaces[1], batch.ErrUnmovable)
		if list := w.shortlist(0, inEach(0)); len(list) != 1 || list[0].not != decide.Kinds(0).With(tier.Host) {
			t.Errorf("the victims are %+v", list)
		}
		if err := w.mover.Relieve(t.Context(), b, disk0, decide.Demand); err != nil {
			t.Fatal(err)
		}
		w.mover.heal()
		if err := w.mover.Relieve(t.Context(), b, gpu0, decide.Demand); err != nil {
			t.Fatal(err)
		}
		list := w.shortlist(0, inEach(0))
		if len(list) != 1 || list[0].not != 0 || tries[tier.Disk] != 1 {
			t.Errorf("the victims are %+v", list)
		}
		w.end(b)
	})
}
