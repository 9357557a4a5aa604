package monitor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// left returns which of the batches are still in a space.
func left(all []*batch.Batch, id tier.ID) (is []int) {
	for i, b := range all {
		if b.Info().Space == id {
			is = append(is, i)
		}
	}
	return is
}

func never() bool { return false }

// after returns true from the n-th call on.
func after(n int) func() bool {
	return func() bool { n--; return n < 0 }
}

// TestClear: batches at rest leave in the policy's order, one after the other, until it is enough.
func TestClear(t *testing.T) {
	for _, runs := range []bool{false, true} {
		bubble(t, map[bool]string{false: "alone", true: "beside Run"}[runs], func(t *testing.T) {
			w := newWorld(t, sizes{gpu0: 64 * kib, host0: 16 * kib, disk0: 64 * kib, disk1: 64 * kib}, nil)
			all := w.fillSpace(gpu0, 12, 4*kib)
			if runs {
				w.start()
			}
			for _, i := range []int{10, 11} { // what a task waits for is the last to go
				if err := all[i].CreateTask(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			h, err := all[10].Open(t.Context(), gpu0, false)
			if err != nil {
				t.Fatal(err)
			}
			w.mon.Clear(t.Context(), gpu0, after(0))
			if n := w.moved(); n != 0 {
				t.Errorf("%d bytes were moved though it was enough", n)
			}
			w.mon.Clear(t.Context(), gpu0, after(3))
			if got := left(all, gpu0); !slices.Equal(got, []int{0, 1, 2, 3, 4, 5, 6, 10, 11}) || len(left(all, host0)) != 3 {
				t.Errorf("%v are left, %v in host memory", got, left(all, host0))
			}
			w.mon.Clear(t.Context(), gpu0, never)
			if got := left(all, gpu0); !slices.Equal(got, []int{10}) {
				t.Errorf("%v are left, want the one that is in use", got)
			}
			if n := len(left(all, host0)); n > 3 || n < 3 && !runs {
				t.Errorf("%d batches are in host memory, want as many as fit besides the headroom", n)
			}
			before := w.moved()
			for _, id := range []tier.ID{disk0, {Kind: tier.GPU, Ordinal: 7}} {
				w.mon.Clear(t.Context(), id, func() bool { t.Errorf("%s: nothing can be moved", id); return true })
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			w.mon.Clear(ctx, host0, never)
			if n := w.moved(); n != before && !runs {
				t.Errorf("%d bytes were moved", n-before)
			}
			if err := h.Close(); err != nil {
				t.Error(err)
			}
			w.end(all...)
		})
	}
}

// TestClearEnds: moves that fail do not go on for ever, and what failed stays where it was and may
// be moved later.
func TestClearEnds(t *testing.T) {
	bubble(t, "a broken way", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, nil)
		all := w.fillSpace(gpu0, 12, 4*kib)
		broken := errors.New("broken")
		tries := 0
		w.mover.fault = func(_ *batch.Batch, _, to tier.ID) error {
			if to == host0 {
				tries++
				return broken
			}
			return nil
		}
		w.mon.Clear(t.Context(), gpu0, never)
		if tries != 2 || len(left(all, disk0)) != 12 {
			t.Errorf("%d tries, %d batches on disk", tries, len(left(all, disk0)))
		}
		w.end(all...)
	})
	bubble(t, "a way that fails now and then", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib}, nil)
		all := w.fillSpace(gpu0, 12, 4*kib)
		tries := 0
		w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error {
			if tries++; tries%3 != 0 {
				return nil
			}
			return errors.New("now and then")
		}
		w.mon.Clear(t.Context(), gpu0, never)
		if tries != 12 || len(left(all, host0)) != 8 {
			t.Errorf("%d tries, %d batches in host memory", tries, len(left(all, host0)))
		}
		w.end(all...)
	})
	bubble(t, "closed", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib}, nil)
		all := w.fillSpace(gpu0, 12, 4*kib)
		tries := 0
		w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error { tries++; return tier.ErrClosed }
		w.mon.Clear(t.Context(), gpu0, never)
		if tries > 2 {
			t.Errorf("%d tries", tries)
		}
		w.mover.heal()
		for range 2 {
			time.Sleep(5 * defaultPeriod) // virtual
			w.mon.Clear(t.Context(), gpu0, never)
		}
		if n := len(left(all, host0)); n != 12 {
			t.Errorf("%d of what failed were moved then", n)
		}
		w.end(all...)
	})
}

// TestClearOneByOne: of two calls that clear the same space, neither moves batches for the other's
// sake.
func TestClearOneByOne(t *testing.T) {
	bubble(t, "two", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib}, nil)
		all := w.fillSpace(gpu0, 12, 4*kib)
		w.mover.bytesA = time.Millisecond
		enough := func() bool { return len(left(all, gpu0)) <= 10 }
		for range 2 {
			go w.mon.Clear(t.Context(), gpu0, enough)
		}
		time.Sleep(time.Second) // virtual
		synctest.Wait()
		if n := len(left(all, gpu0)); n != 10 {
			t.Errorf("%d batches are left", n)
		}
		w.end(all...)
	})
}

// TestClearUnmovable: what cannot be converted for one tier goes to the next. If there is none it
// is reported once and left alone for a while, with Run and without it.
func TestClearUnmovable(t *testing.T) {
	for _, runs := range []bool{false, true} {
		bubble(t, fmt.Sprintf("Run %v", runs), func(t *testing.T) {
			count, told := count(events.Unmovable)
			w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, func(c *Config, _ *world) {
				c.Events = count
			})
			tries := unmovableTo(w, tier.Host, 0)
			all := w.fillSpace(gpu0, 8, 4*kib)
			if runs {
				w.start()
				synctest.Wait()
			}
			w.mon.Clear(t.Context(), gpu0, never)
			if n := len(left(all, disk0)); n != 8 || tries[tier.Host] != 8 || told.Load() != 0 {
				t.Errorf("%d batches are on disk, %v tries, %d events", n, tries, told.Load())
			}
			unmovables(w, 0)
			all = append(all, w.fillSpace(gpu0, 6, 4*kib)...)
			for range 10 {
				w.mon.Clear(t.Context(), gpu0, never)
			}
			synctest.Wait()
			if n := w.failures(); n != 8+2*6 || told.Load() != 6 {
				t.Errorf("%d failures, want one of each batch for each tier; %d events", n-8, told.Load())
			}
			time.Sleep(3 * defaultPeriod) // virtual
			w.mon.Clear(t.Context(), gpu0, never)
			w.mon.Clear(t.Context(), gpu0, never)
			if n := w.failures(); n != 8+4*6 || told.Load() != 6 {
				t.Errorf("%d failures after the pause, %d events", n-8, told.Load())
			}
			w.mover.heal()
			time.Sleep(5 * defaultPeriod)
			w.mon.Clear(t.Context(), gpu0, never)
			if n := len(left(all, host0)); n != 6 {
				t.Errorf("%d batches are in host memory when they can be converted", n)
			}
			w.end(all...)
		})
	}
}
