package httpui_test

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/observe/httpui"
	"github.com/spillway-db/spillway/tier"
)

// BenchmarkRecorder spills batches of 64 KiB or so and brings them back, alternately in an engine that
// is recorded and in one that is not. "recorded-%" is what the first takes more, the median of the
// pairs; "noise-%" what one takes more than itself. It is the worst case: moves between memories, which
// take microseconds.
func BenchmarkRecorder(b *testing.B) {
	rec := arrowgen.Flights(1, 700)
	defer rec.Release()
	round := func(ui *httpui.Recorder) func() time.Duration {
		cfg := spillway.Config{
			GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(4 << 20)}}, HostMemory: spillway.Bytes(64 << 20),
			Disks: []spillway.DiskConfig{}, Logger: slog.New(slog.DiscardHandler),
		}
		if ui != nil {
			cfg.Events = ui.Event
		}
		eng, err := spillway.Open(b.Context(), cfg)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { _ = eng.Close() })
		if ui != nil {
			b.Cleanup(ui.Watch(eng))
		}
		return func() time.Duration {
			begun := time.Now()
			plan, err := eng.Plan("bench")
			if err != nil {
				b.Fatal(err)
			}
			repo, err := plan.Repository("op", 0)
			if err != nil {
				b.Fatal(err)
			}
			for range 200 {
				if err := repo.Put(b.Context(), 0, rec); err != nil {
					b.Fatal(err)
				}
			}
			for h, err := range repo.Drain(b.Context(), 0, tier.GPU) {
				if err != nil {
					b.Fatal(err)
				}
				h.Close()
			}
			if _, err := plan.Close(); err != nil {
				b.Fatal(err)
			}
			return time.Since(begun)
		}
	}
	on, off, again := round(httpui.New()), round(nil), round(nil)
	var cost, noise []float64
	for b.Loop() {
		x, y, z := on(), off(), again()
		cost, noise = append(cost, 100*(x.Seconds()/y.Seconds()-1)), append(noise, 100*(z.Seconds()/y.Seconds()-1))
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	b.ReportMetric(median(cost), "recorded-%")
	b.ReportMetric(median(noise), "noise-%")
}
