package monitor

import (
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// owned is a task of these tests.
type owned struct {
	w *world
	o *reservation.Owner
}

func (w *world) task(name string) owned { return owned{w, reservation.NewOwner(name)} }

func (k owned) hold(id tier.ID, n int64) *reservation.Reservation {
	k.w.t.Helper()
	r, err := k.w.res.TryReserve(specific(id), n, &reservation.Options{Owner: k.o})
	if err != nil {
		k.w.t.Fatal(err)
	}
	return r
}

func (k owned) ask(id tier.ID, n int64) <-chan outcomeOf {
	return k.w.reserve(k.o.Context(k.w.t.Context()), id, n)
}

// got lets a second pass and returns the outcome, which must be there.
func got(t *testing.T, out <-chan outcomeOf, want error) outcomeOf {
	t.Helper()
	settle(time.Second)
	select {
	case o := <-out:
		if !errors.Is(o.err, want) {
			t.Fatalf("the outcome is %v, want %v", o.err, want)
		}
		return o
	default:
		t.Fatal("it still waits")
		panic("not reached")
	}
}

func waits(t *testing.T, out <-chan outcomeOf) {
	t.Helper()
	settle(time.Minute)
	if len(out) > 0 {
		t.Fatalf("it does not wait: %v", (<-out).err)
	}
}

// Which waits end with a deadlock error, which with the monitor's refusal, and which go on.
func TestOwnersAndTheMonitor(t *testing.T) {
	bubble(t, "what can be moved is moved", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, disk0: 64 * kib}, nil)
		w.start()
		all := w.fillSpace(gpu0, 10, 4*kib)
		a, b := w.task("a"), w.task("b")
		ra, rb := a.hold(gpu0, 12*kib), b.hold(gpu0, 12*kib)
		oa, ob := got(t, a.ask(gpu0, 20*kib), nil), got(t, b.ask(gpu0, 20*kib), nil)
		for _, r := range []*reservation.Reservation{ra, rb, oa.r, ob.r} {
			r.Release()
		}
		w.end(all...)
	})
	bubble(t, "a move takes long", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, disk0: 64 * kib}, nil)
		w.mover.bytesA = time.Minute
		w.start()
		all := w.fillSpace(gpu0, 10, 4*kib)
		a, b := w.task("a"), w.task("b")
		ra, rb := a.hold(gpu0, 12*kib), b.hold(gpu0, 12*kib)
		out := a.ask(gpu0, 4*kib)
		out2 := b.ask(gpu0, 4*kib)
		waits(t, out)
		waits(t, out2)
		settle(7 * time.Minute) // one evicts after the other
		oa, ob := got(t, out, nil), got(t, out2, nil)
		for _, r := range []*reservation.Reservation{ra, rb, oa.r, ob.r} {
			r.Release()
		}
		w.mover.bytesA = 0
		w.end(all...)
	})
	// They hold handles besides, on what would have to move.
	bubble(t, "what is being processed by those who wait is not moved", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, disk0: 64 * kib}, nil)
		all := w.fillSpace(gpu0, 10, 4*kib)
		var closeA, closeB []func()
		a, b := w.task("a"), w.task("b")
		for i, one := range all {
			if i%2 == 0 {
				closeA = append(closeA, lockFor(t, a.o, one))
			} else {
				closeB = append(closeB, lockFor(t, b.o, one))
			}
		}
		w.start()
		ra, rb := a.hold(gpu0, 12*kib), b.hold(gpu0, 12*kib)
		oa := a.ask(gpu0, 20*kib)
		waits(t, oa)
		got(t, b.ask(gpu0, 20*kib), reservation.ErrDeadlock)
		waits(t, oa) // b runs, with what its reservation promises
		for _, end := range closeB {
			end() // and now there is something to move
		}
		rb.Release()
		got(t, oa, nil).r.Release()
		ra.Release()
		for _, end := range closeA {
			end()
		}
		w.end(all...)
	})
	bubble(t, "a slower space is held by an owner", func(t *testing.T) {
		w := newWorld(t, sizes{gpu0: 64 * kib, disk0: 64 * kib}, nil)
		all := w.fillSpace(gpu0, 16, 4*kib)
		a, b := w.task("a"), w.task("b")
		rb := b.hold(disk0, 64*kib)
		w.start()
		oa := a.ask(gpu0, 8*kib)
		waits(t, oa) // b runs
		ob := b.ask(gpu0, 8*kib)
		got(t, ob, reservation.ErrDeadlock)
		if len(w.gone) > 0 {
			t.Errorf("refused: %+v", w.gone)
		}
		rb.Release()
		got(t, oa, nil).r.Release()
		w.end(all...)
	})
	bubble(t, "all is at rest and full", func(t *testing.T) {
		w, all := fullWorld(t, nil)
		a, b := w.task("a"), w.task("b")
		oa, ob := a.ask(gpu0, 8*kib), b.ask(host0, 8*kib)
		got(t, oa, tier.ErrNoSpace)
		got(t, ob, tier.ErrNoSpace)
		w.end(all...)
	})
}
