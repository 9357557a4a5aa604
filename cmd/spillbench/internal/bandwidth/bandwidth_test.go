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
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/topology"
)

// TestMain fails when a measurement leaves a goroutine behind.
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

// engine opens an engine with 1 MiB of each memory. When the test ends, it must hold no
// more than it did, close without leaks, and leave an empty directory.
func engine(t *testing.T) *spillway.Engine { return engineOn(t, nil, convert.CodecNone) }

// machine is what all engines are on.
var machine = sync.OnceValues(func() (*topology.Topology, error) {
	return topology.Discover(context.Background(), topology.Options{})
})

func engineOn(t *testing.T, fs disk.FS, codec convert.Codec) *spillway.Engine {
	t.Helper()
	dir := t.TempDir()
	top, err := machine()
	if err != nil {
		t.Fatal(err)
	}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		Topology: top, GPUs: []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20),
		Disks: []spillway.DiskConfig{{Dir: dir, Capacity: spillway.Bytes(4 << 20), FS: fs}}, Codec: codec,
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	held := used(eng)
	t.Cleanup(func() {
		if now := used(eng); !slices.Equal(now, held) {
			t.Errorf("the spaces hold %d bytes; before it was %d", now, held)
		}
		if err := eng.Close(); err != nil {
			t.Errorf("closing the engine: %v", err)
		}
		left, err := os.ReadDir(dir)
		if err != nil || len(left) != 0 {
			t.Errorf("left in the spill directory: %v, %v", left, err)
		}
	})
	return eng
}

func used(eng *spillway.Engine) (bytes []int64) {
	for _, s := range eng.Spaces() {
		bytes = append(bytes, s.Used())
	}
	return bytes
}

// steps counts what a measurement tells, and can end it at a step.
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
	return Config{Engine: eng, Sizes: []int64{64 << 10, 256 << 10}, Threads: []int{1, 2}, Pairs: 3, Seed: 1}
}

// counted counts the limit's files. There must be some, and none open when the test ends.
func counted(t *testing.T, cfg Config) Config {
	fs := faultfs.New(disk.OS(), 1)
	cfg.Files = func() disk.FS { return fs }
	t.Cleanup(func() {
		if made := fs.Count("open-anonymous", "create"); made == 0 || fs.Open() != 0 {
			t.Errorf("of %d files %d are open", made, fs.Open())
		}
	})
	return cfg
}

// TestRun: each load has a row for each edge and state, all figures are there, and our
// side went through the engine's own converters as often as it must.
func TestRun(t *testing.T) {
	t.Run("in place", func(t *testing.T) {
		w := NewWatch()
		cfg := small(engineOn(t, w, convert.CodecNone))
		cfg.Watched = map[tier.ID]*Watch{{Kind: tier.Disk}: w}
		testRun(t, cfg)
	})
	t.Run("on files", func(t *testing.T) { testRun(t, counted(t, small(engine(t)))) })
}

func testRun(t *testing.T, cfg Config) {
	eng := cfg.Engine
	var s steps
	cfg.Progress = &s
	rows, skipped, err := Run(t.Context(), cfg)
	if err != nil || len(skipped) != 0 {
		t.Fatal(err, skipped)
	}
	var got, want []string
	for _, r := range rows {
		got = append(got, fmt.Sprintf("%d %d %s %s %s", r.Bytes>>10, r.Threads, r.From, r.To, r.State))
		for i, v := range []float64{r.GiBPerS, r.Limit, r.Efficiency} {
			if !(v > 0) || math.IsInf(v, 0) {
				t.Errorf("figure %d is %v: %+v", i, v, r)
			}
		}
		if !(r.Noise >= 0) || !(r.CV >= 0) || r.Err != nil {
			t.Errorf("%+v", r)
		}
	}
	for _, load := range []string{"64 1", "64 2", "256 1", "256 2"} {
		for _, edge := range []string{
			"gpu:0 host:0 ", "host:0 gpu:0 ",
			"gpu:0 disk:0 fresh", "gpu:0 disk:0 rewritten", "disk:0 gpu:0 rewritten",
			"host:0 disk:0 fresh", "host:0 disk:0 rewritten", "disk:0 host:0 rewritten",
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
	for _, e := range eng.Stats().Edges {
		if e.Bytes < atLeast {
			t.Errorf("only %d bytes from %s to %s", e.Bytes, e.From, e.To)
		}
	}
	if n := len(eng.Stats().Edges); n != 6 {
		t.Errorf("%d edges moved anything", n)
	}
}

// TestCancelled: wherever it is, it ends with the cause, and all is given back.
func TestCancelled(t *testing.T) {
	eng := engine(t)
	cause := errors.New("enough")
	for _, at := range []int64{0, 1, 4, 8, 11} { // in each link, and at the first of the next load
		ctx, cancel := context.WithCancelCause(t.Context())
		cfg := small(eng)
		cfg.Progress = &steps{at: at, then: func() { cancel(cause) }}
		if at == 0 {
			cancel(cause)
		}
		rows, _, err := Run(ctx, cfg)
		if !errors.Is(err, cause) || rows != nil {
			t.Errorf("cancelled at step %d it ends with %v and %d rows", at, err, len(rows))
		}
		cancel(nil)
	}
}

// TestNoConverter: an edge without a converter is a row that says so, and the others are
// measured all the same, in whichever direction there is one.
func TestNoConverter(t *testing.T) {
	types := map[tier.Kind]batch.PayloadType{tier.GPU: batch.GPUImage, tier.Host: batch.HostImage, tier.Disk: batch.DiskImage}
	for _, c := range []struct{ from, to tier.Kind }{
		{tier.GPU, tier.Host}, {tier.Host, tier.GPU}, {tier.GPU, tier.Disk}, {tier.Disk, tier.GPU}, {tier.Host, tier.Disk}, {tier.Disk, tier.Host},
	} {
		t.Run(fmt.Sprintf("%s-%s", c.from, c.to), func(t *testing.T) {
			eng := engine(t)
			if err := eng.Registry().Unregister(types[c.from], types[c.to]); err != nil {
				t.Fatal(err)
			}
			cfg := counted(t, small(eng))
			cfg.Sizes, cfg.Threads = cfg.Sizes[:1], []int{2}
			rows, _, err := Run(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			edges := make(map[string]int)
			for _, r := range rows {
				if r.From.Kind == c.from && r.To.Kind == c.to {
					if !errors.Is(r.Err, convert.ErrNoConverter) || r.GiBPerS != 0 {
						t.Errorf("%+v", r)
					}
				} else if r.Err != nil || r.GiBPerS <= 0 {
					t.Errorf("%+v", r)
				}
				edges[fmt.Sprint(r.From, r.To)]++
			}
			if len(edges) != 6 {
				t.Errorf("edges are %v", edges)
			}
		})
	}
}

// TestFit: what there is no room for is left out, and told with what lacks.
func TestFit(t *testing.T) {
	eng := engine(t)
	cfg := small(eng)
	cfg.Sizes, cfg.Threads = []int64{64 << 10, 512 << 10, 2 << 20}, []int{1, 2}
	cfg.Files = func() disk.FS { return nil } // the machine's own
	rows, skipped, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(rows) != 8*3 { // the GPU has room for one of 512 KiB
		t.Errorf("%d rows", len(rows))
	}
	var lacks []string
	for _, s := range skipped {
		var full *tier.NoSpaceError
		if !errors.As(s, &full) || full.Requested != s.Bytes*int64(s.Threads) || full.Available >= full.Requested {
			t.Errorf("%v", s)
			continue
		}
		lacks = append(lacks, fmt.Sprint(s.Bytes>>10, s.Threads, full.Space))
	}
	if want := []string{"512 2 gpu:0", "2048 1 gpu:0", "2048 2 gpu:0"}; !slices.Equal(lacks, want) {
		t.Errorf("left out %q; want %q", lacks, want)
	}

	cfg.Sizes, cfg.Threads = []int64{64 << 10}, []int{1 << 60} // 0 bytes, of 64 bits
	if rows, skipped, err = Run(t.Context(), cfg); err != nil || len(rows) != 0 || len(skipped) != 1 {
		t.Errorf("of nothing that fits: %d rows, left out %v, %v", len(rows), skipped, err)
	}

	cfg.Sizes, cfg.Threads, cfg.Spare = []int64{64 << 10}, []int{1, 2}, 3*64<<10
	skipped, err = Fit(cfg)
	if err != nil || len(skipped) != 1 || skipped[0].Threads != 2 || !strings.Contains(skipped[0].Error(), "192.0 KiB may be taken") {
		t.Errorf("left out %v, %v", skipped, err)
	}
}

// roomy is a file system that says how much room it has.
type roomy struct {
	disk.FS
	free int64
	err  error
}

func (r roomy) Usage(string) (disk.Usage, error) { return disk.Usage{Free: r.free}, r.err }

// TestFitOnDisk: the file system must have room for the engine's file and two of raw's.
func TestFitOnDisk(t *testing.T) {
	cfg := small(engine(t))
	cfg.Sizes, cfg.Threads = cfg.Sizes[:1], []int{1, 2}
	need := 3 * load{cfg.Sizes[0], 2}.total()
	for _, c := range []struct {
		free    int64
		err     error
		skipped int
	}{
		{need, nil, 0},
		{need - 1, nil, 1},
		{0, nil, 2},
		{0, errors.ErrUnsupported, 0},
		{need, syscall.EIO, 0},
	} {
		w := NewWatch()
		w.FS = roomy{w.FS, c.free, c.err}
		cfg.Watched = map[tier.ID]*Watch{{Kind: tier.Disk}: w}
		skipped, err := Fit(cfg)
		if len(skipped) != c.skipped || (err != nil) != (c.err == syscall.EIO) {
			t.Errorf("%+v: left out %v, %v", c, skipped, err)
		}
		for _, s := range skipped {
			var full *tier.NoSpaceError
			if !errors.As(s, &full) || full.Space.Kind != tier.Disk || full.Available != c.free {
				t.Errorf("%+v: left out %v", c, s)
			}
		}
	}
}

// TestWrongUse: what cannot be measured is refused, and nothing is taken.
func TestWrongUse(t *testing.T) {
	eng := engine(t)
	for name, change := range map[string]func(*Config){
		"no engine":        func(c *Config) { c.Engine = nil },
		"no sizes":         func(c *Config) { c.Sizes = nil },
		"no threads":       func(c *Config) { c.Threads = nil },
		"no pairs":         func(c *Config) { c.Pairs = 0 },
		"a tiny batch":     func(c *Config) { c.Sizes = []int64{SmallestBatch - tier.Page} },
		"a huge batch":     func(c *Config) { c.Sizes = []int64{LargestBatch + tier.Page} },
		"a part of a page": func(c *Config) { c.Sizes = []int64{1<<20 + 1} },
		"zero moves":       func(c *Config) { c.Threads = []int{1, 0} },
	} {
		cfg := small(eng)
		change(&cfg)
		if _, _, err := Run(t.Context(), cfg); err == nil {
			t.Errorf("%s: no error", name)
		}
		if _, err := Fit(cfg); err == nil {
			t.Errorf("%s: Fit gives no error", name)
		}
	}
}

// TestRecord: images have the size that was asked for, to the byte, of rows of the seed.
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
			again.Release()
			rows := rec.NumRows()
			if n, err := imageBytes(rec); err != nil || n != bytes {
				t.Errorf("%d bytes of seed %d: the image has %d, %v", bytes, seed, n, err)
			}
			if rows < bytes/400 {
				t.Errorf("%d bytes of seed %d: only %d rows", bytes, seed, rows)
			}
		}
	}
}

// TestDropWaits: a batch that is being moved is dropped when that has ended.
func TestDropWaits(t *testing.T) {
	b, _, _ := benchOn(t, NewWatch(), convert.CodecNone)
	if n := b.batches[0].Info().Subscribers; n != 1 { // or the monitor may move it
		t.Errorf("there are %d subscribers", n)
	}
	moving, err := b.batches[0].TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if err := b.drop(ctx); !errors.Is(err, cause) || b.batches[1].Info().State != batch.Released {
		t.Errorf("while one moves, dropping ends with %v; the other is %v", err, b.batches[1].Info().State)
	}
	if err := moving.Abort(); err != nil {
		t.Fatal(err)
	}
	b.batches = b.batches[:1] // which is dropped when the test ends
}

// TestNoBatches: where batches cannot be made nothing is measured of them.
func TestNoBatches(t *testing.T) {
	cfg := small(engine(t))
	rec, err := record(t.Context(), cfg.Seed, cfg.Sizes[0])
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Release()
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if _, err := cfg.byLoad(ctx, load{cfg.Sizes[0], 1}, rec, nil, nil); !errors.Is(err, cause) {
		t.Errorf("it ends with %v", err)
	}
}
