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
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// BenchmarkManyBatches is what batches cost while they rest, each of one row: bytes and objects of
// the heap, their part of a full collection, the end of their plan, and what of the heap is left
// when they are gone. A million take 4 GiB of host memory; there are fewer on disk, where each is
// written. Times are of all cores, so that what else the machine does counts little; what passes on
// one core is as long, or on several shorter.
func BenchmarkManyBatches(b *testing.B) {
	bld := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil))
	defer bld.Release()
	bld.Field(0).(*array.Int64Builder).Append(1)
	rec := bld.NewRecordBatch()
	defer rec.Release()
	for _, c := range []struct {
		in tier.Kind
		n  int
	}{{tier.Host, 1_000_000}, {tier.GPU, 1_000_000}, {tier.Disk, 100_000}} {
		b.Run(fmt.Sprintf("%s/%d", c.in, c.n), func(b *testing.B) {
			size := map[tier.Kind]int64{tier.GPU: 64 << 20, tier.Host: 64 << 20, tier.Disk: 64 << 20}
			size[c.in] += int64(c.n) * 2 * tier.Page
			eng, err := spillway.Open(b.Context(), spillway.Config{
				GPUs:  []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(size[tier.GPU])}},
				Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(size[tier.Host])}},
				Disks: []spillway.DiskConfig{{Dir: b.TempDir(), Capacity: spillway.Bytes(size[tier.Disk])}},
			})
			if err != nil {
				b.Fatal(err)
			}
			defer func() {
				if err := eng.Close(); err != nil {
					b.Error(err)
				}
			}()
			empty, emptyGC := collected(b)
			for b.Loop() {
				plan, err := eng.Plan("plan")
				if err != nil {
					b.Fatal(err)
				}
				repo, err := plan.Repository("operator", 0)
				if err != nil {
					b.Fatal(err)
				}
				begin := worked(b)
				for range c.n {
					if err := repo.Put(b.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(c.in))); err != nil {
						b.Fatal(err)
					}
				}
				put := worked(b) - begin
				full, fullGC := collected(b)
				before, begun := worked(b), time.Now()
				if _, err := plan.Close(); err != nil {
					b.Fatal(err)
				}
				closing, passed := worked(b)-before, time.Since(begun)
				after, _ := collected(b)
				each := func(of func(runtime.MemStats) uint64, m runtime.MemStats) float64 {
					return (float64(of(m)) - float64(of(empty))) / float64(c.n)
				}
				bytes := func(m runtime.MemStats) uint64 { return m.HeapAlloc }
				b.ReportMetric(each(bytes, full), "heap-B/batch")
				b.ReportMetric(each(func(m runtime.MemStats) uint64 { return m.HeapObjects }, full), "objects/batch")
				b.ReportMetric(each(bytes, after), "left-B/batch")
				b.ReportMetric(float64(fullGC-emptyGC)/float64(time.Millisecond), "collection-ms")
				b.ReportMetric(closing.Seconds(), "close-s")
				b.ReportMetric(passed.Seconds(), "close-wall-s")
				b.ReportMetric(put.Seconds()/float64(c.n)*1e6, "put-us")
			}
		})
	}
}

// worked returns for how long the process has used a core.
func worked(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// collected returns what the heap holds, and the median of what full collections take.
func collected(b *testing.B) (m runtime.MemStats, took time.Duration) {
	runtime.GC() // what finalizers free is gone after the second
	var each []time.Duration
	for range 5 {
		begin := worked(b)
		runtime.GC()
		each = append(each, worked(b)-begin)
	}
	runtime.ReadMemStats(&m)
	slices.Sort(each)
	return m, each[len(each)/2]
}
