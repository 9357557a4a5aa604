package convert

import (
	"fmt"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/codec"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// BenchmarkCodec stores batches on disk and brings them back with each codec, in turn, on
// the disk as it is and on slower ones. of-best is the speed of CodecAuto as a share of that
// of the best of the others: the median of the ratios, round by round.
func BenchmarkCodec(b *testing.B) {
	for _, data := range []struct {
		name string
		rec  func() arrow.RecordBatch
	}{
		{"flights", func() arrow.RecordBatch { return arrowgen.Flights(1, 350_000) }},
		{"random", func() arrow.RecordBatch { return random(2 << 20) }},
	} {
		for _, mib := range []int64{0, 200, 50} {
			name := "as-it-is"
			if mib > 0 {
				name = fmt.Sprintf("%dMiB", mib)
			}
			b.Run(data.name+"/"+name, func(b *testing.B) { benchCodec(b, data.rec(), mib<<20) })
		}
	}
}

func benchCodec(b *testing.B, rec arrow.RecordBatch, throttle int64) {
	const batches = 8
	cycles := 8 // so that a job takes a second or more
	if throttle > 0 {
		cycles = 1
	}
	defer rec.Release()
	l, err := image.NewLayout(rec, image.MaxInline)
	if err != nil {
		b.Fatal(err)
	}
	size := l.Desc.Body * batches
	l.Close()
	names := [...]Codec{CodecNone, CodecS2, CodecZstd, CodecBitpack, CodecAuto}
	var took [len(names)][]float64
	var machines [len(names)]*machine
	var stored [len(names)][]*batch.Batch
	for i, codec := range names {
		cfg := machineConfig{host: size + 64<<20, disk: size + 64<<20, chunk: 512 << 10, fast: true, codec: codec, auto: codec == CodecAuto, files: disk.OS()}
		if throttle > 0 {
			cfg.files = faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"read", "write"}, Effect: faultfs.Throttle(throttle)})
		}
		machines[i] = newMachine(b, cfg)
		for range batches {
			stored[i] = append(stored[i], machines[i].put(b, rec, tier.Host))
		}
	}
	round := func(i int) float64 {
		m := machines[i]
		m.settle()
		m.mover.cfg.Builtin.Choose = codec.Chooser{} // each job begins knowing nothing
		begin := time.Now()
		for range cycles {
			for _, k := range []tier.Kind{tier.Disk, tier.Host} {
				for _, x := range stored[i] {
					if err := m.mover.Move(b.Context(), x, reservation.AnyInTier(k)); err != nil {
						b.Fatal(err)
					}
				}
			}
		}
		return time.Since(begin).Seconds() / float64(cycles)
	}
	n := 0
	for b.Loop() {
		for i := range names { // the order changes
			at := (n + i) % len(names)
			took[at] = append(took[at], round(at))
		}
		n++
	}
	best, auto := 0, len(names)-1
	for i, c := range names {
		rate := float64(size) / (1 << 30) / median(took[i])
		b.ReportMetric(rate, c.String()+"-GiB/s")
		if i != auto && median(took[i]) < median(took[best]) {
			best = i
		}
	}
	ratios := make([]float64, n)
	for i := range ratios {
		ratios[i] = took[best][i] / took[auto][i]
	}
	b.ReportMetric(median(ratios), "of-best")
	b.ReportMetric(0, "ns/op")
}
