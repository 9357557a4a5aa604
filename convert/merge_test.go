package convert

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// columnsOf returns a record of about size bytes in so many columns of integers.
func columnsOf(columns int, size int64) arrow.RecordBatch {
	fields := make([]arrow.Field, columns)
	for i := range fields {
		fields[i] = arrow.Field{Name: fmt.Sprint("c", i), Type: arrow.PrimitiveTypes.Int64}
	}
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema(fields, nil))
	defer b.Release()
	for i := range fields {
		values := make([]int64, size/8/int64(columns))
		for row := range values {
			values[row] = int64(i + row)
		}
		b.Field(i).(*array.Int64Builder).AppendValues(values, nil)
	}
	return b.NewRecordBatch()
}

// TestMergesDrawWhatTheyAreGranted: two merges have 15 records of about 1 MiB each open in 64 MiB of
// host memory, and replace them in any order. Next to them large batches are fetched. What has been
// granted for these is had, in one piece or several, though no record can be moved out of the way.
func TestMergesDrawWhatTheyAreGranted(t *testing.T) {
	for _, columns := range []int{1, 3, 10, 200} {
		t.Run(fmt.Sprint(columns, " columns"), func(t *testing.T) {
			seed := testseed.One(t)
			rng := rand.New(rand.NewPCG(seed, uint64(columns)))
			const mib = 1 << 20
			m := newMachine(t, machineConfig{host: 64 * mib, disk: 128 * mib})
			host := m.spaces[tier.Host]
			var merges [2][15]arrow.RecordBatch
			open := func() arrow.RecordBatch {
				rec := columnsOf(2, mib/2+rng.Int64N(mib))
				b, h := m.openIn(t, rec)
				in, err := m.mover.Record(t.Context(), h)
				if err := errors.Join(err, h.Close(), b.Drop()); err != nil {
					t.Fatal(err)
				}
				return in
			}
			for i := range merges {
				for j := range merges[i] {
					merges[i][j] = open()
					defer func() { merges[i][j].Release() }()
				}
			}
			var fetched [2]*batch.Handle // by each merge
			done := func(h *batch.Handle) {
				if h == nil {
					return
				}
				if err := errors.Join(h.Close(), h.Batch().Drop()); err != nil {
					t.Fatal(err)
				}
			}
			defer func() { done(fetched[0]); done(fetched[1]) }()
			for range 200 {
				n := rng.IntN(2)
				merge := &merges[n]
				if rng.IntN(5) > 0 {
					i := rng.IntN(len(merge))
					rec := open()
					merge[i].Release()
					merge[i] = rec
					continue
				}
				if h := fetched[n]; h != nil {
					fetched[n] = nil
					done(h)
					continue
				}
				large := m.put(t, columnsOf(columns, 8*mib+rng.Int64N(4*mib)), tier.Disk)
				r, err := m.reservations.TryReserve(reservation.Specific(host.ID()), large.Info().Descriptor.Body)
				if err != nil {
					t.Fatal(err)
				}
				fetched[n], err = m.mover.AcquireIn(t.Context(), large, r)
				if err := errors.Join(err, r.Release()); err != nil {
					t.Fatalf("%d bytes were granted, with %d free: %v", r.Bytes(), host.Available(), err)
				}
			}
		})
	}
}

// openIn puts a batch of rec into host memory and opens it.
func (m *machine) openIn(t *testing.T, rec arrow.RecordBatch) (*batch.Batch, *batch.Handle) {
	t.Helper()
	b := m.put(t, rec, tier.Host)
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	return b, h
}
