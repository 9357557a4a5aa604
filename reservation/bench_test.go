package reservation_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sync/semaphore"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// BenchmarkReserveRelease is a reservation without contention.
func BenchmarkReserveRelease(b *testing.B) {
	ctx := context.Background()
	for _, bench := range []struct {
		name     string
		strategy reservation.Strategy
		bytes    int64
	}{
		{"specific", reservation.Specific(tier.ID{Kind: tier.GPU}), 100},
		{"any", reservation.AnyInTier(tier.GPU), 100},
		{"pressed", reservation.Specific(tier.ID{Kind: tier.GPU}), 950}, // over the trigger: listeners are called
	} {
		b.Run(bench.name, func(b *testing.B) {
			m, _ := one(b, 1000, 0)
			b.ReportAllocs()
			for b.Loop() {
				r, err := m.Reserve(ctx, bench.strategy, bench.bytes, nil)
				if err != nil {
					b.Fatal(err)
				}
				if err := r.Release(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkBooks is what the space itself takes of BenchmarkReserveRelease.
func BenchmarkBooks(b *testing.B) {
	s := spaceOf(b, "gpu:0", 1000)
	b.ReportAllocs()
	for b.Loop() {
		p, err := s.Promise(100)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Release(p); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTryReserveFull is a refusal.
func BenchmarkTryReserveFull(b *testing.B) {
	m, _ := one(b, 1000, 0)
	all, err := m.TryReserve(reservation.AnyInTier(tier.GPU), 1000, nil)
	if err != nil {
		b.Fatal(err)
	}
	defer all.Release()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.TryReserve(reservation.AnyInTier(tier.GPU), 1, nil); err == nil {
			b.Fatal("a full space had room")
		}
	}
}

// slot is the bytes of each request below: a space of one byte has no room below its trigger.
const slot = 10

// BenchmarkContended compares the manager with x/sync's semaphore, side by side, so that one run gives
// the ratio. Each of 1 or 16 goroutines reserves and releases one slot at a time: where the demand of
// all of them fits (16 slots), with 8 slots, and with 1 slot.
func BenchmarkContended(b *testing.B) {
	ctx := context.Background()
	for _, c := range []struct{ slots, goroutines int }{{16, 1}, {16, 16}, {8, 16}, {1, 16}} {
		name := fmt.Sprintf("slots=%d/goroutines=%d/", c.slots, c.goroutines)
		b.Run(name+"side=manager", func(b *testing.B) {
			m, _ := one(b, int64(c.slots)*slot, 0)
			gpu := reservation.Specific(tier.ID{Kind: tier.GPU})
			contend(b, c.goroutines, func() {
				r, err := m.Reserve(ctx, gpu, slot, nil)
				if err != nil {
					b.Error(err)
					return
				}
				r.Release()
			})
			s := m.Waits()
			b.ReportMetric(float64(s.Count)/float64(b.N), "waits/op")
			b.ReportMetric(float64(s.Max.Microseconds()), "max-wait-µs")
		})
		b.Run(name+"side=semaphore", func(b *testing.B) {
			sem := semaphore.NewWeighted(int64(c.slots) * slot)
			contend(b, c.goroutines, func() {
				if err := sem.Acquire(ctx, slot); err != nil {
					b.Error(err)
					return
				}
				sem.Release(slot)
			})
		})
	}
}

// contend runs f b.N times, rounded up, in so many goroutines.
func contend(b *testing.B, goroutines int, f func()) {
	b.ReportAllocs()
	var wg sync.WaitGroup
	each := (b.N + goroutines - 1) / goroutines
	b.ResetTimer()
	for range goroutines {
		wg.Go(func() {
			for range each {
				f()
			}
		})
	}
	wg.Wait()
}

// BenchmarkServeAmongWaiters serves one of many waiters, which comes back at
// once: its time must hardly grow with their number.
func BenchmarkServeAmongWaiters(b *testing.B) {
	for _, waiters := range []int{10, 1000, 100_000} {
		b.Run(fmt.Sprint(waiters), func(b *testing.B) {
			m, _ := one(b, slot, 0)
			serveAmong(b, m, waiters, nil)
		})
	}
}

// BenchmarkServeAmongIncoming is BenchmarkServeAmongWaiters where all waiters leave headroom free, none
// of which may use it.
func BenchmarkServeAmongIncoming(b *testing.B) {
	for _, waiters := range []int{10, 1000, 100_000} {
		b.Run(fmt.Sprint(waiters), func(b *testing.B) {
			m := managerOf(b, reservation.Config{
				Spaces:   []*tier.Space{spaceOf(b, "gpu:0", 10*slot)},
				Headroom: func(tier.ID, int64) int64 { return slot },
			})
			serveAmong(b, m, waiters, &reservation.Options{Purpose: reservation.Incoming})
		})
	}
}

// serveAmong serves one of so many waiters, again and again.
func serveAmong(b *testing.B, m *reservation.Manager, waiters int, opts *reservation.Options) {
	all := m.Spaces().All()[0].Capacity
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan *reservation.Reservation)
	held := mustTry(b, m, onGPU0, all, nil)
	var wg sync.WaitGroup
	for range waiters {
		wg.Go(func() {
			for {
				r, err := m.Reserve(ctx, onGPU0, slot, opts)
				if err != nil {
					return
				}
				served <- r
			}
		})
	}
	for len(m.Demand(nil)) == 0 || m.Demand(nil)[0].Waiters < waiters {
		runtime.Gosched()
	}
	b.ReportAllocs()
	for b.Loop() {
		held.Release()
		held = <-served
	}
	b.StopTimer()
	cancel()
	held.Release()
	go func() {
		wg.Wait()
		close(served)
	}()
	for r := range served {
		r.Release()
	}
}
