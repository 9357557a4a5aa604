package test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/replay"
	"github.com/spillway-db/spillway/internal/trace"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

var recordTo = flag.String("record", "", "record the traces that policies are tested with into this `folder`")

// workloads are what traces are recorded of. Each gets an engine whose GPU and host memory have
// room for 16 batches each, and a repository.
var workloads = map[string]func(*testing.T, *tracing){
	// A hash join: both sides are partitioned, then each partition is joined, its build side
	// held while its probe side is consumed.
	"join": func(t *testing.T, w *tracing) {
		const partitions, each = 6, 6
		var build, probe [partitions][]*batch.Batch
		for i := range partitions * each {
			build[i%partitions] = append(build[i%partitions], w.put(t, 0))
			probe[i%partitions] = append(probe[i%partitions], w.put(t, 1))
		}
		for p := range partitions {
			var held []*batch.Handle
			for _, b := range build[p] {
				held = append(held, w.open(t, b))
			}
			for _, b := range probe[p] {
				w.close(t, w.open(t, b))
				w.drop(t, b)
			}
			for _, h := range held {
				w.close(t, h)
			}
		}
	},
	// A table that is scanned again and again, of twice the memory.
	"scan": func(t *testing.T, w *tracing) {
		all := w.table(t, 64)
		for range 6 {
			for _, b := range all {
				w.close(t, w.open(t, b))
			}
		}
	},
	// Nine of ten accesses go to a tenth of the batches, in no order.
	"skew": func(t *testing.T, w *tracing) {
		all := w.table(t, 64)
		r := rand.New(rand.NewPCG(1, 2))
		for range 400 {
			i := r.IntN(len(all) / 10)
			if r.IntN(10) == 0 {
				i = r.IntN(len(all))
			}
			w.close(t, w.open(t, all[i*7%len(all)]))
		}
	},
}

// tracing is an engine that is recorded.
type tracing struct {
	eng   *spillway.Engine
	repos [2]*repository.Repository
	file  bytes.Buffer
	files *faultfs.FS // of its disk
}

// batchRows are a bit less than a MiB.
const batchRows = 1 << 17

func openTracing(t *testing.T, policy string) *tracing {
	t.Helper()
	w := &tracing{files: faultfs.New(disk.OS(), 1)}
	p, err := monitor.ByName(policy)
	if err != nil {
		t.Fatal(err)
	}
	w.eng = openMarked(t, 16*mib, func(c *spillway.Config) { c.Trace, c.Policy, c.Disks[0].FS = &w.file, p, w.files })
	plan, err := w.eng.Plan("traced")
	if err != nil {
		t.Fatal(err)
	}
	for i := range w.repos {
		if w.repos[i], err = plan.Repository("table", i); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func (w *tracing) put(t *testing.T, repo int) *batch.Batch {
	t.Helper()
	rec := arrowgen.Ints(1, batchRows-512, 1)
	defer rec.Release()
	if err := w.repos[repo].Put(t.Context(), 0, rec, in(tier.GPU)); err != nil {
		t.Fatal(err)
	}
	all := slices.Collect(w.repos[repo].Batches(0))
	return all[len(all)-1]
}

func (w *tracing) table(t *testing.T, n int) (all []*batch.Batch) {
	for range n {
		all = append(all, w.put(t, 0))
	}
	return all
}

func (w *tracing) open(t *testing.T, b *batch.Batch) *batch.Handle {
	t.Helper()
	h, err := w.eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.eng.Mover().Digest(t.Context(), h); err != nil {
		t.Fatal(err)
	}
	return h
}

func (w *tracing) close(t *testing.T, h *batch.Handle) {
	t.Helper()
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
}

func (w *tracing) drop(t *testing.T, b *batch.Batch) {
	t.Helper()
	if err := b.Discard(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// end closes the engine and reads what was recorded.
func (w *tracing) end(t *testing.T) *trace.Trace {
	t.Helper()
	if err := w.eng.Close(); err != nil {
		t.Fatal(err)
	}
	tr, err := trace.Read(bytes.NewReader(w.file.Bytes()))
	if err != nil || tr.CutOff || tr.Lost > 0 {
		t.Fatal(err, tr)
	}
	return tr
}

// TestRecordTraces records the traces of package replay, with the folder that -record names.
func TestRecordTraces(t *testing.T) {
	if *recordTo == "" {
		t.Skip("needs -record FOLDER, to write the traces of internal/replay there")
	}
	for name, f := range workloads {
		w := openTracing(t, "lru")
		f(t, w)
		w.end(t)
		if err := os.WriteFile(filepath.Join(*recordTo, name+".trace"), w.file.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReplayPredicts: a replay moves what the run moved. Where other programs use the processors, a
// run may race for the last room once; not each time.
func TestReplayPredicts(t *testing.T) {
	t.Parallel()
	for name, f := range workloads {
		t.Run(name, func(t *testing.T) {
			for try := 1; ; try++ {
				got, real := replayed(t, f)
				diff := got - real
				if diff*50 <= real && -diff*50 <= real {
					return
				}
				if try == 4 {
					t.Fatalf("%d bytes were predicted and %d moved", got, real)
				}
			}
		})
	}
}

// replayed runs a workload, and returns how many bytes a replay moves and how many the run did.
func replayed(t *testing.T, f func(*testing.T, *tracing)) (predicted, moved int64) {
	t.Helper()
	w := openTracing(t, "lru")
	f(t, w)
	tr := w.end(t)
	for _, e := range w.eng.Stats().Edges {
		moved += e.Bytes
	}
	real := replay.Measured(tr)
	if real.Bytes() != moved {
		t.Errorf("the trace has %d bytes that were moved, the engine %d", real.Bytes(), moved)
	}
	got, err := replay.Run(t.Context(), tr, replay.Setting{})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes predicted, %d moved; %v predicted, %v measured; %d of %d found, %d were; stalled %v, was %v",
		got.Bytes(), moved, got.Took, real.Took, got.Found, got.Accesses, real.Found, got.Stalled, real.Stalled)
	return got.Bytes(), moved
}

// wrong is a strategy that panics, or names no space.
type wrong bool

func (panics wrong) Candidates(_ *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	if panics {
		panic("no idea")
	}
	return append(dst, nil)
}

func (wrong) String() string { return "wrong" }

// TestTracedFailures: what fails without a trace fails with one the same way, and the trace has no
// figures of it.
func TestTracedFailures(t *testing.T) {
	w := openTracing(t, "lru")
	rec := arrowgen.Ints(1, batchRows-512, 1)
	defer rec.Release()
	for _, panics := range []wrong{false, true} {
		if _, err := w.eng.Mover().Ingest(t.Context(), rec, panics); err == nil {
			t.Errorf("a strategy that is wrong (it panics: %v) is no error", panics)
		}
	}
	b := w.put(t, 0)
	if err := w.eng.Mover().Move(t.Context(), b, wrong(false)); err == nil {
		t.Error("a batch was moved nowhere")
	}
	w.files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.EIO)})
	if _, err := w.eng.Mover().Ingest(t.Context(), rec, reservation.AnyInTier(tier.Disk)); !errors.Is(err, syscall.EIO) {
		t.Errorf("laying out on a broken disk: %v", err)
	}
	calls, laid := 0, 0
	for _, e := range w.end(t).Events {
		switch {
		case e.Kind == trace.Put || e.Kind == trace.Bring:
			calls++
		case e.Kind == trace.End:
			calls--
		case e.Kind == trace.Moved:
			laid++
		}
	}
	if calls != 0 || laid != 1 {
		t.Errorf("%d calls have not ended, and %d times something was laid out; want 0, and once", calls, laid)
	}
}

// BenchmarkTraced is what recording costs: small batches are put on a GPU that is full, so that as
// many leave it, and are drained again, by engines that are recorded and engines that are not, in
// turns.
func BenchmarkTraced(b *testing.B) {
	for _, rows := range []int{512, 8 << 10, 128 << 10} {
		b.Run(fmt.Sprintf("%dKiB", rows*8>>10), func(b *testing.B) {
			round := min(2000, 32<<20/(rows*8))
			rec := arrowgen.Ints(1, rows, 1)
			defer rec.Release()
			var plans [2]*spillway.Plan
			var events int64
			for i := range plans {
				cfg := spillway.Config{
					GPUs:  []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(int64(rows) * 8 * int64(round) / 2)}},
					Hosts: []spillway.HostConfig{{Memory: spillway.Bytes(128 << 20)}}, Disks: []spillway.DiskConfig{{Dir: b.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
				}
				if i == 1 {
					cfg.Trace = countWriter{&events}
				}
				eng, err := spillway.Open(b.Context(), cfg)
				if err != nil {
					b.Fatal(err)
				}
				defer eng.Close()
				if plans[i], err = eng.Plan("plan"); err != nil {
					b.Fatal(err)
				}
			}
			var ratios, plain []float64
			for rounds := 0; b.Loop(); rounds++ {
				var took [2]float64
				for k := range plans {
					i := (k + rounds) % 2
					took[i] = putAndDrain(b, plans[i], rounds, round, rec)
				}
				ratios, plain = append(ratios, took[1]/took[0]), append(plain, took[0])
			}
			slices.Sort(ratios)
			slices.Sort(plain)
			b.ReportMetric(100*(ratios[len(ratios)/2]-1), "%slower")
			b.ReportMetric(plain[len(plain)/2]/float64(round), "ns/batch")
			b.ReportMetric(float64(atomic.LoadInt64(&events))/float64(b.N*round), "B/batch")
		})
	}
}

// putAndDrain returns how many nanoseconds it took.
func putAndDrain(b *testing.B, plan *spillway.Plan, n, round int, rec arrow.RecordBatch) float64 {
	repo, err := plan.Repository("operator", n)
	if err != nil {
		b.Fatal(err)
	}
	begin := time.Now()
	for range round {
		if err := repo.Put(b.Context(), 0, rec, in(tier.GPU)); err != nil {
			b.Fatal(err)
		}
	}
	repo.CloseInput()
	for h, err := range repo.Drain(b.Context(), 0, tier.GPU) {
		if err != nil {
			b.Fatal(err)
		}
		if err := h.Close(); err != nil {
			b.Fatal(err)
		}
	}
	took := time.Since(begin)
	if err := repo.Close(b.Context()); err != nil {
		b.Fatal(err)
	}
	return float64(took.Nanoseconds())
}

// countWriter counts bytes.
type countWriter struct{ n *int64 }

func (w countWriter) Write(p []byte) (int, error) {
	atomic.AddInt64(w.n, int64(len(p)))
	return len(p), nil
}
