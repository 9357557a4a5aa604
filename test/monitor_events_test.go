package test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// noted checks all fields of an event: want has them but for the time, and an error that the
// event's is.
func noted(t *testing.T, e, want spillway.Event) {
	t.Helper()
	if e.At.IsZero() || e.At.After(time.Now()) || (e.Err == nil) != (want.Err == nil) || !errors.Is(e.Err, want.Err) {
		t.Errorf("at %v with the error %v, want %v", e.At, e.Err, want.Err)
	}
	if e.Context == nil {
		t.Error("it has no context")
	}
	e.At, e.Context, e.Err, want.Err = time.Time{}, nil, nil, nil
	if e != want {
		t.Errorf("%+v, want %+v", e, want)
	}
}

// once returns the only event of the kinds.
func (r *heard) once(t *testing.T, kinds ...events.Kind) spillway.Event {
	t.Helper()
	all := r.of(kinds...)
	if len(all) != 1 {
		t.Fatalf("%d events, want one: %+v", len(all), all)
	}
	return all[0]
}

// quietly has an engine with plain marks whose batches move only when they must.
func quietly(c *spillway.Config) {
	marks := tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}
	c.GPUMarks, c.HostMarks, c.DiskMarks = marks, marks, marks
	c.WriteAhead, c.Codec = -1, convert.CodecNone
}

// await lets virtual time pass, in which the monitor does all that it has to.
func await(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// TestPressureEvents: of each space rises and falls are told in turns, each once, also if the
// pressure stays high for long; and that there is no slower tier, if that is so.
func TestPressureEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, r := telling(t, quietly)
		defer closeEngine(t, eng)
		var want []spillway.Event
		for range 2 {
			for _, s := range eng.Spaces() {
				free := full(t, s, eng)
				rose := spillway.Event{Kind: events.PressureRose, To: s.ID(), Bytes: s.State().Pressure}
				if s.Kind() == tier.Disk {
					rose.Text = "there is no slower tier"
				}
				await(time.Minute)
				free()
				await(time.Second)
				fell := spillway.Event{Kind: events.PressureFell, To: s.ID(), Bytes: s.State().Pressure}
				want = append(want, rose, fell)
			}
		}
		all := r.of(events.PressureRose, events.PressureFell)
		if len(all) != len(want) {
			t.Fatalf("%d events, want %d: %+v", len(all), len(want), all)
		}
		for i, e := range all {
			noted(t, e, want[i])
		}
	})
}

// TestPressureEventsOfMoves: they alternate while batches come and are moved down, too. A rise is at
// the trigger or above, a fall at the stop mark or below.
func TestPressureEventsOfMoves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, r := telling(t, quietly)
		defer closeEngine(t, eng)
		p, repo := putMany(t, eng, "query", "build", 60)
		await(time.Second)
		if left, err := p.Close(); err != nil || len(left) != 1 || left[0].Batches != 60 || left[0].Key != repo.Key() {
			t.Errorf("the plan had %+v left, %v", left, err)
		}
		await(time.Second)
		high, falls := map[tier.ID]bool{}, 0
		for _, e := range r.of(events.PressureRose, events.PressureFell) {
			s := spaceAt(eng, e.To.Kind, e.To.Ordinal)
			rose := e.Kind == events.PressureRose
			if high[e.To] == rose || rose && e.Bytes < s.State().Trigger || !rose && e.Bytes > s.State().Stop {
				t.Errorf("%s; the marks are %d and %d", e, s.State().Trigger, s.State().Stop)
			}
			if high[e.To] = rose; !rose {
				falls++
			}
			noted(t, e, spillway.Event{Kind: e.Kind, To: e.To, Bytes: e.Bytes})
		}
		if falls < 2 || len(high) < 2 || high[tier.ID{Kind: tier.GPU}] || high[tier.ID{Kind: tier.Host}] {
			t.Errorf("%d falls; at the end it is high in %v", falls, high)
		}
	})
}

// TestStuckEvents: a need that nothing can be moved for is told once, with what is lacking and why,
// and again when it has been met and comes back.
func TestStuckEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const need = 64 << 10
		eng, r := telling(t, quietly)
		defer closeEngine(t, eng)
		gpu, host := gpuOf(t, eng), spaceAt(eng, tier.Host, 0)
		b := putOn(t, eng, tier.GPU, 2000)
		resting := b.Info().Bytes
		var want []spillway.Event
		for range 2 {
			var free []func()
			for _, s := range slices.Backward(eng.Spaces()) { // nothing moves, and no waiter is refused
				free = append(free, full(t, s, eng))
			}
			rest := fmt.Sprintf("%d bytes are used of %d, %d of them in batches at rest, host:0 has 0, disk:0 has 0",
				gpu.State().Used(), gpu.State().Limit, resting)
			want = append(want,
				spillway.Event{
					Kind: events.Stuck, To: gpu.ID(), Bytes: gpu.State().Used() - gpu.State().Trigger + 1,
					Reason: convert.ReasonTrigger, Text: "0 wait, " + rest,
				},
				spillway.Event{
					Kind: events.Stuck, To: host.ID(), Bytes: host.State().Used() - host.State().Trigger + 1,
					Reason: convert.ReasonTrigger,
					Text: fmt.Sprintf("0 wait, %d bytes are used of %d, 0 of them in batches at rest, disk:0 has 0",
						host.State().Used(), host.State().Limit),
				},
				spillway.Event{Kind: events.Stuck, To: gpu.ID(), Bytes: need, Reason: convert.ReasonDemand, Text: "1 wait, " + rest})
			await(time.Minute)
			ctx, cancel := context.WithCancel(t.Context())
			waited := make(chan error)
			go func() {
				_, err := eng.Reserve(ctx, reservation.Specific(gpu.ID()), need)
				waited <- err
			}()
			await(time.Minute)
			cancel()
			if err := <-waited; !errors.Is(err, context.Canceled) {
				t.Errorf("the wait: %v", err)
			}
			for _, f := range free {
				f()
			}
			await(time.Second)
		}
		all := r.of(events.Stuck)
		if len(all) != len(want) {
			t.Fatalf("%d events, want %d: %+v", len(all), len(want), all)
		}
		for i := 0; i < len(all); i += 3 { // the two spaces at their triggers are found in any order
			if all[i].To != want[i].To {
				all[i], all[i+1] = all[i+1], all[i]
			}
		}
		for i, e := range all {
			noted(t, e, want[i])
		}
	})
}

// TestRefusedEvents: waiters that are sent away together are told of together, with the spaces that
// are full for good; those that come later are told of by themselves.
func TestRefusedEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, r := telling(t, func(c *spillway.Config) {
			quietly(c)
			c.Disks, c.StallTimeout = []spillway.DiskConfig{}, time.Second
		})
		defer closeEngine(t, eng)
		var all []*batch.Batch
		for _, k := range []tier.Kind{tier.Host, tier.GPU} {
			for s := spaceAt(eng, k, 0); s.State().Available >= 64<<10; {
				all = append(all, inTier(t, eng, k, batch.ID(1000+len(all)), 64<<10, false))
			}
		}
		refused := func(waiters int) spillway.Event {
			t.Helper()
			before := len(r.of(events.Refused))
			got := make(chan error)
			for range waiters {
				go func() {
					_, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.GPU), 128<<10)
					got <- err
				}()
			}
			for range waiters {
				if err := <-got; !errors.Is(err, tier.ErrNoSpace) {
					t.Errorf("a waiter: %v", err)
				}
			}
			await(time.Minute)
			now := r.of(events.Refused)
			if len(now) != before+1 {
				t.Fatalf("of %d waiters it is told %+v", waiters, now[before:])
			}
			return now[before]
		}
		for _, waiters := range []int{2, 1} {
			noted(t, refused(waiters), spillway.Event{Kind: events.Refused, Text: fmt.Sprintf("%d waiters; full for good: host:0, gpu:0", waiters)})
		}
		dropAll(t, all)
	})
}

// TestUnmovableEvents: a batch in a form that nothing converts is told once, however often it is
// tried, and once more when there is another converter.
func TestUnmovableEvents(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, r := telling(t, func(c *spillway.Config) {
			quietly(c)
			c.GPUs = []spillway.GPUConfig{} // none
		})
		defer closeEngine(t, eng)
		host := spaceAt(eng, tier.Host, 0)
		var bad []*batch.Batch
		for i := range 2 {
			bad = append(bad, inHost(t, eng, batch.ID(1000+i), 64<<10, true))
		}
		free := full(t, host, eng)
		for i := 1; i <= 2; i++ {
			await(10 * time.Minute)
			all := r.of(events.Unmovable)
			if len(all) != i*len(bad) {
				t.Fatalf("%d events, want %d: %+v", len(all), i*len(bad), all)
			}
			all = all[(i-1)*len(bad):]
			slices.SortFunc(all, func(a, b spillway.Event) int { return int(a.Batch) - int(b.Batch) })
			for k, e := range all {
				var own *batch.UnmovableError
				var none *convert.NoConverterError
				if !errors.As(e.Err, &own) || own.Batch != bad[k].ID() || !errors.As(e.Err, &none) {
					t.Errorf("batch %d: %v", bad[k].ID(), e.Err)
				}
				noted(t, e, spillway.Event{
					Kind: events.Unmovable, Origin: events.Origin{Plan: "of a program", Operator: "op"}, Batch: uint64(bad[k].ID()), From: host.ID(), To: tier.ID{Kind: tier.Disk},
					Bytes: bad[k].Info().Bytes, Text: string(ownForm{}.Type()), Err: batch.ErrUnmovable,
				})
			}
			if err := eng.Registry().Register(convert.Form{Type: batch.PayloadType(fmt.Sprint("something ", i)), Kind: tier.GPU}, convert.ImageIn(tier.Host), func(context.Context, batch.Payload, *reservation.Reservation) (batch.Payload, error) {
				return nil, errors.New("it is not called")
			}); err != nil {
				t.Fatal(err)
			}
		}
		free()
		dropAll(t, bad)
	})
}

// TestLostEvent: a loss is told once. The space is not said to be above its trigger any more, and
// not to have fallen.
func TestLostEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var gpu *faultdev.Device
		eng, r := telling(t, func(c *spillway.Config) {
			quietly(c)
			c.GPUs[0].Wrap = func(dev tier.Device) (tier.Device, error) {
				gpu = faultdev.New(dev, 1)
				return gpu, nil
			}
		})
		defer closeEngine(t, eng)
		free := full(t, gpuOf(t, eng), eng)
		await(time.Second)
		gpu.Lose(errFellOff)
		await(time.Minute)
		free()
		await(time.Minute)
		e := r.once(t, events.Lost)
		isLost(t, "what is told", e.Err)
		noted(t, e, spillway.Event{Kind: events.Lost, To: lostGPU, Err: errFellOff})
		if e := r.once(t, events.PressureRose, events.PressureFell); e.Kind != events.PressureRose {
			t.Error(e)
		}
	})
}

// TestOversizedEvent: a batch that never fits where it was to go is told once, with whose it is and
// where it went.
func TestOversizedEvent(t *testing.T) {
	t.Parallel()
	eng, r := telling(t, nil)
	defer closeEngine(t, eng)
	repo := scanOf(t, eng)
	rec := arrowgen.Ints(1, 200_000, 1) // 1.6 MB; the GPU has one MiB
	defer rec.Release()
	if err := repo.Put(t.Context(), 7, rec, in(tier.GPU)); err != nil {
		t.Fatal(err)
	}
	b, _ := repo.Peek(7)
	e := r.once(t, events.Oversized)
	if !strings.HasPrefix(e.Text, "it was to go to ") {
		t.Error(e)
	}
	noted(t, e, spillway.Event{
		Kind: events.Oversized, Origin: events.Origin{Plan: "p", Operator: "scan", Partition: 7},
		To: tier.ID{Kind: tier.Host}, Bytes: b.Info().Bytes, Text: "it was to go to " + reservation.AnyInTiers(tier.GPU).String(),
	})
}
