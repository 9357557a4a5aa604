package bandwidth

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
	"github.com/spillway-db/spillway/topology"
)

// TestMain fails if a measurement leaves a goroutine behind.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > before && code == 0 {
		fmt.Fprintf(os.Stderr, "%d goroutines are left of %d\n", n, before)
		code = 1
	}
	os.Exit(code)
}

// machine is the topology that all engines use.
var machine = sync.OnceValues(func() (*topology.Topology, error) {
	return topology.Discover(context.Background(), topology.Options{})
})

// open opens an engine without codec. When the test ends it must hold no more than it did, close
// without leaks, and leave its spill directories empty.
func open(t *testing.T, cfg spillway.Config) *spillway.Engine {
	t.Helper()
	top, err := machine()
	if err != nil {
		t.Fatal(err)
	}
	cfg.Topology, cfg.Codec, cfg.Logger = top, convert.CodecNone, slog.New(slog.DiscardHandler)
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	held := used(eng)
	t.Cleanup(func() {
		givenBack(t, eng, held)
		if err := eng.Close(); err != nil {
			t.Errorf("closing the engine: %v", err)
		}
		for _, d := range cfg.Disks {
			if left, err := os.ReadDir(d.Dir); err != nil || len(left) != 0 {
				t.Errorf("left in the spill directory: %v, %v", left, err)
			}
		}
	})
	return eng
}

// engine opens an engine with a simulated GPU and a disk, and 1 MiB of each memory.
func engine(t *testing.T) *spillway.Engine { return engineOn(t, nil) }

func engineOn(t *testing.T, fs disk.FS) *spillway.Engine {
	t.Helper()
	return open(t, spillway.Config{
		GPUs: []spillway.GPUConfig{
			{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)},
		}, HostMemory: spillway.Bytes(1 << 20),
		Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(4 << 20), FS: fs}},
	})
}

// several opens an engine with two simulated GPUs and two host spaces, of 2 MiB each.
func several(t *testing.T) *spillway.Engine {
	t.Helper()
	gpu := spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Bytes(2 << 20)}
	host := spillway.HostConfig{Memory: spillway.Bytes(2 << 20), Node: -1}
	return open(t, spillway.Config{GPUs: []spillway.GPUConfig{gpu, gpu}, Hosts: []spillway.HostConfig{host, host},
		Disks: []spillway.DiskConfig{}})
}

// emulated opens an engine with so many emulated CUDA GPUs, and 2 MiB of each memory. When the test
// ends nothing may be left in the driver.
func emulated(t *testing.T, gpus int, emulator *cudatest.Emulator, disks ...spillway.DiskConfig) *spillway.Engine {
	t.Helper()
	t.Cleanup(func() {
		for _, leak := range emulator.Leaks() {
			t.Error(leak)
		}
	})
	cfg := spillway.Config{CUDALibrary: emulator.Path, HostMemory: spillway.Bytes(2 << 20),
		Disks: append([]spillway.DiskConfig{}, disks...)}
	for range gpus {
		cfg.GPUs = append(cfg.GPUs, spillway.GPUConfig{Backend: spillway.CUDA, Memory: spillway.Bytes(2 << 20)})
	}
	return open(t, cfg)
}

func emulator(t *testing.T) *cudatest.Emulator {
	return cudatest.New(t, cudatest.Config{Memory: 4 << 20})
}

func used(eng *spillway.Engine) (bytes []int64) {
	for _, s := range eng.Spaces() {
		bytes = append(bytes, s.State().Used())
	}
	return bytes
}

// givenBack waits until the spaces hold what they held: freed memory is free when the device has
// finished with it.
func givenBack(t *testing.T, eng *spillway.Engine, held []int64) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !slices.Equal(used(eng), held) && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	if now := used(eng); !slices.Equal(now, held) {
		t.Errorf("the spaces hold %d bytes; before it was %d", now, held)
	}
}

// steps is a Progress that counts, and can call a function at a step.
type steps struct {
	promised, done int64
	at             int64
	then           func()
}

func (s *steps) Begin(_ string, n int64) { s.promised += n }

func (s *steps) Step() {
	if s.done++; s.done == s.at {
		s.then()
	}
}

func small(eng *spillway.Engine) Config {
	return Config{
		Engine:   eng,
		Sizes:    []int64{64 << 10, 256 << 10},
		Threads:  []int{1, 2},
		Pairs:    3,
		Seed:     1,
		Progress: new(steps),
		Files:    disk.OS,
	}
}

// run runs a measurement that leaves nothing out. Its rows must have figures or an error.
func run(t *testing.T, cfg Config) []report.BandwidthRow {
	t.Helper()
	rows, err := measured(t.Context(), t, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		figures := []float64{r.GiBPerS, r.LimitGiBPerS, r.Efficiency}
		if r.BothWays {
			figures = append(figures, r.Gain, r.LimitGain)
		}
		for i, v := range figures {
			if r.Error == "" && (!(v > 0) || math.IsInf(v, 0)) {
				t.Errorf("figure %d is %v: %+v", i, v, r)
			}
		}
		if !(r.Noise >= 0) || !(r.CV >= 0) {
			t.Errorf("%+v", r)
		}
	}
	return rows
}

func measured(ctx context.Context, t *testing.T, cfg Config) ([]report.BandwidthRow, error) {
	t.Helper()
	m, err := New(cfg)
	if err != nil || len(m.Skipped) != 0 {
		t.Fatal(err, m)
	}
	return m.Run(ctx)
}

// TestRun: each load has a row for each edge and state, all figures are there, our side went
// through the engine's own converters, and the limit's files are closed.
func TestRun(t *testing.T) {
	files := faultfs.New(disk.OS(), 1)
	cfg := small(engine(t))
	var s steps
	cfg.Progress, cfg.Files = &s, func() disk.FS { return files }
	var got, want []string
	for _, r := range run(t, cfg) {
		got = append(got, fmt.Sprintf("%d %d %s %s %s", r.Bytes>>10, r.Threads, r.From, r.To, r.State))
		if r.Error != "" || r.BothWays {
			t.Errorf("%+v", r)
		}
	}
	for _, load := range []string{"64 1", "64 2", "256 1", "256 2"} {
		for _, edge := range []string{
			"gpu:0 host:0 ", "host:0 gpu:0 ",
			"gpu:0 disk:0 rewritten", "disk:0 gpu:0 rewritten",
			"host:0 disk:0 rewritten", "disk:0 host:0 rewritten",
		} {
			want = append(want, load+" "+edge)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows are %q\nwant     %q", got, want)
	}
	if s.done != s.promised {
		t.Errorf("%d steps of %d", s.done, s.promised)
	}
	// Twice in each turn of four rounds, by one batch and by two of each size.
	const atLeast = 2 * 4 * (1 + 2) * (64<<10 + 256<<10)
	edges := cfg.Engine.Stats().Edges
	for _, e := range edges {
		if e.Bytes < atLeast {
			t.Errorf("only %d bytes from %s to %s", e.Bytes, e.From, e.To)
		}
	}
	if len(edges) != 6 {
		t.Errorf("%d edges moved anything", len(edges))
	}
	if made := files.Count("open-anonymous", "create"); made == 0 || files.Open() != 0 {
		t.Errorf("of %d files of the limit %d are open", made, files.Open())
	}
}

// TestSeveralSpaces: edges between two GPUs and between two host spaces are measured, beside the
// device's copy to its peer and memmove between the spaces, and both ways at once.
func TestSeveralSpaces(t *testing.T) {
	cfg := small(several(t))
	cfg.Sizes = cfg.Sizes[:1]
	var s steps
	cfg.Progress = &s
	var got []string
	for _, r := range run(t, cfg) {
		if r.From[:3] == r.To[:3] {
			got = append(got, fmt.Sprintf("%d %s %s %s %v", r.Threads, r.From, r.To, r.LimitOf, r.BothWays))
		} else if r.LimitOf != memmove || r.BothWays {
			t.Errorf("%+v", r)
		}
	}
	want := []string{
		"1 gpu:0 gpu:1 peer copy false", "1 gpu:1 gpu:0 peer copy false",
		"1 host:0 host:1 memmove false", "1 host:1 host:0 memmove false",
		"2 gpu:0 gpu:1 peer copy false", "2 gpu:1 gpu:0 peer copy false", "2 gpu:0 gpu:1 peer copy true",
		"2 host:0 host:1 memmove false", "2 host:1 host:0 memmove false", "2 host:0 host:1 memmove true",
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows are %q\nwant     %q", got, want)
	}
	if s.done != s.promised {
		t.Errorf("%d steps of %d", s.done, s.promised)
	}

	cfg.OneOfEach, cfg.Threads = true, []int{1}
	edges := make(map[string]bool)
	for _, r := range run(t, cfg) {
		edges[r.From+"-"+r.To] = true
	}
	for _, e := range []string{
		"gpu:0-gpu:1", "gpu:1-gpu:0", "gpu:0-host:0", "host:0-gpu:0", "host:0-host:1", "host:1-host:0",
	} {
		if !edges[e] {
			t.Errorf("one edge of each kind: no %s", e)
		}
		delete(edges, e)
	}
	if len(edges) != 0 {
		t.Errorf("one edge of each kind: also %v", edges)
	}
}

// TestBetween: only edges between the requested kinds are measured.
func TestBetween(t *testing.T) {
	eng := several(t)
	for _, c := range []struct {
		between []tier.Kind
		want    []string
	}{
		{[]tier.Kind{tier.GPU, tier.GPU}, []string{"gpu:0-gpu:1", "gpu:1-gpu:0"}},
		{[]tier.Kind{tier.Host}, []string{"host:0-host:1", "host:1-host:0"}},
		{[]tier.Kind{tier.Host, tier.Disk}, []string{"host:0-host:1", "host:1-host:0"}},
	} {
		cfg := small(eng)
		cfg.Sizes, cfg.Threads, cfg.Between = cfg.Sizes[:1], []int{1}, c.between
		var got []string
		for _, r := range run(t, cfg) {
			got = append(got, r.From+"-"+r.To)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("between %v: %q", c.between, got)
		}
	}
	cfg := small(engine(t))
	for _, kind := range tier.Kinds() {
		cfg.Between = []tier.Kind{kind}
		if _, err := New(cfg); !errors.Is(err, ErrNoEdges) || !strings.Contains(err.Error(), kind.String()+":0") {
			t.Errorf("between %s alone: %v", kind, err)
		}
	}
}

// TestByDriver: the limit of a GPU with a driver is the driver's copy, and an even number of moves
// is also measured in both directions at once.
func TestByDriver(t *testing.T) {
	cfg := small(emulated(t, 1, emulator(t)))
	var s steps
	cfg.Progress = &s
	var got, want []string
	for _, r := range run(t, cfg) {
		got = append(got, fmt.Sprintf("%d %d %s %s %s %v", r.Bytes>>10, r.Threads, r.From, r.To, r.LimitOf, r.BothWays))
	}
	for _, load := range []string{"64 1", "64 2", "256 1", "256 2"} {
		want = append(want, load+" gpu:0 host:0 driver's copy false", load+" host:0 gpu:0 driver's copy false")
		if load[len(load)-1] != '1' {
			want = append(want, load+" gpu:0 host:0 driver's copy true")
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("rows are %q\nwant     %q", got, want)
	}
	if s.done != s.promised {
		t.Errorf("%d steps of %d", s.done, s.promised)
	}
}

// TestCancelled: wherever the context ends, Run ends with the cause, and everything is given back.
func TestCancelled(t *testing.T) {
	cause := errors.New("enough")
	for name, eng := range map[string]*spillway.Engine{
		"disk": engine(t), "several": several(t), "driver": emulated(t, 1, emulator(t)),
	} {
		for at := range int64(10) { // in each link, and with both directions at once
			ctx, cancel := context.WithCancelCause(t.Context())
			cfg := small(eng)
			cfg.Sizes = cfg.Sizes[:1]
			cfg.Progress = &steps{at: at, then: func() { cancel(cause) }}
			if at == 0 {
				cancel(cause)
			}
			if rows, err := measured(ctx, t, cfg); !errors.Is(err, cause) || rows != nil {
				t.Errorf("%s: cancelled at step %d Run ends with %v and %d rows", name, at, err, len(rows))
			}
			cancel(nil)
		}
	}
}

// TestFit: what there is no room for is left out, with the reason.
func TestFit(t *testing.T) {
	cfg := small(engine(t))
	cfg.Sizes, cfg.Threads = []int64{64 << 10, 512 << 10, 2 << 20}, []int{1, 2}
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := m.Run(t.Context())
	if err != nil || len(rows) != 6*3 { // the GPU has room for one of 512 KiB
		t.Errorf("%d rows, %v", len(rows), err)
	}
	var lacks []string
	for _, err := range m.Skipped {
		var full *tier.NoSpaceError
		if !errors.As(err, &full) || full.Available >= full.Requested {
			t.Errorf("%v", err)
			continue
		}
		lacks = append(
			lacks,
			fmt.Sprintf("%s %d %s", strings.SplitN(err.Error(), " at ", 2)[0], full.Requested>>10, full.Space),
		)
	}
	if want := []string{"2 × 512KiB 1024 gpu:0", "1 × 2MiB 2048 gpu:0", "2 × 2MiB 4096 gpu:0"}; !slices.Equal(
		lacks,
		want,
	) {
		t.Errorf("left out %q; want %q", lacks, want)
	}

	cfg.Sizes, cfg.Threads = []int64{64 << 10}, []int{1 << 60} // 0 bytes in 64 bits
	if m, err = New(cfg); err != nil || len(m.Skipped) != 1 {
		t.Errorf("left out %v, %v", m.Skipped, err)
	}
	if rows, err = m.Run(t.Context()); err != nil || len(rows) != 0 {
		t.Errorf("of nothing that fits: %d rows, %v", len(rows), err)
	}

	cfg.Threads, cfg.Spare = []int{1, 2}, 3*64<<10
	m, err = New(cfg)
	if err != nil || len(m.Skipped) != 1 || !strings.Contains(m.Skipped[0].Error(), "2 × 64KiB") ||
		!strings.Contains(m.Skipped[0].Error(), "192.0 KiB may be taken") {
		t.Errorf("left out %v, %v", m.Skipped, err)
	}

	// Raw copies between spaces need as much memory as the batches, and no disk.
	cfg = small(emulated(t, 1, emulator(t), spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(768 << 10)}))
	cfg.Sizes, cfg.Threads = []int64{512 << 10, 1 << 20}, []int{1}
	m, err = New(cfg)
	var full *tier.NoSpaceError
	if err != nil || len(m.Skipped) != 1 || !errors.As(m.Skipped[0], &full) || full.Space.Kind != tier.GPU ||
		full.Requested != 2<<20 {
		t.Errorf("left out %v, %v", m.Skipped, err)
	}
}

// roomy is a file system that reports so many free bytes.
type roomy struct {
	disk.FS
	free int64
	err  error
}

func (r roomy) Usage(string) (disk.Usage, error) { return disk.Usage{Free: r.free}, r.err }

// TestFitOnDisk: the file system must have room for the engine's file, for raw's, and to spare.
func TestFitOnDisk(t *testing.T) {
	cfg := small(engine(t))
	cfg.Sizes, cfg.Threads = cfg.Sizes[:1], []int{1, 2}
	need := 3 * load{cfg.Sizes[0], 2}.total()
	for _, c := range []struct {
		free    int64
		err     error
		skipped int
	}{
		{need, nil, 0}, {need - 1, nil, 1}, {0, nil, 2}, {0, errors.ErrUnsupported, 0},
	} {
		cfg.Files = func() disk.FS { return roomy{disk.OS(), c.free, c.err} }
		m, err := New(cfg)
		if err != nil || len(m.Skipped) != c.skipped {
			t.Errorf("%+v: left out %v, %v", c, m.Skipped, err)
		}
		for _, err := range m.Skipped {
			var full *tier.NoSpaceError
			if !errors.As(err, &full) || full.Space.Kind != tier.Disk || full.Available != c.free {
				t.Errorf("%+v: left out %v", c, err)
			}
		}
	}
}

// TestPlan: our side moves as much as was planned, but for batches that were already where an edge
// begins, for each kind of limit.
func TestPlan(t *testing.T) {
	for name, eng := range map[string]*spillway.Engine{
		"disk": engine(t), "several": several(t), "driver": emulated(t, 1, emulator(t)),
	} {
		cfg := small(eng)
		m, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := m.Run(t.Context()); err != nil {
			t.Fatal(err)
		}
		moved := int64(0)
		for _, e := range eng.Stats().Edges {
			moved += e.Bytes
		}
		slack := int64(
			len(m.links),
		) * 2 * 3 * (64 + 256) << 10 // each load, to where the link begins, and to be compared
		if moved > m.Ours || moved < m.Ours-slack {
			t.Errorf("%s: %d bytes were moved, and %d planned", name, moved, m.Ours)
		}
		if m.Limit < m.Ours { // raw runs twice in each round
			t.Errorf("%s: %d bytes of the limit, and %d of ours", name, m.Limit, m.Ours)
		}
		cfg.Between = []tier.Kind{tier.GPU, tier.Host}
		rest, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		if all := m.Ours + m.Limit; rest.Disk != 0 || (m.Disk > 0) != (name == "disk") ||
			m.Disk != all-rest.Ours-rest.Limit {
			t.Errorf("%s: %d of %d bytes are planned for the disk, and %+v without it", name, m.Disk, all, rest)
		}
	}
}

// TestVerified: a bit that a move flips is an error, and so is work that fails.
func TestVerified(t *testing.T) {
	for _, c := range []struct {
		effect faultdev.Effect
		want   error
	}{{faultdev.BitFlip(), ErrChanged}, {faultdev.FailWork(syscall.EIO), syscall.EIO}} {
		var dev *faultdev.Device
		eng := open(t, spillway.Config{HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{},
			GPUs: []spillway.GPUConfig{
				{
					Backend: spillway.Sim,
					Memory:  spillway.Bytes(1 << 20),
					Wrap: func(d tier.Device) (tier.Device, error) {
						dev = faultdev.New(d, 1)
						return dev, nil
					},
				},
			}})
		remove := dev.Add(faultdev.Rule{Ops: []string{"copy-*"}, Skip: 10, Times: 1, Effect: c.effect})
		if _, err := measured(t.Context(), t, small(eng)); !errors.Is(err, c.want) {
			t.Errorf("Run ends with %v; want %v", err, c.want)
		}
		remove()
	}
}

// TestRecord: images have the requested size, to the byte, and are made of rows of the seed.
func TestRecord(t *testing.T) {
	for _, bytes := range []int64{SmallestBatch, 100 << 10, 256 << 10, 1 << 20, 1<<20 + tier.Page, 3 << 20} {
		for seed := range uint64(3) {
			rec, err := record(t.Context(), seed, bytes)
			if err != nil {
				t.Fatal(err)
			}
			again, err := record(t.Context(), seed, bytes)
			if err != nil {
				t.Fatal(err)
			}
			if err := convert.Equal(rec, again); err != nil {
				t.Errorf("%d bytes of seed %d: %v", bytes, seed, err)
			}
			layout, err := convert.NewLayout(rec)
			if err != nil {
				t.Fatal(err)
			}
			if n := layout.Desc.Body; n != bytes || rec.NumRows() < bytes/400 {
				t.Errorf("%d bytes of seed %d: the image of %d rows has %d", bytes, seed, rec.NumRows(), n)
			}
			layout.Close()
			rec.Release()
			again.Release()
		}
	}
}
