package peer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/gen"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/job"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// hostMemory is less than the inputs of the tests, so that they go through it in several windows.
const hostMemory = 256 << 10

// rig is a configuration whose engines must hold nothing when they are closed, and whose directory
// must stay empty.
type rig struct {
	Config
	engines []*spillway.Engine
}

func newRig(t *testing.T, inputs ...job.Input) *rig {
	t.Helper()
	dir := t.TempDir()
	r := &rig{
		Config: Config{
			Inputs:   inputs,
			Repeat:   1,
			Rounds:   1,
			Workers:  3,
			Dir:      dir,
			Progress: new(phases),
		},
	}
	r.Open = func(ctx context.Context) (*spillway.Engine, error) { return r.open(ctx, 64<<20) }
	fds := openFiles(t)
	t.Cleanup(func() {
		for _, eng := range r.engines {
			for _, s := range eng.Stats().Spaces {
				if s.Used() != 0 {
					t.Errorf("%s ends with %+v", s.ID, s.Usage)
				}
			}
			if _, err := eng.Plan("late"); !errors.Is(err, tier.ErrClosed) {
				t.Errorf("an engine is open: %v", err)
			}
		}
		left, err := os.ReadDir(dir)
		if err != nil || len(left) > 0 {
			t.Errorf("left behind: %v, %v", left, err)
		}
		if now := openFiles(t); now != fds {
			t.Errorf("%d files are open, and %d were before", now, fds)
		}
	})
	return r
}

func (r *rig) runner() *runner { return &runner{cfg: r.Config, digests: make(map[string]uint64)} }

// withPeer calls f with the peer's side, and closes that.
func (r *runner) withPeer(ctx context.Context, f func(*ipcFiles) error) error {
	return r.with(ctx, "test ", ArrowIPC, 1, func(s side) error { return f(s.(*ipcFiles)) })
}

func (r *rig) run(ctx context.Context) (Result, error) { return Run(ctx, r.Config) }

// checked is memory of which all must be released when the test ends.
func checked(t *testing.T) memory.Allocator {
	mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
	t.Cleanup(func() { mem.AssertSize(t, 0) })
	return mem
}

// machine is what all engines are on.
var machine = sync.OnceValue(func() *topology.Topology {
	top, err := topology.Discover(context.Background(), topology.Options{})
	if err != nil {
		panic(err)
	}
	return top
})

func (r *rig) open(ctx context.Context, disk int64) (*spillway.Engine, error) {
	eng, err := spillway.Open(ctx, spillway.Config{
		GPUs: []spillway.GPUConfig{}, HostMemory: spillway.Bytes(hostMemory),
		Disks:  []spillway.DiskConfig{{Dir: r.Dir, Capacity: spillway.Bytes(disk)}},
		Logger: slog.New(slog.DiscardHandler), Topology: machine(), StallTimeout: time.Second,
	})
	if err == nil {
		r.engines = append(r.engines, eng)
	}
	return eng, err
}

// openFiles is 0 where it cannot be told. Only files of directories for tests count: the
// runtime opens others when it likes to.
func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	n := 0
	for _, fd := range fds {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", fd.Name())); err == nil &&
			strings.HasPrefix(to, os.TempDir()) {
			n++
		}
	}
	return n
}

// table is a generated input of about 512 KiB.
func table(seed uint64) job.Input { return tableOf(func(int) gen.Config { return small(seed) }) }

func small(seed uint64) gen.Config { return gen.Config{Seed: seed, Rows: 3_000, RowsPerBatch: 200} }

// tableOf is an input that may be another each time it is opened, counted from 1.
func tableOf(cfg func(opened int) gen.Config) job.Input {
	opened := 0
	return job.Input{Name: "table", Open: func(context.Context) (job.Source, error) {
		opened++
		return generated(cfg(opened))
	}}
}

// made are the tables that were made, by gen.Config.
var made sync.Map

func generated(cfg gen.Config) (*gen.Table, error) {
	if table, ok := made.Load(cfg); ok {
		return table.(*gen.Table).Again(), nil
	}
	table, err := gen.New(cfg)
	if err == nil {
		made.Store(cfg, table)
	}
	return table, err
}

// records is an input of these, which it does not release.
type records struct {
	recs []arrow.RecordBatch
	*gen.Table
}

func (r *records) Next(ctx context.Context) (arrow.RecordBatch, error) {
	if len(r.recs) == 0 {
		return r.Table.Next(ctx) // the end
	}
	rec := r.recs[0]
	r.recs = r.recs[1:]
	rec.Retain()
	return rec, nil
}

// recordsOf is an input of these, which are released when the test ends.
func recordsOf(t *testing.T, recs ...arrow.RecordBatch) job.Input {
	t.Cleanup(func() {
		for _, rec := range recs {
			rec.Release()
		}
	})
	end, err := generated(gen.Config{RowsPerBatch: 1})
	if err != nil {
		t.Fatal(err)
	}
	return job.Input{
		Name: "records",
		Open: func(context.Context) (job.Source, error) { return &records{slices.Clone(recs), end.Again()}, nil },
	}
}

// phases is a Progress that calls at with the number of the step, over all phases.
type phases struct {
	at func(step int)

	mu    sync.Mutex
	names []string
	steps int
	told  int // how many there would be
}

func (p *phases) Begin(name string, steps int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.names = append(p.names, name)
	p.told += int(steps)
}

func (p *phases) Step() {
	p.mu.Lock()
	p.steps++
	n := p.steps
	p.mu.Unlock()
	if p.at != nil {
		p.at(n)
	}
}

// TestRun: both sides take turns, in every round everything is written and read,
// and sizes are those of the Arrow buffers.
func TestRun(t *testing.T) {
	strings, empty := oneColumn(t), table(3)
	empty.Open = func(context.Context) (job.Source, error) { return generated(gen.Config{RowsPerBatch: 1}) }
	r := newRig(t, table(1), strings, empty) // of three schemas, and one without batches
	r.Repeat, r.Rounds, r.Batches = 2, 3, 2*16
	var p phases
	r.Progress = &p
	res, err := r.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if res.Batches != 2*16 || res.Rows != 2*(3_000+3) || res.Verified != 2*res.Batches ||
		res.Bytes != 2*(logical(t, table(1))+logical(t, strings)) {
		t.Errorf("%+v", res)
	}
	if len(res.Rounds) != 3 {
		t.Errorf("there are %d rounds", len(res.Rounds))
	}
	for _, r := range res.Rounds {
		for _, took := range []time.Duration{
			r.Ours.Write, r.Ours.Read, r.Put, r.Rewritten.Write, r.Rewritten.Read,
			r.Peer.Write, r.Peer.Read, r.Warm.Write, r.Warm.Read,
		} {
			if took <= 0 {
				t.Errorf("times are %+v", r)
			}
		}
		if r.Peer.Write < r.Warm.Write {
			t.Errorf("written in %v with the sync and in %v without", r.Peer.Write, r.Warm.Write)
		}
	}
	want := []string{"read", "verify spillway", "verify arrow-ipc"}
	for i, sides := range [][]string{{ourName, ArrowIPC}, {ArrowIPC, ourName}, {ourName, ArrowIPC}} {
		for _, side := range sides {
			want = append(want, fmt.Sprintf("round %d, %s", i+1, side))
		}
	}
	if !slices.Equal(p.names, want) {
		t.Errorf("phases are %q, want %q", p.names, want)
	}
	if p.steps != p.told {
		t.Errorf("the progress had %d steps of %d", p.steps, p.told)
	}
	if res.CacheStays != (runtime.GOOS != "linux") {
		t.Errorf("on %s the cache stays: %v", runtime.GOOS, res.CacheStays)
	}
}

// oneColumn is an input of one batch that is the middle of a larger one.
func oneColumn(t *testing.T) job.Input {
	b := array.NewStringBuilder(checked(t))
	defer b.Release()
	b.AppendValues([]string{"a", "bc", "def", "g", ""}, []bool{true, true, false, true, true})
	col := b.NewArray()
	defer col.Release()
	rec := array.NewRecordBatch(
		arrow.NewSchema([]arrow.Field{{Name: "s", Type: col.DataType(), Nullable: true}}, nil),
		[]arrow.Array{col},
		5,
	)
	defer rec.Release()
	return recordsOf(t, rec.NewSlice(1, 4))
}

func logical(t *testing.T, in job.Input) (n int64) {
	t.Helper()
	r := &runner{cfg: Config{Inputs: []job.Input{in}, Repeat: 1}}
	err := r.each(t.Context(), func(_ int, rec arrow.RecordBatch) error {
		n += convert.LogicalBytes(rec)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestOtherDataIsFound: whenever what a side gave back is not what it was given,
// as when the source is another the n-th time it is read, that is an error that
// names the side.
func TestOtherDataIsFound(t *testing.T) {
	const opened = 9 // to be counted, written and compared by each side, and in a round twice by each
	side := []string{
		2: "spillway",
		3: "spillway",
		4: ArrowIPC,
		5: ArrowIPC,
		6: "spillway",
		7: "spillway",
		8: ArrowIPC,
		9: ArrowIPC,
	}
	first, step := testseed.Share(t, 4)
	for other := 2; other <= opened; other++ {
		for i, kind := range []struct {
			name string
			cfg  gen.Config
		}{
			{"other values", small(2)},
			{"fewer batches", gen.Config{Seed: 1, Rows: 3_000 - 200, RowsPerBatch: 200}},
			{"more batches", gen.Config{Seed: 1, Rows: 3_000 + 1, RowsPerBatch: 200}},
		} {
			if (3*other+i)%step != first {
				continue
			}
			t.Run(fmt.Sprintf("%s at %d", kind.name, other), func(t *testing.T) {
				r := newRig(t, tableOf(func(n int) gen.Config {
					if n == other {
						return kind.cfg
					}
					return small(1)
				}))
				_, err := r.run(t.Context())
				if !errors.Is(err, ErrMismatch) || !strings.HasPrefix(err.Error(), side[other]) {
					t.Errorf("ended with %v", err)
				}
			})
		}
	}
	var times int
	r := newRig(t, tableOf(func(n int) gen.Config { times = n; return small(1) }))
	if _, err := r.run(t.Context()); err != nil || times != opened {
		t.Errorf("the source was read %d times, and %d are tested: %v", times, opened, err)
	}
}

// TestCancelled: wherever the context ends, Run ends with its cause and leaves
// nothing; the rig looks for that.
func TestCancelled(t *testing.T) {
	var all phases
	r := newRig(t, table(1))
	r.Progress = &all
	if _, err := r.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	cause := errors.New("enough")
	for at := 0; at < all.steps; at += 11 {
		t.Run(fmt.Sprint("step ", at), func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			if at == 0 {
				cancel(cause)
			}
			r := newRig(t, table(1))
			r.Progress = &phases{at: func(step int) {
				if step == at {
					cancel(cause)
				}
			}}
			if _, err := r.run(ctx); !errors.Is(err, cause) {
				t.Errorf("ended with %v", err)
			}
		})
	}
}

// TestFailures: errors say whose they are, and nothing is left.
func TestFailures(t *testing.T) {
	t.Run("no batches", func(t *testing.T) {
		if _, err := newRig(t, recordsOf(t)).run(t.Context()); err != ErrNoBatches {
			t.Errorf("ended with %v", err)
		}
	})
	t.Run("a batch larger than host memory", func(t *testing.T) {
		r := newRig(t, tableOf(func(int) gen.Config { return gen.Config{Rows: 3_000, RowsPerBatch: 3_000} }))
		_, err := r.run(t.Context())
		var e *reservation.ExceededError
		if !errors.As(err, &e) || e.Requested < hostMemory || e.Space.Kind != tier.Host ||
			!strings.Contains(err.Error(), "table, batch 1") {
			t.Errorf("ended with %v", err)
		}
	})
	t.Run("disk full", func(t *testing.T) {
		r := newRig(t, table(1))
		r.Config.Open = func(ctx context.Context) (*spillway.Engine, error) { return r.open(ctx, 256<<10) }
		if _, err := r.run(t.Context()); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("ended with %v", err)
		}
	})
	t.Run("no engine", func(t *testing.T) {
		r, broken := newRig(t, table(1)), errors.New("broken")
		r.Config.Open = func(context.Context) (*spillway.Engine, error) { return nil, broken }
		if _, err := r.run(t.Context()); err != broken {
			t.Errorf("ended with %v", err)
		}
	})
	t.Run("an input that cannot be closed", func(t *testing.T) {
		in := table(1)
		open := in.Open
		in.Open = func(ctx context.Context) (job.Source, error) {
			src, err := open(ctx)
			return unclosed{src}, err
		}
		if _, err := newRig(t, in).run(t.Context()); !errors.Is(err, errUnclosed) {
			t.Errorf("ended with %v", err)
		}
	})
	t.Run("no directory for the peer", func(t *testing.T) {
		r := newRig(t, table(1))
		r.Dir = filepath.Join(r.Dir, "absent")
		open := r.Config.Open
		r.Config.Open = func(ctx context.Context) (*spillway.Engine, error) {
			defer func(dir string) { r.Dir = dir }(r.Dir)
			r.Dir = filepath.Dir(r.Dir)
			return open(ctx)
		}
		if _, err := r.run(t.Context()); !errors.Is(err, os.ErrNotExist) ||
			!strings.Contains(err.Error(), ArrowIPC+": making a file in "+r.Dir) {
			t.Errorf("ended with %v", err)
		}
	})
	t.Run("what the peer cannot write", func(t *testing.T) {
		r := newRig(t, recordsOf(t, coded(t, "a", "b"), coded(t, "c", "d")))
		if _, err := r.run(t.Context()); err == nil || !strings.Contains(err.Error(), ArrowIPC) {
			t.Errorf("ended with %v", err)
		}
	})
}

// unclosed is a source that fails when it is closed.
type unclosed struct{ job.Source }

var errUnclosed = errors.New("it cannot be closed")

func (unclosed) Close() error { return errUnclosed }

// coded is a batch whose dictionary is these words: a file of arrow-go's has one for
// all batches.
func coded(t *testing.T, words ...string) arrow.RecordBatch {
	t.Helper()
	typ := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}
	b := array.NewDictionaryBuilder(memory.DefaultAllocator, typ).(*array.BinaryDictionaryBuilder)
	defer b.Release()
	for _, w := range words {
		if err := b.AppendString(w); err != nil {
			t.Fatal(err)
		}
	}
	col := b.NewArray()
	defer col.Release()
	return array.NewRecordBatch(
		arrow.NewSchema([]arrow.Field{{Name: "c", Type: typ}}, nil),
		[]arrow.Array{col},
		int64(len(words)),
	)
}

// TestBatchesWithoutBytes are put, moved and read as any others are.
func TestBatchesWithoutBytes(t *testing.T) {
	r := newRig(t, recordsOf(t, array.NewRecordBatch(arrow.NewSchema(nil, nil), nil, 3)))
	if res, err := r.run(t.Context()); err != nil || res.Rows != 3 || res.Bytes != 0 || res.Verified != 2 {
		t.Errorf("%+v, %v", res, err)
	}
}

// TestTouch: every byte of every buffer counts, in its place.
func TestTouch(t *testing.T) {
	cfg := small(1)
	cfg.Rows = cfg.RowsPerBatch
	src, err := generated(cfg)
	if err != nil {
		t.Fatal(err)
	}
	rec, err := src.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer rec.Release()
	want := touch(rec)
	seen := 0
	for _, b := range buffers(rec) {
		for _, i := range []int{0, len(b) / 2, len(b) - 1} {
			b[i]++
			if touch(rec) == want {
				t.Errorf("byte %d of a buffer of %d does not count", i, len(b))
			}
			b[i]--
			seen++
		}
	}
	if seen < 3*len(rec.Columns()) || touch(rec) != want {
		t.Errorf("%d bytes were tried; digest %x, want %x", seen, touch(rec), want)
	}
	cols := slices.Clone(rec.Columns())
	cols[0], cols[1] = cols[1], cols[0]
	fields := slices.Clone(rec.Schema().Fields())
	fields[0], fields[1] = fields[1], fields[0]
	swapped := array.NewRecordBatch(arrow.NewSchema(fields, nil), cols, rec.NumRows())
	defer swapped.Release()
	if touch(swapped) == want {
		t.Error("the order of columns does not count")
	}
}

// buffers are those of the arrays and of their dictionaries.
func buffers(rec arrow.RecordBatch) (out [][]byte) {
	for _, col := range rec.Columns() {
		all := col.Data().Buffers()
		if col.DataType().ID() == arrow.DICTIONARY {
			all = slices.Concat(all, col.Data().Dictionary().Buffers())
		}
		for _, b := range all {
			if b != nil && b.Len() > 0 {
				out = append(out, b.Bytes())
			}
		}
	}
	return out
}

// TestMain checks that no goroutine of a test is left.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	// Goroutines that were told to end may need a moment to be gone.
	for deadline := time.Now().Add(10 * time.Second); runtime.NumGoroutine() > before && time.Now().Before(deadline); {
		runtime.Gosched()
	}
	if n := runtime.NumGoroutine(); n > before && code == 0 {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "%d goroutines are left of %d:\n%s\n", n, before, buf[:runtime.Stack(buf, true)])
		code = 1
	}
	os.Exit(code)
}

// TestPeerHasTheRate: a slow disk is slow for the peer, too, whose page cache is not.
func TestPeerHasTheRate(t *testing.T) {
	r := newRig(t, table(1), table(2))
	r.Rate = 32 << 20
	res, err := r.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	least := time.Duration(float64(res.Bytes) / float64(r.Rate) * float64(time.Second))
	if got := res.Rounds[0].Peer; got.Write < least || got.Read < least {
		t.Errorf("%d bytes passed a disk of %d a second in %+v", res.Bytes, r.Rate, got)
	}
}

// TestWaitingForTheRateEnds with the context.
func TestWaitingForTheRateEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &runner{cfg: Config{Rate: 1000}}
		begun := time.Now()
		if err := p.passed(t.Context(), begun, 3000); err != nil || time.Since(begun) != 3*time.Second {
			t.Errorf("3000 bytes passed in %v: %v", time.Since(begun), err)
		}
		why := errors.New("why")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { cancel(why) })
		if err := p.passed(ctx, time.Now(), 1<<40); !errors.Is(err, why) || time.Since(begun) != 4*time.Second {
			t.Errorf("cancelled after a second it ended with %v at %v", err, time.Since(begun))
		}
	})
}
