package monitor

import (
	"context"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// inside is a Monitor as reservations see it, and a replay of a trace, which lets time pass itself.
type inside struct{ *Monitor }

// Inside returns what only this module's packages do with a monitor. Programs have no use for it.
func (m *Monitor) Inside() inside { return inside{m} }

// demander knows what waits for room: a reservation.Manager.
type demander interface {
	Demand(dst []reservation.Demand) []reservation.Demand
	Waiting(dst []reservation.Demand, any []reservation.Choice) ([]reservation.Demand, []reservation.Choice)
}

// Drive makes the caller's goroutine the one that calls Look, in place of Run. Nothing is written
// ahead. now is its clock, spawn begins what moves batches, and d is asked for what waits. It must
// be called once, before all else.
func (in inside) Drive(now func() time.Time, spawn func(func()), d demander) {
	in.now, in.spawn, in.demander, in.last = now, spawn, d, now()
	for _, s := range in.spaces {
		s.linger = lingering{}
		s.linger.begin(s.Space, now())
		s.Inside().Subscribe(func(_ *tier.Space, pressed bool) { in.changed(s, pressed) })
	}
}

// Woken reports whether the monitor was woken, which takes its time to look then.
func (in inside) Woken() bool { return len(in.wake) > 0 }

// Due is when the monitor looks if nothing wakes it: when moves have ended, or when enough time has
// passed since the last look.
func (in inside) Due() (at time.Time) {
	if len(in.ended) > 0 {
		return in.now()
	}
	if len(in.hint) > 0 {
		return in.last.Add(in.cfg.Period / hintsPerPeriod)
	}
	if !in.needed {
		return in.last.Add(max(idlePeriod, in.cfg.Period))
	}
	return in.last.Add(in.cfg.Period)
}

// Look is one round of Run.
func (in inside) Look(ctx context.Context) {
	for _, c := range []chan struct{}{in.wake, in.hint} {
		select {
		case <-c:
		default:
		}
	}
	in.drain()
	in.step(ctx)
}

// Wake wakes the monitor.
func (in inside) Wake() { in.wakeUp() }

// walkStep is how many batches are looked up at a time: some ten microseconds.
const walkStep = 4096

// Each calls f with all batches that the monitor knows, with no lock held. Those that come, or go,
// meanwhile may be left out.
func (in inside) Each(f func(*batch.Batch)) {
	var some []*batch.Batch
	for from := uint32(1); ; from += walkStep {
		some = some[:0]
		in.index.mu.Lock()
		most := in.index.mu.entries.Numbers()
		for n := from; n < from+walkStep && n <= most; n++ {
			if b := in.index.mu.entries.Of(n); b != nil {
				some = append(some, b)
			}
		}
		in.index.mu.Unlock()
		for _, b := range some {
			f(b)
		}
		if from+walkStep > most {
			return
		}
	}
}
