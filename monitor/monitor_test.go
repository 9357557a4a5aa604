package monitor

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// outcomeOf is how a Reserve ended.
type outcomeOf struct {
	r   *reservation.Reservation
	err error
}

func (w *world) reserve(ctx context.Context, id tier.ID, n int64) <-chan outcomeOf {
	out := make(chan outcomeOf, 1)
	go func() {
		r, err := w.res.Reserve(ctx, specific(id), n, nil)
		out <- outcomeOf{r, err}
	}()
	return out
}

func (w *world) fillSpace(id tier.ID, n int, size int64) (all []*batch.Batch) {
	w.t.Helper()
	for i := range n {
		all = append(all, w.put(id, size, seq(i)))
	}
	return all
}

// settle lets virtual time pass, and what is due at its end happen.
func settle(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

func TestTrigger(t *testing.T) {
	three := sizes{gpu0: 100 * kib, host0: 1000 * kib, disk0: 1000 * kib}
	bubble(t, "below it nothing happens", func(t *testing.T) {
		w := newWorld(t, three, nil)
		w.start()
		all := w.fillSpace(gpu0, 79, kib)
		settle(5 * time.Minute)
		if n, s := w.moved(), w.mon.Stats(); n != 0 || s != (Stats{Looks: s.Looks}) {
			t.Errorf("%d bytes moved; %+v", n, s)
		}
		w.end(all...)
	})
	for _, size := range []int64{1, 4, 7, 30} {
		bubble(t, "as far below it as it was above, and no further", func(t *testing.T) {
			w := newWorld(t, three, nil)
			w.start()
			settle(time.Second)
			n := int(80/size) + 1
			all := w.fillSpace(gpu0, n, size*kib)
			synctest.Wait()
			w.mu.Lock()
			begun := len(w.begun)
			w.mu.Unlock()
			if begun == 0 {
				t.Error("the monitor was not woken at once")
			}
			settle(time.Minute)
			excess := int64(n)*size*kib - 80*kib + 1
			if got := w.moved(); got < excess || got >= 2*excess+size*kib {
				t.Errorf("%d bytes were moved for an excess of %d, in batches of %d", got, excess, size*kib)
			}
			w.mustBeRelieved(gpu0)
			for _, m := range w.ended {
				if m.Reason != decide.Trigger || m.From != gpu0 || m.To != host0 {
					t.Errorf("a move %+v", m)
				}
			}
			for _, b := range all {
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			}
			settle(time.Second)
			if len(w.press) != 2 || w.press[0].Kind != events.PressureRose || w.press[1].Kind != events.PressureFell {
				t.Errorf("pressure: %+v", w.press)
			}
			w.end()
		})
	}
	bubble(t, "marks that change", func(t *testing.T) {
		w := newWorld(t, three, nil)
		w.start()
		all := w.fillSpace(gpu0, 70, kib)
		settle(time.Second)
		for _, c := range []struct {
			marks tier.Marks
			moves bool
		}{{tier.Marks{Limit: 1, Trigger: 0.65, Stop: 0.5}, true},
			{tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.1}, false}} {
			was := w.moved()
			if err := w.spaces[gpu0].SetMarks(c.marks); err != nil {
				t.Fatal(err)
			}
			settle(time.Millisecond)
			if moves := w.moved() > was; moves != c.moves {
				t.Errorf("at %+v, %d bytes are moved", c.marks, w.moved()-was)
			}
			w.mustBeRelieved(gpu0)
		}
		w.end(all...)
	})
	bubble(t, "each time it is reached, at once", func(t *testing.T) {
		w := newWorld(t, three, nil)
		w.start()
		all := w.fillSpace(gpu0, 80, kib)
		settle(time.Second + time.Millisecond)
		was := len(w.begun)
		all = append(all, w.fillSpace(gpu0, 20, kib)...)
		synctest.Wait()
		if len(w.begun) == was {
			t.Error("the monitor was not woken the second time")
		}
		w.end(all...)
	})
	bubble(t, "a batch that somebody reads behind the index's back", func(t *testing.T) {
		w := newWorld(t, three, nil)
		w.start()
		all := w.fillSpace(gpu0, 78, kib) // the newest takes a whole KiB: the trigger is at 80
		newest := w.put(gpu0, kib/2, seq(1000))
		end := imageOf(t, newest).Buffer().Lease()
		all = append(all, w.put(gpu0, kib, seq(500)), newest)
		settle(time.Second)
		for _, m := range w.begun {
			if m.Batch == newest.ID() {
				t.Error("it was moved")
			}
		}
		if used := w.spaces[gpu0].State().Used(); used != 79*kib {
			t.Errorf("%d bytes are left", used)
		}
		end()
		w.end(all...)
	})
	bubble(t, "memory that is freed late is not freed twice", func(t *testing.T) {
		w := newWorld(t, three, nil)
		w.pools[gpu0].lag = time.Second
		all := w.fillSpace(gpu0, 85, kib)
		w.start()
		settle(time.Minute)
		if got := w.moved(); got != 11*kib { // it is above by 5 KiB and a byte, and goes twice as far
			t.Errorf("%d bytes were moved, want %d", got, 11*kib)
		}
		w.end(all...)
	})
	bubble(t, "down two tiers", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 50 * kib, disk0: 1000 * kib}, nil)
		w.start()
		var all []*batch.Batch
		for i := range 300 { // more than GPU and host hold together
			o := <-w.reserve(t.Context(), gpu0, kib)
			if o.err != nil {
				t.Fatal(o.err)
			}
			all = append(all, w.fill(o.r, seq(i)))
		}
		settle(time.Minute)
		for id, s := range w.spaces {
			if s.State().Used() >= s.State().Trigger {
				t.Errorf("%s has %d bytes in the end", id, s.State().Used())
			}
		}
		// 300 KiB were made; 60 and 30 may stay. Each that left went down twice at most.
		if got := w.moved(); got > 2*(300-60)*kib {
			t.Errorf("%d bytes were moved", got)
		}
		w.end(all...)
	})
}

func TestDemand(t *testing.T) {
	bubble(t, "below the trigger only the need is freed", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
		w.start()
		all := w.fillSpace(gpu0, 14, 5*kib) // 70 of 100
		begin := time.Now()
		o := <-w.reserve(t.Context(), gpu0, 42*kib)
		if o.err != nil {
			t.Fatal(o.err)
		}
		if d := time.Since(begin); d >= defaultPeriod {
			t.Errorf("the waiter was served after %v", d)
		}
		synctest.Wait()                      // until the last move is reported
		if got := w.moved(); got != 15*kib { // 12 are lacking, in batches of 5
			t.Errorf("%d bytes were moved, want %d", got, 15*kib)
		}
		for _, m := range w.ended {
			if m.Reason != decide.Demand {
				t.Errorf("a move %+v", m)
			}
		}
		o.r.Release()
		settle(time.Minute)
		w.end(all...)
	})
	var ofOne int64
	for _, n := range []int{1, 8} {
		bubble(t, fmt.Sprint("a waiter for any of GPUs: ", n), func(t *testing.T) {
			spaces := sizes{host0: 1000 * kib}
			for i := range n {
				spaces[tier.ID{Kind: tier.GPU, Ordinal: i}] = 100 * kib
			}
			w := newWorld(t, spaces, nil)
			var all []*batch.Batch
			for i := range n {
				all = append(all, w.fillSpace(tier.ID{Kind: tier.GPU, Ordinal: i}, 39, 2*kib)...)
			}
			w.start()
			for range 2 { // the second finds the room of the first
				r, err := w.res.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 22*kib+30*kib, nil)
				if err != nil {
					t.Fatal(err)
				}
				settle(time.Minute)
				if n == 1 {
					ofOne = w.moved()
				}
				if moved := w.moved(); moved < 30*kib || moved > ofOne {
					t.Errorf("%d bytes were moved for a waiter that lacks 30 KiB; %d with one GPU", moved, ofOne)
				}
				if err := r.Release(); err != nil {
					t.Fatal(err)
				}
			}
			w.end(all...)
		})
	}
	bubble(t, "several waiters", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, w *world) { w.mover.bytesA = time.Millisecond })
		w.start()
		all := w.fillSpace(gpu0, 70, kib)
		var outs []<-chan outcomeOf
		var rs []*reservation.Reservation
		for range 5 {
			outs = append(outs, w.reserve(t.Context(), gpu0, 10*kib))
		}
		for _, out := range outs {
			o := <-out
			if o.err != nil {
				t.Fatal(o.err)
			}
			rs = append(rs, o.r)
		}
		// 50 KiB more make 120; at 100 the trigger is reached as well.
		settle(time.Minute)
		if got, used := w.moved(), w.spaces[gpu0].State().Used(); got+used != 120*kib {
			t.Errorf("%d bytes were moved, %d are used", got, used)
		}
		w.mustBeRelieved(gpu0)
		for _, r := range rs {
			r.Release()
		}
		w.end(all...)
	})
	bubble(t, "a batch that becomes free helps at once", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
		w.start()
		b := w.put(gpu0, 70*kib, seq(1))
		if err := b.TryCreateTask(); err != nil {
			t.Fatal(err)
		}
		h, err := b.TryLock(gpu0)
		if err != nil {
			t.Fatal(err)
		}
		out := w.reserve(t.Context(), gpu0, 50*kib)
		settle(10*time.Second + 7*time.Millisecond)
		begin := time.Now()
		h.Close()
		o := <-out
		if o.err != nil {
			t.Fatal(o.err)
		}
		if d := time.Since(begin); d > time.Millisecond { // 70 µs for the move
			t.Errorf("the waiter was served after %v", d)
		}
		o.r.Release()
		w.end(b)
	})
	bubble(t, "room that others free in the tier below helps at once", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib}, nil)
		w.start()
		b := w.put(gpu0, 70*kib, seq(1))
		r, err := w.res.TryReserve(specific(host0), 79*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		out := w.reserve(t.Context(), gpu0, 50*kib)
		settle(10*time.Second + 7*time.Millisecond)
		if len(out) > 0 {
			t.Fatalf("the waiter is not waiting: %v", <-out)
		}
		begin := time.Now()
		r.Release()
		o := <-out
		if o.err != nil {
			t.Fatal(o.err)
		}
		if d := time.Since(begin); d > time.Millisecond {
			t.Errorf("the waiter was served after %v", d)
		}
		o.r.Release()
		w.end(b)
	})
}

// TestTaskQueue: what tasks were created for goes last, and of that what was asked for last goes
// first.
func TestTaskQueue(t *testing.T) {
	bubble(t, "", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, _ *world) { c.MovesPerEdge = 1 })
		all := w.fillSpace(gpu0, 7, 10*kib)
		for i := len(all) - 1; i >= 0; i-- {
			if err := all[i].TryCreateTask(); err != nil {
				t.Fatal(err)
			}
		}
		rest := w.put(gpu0, 5*kib, seq(0))
		w.start()
		r, err := w.res.Reserve(t.Context(), reservation.Specific(gpu0), 59*kib, nil) // and then the pressure is above the trigger
		if err != nil {
			t.Fatal(err)
		}
		settle(time.Minute)
		var order []batch.ID
		for _, m := range w.begun {
			order = append(order, m.Batch)
		}
		if want := []batch.ID{rest.ID(), 1, 2, 3, 4, 5, 6, 7}; len(order) < 4 || !slices.Equal(order, want[:len(order)]) {
			t.Errorf("they go in the order %v, want %v", order, want)
		}
		if err := r.Release(); err != nil {
			t.Error(err)
		}
		w.end(append(all, rest)...)
	})
}

func TestRunEnds(t *testing.T) {
	bubble(t, "moves under way are cancelled", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(_ *Config, w *world) { w.mover.bytesA = time.Hour })
		all := w.fillSpace(gpu0, 85, kib)
		w.start()
		synctest.Wait()
		if len(w.begun) != 2 {
			t.Errorf("%d moves are under way", len(w.begun))
		}
		w.stop()
		if n := len(w.begun) - len(w.failed); n != 0 {
			t.Errorf("%d moves outlived Run", n)
		}
		for _, b := range all {
			if i := b.Info(); i.State != batch.Idle || i.Space != gpu0 {
				t.Errorf("batch %d is %+v", b.ID(), i)
			}
		}
		// It may run again, and finds its victims.
		w.mover.bytesA = time.Microsecond
		w.start()
		settle(time.Second)
		w.mustBeRelieved(gpu0)
		w.end(all...)
	})
	bubble(t, "what was set aside is forgotten", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
		w.mover.fault = func(*batch.Batch, tier.ID, tier.ID) error { return errors.New("not today") }
		w.start()
		all := w.fillSpace(gpu0, 2, 45*kib)
		settle(10 * time.Millisecond)
		if len(w.failed) != 2 {
			t.Errorf("%d moves failed", len(w.failed))
		}
		w.stop()
		w.mover.heal()
		w.start()
		settle(5 * time.Second)
		if used := w.spaces[gpu0].State().Used(); used != 45*kib {
			t.Errorf("%d bytes are left", used)
		}
		w.end(all...)
	})
	bubble(t, "only one at a time", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib}, nil)
		w.start()
		synctest.Wait()
		if err := w.mon.Run(t.Context()); err == nil {
			t.Error("two run at once")
		}
		w.end()
	})
}

func TestPlanOrderOfMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, _ *world) { c.MovesPerEdge = 1 })
		place := func(rank int, last bool, seq uint64) batch.Place {
			return batch.Place{Plan: 1, Rank: rank, Last: last, Seq: seq}
		}
		all := []*batch.Batch{
			w.put(gpu0, 10*kib, place(0, false, 1)), // 6th
			w.put(gpu0, 10*kib, place(0, false, 2)), // 5th
			w.put(gpu0, 10*kib, place(1, false, 3)), // 4th
			w.put(gpu0, 10*kib, place(2, true, 4)),  // 7th
			w.put(gpu0, 10*kib, place(1, false, 5)), // 3rd
			w.put(gpu0, 10*kib, place(1, false, 6)), // queued: 8th
			w.put(gpu0, 10*kib, place(1, false, 7)), // 2nd
		}
		if err := all[5].TryCreateTask(); err != nil {
			t.Fatal(err)
		}
		w.start()
		o := <-w.reserve(t.Context(), gpu0, 100*kib)
		if o.err != nil {
			t.Fatal(o.err)
		}
		synctest.Wait() // until the last move is reported
		var got []batch.ID
		for _, m := range w.ended {
			got = append(got, m.Batch)
		}
		want := []batch.ID{7, 5, 3, 2, 1, 4, 6}
		for i := range want {
			if i >= len(got) || got[i] != want[i] {
				t.Fatalf("the order is %v, want %v", got, want)
			}
		}
		o.r.Release()
		if err := all[5].CancelTask(); err != nil {
			t.Error(err)
		}
		w.end(all...)
	})
}

// TestOutputMoves: batches of the output repository, which go last, leave when nothing else can.
func TestOutputMoves(t *testing.T) {
	for _, p := range []Policy{PlanOrder(), PlanOrderFromScans(), CostAware()} {
		bubble(t, p.Name(), func(t *testing.T) {
			w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, _ *world) { c.Policy = p })
			w.start()
			scan := w.put(gpu0, kib, batch.Place{Plan: 1, Operator: "scan", Seq: 1000})
			var all []*batch.Batch
			for i := range 79 {
				all = append(all, w.put(gpu0, kib, batch.Place{Plan: 1, Operator: "sort", Last: true, Seq: uint64(i)}))
			}
			settle(time.Second)
			if scan.Info().Space != host0 || w.moved() == 0 {
				t.Errorf("the scan's batch is in %s, %d bytes were moved", scan.Info().Space, w.moved())
			}
			o := <-w.reserve(t.Context(), gpu0, 60*kib)
			if o.err != nil {
				t.Fatal(o.err)
			}
			o.r.Release()
			w.end(append(all, scan)...)
		})
	}
}

func TestConfig(t *testing.T) {
	w := newWorld(t, sizes{gpu0: kib}, nil)
	for _, c := range []Config{
		{}, {Reservations: w.res}, {Mover: w.mover},
		{Reservations: w.res, Mover: w.mover, Period: -1}, {Reservations: w.res, Mover: w.mover, Period: MinPeriod - 1}, {Reservations: w.res, Mover: w.mover, MovesPerEdge: -1},
		{Reservations: w.res, Mover: w.mover, MovesPerEdge: MaxMovesPerEdge + 1}, {Reservations: w.res, Mover: w.mover, MovesPerEdge: math.MaxInt},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%+v is taken", c)
		}
	}
	if _, err := New(Config{Reservations: w.res, Mover: w.mover, Period: MinPeriod, MovesPerEdge: MaxMovesPerEdge}); err != nil {
		t.Errorf("the shortest period and the most moves: %v", err)
	}
	m, err := New(Config{Reservations: w.res, Mover: w.mover})
	if err != nil {
		t.Fatal(err)
	}
	if m.cfg.Period != defaultPeriod || m.cfg.MovesPerEdge != defaultMovesPerEdge || m.cfg.Policy.Name() != "cost-aware" {
		t.Errorf("the defaults are %+v", m.cfg)
	}
	w.end()
}

// TestRetiredBytesAreComing: bytes that a device is about to free count as freed, and those of which the
// pool cannot find out whether the device has freed them do not.
func TestRetiredBytesAreComing(t *testing.T) {
	for _, tt := range []struct {
		name             string
		unsure           int64
		demand, pressure int64 // bytes that are moved for a request, and at the trigger
	}{
		{"all are coming", 0, 15 * kib, 0},
		{"none is coming", 30 * kib, 45 * kib, 25 * kib}, // 42 and 22 in batches of 5
	} {
		retire := func(w *world) []*batch.Batch {
			all := w.fillSpace(gpu0, 12, 5*kib)
			gone := w.put(gpu0, 30*kib, batch.Place{})
			pool := w.pools[gpu0]
			pool.unsure.Store(tt.unsure)
			pool.lag = time.Hour
			if err := gone.Drop(); err != nil {
				t.Error(err)
			}
			pool.lag = 0
			return all
		}
		bubble(t, tt.name+", and a request lacks room", func(t *testing.T) {
			w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
			all := retire(w)
			if e := w.mon.Evict(t.Context(), gpu0, 42*kib); e.Moved != tt.demand {
				t.Errorf("%d bytes have left, want %d", e.Moved, tt.demand)
			}
			w.end(all...)
		})
		bubble(t, tt.name+", and the trigger is reached", func(t *testing.T) {
			w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, nil)
			all := retire(w)
			w.start()
			settle(time.Minute)
			if n := w.moved(); n != tt.pressure {
				t.Errorf("%d bytes were moved, want %d", n, tt.pressure)
			}
			w.end(all...)
		})
	}
}

// TestRoomThatWaitersWant: batches are not evicted to room that requests wait for there.
func TestRoomThatWaitersWant(t *testing.T) {
	bubble(t, "in the next tier", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 100 * kib, disk0: 1000 * kib}, nil)
		all := w.fillSpace(gpu0, 4, 5*kib)
		holder := <-w.reserve(t.Context(), host0, 90*kib)
		if holder.err != nil {
			t.Fatal(holder.err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		waiter := w.reserve(ctx, host0, 20*kib)
		synctest.Wait()
		_ = w.mon.Evict(t.Context(), gpu0, 5*kib)
		if len(w.ended) != 1 || w.ended[0].To != disk0 {
			t.Errorf("the moves are %+v, want one to the disk", w.ended)
		}
		cancel()
		<-waiter
		if err := holder.r.Release(); err != nil {
			t.Error(err)
		}
		w.end(all...)
	})
}

// TestDemandWakes: a new waiter wakes the monitor, which otherwise looks once in a period.
func TestDemandWakes(t *testing.T) {
	bubble(t, "below the trigger", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 1000 * kib}, func(c *Config, _ *world) { c.Period = time.Hour })
		w.start()
		all := w.fillSpace(gpu0, 70, kib)
		settle(time.Minute)
		for range 2 {
			begin := time.Now()
			o := <-w.reserve(t.Context(), gpu0, 40*kib)
			if o.err != nil {
				t.Fatal(o.err)
			}
			if d := time.Since(begin); d > time.Second {
				t.Errorf("the waiter was served after %v", d)
			}
			o.r.Release()
			settle(time.Minute)
			all = append(all, w.fillSpace(gpu0, 10, kib)...)
			settle(time.Minute)
		}
		w.end(all...)
	})
}

// TestDemandThatHasGone: a request is withdrawn when the first batches have left for it. Those that
// no executor has begun with stay.
func TestDemandThatHasGone(t *testing.T) {
	bubble(t, "one space", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 10000 * kib, host0: 100000 * kib}, nil)
		all := w.fillSpace(gpu0, 100, 64*kib)
		if err := w.spaces[gpu0].SetLimit(6400 * kib); err != nil {
			t.Fatal(err)
		}
		w.start()
		settle(time.Second)
		ctx, cancel := context.WithCancel(t.Context())
		out := w.reserve(ctx, gpu0, 6000*kib)
		time.Sleep(100 * time.Microsecond) // a move takes 64
		cancel()
		<-out
		at := w.moved() / kib
		settle(time.Second)
		if n := w.moved() / kib; n > at+4*64 {
			t.Errorf("%d KiB had left when the request was withdrawn, and %d in the end", at, n)
		}
		w.end(all...)
	})
}

// TestIdleMonitorSleeps: while nothing is needed it looks once a second. A need is seen at once: a
// limit below what is used, and the trigger.
func TestIdleMonitorSleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 400 * kib}, nil)
		w.start()
		gpu := w.spaces[gpu0]
		var all []*batch.Batch
		for range 5 {
			all = append(all, w.put(gpu0, 10*kib, batch.Place{}))
		}
		settle(time.Minute)
		if n := w.mon.Stats().Looks; n > 70 {
			t.Errorf("%d looks in a minute", n)
		}
		at := func(what string, most int64) {
			t.Helper()
			settle(10 * time.Millisecond)
			if n := gpu.State().Used(); n > most {
				t.Errorf("%s: %d bytes are used", what, n)
			}
			settle(time.Minute)
		}
		if err := gpu.SetLimit(40 * kib); err != nil {
			t.Fatal(err)
		}
		at("a lower limit", 40*kib)
		if err := gpu.SetLimit(100 * kib); err != nil {
			t.Fatal(err)
		}
		for range 5 {
			all = append(all, w.put(gpu0, 10*kib, batch.Place{}))
		}
		at("the trigger", 79*kib)
		w.mustSleep("after there was something to do")
		w.end(all...)
	})
}

// TestMonitorBetweenTheMarksSleeps: the pressure was at the trigger once, and stays between the
// marks, because work goes on. Nothing is needed. That the stop mark is reached is seen at once.
func TestMonitorBetweenTheMarksSleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 400 * kib}, nil)
		w.start()
		r, err := w.res.Reserve(t.Context(), specific(gpu0), 70*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		b := w.put(gpu0, 10*kib, batch.Place{})
		settle(time.Minute)
		w.mustSleep("work goes on")
		w.mustBeRelieved(gpu0)
		settle(500 * time.Millisecond) // it looks about when a second is over
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		settle(10 * time.Millisecond)
		if n := len(w.press); n != 2 || w.press[1].Kind != events.PressureFell {
			t.Errorf("the events are %+v", w.press)
		}
		w.end(b)
	})
}

// TestMonitorBesideAnUnmovableBatchSleeps: a batch could not be converted once, and nothing is
// needed since.
func TestMonitorBesideAnUnmovableBatchSleeps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 100 * kib, host0: 400 * kib}, nil)
		w.mover.fault = func(b *batch.Batch, _, _ tier.ID) error { return &batch.UnmovableError{Batch: b.ID()} }
		w.start()
		b := w.put(gpu0, 10*kib, batch.Place{})
		r, err := w.res.Reserve(t.Context(), specific(gpu0), 75*kib, nil)
		if err != nil {
			t.Fatal(err)
		}
		settle(time.Minute)
		if err := r.Release(); err != nil {
			t.Fatal(err)
		}
		settle(time.Minute)
		w.mustSleep("a batch cannot be moved")
		w.end(b)
	})
}

// mustSleep fails the test if the monitor looks more than once a second.
func (w *world) mustSleep(why string) {
	w.t.Helper()
	n := w.mon.Stats().Looks
	settle(time.Minute)
	if n = w.mon.Stats().Looks - n; n > 61 {
		w.t.Errorf("%s: %d looks in a minute, in which nothing was needed", why, n)
	}
}
