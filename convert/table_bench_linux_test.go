package convert

import (
	"slices"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/payload"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/tier"
)

// BenchmarkTable times the moves of a table of 200 columns, half of them strings, with nulls,
// between a simulated GPU and host memory; of one that was an image before (own), and of one
// whose checksums have to be made (foreign). The limit, in the same run and in turn with
// it, is memmove of the same regions between two pinned ones. Figures as BenchmarkMove's.
func BenchmarkTable(b *testing.B) {
	g := arrowgen.New(1)
	g.Plain = true
	types := slices.Repeat([]arrow.DataType{arrow.PrimitiveTypes.Int64, arrow.BinaryTypes.String}, 100)
	rec := g.Record(arrowgen.Schema(types...), 27_000)
	defer rec.Release()
	for _, name := range []string{"own-gpu-host", "own-host-gpu", "foreign-gpu-host"} {
		b.Run(name, func(b *testing.B) { benchTable(b, rec, name) })
	}
}

func benchTable(b *testing.B, rec arrow.RecordBatch, name string) {
	const capacity = 256 << 20
	m := newMachine(b, machineConfig{gpu: capacity, host: capacity, chunk: 1 << 19, fast: true})
	p, err := m.mover.Ingest(b.Context(), rec, toHost)
	if err != nil {
		b.Fatal(err)
	}
	x := m.adopt(b, rec, p)
	d := x.Info().Descriptor
	var spans []payload.Span
	size := int64(0)
	for _, s := range d.Buffers {
		if s.Length > 0 {
			spans = append(spans, s)
			size += s.Length
		}
	}
	region := [2][]byte{pinned(b, d.Body), pinned(b, d.Body)}
	limit := func() {
		for _, s := range spans {
			sumcopy.Spread(region[0][s.Offset:][:s.Length], region[1][s.Offset:][:s.Length])
		}
	}
	as := func(x *batch.Batch, form batch.PayloadType) {
		to := toHost
		if form == batch.ScatteredImage {
			to = toGPU
		}
		if err := m.mover.MoveAs(b.Context(), x, to, form); err != nil {
			b.Fatal(err)
		}
	}
	var before, timed, after func()
	switch name {
	case "own-gpu-host":
		as(x, batch.ScatteredImage)
		before, timed, after = func() {}, func() { as(x, batch.PlainImage) }, func() { as(x, batch.ScatteredImage) }
	case "own-host-gpu":
		before, timed, after = func() {}, func() { as(x, batch.ScatteredImage) }, func() { as(x, batch.PlainImage) }
	default:
		f := newForeign(b, m)
		f.lengths, f.nulls = true, true
		table := f.table(rec, m.spaces[tier.GPU])
		table.Release = nil
		defer f.release()
		var y *batch.Batch
		before = func() {
			p, err := m.mover.AdoptTable(b.Context(), table)
			if err == nil {
				y, err = batch.New(batch.Options{ID: m.ids.Next(), Payload: p})
			}
			if err != nil {
				b.Fatal(err)
			}
		}
		timed = func() { as(y, batch.PlainImage) }
		after = func() {
			if err := y.Drop(); err != nil {
				b.Fatal(err)
			}
		}
	}
	var took [2][]float64
	b.SetBytes(size)
	for round := 0; b.Loop(); round++ {
		m.settle()
		before()
		for i := range 2 { // the order alternates
			who := (round + i) % 2
			begin := time.Now()
			[]func(){timed, limit}[who]()
			took[who] = append(took[who], time.Since(begin).Seconds())
		}
		after()
		copy(region[1], region[0])
	}
	ratios := make([]float64, len(took[0]))
	for i := range ratios {
		ratios[i] = took[1][i] / took[0][i]
	}
	rate := func(s []float64) float64 { return float64(size) / (1 << 30) / median(s) }
	b.ReportMetric(rate(took[0]), "GiB/s")
	b.ReportMetric(rate(took[1]), "limit-GiB/s")
	b.ReportMetric(median(ratios), "of-limit")
	b.ReportMetric(float64(len(spans)), "regions")
	b.ReportMetric(0, "MB/s") // of everything in the loop: says nothing
	b.ReportMetric(0, "ns/op")
}
