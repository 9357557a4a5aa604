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

// TestMergesDrawWhatTheyAreGranted: two merges have 15 records of about 1 MiB each open in 64 MiB of
// host memory, and replace them in any order. Each has a batch of about 10 MiB fetched from disk now
// and then, and closed again. Reserved memory can be allocated, in one piece or several,
// although none of the records can be evicted.
func TestMergesDrawWhatTheyAreGranted(t *testing.T) {
	const mib = 1 << 20
	rounds := testseed.Rounds(200, 10)
	first, step := testseed.Share(t, 1)
	for i, columns := range []int{1, 3, 10, 200} {
		if i%step != first {
			continue
		}
		t.Run(fmt.Sprint(columns, " columns"), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(testseed.One(t), uint64(columns)))
			m := newMachine(t, machineConfig{host: 64 * mib, disk: 128 * mib})
			var merges [2]*merge
			for i := range merges {
				merges[i] = &merge{machine: m}
				defer merges[i].close(t)
				for range 15 {
					merges[i].records = append(merges[i].records, m.openRecord(t, columnsOf(2, mib/2+rng.Int64N(mib))))
				}
			}
			for range rounds {
				g := merges[rng.IntN(2)]
				switch {
				case rng.IntN(5) > 0:
					i := rng.IntN(len(g.records))
					next := m.openRecord(t, columnsOf(2, mib/2+rng.Int64N(mib)))
					g.records[i].Release()
					g.records[i] = next
				case g.fetched != nil:
					g.drop(t)
				default:
					g.fetch(t, columnsOf(columns, 8*mib+rng.Int64N(4*mib)))
				}
			}
		})
	}
}

// merge is an operator with records open, and perhaps a large batch.
type merge struct {
	*machine
	records []arrow.RecordBatch
	fetched *batch.Handle
}

// openRecord returns rec from host memory, which stays in use until it is released.
func (m *machine) openRecord(t *testing.T, rec arrow.RecordBatch) arrow.RecordBatch {
	t.Helper()
	b := m.put(t, rec, tier.Host)
	h, err := m.mover.Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		t.Fatal(err)
	}
	in, err := m.mover.Record(t.Context(), h)
	if err := errors.Join(err, h.Close(), b.Drop()); err != nil {
		t.Fatal(err)
	}
	return in
}

// fetch reserves room for a batch on disk, and brings it there.
func (g *merge) fetch(t *testing.T, rec arrow.RecordBatch) {
	t.Helper()
	b := g.put(t, rec, tier.Disk)
	host, need := g.spaces[tier.Host], b.Info().Descriptor.Body
	r, err := g.reservations.TryReserve(reservation.Specific(host.ID()), need, nil)
	if err != nil {
		t.Fatal(err)
	}
	g.fetched, err = g.mover.AcquireIn(t.Context(), b, r)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatalf("%d bytes were granted, and %d are free: %v", need, host.State().Available, err)
	}
	if err := g.same(t.Context(), b); err != nil {
		t.Error(err)
	}
}

func (g *merge) drop(t *testing.T) {
	t.Helper()
	if err := errors.Join(g.fetched.Close(), g.fetched.Batch().Drop()); err != nil {
		t.Fatal(err)
	}
	g.fetched = nil
}

func (g *merge) close(t *testing.T) {
	t.Helper()
	if g.fetched != nil {
		g.drop(t)
	}
	for _, rec := range g.records {
		rec.Release()
	}
}

// columnsOf returns a record of about size bytes, in so many columns of integers.
func columnsOf(columns int, size int64) arrow.RecordBatch {
	fields, rows := make([]arrow.Field, columns), int(size)/8/columns
	cols := make([]arrow.Array, columns)
	for i := range fields {
		fields[i] = arrow.Field{Name: fmt.Sprint("c", i), Type: arrow.PrimitiveTypes.Int64}
		b := array.NewInt64Builder(memory.DefaultAllocator)
		b.Resize(rows)
		for row := range rows {
			b.UnsafeAppend(int64(i + row))
		}
		cols[i] = b.NewArray()
	}
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, int64(rows))
}
