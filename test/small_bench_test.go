package test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"golang.org/x/sync/errgroup"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// BenchmarkSmallBatches is what a batch of 4 KiB costs: to be put on a GPU that has room, to be put
// on one of 4 MiB that is full, so that for each that comes one leaves to host memory or to disk,
// and to be drained from there again.
func BenchmarkSmallBatches(b *testing.B) {
	const round, full = 2000, 1000
	rec := zeros(512)
	defer rec.Release()
	for _, c := range []struct {
		name      string
		gpu, host int64
		before    int // batches that are there already
		spill     tier.Kind
	}{
		{"put", 32 << 20, 16 << 20, 0, tier.GPU},
		{"host", 4 << 20, 32 << 20, full, tier.Host},
		{"disk", 4 << 20, 4 << 20, 2 * full, tier.Disk},
	} {
		b.Run(c.name, func(b *testing.B) {
			_, plan := benchEngine(b, c.gpu, c.host, 64<<20)
			var put, drain time.Duration
			rounds := 0
			for b.Loop() {
				repo, err := plan.Repository("operator", rounds)
				if err != nil {
					b.Fatal(err)
				}
				fill := func(n int) time.Duration {
					begin := time.Now()
					for range n {
						if err := repo.Put(b.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
							b.Fatal(err)
						}
					}
					return time.Since(begin)
				}
				fill(c.before)
				put += fill(round)
				if got := repo.Bytes(c.spill); got == 0 {
					b.Fatalf("nothing is in %s", c.spill)
				}
				repo.CloseInput()
				begin := time.Now()
				for h, err := range repo.Drain(b.Context(), 0, tier.GPU) {
					if err != nil {
						b.Fatal(err)
					}
					if err := h.Close(); err != nil {
						b.Fatal(err)
					}
				}
				drain += time.Since(begin)
				if err := repo.Close(b.Context()); err != nil {
					b.Fatal(err)
				}
				rounds++
			}
			b.ReportMetric(float64(put.Nanoseconds())/float64(round*rounds), "ns/put")
			b.ReportMetric(float64(drain.Nanoseconds())/float64((round+c.before)*rounds), "ns/drain")
		})
	}
}

// BenchmarkRelief is how fast batches leave a GPU for host memory: moved by the monitor, for a
// request for all of the GPU, and, in turns with that, by two callers of Move.
func BenchmarkRelief(b *testing.B) {
	const total = 16 << 20
	for _, size := range []int64{8 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			eng, plan := benchEngine(b, 3*total, 3*total, 64<<20, handsOutAll)
			rec := zeros((size - 64) / 8)
			defer rec.Release()
			gpu := eng.Spaces()[0]
			monitor := func([]*batch.Batch) error {
				r, err := eng.Reserve(b.Context(), spillway.Specific(gpu.ID()), gpu.State().Room)
				if err != nil {
					return err
				}
				return r.Release()
			}
			callers := func(all []*batch.Batch) error {
				g, ctx := errgroup.WithContext(b.Context())
				for i := range 2 {
					g.Go(func() error {
						for ; i < len(all); i += 2 {
							if err := eng.Mover().Move(ctx, all[i], spillway.AnyInTier(tier.Host)); err != nil {
								return err
							}
						}
						return nil
					})
				}
				return g.Wait()
			}
			var took [2]time.Duration
			rounds := 0
			for b.Loop() {
				for i, way := range []func([]*batch.Batch) error{monitor, callers} {
					repo, err := plan.Repository("operator", 2*rounds+i)
					if err != nil {
						b.Fatal(err)
					}
					for range total / size {
						if err := repo.Put(b.Context(), 0, rec, repository.WithPlacement(spillway.Specific(gpu.ID()))); err != nil {
							b.Fatal(err)
						}
					}
					batches := slices.Collect(repo.Batches(0))
					begin := time.Now()
					if err := way(batches); err != nil {
						b.Fatal(err)
					}
					took[i] += time.Since(begin)
					if n := repo.Bytes(tier.GPU); n > 0 {
						b.Fatalf("%d bytes are left", n)
					}
					if err := repo.Close(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
				rounds++
			}
			for i, name := range []string{"monitor", "callers"} {
				b.ReportMetric(float64(total)*float64(rounds)/took[i].Seconds()/(1<<30), name+"-GiB/s")
			}
			b.ReportMetric(took[1].Seconds()/took[0].Seconds(), "ratio")
		})
	}
}

// benchEngine opens an engine with so many bytes in each tier, and a plan. It is closed when b ends.
func benchEngine(b *testing.B, gpu, host, disk int64, change ...func(*spillway.Config)) (*spillway.Engine, *spillway.Plan) {
	b.Helper()
	cfg := spillway.Config{
		GPUs:  []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(gpu)}},
		Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(host)}},
		Disks: []spillway.DiskConfig{{Dir: b.TempDir(), Capacity: spillway.Bytes(disk)}},
	}
	for _, f := range change {
		f(&cfg)
	}
	eng, err := spillway.Open(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if err := eng.Close(); err != nil {
			b.Error(err)
		}
	})
	plan, err := eng.Plan("plan")
	if err != nil {
		b.Fatal(err)
	}
	return eng, plan
}

// handsOutAll has the engine hand out all of its memory.
func handsOutAll(c *spillway.Config) {
	c.GPUMarks, c.HostMarks = tier.Marks{Limit: 1}, tier.Marks{Limit: 1}
}

// zeros returns a record of n numbers.
func zeros(n int64) arrow.RecordBatch {
	bld := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "x", Type: arrow.PrimitiveTypes.Int64}}, nil))
	defer bld.Release()
	bld.Field(0).(*array.Int64Builder).AppendValues(make([]int64, n), nil)
	return bld.NewRecordBatch()
}
