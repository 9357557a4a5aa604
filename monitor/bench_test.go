package monitor

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/spillway-db/spillway/batch"
)

// manyBatches is a world with n batches in GPU memory that is a tenth full.
func manyBatches(b *testing.B, n int) (*world, []*batch.Batch) {
	w := newWorld(b, sizes{gpu0: int64(n) * 10 * kib, host0: int64(n) * 10 * kib, disk0: int64(n) * 10 * kib}, nil)
	all := make([]*batch.Batch, n)
	for i := range all {
		all[i] = w.put(gpu0, kib, batch.Place{Plan: 1, Rank: i % 7, Seq: uint64(i)})
	}
	return w, all
}

// BenchmarkChoose measures how long it takes to choose the victims of one list of moves: less than a
// millisecond, however many batches there are.
func BenchmarkChoose(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w, all := manyBatches(b, n)
			from := w.mon.byID[gpu0]
			below := from.below(w.mon)
			b.ReportAllocs()
			for b.Loop() {
				if _, moves := w.mon.choose(from, below, 64*kib); len(moves) != 64 {
					b.Fatalf("%d moves were chosen", len(moves))
				}
			}
			w.end(all...)
		})
	}
}

// BenchmarkBatchChanged measures what the index adds to one change of a batch, here of its place in
// the policy's order.
func BenchmarkBatchChanged(b *testing.B) {
	for _, n := range []int{1000, 100_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w, all := manyBatches(b, n)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				all[(i*7919)%n].SetPlace(batch.Place{Plan: 1, Rank: i % 5, Seq: uint64(i)})
			}
			w.end(all...)
		})
	}
}

// BenchmarkDryEvict measures a call of Evict when nothing can leave, because the slower spaces are full
// or because no batch can be converted. Each release of memory below, and each end of a use, may cause
// one.
func BenchmarkDryEvict(b *testing.B) {
	evict := func(b *testing.B, w *world) {
		b.ReportAllocs()
		s := w.mon.byID[gpu0]
		for b.Loop() {
			s.dry.Store(nil) // or it would rest
			if e := w.mon.Evict(context.Background(), gpu0, 100*kib); e.Moved > 0 {
				b.Fatal("something was moved")
			}
		}
	}
	b.Run("full", func(b *testing.B) {
		const n = 10_000
		w := newWorld(b, sizes{gpu0: n * kib, host0: n * kib, disk0: n * kib}, nil)
		var all []*batch.Batch
		for i := range n {
			all = append(all, w.put(gpu0, kib, seq(i)), w.put(host0, kib, seq(i)), w.put(disk0, kib, seq(i)))
		}
		evict(b, w)
		w.end(all...)
	})
	b.Run("unmovable", func(b *testing.B) {
		w, all := manyBatches(b, 100_000)
		w.mon.cfg.Period = time.Hour // of the pauses
		from := w.mon.byID[gpu0]
		for _, one := range all {
			for _, to := range from.below(w.mon) {
				w.mon.noted(Victim{Batch: one, ID: one.ID(), Bytes: kib}, from, to, batch.ErrUnmovable)
			}
		}
		evict(b, w)
		w.end(all...)
	})
}
