package monitor

import (
	"context"
	"fmt"
	"testing"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
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

// The cost of looking when there is nothing to do. At 20 looks a second, 0.1 % of
// a core is 50 µs each.
func BenchmarkIdleLook(b *testing.B) {
	for _, n := range []int{1000, 100000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w, all := manyBatches(b, n)
			b.ReportAllocs()
			for b.Loop() {
				w.mon.step(context.Background())
			}
			w.end(all...)
		})
	}
}

// The cost that the index adds to one change of a batch, here of its place in
// the order.
func BenchmarkBatchChanged(b *testing.B) {
	for _, n := range []int{1000, 100000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w, all := manyBatches(b, n)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				all[(i*7919)%n].SetPlace(batch.Place{Plan: 1, Rank: i % 5, Seq: uint64(i)})
				i++
			}
			w.end(all...)
		})
	}
}

// The cost of one look under pressure: state, shortlists and Step.
func BenchmarkStepUnderPressure(b *testing.B) {
	for _, n := range []int{1000, 100000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w, all := manyBatches(b, n)
			b.ReportAllocs()
			for b.Loop() {
				s := w.mon.observe(w.mon.last, nil)
				if d := decide.Decide(s); len(d.Moves) > 0 {
					b.Fatal("there should be nothing to do")
				}
			}
			w.end(all...)
		})
	}
}

// The cost of the longest shortlist of victims.
func BenchmarkVictims(b *testing.B) {
	for _, n := range []int{1000, 100000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w, all := manyBatches(b, n)
			b.ReportAllocs()
			for b.Loop() {
				if v := w.shortlist(w.mon.byID[gpu0], inEach(0)); len(v) == 0 {
					b.Fatal("there are no victims")
				}
			}
			w.end(all...)
		})
	}
}
