package simulate_test

import (
	"bytes"
	"compress/gzip"
	"flag"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/simulate"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

var record = flag.Bool("record", false, "record the traces in testdata")

// workloads are the programs whose traces are in testdata. Each gets an engine whose GPU and host
// memory have room for 16 batches each.
var workloads = map[string]func(*testing.T, *program){
	// A hash join: both sides are partitioned. Then each partition is joined: its build side is open
	// while its probe side is consumed.
	"join": func(t *testing.T, p *program) {
		const partitions, each = 6, 6
		var build, probe [partitions][]*batch.Batch
		for i := range partitions * each {
			build[i%partitions] = append(build[i%partitions], p.put(t, 0))
			probe[i%partitions] = append(probe[i%partitions], p.put(t, 1))
		}
		for i := range partitions {
			var held []*batch.Handle
			for _, b := range build[i] {
				held = append(held, p.open(t, b))
			}
			for _, b := range probe[i] {
				p.close(t, p.open(t, b))
				if err := b.Discard(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			p.close(t, held...)
		}
	},
	// Six scans of a table that has twice the size of GPU and host memory.
	"scan": func(t *testing.T, p *program) {
		all := p.table(t, 64)
		for range 6 {
			for _, b := range all {
				p.close(t, p.open(t, b))
			}
		}
	},
	// Nine of ten uses are of a tenth of the batches, in random order.
	"skew": func(t *testing.T, p *program) {
		all := p.table(t, 64)
		r := rand.New(rand.NewPCG(1, 2))
		for range 400 {
			i := r.IntN(len(all) / 10)
			if r.IntN(10) == 0 {
				i = r.IntN(len(all))
			}
			p.close(t, p.open(t, all[i*7%len(all)]))
		}
	},
}

// program is a program with an engine that is recorded.
type program struct {
	eng      *spillway.Engine
	repos    [2]*repository.Repository
	recorder *simulate.Recorder
	file     bytes.Buffer
}

func start(t *testing.T) *program {
	t.Helper()
	const mib = 1 << 20
	marks := tier.Marks{Limit: 1, Trigger: 0.8, Stop: 0.6}
	p := new(program)
	p.recorder = simulate.NewRecorder(&p.file)
	var err error
	if p.eng, err = spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(16 * mib)}},
		HostMemory: spillway.Bytes(16 * mib),
		Disks:      []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 * mib)}},
		GPUMarks:   marks, HostMarks: marks, Codec: convert.CodecNone, Policy: monitor.LRU(), WriteAhead: -1,
		Events: p.recorder.Event,
	}); err != nil {
		t.Fatal(err)
	}
	p.recorder.Begin(monitor.LRU().Name(), p.eng.Stats().Spaces)
	plan, err := p.eng.Plan("recorded")
	if err != nil {
		t.Fatal(err)
	}
	for i := range p.repos {
		if p.repos[i], err = plan.Repository("table", i); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// put puts a bit less than a MiB.
func (p *program) put(t *testing.T, repo int) *batch.Batch {
	t.Helper()
	rec := arrowgen.Ints(1, 1<<17-512, 1)
	defer rec.Release()
	onGPU := repository.WithPlacement(reservation.AnyInTier(tier.GPU))
	if err := p.repos[repo].Put(t.Context(), 0, rec, onGPU); err != nil {
		t.Fatal(err)
	}
	all := slices.Collect(p.repos[repo].Batches(0))
	return all[len(all)-1]
}

func (p *program) table(t *testing.T, n int) (all []*batch.Batch) {
	for range n {
		all = append(all, p.put(t, 0))
	}
	return all
}

func (p *program) open(t *testing.T, b *batch.Batch) *batch.Handle {
	t.Helper()
	h, err := p.eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.eng.Mover().Digest(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	return h
}

func (p *program) close(t *testing.T, handles ...*batch.Handle) {
	t.Helper()
	for _, h := range handles {
		if err := h.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// end closes the engine and reads the trace.
func (p *program) end(t *testing.T) *simulate.Trace {
	t.Helper()
	if err := p.eng.Close(); err != nil {
		t.Fatal(err)
	}
	if err := p.recorder.Close(); err != nil {
		t.Fatal(err)
	}
	tr, err := simulate.Read(bytes.NewReader(p.file.Bytes()))
	if err != nil || tr.CutOff {
		t.Fatal(err, tr)
	}
	return tr
}

// TestRecordTraces records the traces in testdata if -record is set.
func TestRecordTraces(t *testing.T) {
	if !*record {
		t.Skip("needs the flag -record: it writes testdata")
	}
	for name, run := range workloads {
		p := start(t)
		run(t, p)
		p.end(t)
		var packed bytes.Buffer
		w := gzip.NewWriter(&packed)
		if _, err := w.Write(p.file.Bytes()); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join("testdata", name+".trace.gz"), packed.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestMeasured: the figures of a trace are those of the engine that was recorded, and a replay with
// its own setting uses the same batches.
func TestMeasured(t *testing.T) {
	t.Parallel()
	for name, run := range workloads {
		t.Run(name, func(t *testing.T) {
			p := start(t)
			run(t, p)
			tr := p.end(t)
			measured, stats := simulate.Measured(tr), p.eng.Stats()
			var bytes, copies int64
			for _, e := range stats.Edges {
				bytes += e.Bytes
				copies += e.Copies
			}
			for _, m := range measured.Moves {
				copies -= m.Copies
			}
			if measured.Bytes != bytes || bytes == 0 || copies != 0 {
				t.Errorf(
					"the trace has %d bytes of moves, the engine %d, and %d copies more",
					measured.Bytes,
					bytes,
					copies,
				)
			}
			got, err := simulate.Run(t.Context(), tr, simulate.Setting{})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf(
				"%d bytes moved, %d were; %d of %d uses are found, %d were; stalled for %v, was %v; took %v, was %v",
				got.Bytes,
				measured.Bytes,
				got.Found,
				got.Accesses,
				measured.Found,
				got.Stalled,
				measured.Stalled,
				got.Took,
				measured.Took,
			)
			if got.Accesses != measured.Accesses || got.Accesses == 0 {
				t.Errorf("%d uses are replayed, %d recorded", got.Accesses, measured.Accesses)
			}
		})
	}
}
