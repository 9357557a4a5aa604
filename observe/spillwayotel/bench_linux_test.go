package spillwayotel

import (
	"context"
	"io"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// nowhere is an exporter that takes what it gets.
type nowhere struct{}

func (nowhere) ExportSpans(context.Context, []sdk.ReadOnlySpan) error { return nil }
func (nowhere) Shutdown(context.Context) error                        { return nil }

// BenchmarkEvents is what it costs to listen: batches are put on a simulated GPU, moved to host
// memory and brought back, with no function for events, with one that does nothing, with spans as
// they are by default, and with all spans. A batching processor takes them. The four take turns in
// each round; the figures are medians of the rounds.
func BenchmarkEvents(b *testing.B) {
	for _, of := range []struct {
		name    string
		rows    int
		batches int
	}{{"4KiB", 512, 256}, {"64KiB", 8 << 10, 64}, {"1MiB", 128 << 10, 16}, {"16MiB", 2 << 20, 2}} {
		b.Run(of.name, func(b *testing.B) {
			provider := sdk.NewTracerProvider(sdk.WithBatcher(nowhere{}))
			defer provider.Shutdown(context.Background())
			ways := []func(spillway.Event){nil, func(spillway.Event) {}, Spans(provider, SpanOptions{}), Spans(provider, SpanOptions{Shortest: -1})}
			repos := make([]*spillway.Repository, len(ways))
			engines := make([]*spillway.Engine, len(ways))
			for i, hear := range ways {
				eng, err := spillway.Open(b.Context(), spillway.Config{
					GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(64 << 20)}}, HostMemory: spillway.Bytes(128 << 20),
					Disks:  []spillway.DiskConfig{},
					Logger: slog.New(slog.NewTextHandler(io.Discard, nil)), Events: hear,
				})
				if err != nil {
					b.Fatal(err)
				}
				defer eng.Close()
				plan, err := eng.Plan("bench")
				if err != nil {
					b.Fatal(err)
				}
				if repos[i], err = plan.Repository("scan", 0); err != nil {
					b.Fatal(err)
				}
				engines[i] = eng
			}
			rec := arrowgen.Ints(1, of.rows, 1)
			defer rec.Release()
			for i := range ways { // the memory is touched, the classes of sizes are there
				cycle(b, engines[i], repos[i], rec, of.batches)
			}
			times, busy := make([][]float64, len(ways)), make([][]float64, len(ways))
			for first := 0; b.Loop(); first++ {
				for n := range ways {
					i := (first + n) % len(ways)
					begin, worked := time.Now(), processor()
					cycle(b, engines[i], repos[i], rec, of.batches)
					times[i] = append(times[i], float64(time.Since(begin))/float64(of.batches))
					busy[i] = append(busy[i], float64(processor()-worked)/float64(of.batches))
				}
			}
			median := func(all []float64) float64 { slices.Sort(all); return all[len(all)/2] }
			off, idle := median(times[0]), median(busy[0])
			b.ReportMetric(off, "ns/batch")
			b.ReportMetric(median(times[1])/off, "ignored/off")
			b.ReportMetric(median(times[2])/off, "spans/off")
			b.ReportMetric(median(times[3])/off, "all/off")
			b.ReportMetric(idle, "cpu-ns/batch")
			b.ReportMetric(median(busy[1])/idle, "ignored/off-cpu")
			b.ReportMetric(median(busy[2])/idle, "spans/off-cpu")
			b.ReportMetric(median(busy[3])/idle, "all/off-cpu")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// processor returns the time of processors that the process has used. That of the goroutine which
// takes the spans is in it, and other programs on the machine disturb it less than they disturb the
// clock.
func processor() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// cycle puts batches, moves each down and up, and drains them: two moves are told of each, as begun and as ended.
func cycle(b *testing.B, eng *spillway.Engine, repo *spillway.Repository, rec arrow.RecordBatch, batches int) {
	for range batches {
		if err := repo.Put(b.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			b.Fatal(err)
		}
	}
	for one := range repo.Batches(0) {
		if err := eng.Mover().Move(b.Context(), one, reservation.AnyInTier(tier.Host)); err != nil {
			b.Fatal(err)
		}
	}
	for h, err := range repo.Drain(b.Context(), 0, tier.GPU, repository.NoWait(), repository.ReadAhead(0)) {
		if err != nil {
			b.Fatal(err)
		}
		if err := h.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
