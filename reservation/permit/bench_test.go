package permit_test

import (
	"context"
	"sync"
	"testing"

	"golang.org/x/sync/semaphore"

	"github.com/spillway-db/spillway/reservation/permit"
)

// BenchmarkTryAcquire takes and releases two budgets and a slot. The limit beside it is two
// lock-unlock pairs of a mutex.
func BenchmarkTryAcquire(b *testing.B) {
	b.Run("permit", func(b *testing.B) {
		p := newPool(b, permit.Config{})
		r := of(b, permit.Device, 1<<20, permit.Host, 2<<20).Spill()
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

// BenchmarkContended has more takers than slots. All of them wait in line.
func BenchmarkContended(b *testing.B) {
	run := func(b *testing.B, once func(context.Context) error) {
		b.SetParallelism(8)
		b.ReportAllocs()
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if err := once(b.Context()); err != nil {
					b.Error(err)
				}
			}
		})
	}
	b.Run("permit", func(b *testing.B) {
		p := newPool(b, abc(4))
		run(b, func(ctx context.Context) error {
			got, err := p.Acquire(ctx, slot())
			if err != nil {
				return err
			}
			return got.Release()
		})
	})
	b.Run("semaphore", func(b *testing.B) {
		s := semaphore.NewWeighted(4)
		run(b, func(ctx context.Context) error {
			if err := s.Acquire(ctx, 1); err != nil {
				return err
			}
			s.Release(1)
			return nil
		})
	})
}
