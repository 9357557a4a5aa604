package monitor

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// fullWorld is a world in which nothing can go anywhere.
// refusedAfter is the StallTimeout of tests with refusals.
const refusedAfter = 500 * time.Millisecond

func fullWorld(t *testing.T, change func(*Config, *world)) (*world, []*batch.Batch) {
	w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, func(c *Config, w *world) {
		w.stall = refusedAfter
		if change != nil {
			change(c, w)
		}
	})
	var all []*batch.Batch
	for _, id := range []tier.ID{disk0, host0, gpu0} {
		all = append(all, w.fillSpace(id, 16, 4*kib)...)
	}
	w.start()
	return w, all
}

func TestRefuse(t *testing.T) {
	bubble(t, "everything is full", func(t *testing.T) {
		w, all := fullWorld(t, nil)
		for id := range w.spaces {
			begin := time.Now()
			o := <-w.reserve(t.Context(), id, 8*kib)
			var full *tier.NoSpaceError
			if !errors.As(o.err, &full) || full.Space != id || full.Requested != 8*kib || full.Hint != refuseHint {
				t.Errorf("%s: the outcome is %v", id, o.err)
			}
			if d := time.Since(begin); d < refusedAfter || d > refusedAfter+100*time.Millisecond {
				t.Errorf("%s: refused after %v", id, d)
			}
		}
		_, err := w.res.Reserve(t.Context(), reservation.AnyInTiers(tier.GPU, tier.Host, tier.Disk), kib, nil)
		if !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("all tiers: the outcome is %v", err)
		}
		synctest.Wait()
		if n := w.moved(); n != 0 {
			t.Errorf("%d bytes moved", n)
		}
		if len(w.gone) != 4 || w.mon.Stats().Refused != 4 {
			t.Errorf("refusals: %+v", w.gone)
		}
		w.end(all...)
	})
	bubble(t, "no tier below", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib}, nil)
		w.start()
		all := w.fillSpace(gpu0, 16, 4*kib)
		if o := <-w.reserve(t.Context(), gpu0, kib); !errors.Is(o.err, tier.ErrNoSpace) {
			t.Errorf("the outcome is %v", o.err)
		}
		w.end(all...)
	})
	// A release is still possible; the wait goes on until that has happened, and ends well or with
	// a refusal.
	for _, tt := range []struct {
		name string
		hold func(t *testing.T, w *world, all []*batch.Batch) (release func())
		good bool // the wait ends well
	}{
		{"a handle here", func(t *testing.T, w *world, all []*batch.Batch) func() { return lockOne(t, all[len(all)-1]) }, false},
		{"a handle in host", func(t *testing.T, w *world, all []*batch.Batch) func() { return lockOne(t, all[16]) }, false},
		{"a handle on disk", func(t *testing.T, w *world, all []*batch.Batch) func() { return lockOne(t, all[0]) }, false},
		{"a transit", func(t *testing.T, w *world, all []*batch.Batch) func() {
			tr, err := all[0].TryTransit()
			if err != nil {
				t.Fatal(err)
			}
			return func() { tr.Abort() }
		}, false},
		{"a reservation", func(t *testing.T, w *world, all []*batch.Batch) func() {
			asked := w.reserve(t.Context(), disk0, 4*kib) // in line before a move can ask for the room
			synctest.Wait()
			if err := all[0].Drop(); err != nil {
				t.Fatal(err)
			}
			o := <-asked
			if o.err != nil {
				t.Fatal(o.err)
			}
			return func() { all[0] = w.fill(o.r, seq(0)) }
		}, false},
		{"memory that the device has not given back", func(t *testing.T, w *world, all []*batch.Batch) func() {
			w.pools[disk0].lag = time.Minute
			for _, b := range all[:2] { // of which one is the headroom of host
				if err := b.Drop(); err != nil {
					t.Fatal(err)
				}
			}
			w.pools[disk0].lag = 0
			return func() {
				settle(time.Minute)
				all[0], all[1] = w.put(disk0, 0, seq(0)), w.put(disk0, 0, seq(1)) // in their place, for the end of the test
			}
		}, true},
	} {
		bubble(t, tt.name, func(t *testing.T) {
			w, all := fullWorld(t, nil)
			release := tt.hold(t, w, all)
			out := w.reserve(t.Context(), gpu0, 4*kib)
			settle(10 * time.Second)
			if len(out) > 0 {
				t.Fatalf("the wait has ended: %v", (<-out).err)
			}
			release()
			o := <-out
			switch {
			case tt.good && o.err == nil:
				o.r.Release()
			case tt.good || !errors.Is(o.err, tier.ErrNoSpace):
				t.Errorf("the outcome is %v", o.err)
			}
			w.end(all...)
		})
	}
	bubble(t, "a handle, and the batch is then dropped", func(t *testing.T) {
		w, all := fullWorld(t, nil)
		release := lockOne(t, all[0])
		out := w.reserve(t.Context(), gpu0, 4*kib)
		settle(10 * time.Second)
		release()
		for _, b := range all[:2] { // the room of one becomes the headroom of host
			if err := b.Drop(); err != nil {
				t.Fatal(err)
			}
		}
		o := <-out
		if o.err != nil {
			t.Fatal(o.err)
		}
		synctest.Wait()
		if n := w.moved(); n > 16*kib {
			t.Errorf("%d bytes moved, want at most two batches out of gpu:0 and two from host to disk", n)
		}
		o.r.Release()
		w.end(all[2:]...)
	})
	for _, tt := range []struct {
		name  string
		batch int
	}{{"here", 40}, {"in host", 20}, {"on disk", 3}} {
		bubble(t, "while a batch is used "+tt.name, func(t *testing.T) {
			w, all := fullWorld(t, nil)
			out := w.reserve(t.Context(), gpu0, 4*kib)
			for range 100 {
				settle(defaultPeriod - time.Millisecond)
				w.use(all[tt.batch])
			}
			if len(out) > 0 {
				t.Errorf("the wait has ended: %v", (<-out).err)
			} else if o := <-out; !errors.Is(o.err, tier.ErrNoSpace) {
				t.Errorf("the outcome is %v", o.err)
			}
			w.end(all...)
		})
	}
}

func lockOne(t *testing.T, b *batch.Batch) (release func()) {
	t.Helper()
	return lockFor(t, nil, b)
}

// lockFor opens a handle that is o's.
func lockFor(t *testing.T, o *reservation.Owner, b *batch.Batch) (release func()) {
	t.Helper()
	if err := b.TryCreateTask(); err != nil {
		t.Fatal(err)
	}
	h, err := b.TryLock(b.Info().Space)
	if err != nil {
		t.Fatal(err)
	}
	h.SetOwner(o)
	return func() { h.Close() }
}

func TestFailures(t *testing.T) {
	broken := errors.New("the disk is broken")
	bubble(t, "one bad batch does not stop the others", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, nil)
		const bad = 85 // the newest, which goes first
		w.mover.fault = func(b *batch.Batch, _, _ tier.ID) error {
			if b.ID() == bad {
				return broken
			}
			return nil
		}
		all := w.fillSpace(gpu0, 85, kib)
		w.start()
		settle(10 * time.Second)
		w.mustBeRelieved(gpu0)
		if n := len(w.failed); n != 1 {
			t.Errorf("%d failures, want one: the others made enough room", n)
		}
		w.end(all...)
	})
	bubble(t, "a broken disk is tried less and less often, and again", func(t *testing.T) {
		log := new(bytes.Buffer)
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, func(c *Config, _ *world) {
			c.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelWarn}))
		})
		var mended atomic.Bool
		w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error {
			if !mended.Load() {
				return broken
			}
			return nil
		}
		all := w.fillSpace(gpu0, 79, kib)
		w.start()
		last := w.put(gpu0, kib, seq(100))
		settle(time.Minute)
		// Backing off doubles up to 64 periods of 50 ms, which is 3.2 s.
		if n := len(w.failed); n < 10 || n > 30 {
			t.Errorf("%d failures in a minute", n)
		}
		if n := strings.Count(log.String(), "a move failed"); n != len(w.failed) {
			t.Errorf("%d warnings for %d failures:\n%s", n, len(w.failed), log)
		}
		if n := strings.Count(log.String(), "no batch can be moved"); n > len(w.failed) {
			t.Errorf("%d warnings that it is stuck:\n%s", n, log)
		}
		mended.Store(true)
		settle(time.Minute)
		w.mustBeRelieved(gpu0)
		w.end(append(all, last)...)
	})
	bubble(t, "who waits for a broken disk is told", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, nil)
		w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error { return broken }
		w.start()
		all := w.fillSpace(gpu0, 10, 7*kib)
		o := <-w.reserve(t.Context(), gpu0, 50*kib)
		if !errors.Is(o.err, tier.ErrNoSpace) {
			t.Errorf("the outcome is %v", o.err)
		}
		w.end(all...)
	})
	bubble(t, "a file system that is fuller than the books say", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, func(_ *Config, w *world) { w.stall = refusedAfter })
		w.pools[disk0].refuse.Store(1)
		w.start()
		all := w.fillSpace(gpu0, 10, 7*kib)
		o := <-w.reserve(t.Context(), gpu0, 50*kib)
		if !errors.Is(o.err, tier.ErrNoSpace) {
			t.Errorf("the outcome is %v", o.err)
		}
		settle(time.Minute)
		out := w.reserve(t.Context(), gpu0, 50*kib)
		w.pools[disk0].refuse.Store(0)
		settle(time.Minute)
		if o := <-out; o.err == nil {
			o.r.Release()
		} else if !errors.Is(o.err, tier.ErrNoSpace) {
			t.Errorf("the outcome is %v", o.err)
		}
		if n := w.mon.Stats().NoRoom; n > 10 {
			t.Errorf("%d moves found no room", n)
		}
		w.end(all...)
	})
	bubble(t, "room in pieces: the tier below takes it", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib, disk0: 1000 * kib}, nil)
		w.pools[host0].refuse.Store(4 * kib)
		w.start()
		all := w.fillSpace(gpu0, 10, 7*kib)
		o := <-w.reserve(t.Context(), gpu0, 80*kib)
		if o.err != nil {
			t.Fatal(o.err)
		}
		if w.spaces[disk0].State().Used() == 0 {
			t.Error("nothing is on the disk")
		}
		o.r.Release()
		w.end(all...)
	})
	bubble(t, "a batch that is always busy", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, disk0: 1000 * kib}, nil)
		w.mover.fault = func(b *batch.Batch, _, _ tier.ID) error {
			return &batch.StateError{Batch: b.ID(), Op: "transit", Status: batch.InvalidState}
		}
		w.start()
		all := w.fillSpace(gpu0, 1, 85*kib)
		settle(time.Second)
		if n := w.mon.Stats().Busy; n < 3 || n > 21 {
			t.Errorf("tried %d times in 20 periods", n)
		}
		w.end(all...)
	})
}

func TestStuckIsToldOnce(t *testing.T) {
	bubble(t, "demand", func(t *testing.T) {
		log := new(bytes.Buffer)
		w, all := fullWorld(t, func(c *Config, _ *world) {
			c.Logger = slog.New(slog.NewTextHandler(log, nil))
		})
		release := lockOne(t, all[0])
		ctx, cancel := context.WithCancel(t.Context())
		out := w.reserve(ctx, gpu0, 8*kib)
		settle(time.Minute)
		var mine []events.Event
		for _, s := range w.stuck {
			if s.To == gpu0 && s.Reason == decide.Demand {
				mine = append(mine, s)
			}
		}
		if len(mine) != 1 {
			t.Fatalf("stuck: %+v", w.stuck)
		}
		s := mine[0]
		const text = "1 wait, 65536 bytes are used of 65536, 65536 of them in batches at rest, host:0 has 0, disk:0 has 0"
		if s.Bytes != 8*kib || s.Text != text {
			t.Errorf("stuck: %+v", s)
		}
		if n := strings.Count(log.String(), "bytes=8192"); n != 1 {
			t.Errorf("%d warnings:\n%s", n, log)
		}
		if n := w.mon.Stats().Steps; n > 61*20+100 {
			t.Errorf("%d steps in a minute", n)
		}
		cancel()
		if o := <-out; !errors.Is(o.err, context.Canceled) {
			t.Errorf("the outcome is %v", o.err)
		}
		release()
		w.end(all...)
	})
	bubble(t, "all at rest is wanted by somebody", func(t *testing.T) {
		log := new(bytes.Buffer)
		w, all := fullWorld(t, func(c *Config, _ *world) {
			c.Logger = slog.New(slog.NewTextHandler(log, nil))
		})
		var cancel []func()
		for _, b := range all {
			if b.Info().Space == gpu0 {
				cancel = append(cancel, b.Subscribe())
			}
		}
		release := lockOne(t, all[0])
		ctx, stop := context.WithCancel(t.Context())
		out := w.reserve(ctx, gpu0, 8*kib)
		settle(time.Minute)
		i := slices.IndexFunc(w.stuck, func(s events.Event) bool { return s.To == gpu0 && s.Reason == decide.Demand })
		if i < 0 || !strings.Contains(w.stuck[i].Text, " 0 of them in batches at rest") || strings.Contains(log.String(), "bytes=8192") {
			t.Errorf("stuck: %+v\n%s", w.stuck, log)
		}
		for _, c := range cancel {
			c()
		}
		settle(time.Minute)
		if n := strings.Count(log.String(), "bytes=8192"); n != 1 {
			t.Errorf("%d warnings when nobody waits for them any more:\n%s", n, log)
		}
		stop()
		<-out
		release()
		w.end(all...)
	})
	bubble(t, "who waits comes and goes", func(t *testing.T) {
		w, all := fullWorld(t, nil)
		release := lockOne(t, all[0])
		for range 4 {
			var cancel []func()
			for _, b := range all {
				if b.Info().Space == gpu0 {
					cancel = append(cancel, b.Subscribe())
				}
			}
			ctx, stop := context.WithCancel(t.Context())
			out := w.reserve(ctx, gpu0, 8*kib)
			settle(time.Minute)
			stop()
			<-out
			for _, c := range cancel {
				c()
			}
			settle(time.Minute)
		}
		told := 0
		for _, s := range w.stuck {
			if s.To == gpu0 {
				told++
			}
		}
		if told == 0 || told > 2 {
			t.Errorf("it was told of %d times: %+v", told, w.stuck)
		}
		release()
		w.end(all...)
	})
	bubble(t, "a change is not news if it does not help", func(t *testing.T) {
		w, all := fullWorld(t, nil)
		release := lockOne(t, all[0])
		settle(time.Second)
		for range 100 {
			all[20].SetPlace(seq(int(time.Now().UnixNano())))
			settle(time.Millisecond)
		}
		count := make(map[tier.ID]int)
		for _, s := range w.stuck {
			count[s.To]++
		}
		if count[gpu0] != 1 || count[host0] != 1 || count[disk0] != 0 {
			t.Errorf("stuck: %+v", w.stuck)
		}
		release()
		w.end(all...)
	})
}

// TestAnotherTierAfterNoRoom: an eviction whose target turns out to have no room for what it
// promised, for example because the batch needs dictionaries there, goes to the next tier at once.
func TestAnotherTierAfterNoRoom(t *testing.T) {
	bubble(t, "disk", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, host0: 64 * kib, disk0: 64 * kib}, nil)
		w.mover.fault = func(_ *batch.Batch, _, to tier.ID) error {
			if to == host0 {
				return &tier.NoSpaceError{Space: host0, Cause: errors.New("a dictionary needs it")}
			}
			return nil
		}
		all := w.fillSpace(gpu0, 8, 8*kib)
		e := w.mon.Evict(t.Context(), gpu0, 8*kib)
		for e.Again {
			e = w.mon.Evict(t.Context(), gpu0, 8*kib)
		}
		if e.Moved == 0 {
			t.Errorf("%+v", e)
		}
		if n := len(left(all, disk0)); n != 1 {
			t.Errorf("%d batches are on disk, want 1", n)
		}
		w.start()
		w.end(all...)
	})
}
