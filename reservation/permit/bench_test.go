package permit_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sync/semaphore"

	"github.com/spillway-db/spillway/reservation/permit"
)

// BenchmarkTryAcquire takes and releases two budgets and a slot, beside two lock-unlock pairs of a
// mutex, without which no pool can do that.
func BenchmarkTryAcquire(b *testing.B) {
	b.Run("permit", func(b *testing.B) {
		p := newPool(b, permit.Config{})
		r := spill(of(b, permit.Device, 1<<20, permit.Host, 2<<20))
		b.ReportAllocs()
		for b.Loop() {
			got, err := p.TryAcquire(r)
			if err != nil {
				b.Fatal(err)
			}
			if err := got.Release(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("two locks", func(b *testing.B) {
		var mu sync.Mutex
		n := 0
		for b.Loop() {
			for range 2 {
				mu.Lock()
				n++
				mu.Unlock()
			}
		}
	})
}

// BenchmarkGoroutines has 16 goroutines, for each of which there is a slot, or which wait in line.
func BenchmarkGoroutines(b *testing.B) {
	const goroutines = 16
	run := func(b *testing.B, once func(context.Context) error) {
		b.SetParallelism(max(1, goroutines/runtime.GOMAXPROCS(0)))
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if err := once(b.Context()); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for _, slots := range []int{goroutines, 4, 1} {
		b.Run(fmt.Sprintf("slots=%d/permit", slots), func(b *testing.B) {
			p := newPool(b, abc(slots))
			run(b, func(ctx context.Context) error {
				got, err := p.Acquire(ctx, slot())
				if err != nil {
					return err
				}
				return got.Release()
			})
		})
		b.Run(fmt.Sprintf("slots=%d/semaphore", slots), func(b *testing.B) {
			s := semaphore.NewWeighted(int64(slots))
			run(b, func(ctx context.Context) error {
				if err := s.Acquire(ctx, 1); err != nil {
					return err
				}
				s.Release(1)
				return nil
			})
		})
	}
}
