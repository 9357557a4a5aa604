package test

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// engineForMany returns an engine with room for n small batches in a tier.
func engineForMany(tb testing.TB, in tier.Kind, n int) *spillway.Engine {
	tb.Helper()
	size := map[tier.Kind]int64{tier.GPU: 64 << 20, tier.Host: 64 << 20, tier.Disk: 64 << 20}
	size[in] += int64(n) * 2 * tier.Page
	eng, err := spillway.Open(tb.Context(), spillway.Config{
		GPUs:  []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(size[tier.GPU])}},
		Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(size[tier.Host])}},
		Disks: []spillway.DiskConfig{{Dir: tb.TempDir(), Capacity: spillway.Bytes(size[tier.Disk])}},
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := eng.Close(); err != nil {
			tb.Error(err)
		}
	})
	return eng
}

// putSmall puts n batches of one row in a tier.
func putSmall(tb testing.TB, eng *spillway.Engine, in tier.Kind, n int) *spillway.Plan {
	tb.Helper()
	schema := arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil)
	bld := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer bld.Release()
	bld.Field(0).(*array.Int64Builder).Append(1)
	rec := bld.NewRecordBatch()
	defer rec.Release()
	plan, err := eng.Plan("plan")
	if err != nil {
		tb.Fatal(err)
	}
	repo, err := plan.Repository("operator", 0)
	if err != nil {
		tb.Fatal(err)
	}
	for range n {
		if err := repo.Put(tb.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(in))); err != nil {
			tb.Fatal(err)
		}
	}
	return plan
}

// TestABatchTakesTwoKiB of the heap at most while it rests, in whatever tier. With invariants, whose
// locks are larger, it takes a fifth more.
func TestABatchTakesTwoKiB(t *testing.T) {
	limit := int64(2048)
	if invariants.Enabled {
		limit += limit / 5
	}
	n := testseed.Rounds(5000, 2000)
	for _, in := range []tier.Kind{tier.Host, tier.GPU, tier.Disk} {
		eng := engineForMany(t, in, n)
		empty, _ := collected(t)
		plan := putSmall(t, eng, in, n)
		full, _ := collected(t)
		each := (int64(full.HeapAlloc) - int64(empty.HeapAlloc)) / int64(n)
		t.Logf("%s: %d bytes each", in, each)
		if each <= 0 || each > limit {
			t.Errorf("a batch in %s takes %d bytes of the heap, want at most %d", in, each, limit)
		}
		if _, err := plan.Close(); err != nil {
			t.Error(err)
		}
	}
}

// BenchmarkManyBatches measures 100,000 batches of one row while they rest: bytes and objects of the
// heap, their part of a full collection, the end of their plan, and what of the heap is left when
// they are gone. Times are those of all cores, so that other work of the machine counts little.
func BenchmarkManyBatches(b *testing.B) {
	const n = 100_000
	for _, in := range []tier.Kind{tier.Host, tier.GPU, tier.Disk} {
		b.Run(fmt.Sprintf("%s/%d", in, n), func(b *testing.B) {
			eng := engineForMany(b, in, n)
			empty, emptyGC := collected(b)
			for b.Loop() {
				begin := worked(b)
				plan := putSmall(b, eng, in, n)
				put := worked(b) - begin
				full, fullGC := collected(b)
				before, begun := worked(b), time.Now()
				if _, err := plan.Close(); err != nil {
					b.Fatal(err)
				}
				closing, passed := worked(b)-before, time.Since(begun)
				after, _ := collected(b)
				each := func(of func(runtime.MemStats) uint64, m runtime.MemStats) float64 {
					return (float64(of(m)) - float64(of(empty))) / n
				}
				bytes := func(m runtime.MemStats) uint64 { return m.HeapAlloc }
				b.ReportMetric(each(bytes, full), "heap-B/batch")
				b.ReportMetric(each(func(m runtime.MemStats) uint64 { return m.HeapObjects }, full), "objects/batch")
				b.ReportMetric(each(bytes, after), "left-B/batch")
				b.ReportMetric(float64(fullGC-emptyGC)/float64(time.Millisecond), "collection-ms")
				b.ReportMetric(closing.Seconds(), "close-s")
				b.ReportMetric(passed.Seconds(), "close-wall-s")
				b.ReportMetric(put.Seconds()/n*1e6, "put-us")
			}
		})
	}
}

// worked returns for how long the process has used a core.
func worked(tb testing.TB) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// collected returns what the heap holds, and the median of what full collections take.
func collected(tb testing.TB) (m runtime.MemStats, took time.Duration) {
	runtime.GC() // what finalizers free is gone after the second
	var each []time.Duration
	for range 5 {
		begin := worked(tb)
		runtime.GC()
		each = append(each, worked(tb)-begin)
	}
	runtime.ReadMemStats(&m)
	slices.Sort(each)
	return m, each[len(each)/2]
}
