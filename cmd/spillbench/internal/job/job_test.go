package job

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/tier"
)

// engine opens one with a MiB of memory in each tier above the disk. Whatever a
// test does, nothing may be left in it.
func engine(t *testing.T, gpu spillway.GPUConfig) *spillway.Engine {
	t.Helper()
	gpu.Memory = spillway.Bytes(1 << 20)
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{gpu}, HostMemory: spillway.Bytes(1 << 20),
		Disks:  []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := eng.Close(); err != nil {
			t.Errorf("closing the engine: %v", err)
		}
		for _, s := range eng.Stats().Spaces {
			if s.Used() != 0 {
				t.Errorf("%s ends with %+v", s.ID, s.Usage)
			}
		}
	})
	return eng
}

// table is a generated input of about 4 MiB.
func table() Input {
	return Input{Name: "table", Open: func(context.Context) (Source, error) {
		return gen.New(gen.Config{Seed: 1, Rows: 25_000, RowsPerBatch: 800})
	}}
}

func config(eng *spillway.Engine) Config {
	return Config{
		Engine:     eng,
		Inputs:     []Input{table()},
		Repeat:     1,
		Partitions: 3,
		Passes:     1,
		Workers:    4,
		Progress:   new(counter),
	}
}

// counter is a Progress that calls at as each step of a phase is taken.
type counter struct {
	phase atomic.Value
	steps atomic.Int64
	at    func(phase string, step int64)
}

func (c *counter) Begin(phase string, _ int64) {
	c.phase.Store(phase)
	c.steps.Store(0)
}

func (c *counter) Step() {
	n := c.steps.Add(1)
	if c.at != nil {
		c.at(c.phase.Load().(string), n)
	}
}

// TestRun: everything is loaded, worked on in every pass, and dropped.
func TestRun(t *testing.T) {
	cfg := config(engine(t, spillway.GPUConfig{}))
	cfg.Repeat, cfg.Passes = 2, 2
	var c counter
	cfg.Progress = &c
	res, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if res.Rows != 50_000 || res.Batches != 64 || res.Checked != 2*64 || res.Mismatches != 0 || res.First != "" {
		t.Errorf("%+v", res)
	}
	if len(res.Phases) != 4 || res.Phases[0].Name != "load" || res.Phases[3].Name != "drain" {
		t.Errorf("%v", res.Phases)
	}
}

// TestTasks: at the end the engine admits one task for each batch, and none without a pass. A batch
// that fits no GPU is checked in the passes alone.
func TestTasks(t *testing.T) {
	huge := []Input{{Name: "huge", Open: func(context.Context) (Source, error) {
		return gen.New(gen.Config{Rows: 20_000, RowsPerBatch: 10_000}) // of more than 1 MiB
	}}}
	for name, c := range map[string]struct {
		passes            int
		inputs            []Input
		admitted, checked int64
	}{
		"no pass":    {0, []Input{table()}, 0, 0},
		"one pass":   {1, []Input{table()}, 32, 32},
		"two passes": {2, []Input{table(), table()}, 64, 128},
		"too large":  {1, huge, 0, 2},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := config(engine(t, spillway.GPUConfig{}))
			cfg.Inputs, cfg.Passes, cfg.Fits = c.inputs, c.passes, true
			res, err := Run(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			got := cfg.Engine.Stats().Admission
			if got.Admitted-got.Retried != c.admitted || got.Running != 0 || res.Checked != c.checked ||
				res.Mismatches != 0 {
				t.Errorf("%+v, and %+v; want %d admitted and %d checked", got, res, c.admitted, c.checked)
			}
		})
	}
}

// TestTasksFindWrongBytes: tasks find wrong bytes that no pass has found, and count no others.
func TestTasksFindWrongBytes(t *testing.T) {
	j := start(t, config(engine(t, spillway.GPUConfig{})))
	j.items[10].digest.Hash++
	if err := j.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	j.items[20].digest.Hash++
	if err := errors.Join(j.runTasks(t.Context()), j.drop(t.Context())); err != nil {
		t.Fatal(err)
	}
	if r := j.res; r.Checked != r.Batches || r.Mismatches != 2 || !strings.Contains(r.First, "table, batch 11") {
		t.Errorf("%+v", r)
	}
}

// divided is a table that several goroutines make.
type divided struct{ *gen.Table }

func (d divided) Part(number, of int64) Source { return d.Table.Part(number, of) }

// TestDivided: what several goroutines have made is what one does, also of two inputs and with little
// that may be held.
func TestDivided(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	load := func(wrap func(Source) Source) (items []item) {
		cfg := config(engine(t, spillway.GPUConfig{}))
		open := func(ctx context.Context) (Source, error) {
			src, err := table().Open(ctx)
			return wrap(src), err
		}
		cfg.Inputs = []Input{{"a", open}, {"b", open}}
		cfg.Repeat, cfg.Partitions, cfg.Held = 2, 5, 300<<10
		for _, it := range start(t, cfg).items {
			it.b, it.repo = nil, nil
			items = append(items, it)
		}
		return items
	}
	one := load(func(src Source) Source { return src })
	several := load(func(src Source) Source { return divided{src.(*gen.Table)} })
	if len(one) != 2*2*32 || !slices.Equal(one, several) {
		t.Errorf("one goroutine reads\n%v\nand several make\n%v", one, several)
	}
}

// late is a table of two parts, of which the first begins when the second has ended.
type late struct {
	*gen.Table
	ended chan struct{}
}

func (l late) Part(number, of int64) Source {
	return &latePart{l.Table.Part(number, of), number == 0, l.ended}
}

type latePart struct {
	Source
	waits bool
	ended chan struct{}
}

func (p *latePart) Next(ctx context.Context) (arrow.RecordBatch, error) {
	if p.waits {
		<-p.ended
	}
	rec, err := p.Source.Next(ctx)
	if err == io.EOF && !p.waits {
		close(p.ended)
	}
	return rec, err
}

// TestPartsOutOfOrder: tasks find the batch of each digest, also where a partition has batches of
// several goroutines in an order of its own.
func TestPartsOutOfOrder(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(2))
	cfg := config(engine(t, spillway.GPUConfig{}))
	cfg.Inputs = []Input{{"late", func(context.Context) (Source, error) {
		src, err := gen.New(gen.Config{Seed: 1, Rows: 25_000, RowsPerBatch: 800})
		return late{src, make(chan struct{})}, err
	}}}
	res, err := Run(t.Context(), cfg)
	if err != nil || res.Batches != 32 || res.Checked != 32 || res.Mismatches != 0 {
		t.Errorf("%+v, %v", res, err)
	}
	if got := cfg.Engine.Stats().Admission; got.Admitted-got.Retried != 32 {
		t.Errorf("%+v", got)
	}
}

// TestNoBytes: a batch without a byte is checked, too.
func TestNoBytes(t *testing.T) {
	cfg := config(engine(t, spillway.GPUConfig{}))
	cfg.Inputs = []Input{{Name: "nulls", Open: func(context.Context) (Source, error) { return new(nulls), nil }}}
	res, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if res.Bytes != 0 || res.Rows != 5 || res.Checked != 1 {
		t.Errorf("%+v", res)
	}
}

// nulls gives one batch that takes no memory.
type nulls struct{ given bool }

func (n *nulls) Next(context.Context) (arrow.RecordBatch, error) {
	if n.given {
		return nil, io.EOF
	}
	n.given = true
	col := array.NewNull(5)
	defer col.Release()
	schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.Null, Nullable: true}}, nil)
	return array.NewRecordBatch(schema, []arrow.Array{col}, 5), nil
}

func (*nulls) Close() error { return nil }

// TestWrongBytes: a batch whose bytes are not those that were loaded is counted
// and named, and the others are checked all the same.
func TestWrongBytes(t *testing.T) {
	cfg := config(engine(t, spillway.GPUConfig{}))
	j := start(t, cfg)
	j.items[10].digest.Hash++
	if err := j.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := j.res; r.Checked != r.Batches || r.Mismatches != 1 || !strings.Contains(r.First, "table, batch 11") {
		t.Errorf("%+v", r)
	}
}

// start loads what cfg says.
func start(t *testing.T, cfg Config) *job {
	t.Helper()
	plan, err := cfg.Engine.Plan("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := plan.Close(); err != nil {
			t.Errorf("closing the plan: %v", err)
		}
	})
	j := &job{cfg: cfg, plan: plan, res: new(Result)}
	if err := j.load(t.Context()); err != nil {
		t.Fatal(err)
	}
	return j
}

// TestCorruptDisk: what is changed on the disk is found by the engine's checksums
// and counted.
func TestCorruptDisk(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc, to find the spill files")
	}
	cfg := config(engine(t, spillway.GPUConfig{}))
	j := start(t, cfg)
	if n := scribble(t); n == 0 {
		t.Skip("needs spill files that can be opened")
	}
	if err := j.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := j.res; r.Checked != r.Batches || r.Mismatches == 0 || !strings.Contains(r.First, "disk") {
		t.Errorf("%+v", r)
	}
}

// scribble overwrites a part of each spill file that this process has open, and
// returns how many that were.
func scribble(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		path := filepath.Join("/proc/self/fd", e.Name())
		target, err := os.Readlink(path)
		if err != nil || !strings.Contains(target, filepath.Base(filepath.Dir(t.TempDir()))) {
			continue
		}
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			continue
		}
		if info, err := f.Stat(); err == nil && info.Mode().IsRegular() && info.Size() > 1<<20 {
			if _, err := f.WriteAt(make([]byte, 1<<20), 0); err != nil {
				t.Error(err)
			}
			n++
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
	return n
}

// TestCancel: a job that is cancelled in any phase ends with the reason, and
// leaves nothing (which closing the engine checks).
func TestCancel(t *testing.T) {
	for _, when := range []struct {
		phase string
		step  int64
	}{{"load", 1}, {"load", 10}, {"pass-1", 1}, {"pass-1", 15}} {
		t.Run(fmt.Sprint(when.phase, when.step), func(t *testing.T) {
			cfg := config(engine(t, spillway.GPUConfig{}))
			ctx, cancel := context.WithCancelCause(t.Context())
			reason := errors.New("enough")
			cfg.Progress = &counter{at: func(phase string, step int64) {
				if phase == when.phase && step == when.step {
					cancel(reason)
				}
			}}
			if _, err := Run(ctx, cfg); !errors.Is(err, reason) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// failing gives one batch and then an error.
type failing struct {
	given  bool
	closed *bool
}

var errSource = errors.New("the source failed")

func (f *failing) Next(context.Context) (arrow.RecordBatch, error) {
	if f.given {
		return nil, errSource
	}
	f.given = true
	return arrowgen.Flights(1, 1000), nil
}

func (f *failing) Close() error {
	*f.closed = true
	return nil
}

// unclosed is a source that is read, and fails when it is closed.
type unclosed struct{ Source }

func (unclosed) Close() error { return errSource }

// TestSourceFails: a source's error ends the job, and the source is closed.
func TestSourceFails(t *testing.T) {
	cfg := config(engine(t, spillway.GPUConfig{}))
	closed := false
	cfg.Inputs = append(cfg.Inputs, Input{Name: "bad", Open: func(context.Context) (Source, error) {
		return &failing{closed: &closed}, nil
	}})
	if _, err := Run(t.Context(), cfg); !errors.Is(err, errSource) || !closed {
		t.Errorf("got %v, closed %v", err, closed)
	}
	cfg.Inputs = []Input{{Name: "unclosed", Open: func(context.Context) (Source, error) {
		src, err := gen.New(gen.Config{Rows: 100, RowsPerBatch: 100})
		return unclosed{src}, err
	}}}
	if _, err := Run(t.Context(), cfg); !errors.Is(err, errSource) {
		t.Errorf("a source that cannot be closed: %v", err)
	}
	cfg.Inputs = []Input{{Name: "worse", Open: func(context.Context) (Source, error) { return nil, io.ErrClosedPipe }}}
	if _, err := Run(t.Context(), cfg); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("got %v", err)
	}
}

// TestNoRoom: a batch that fits no space is named.
func TestNoRoom(t *testing.T) {
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20),
		Disks: []spillway.DiskConfig{
			{Dir: t.TempDir(), Capacity: spillway.Bytes(1 << 20)},
		}, Logger: slog.New(slog.DiscardHandler), StallTimeout: 100 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	defer eng.Close()
	cfg := config(eng)
	cfg.Inputs = []Input{{Name: "huge", Open: func(context.Context) (Source, error) {
		return gen.New(gen.Config{Rows: 10_000, RowsPerBatch: 10_000})
	}}}
	if _, err := Run(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "huge, batch 1") {
		t.Errorf("got %v", err)
	}
	cfg.Inputs = []Input{table()} // 4 MiB in batches that fit, in 3 MiB
	if _, err := Run(t.Context(), cfg); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("got %v", err)
	}
}

// TestLostBatches: a batch that is not there any more is noticed, after loading and when all
// are dropped.
func TestLostBatches(t *testing.T) {
	j := start(t, config(engine(t, spillway.GPUConfig{})))
	loaded := j.res.Batches
	repo, err := j.plan.Repository("load", 0)
	if err != nil {
		t.Fatal(err)
	}
	l := &loader{job: j, repo: repo, shelves: make([][]item, j.cfg.Partitions)}
	for _, it := range j.items {
		l.shelves[it.partition] = append(l.shelves[it.partition], it)
	}
	b, err := repo.Take(t.Context(), 0, batch.Idle)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Drop(); err != nil {
		t.Fatal(err)
	}
	if err := l.collect(true); err == nil || !strings.Contains(err.Error(), "partition 0 holds") {
		t.Errorf("after loading: %v", err)
	}
	j.res.Batches = loaded // which collect has counted again
	if err := j.drop(t.Context()); err == nil || !strings.Contains(err.Error(), "left to drop") {
		t.Errorf("in the end: %v", err)
	}
}
