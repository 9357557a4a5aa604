package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// cursorConfig is an engine with a GPU, host memory and a disk in memory.
func cursorConfig(t *testing.T, gpu, host, disk int64) spillway.Config {
	t.Helper()
	dir := testfs.MemoryDir(t)
	return spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(gpu)}},
		HostMemory: spillway.Bytes(host),
		Disks:      []spillway.DiskConfig{{Dir: dir, FS: testfs.DiskFS(dir, nil), Capacity: spillway.Bytes(disk)}},
		Topology:   thisMachine(),
	}
}

// cursorEngine opens an engine with a repository of batches that are read by rows, or not.
func cursorEngine(t *testing.T, cfg spillway.Config, byRows bool) (*spillway.Engine, *repository.Repository) {
	t.Helper()
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("merge")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Manager().Create(repository.Key{Operator: "runs"}, repository.Options{ByRows: byRows})
	if err != nil {
		t.Fatal(err)
	}
	return eng, repo
}

// cursorsOf opens cursors with so many bytes each, or with as many as the error demands.
func cursorsOf(t *testing.T, repo *repository.Repository, partitions []int, each int64) []*repository.Cursor {
	t.Helper()
	for {
		each = (each + tier.Page - 1) / tier.Page * tier.Page
		cursors, err := repo.Cursors(t.Context(), partitions, each*int64(len(partitions)))
		short, ok := errors.AsType[*reservation.ExceededError](err)
		if err == nil {
			return cursors
		}
		if !ok || short.Requested <= each || short.Available > each {
			t.Fatalf("cursors of %d bytes each: %v", each, err)
		}
		each = short.Requested
	}
}

// cursorRun is what a partition of TestCursorsAtRandom has, and how far it was read.
type cursorRun struct {
	records []arrow.RecordBatch
	batch   int
	row     int64
}

// TestCursorsAtRandom reads batches of random types, slices, codecs and tiers in windows of random sizes,
// of several partitions in turns. Meanwhile batches are moved, and cursors are closed and opened again:
// then their batch begins again. The rows are those that were put, and all memory is free in the end.
func TestCursorsAtRandom(t *testing.T) {
	t.Parallel()
	for seed := range testseed.Each(t, testseed.Rounds(60, 12)) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) { t.Parallel(); cursorsAtRandom(t, seed) })
	}
}

func cursorsAtRandom(t *testing.T, seed uint64) {
	rnd := rand.New(rand.NewPCG(seed, 5))
	gen := arrowgen.New(seed)
	cfg := cursorConfig(t, 8*mib, 32*mib, 96*mib)
	codecs := []convert.Codec{convert.CodecNone, convert.CodecZstd, convert.CodecS2, convert.CodecBitpack}
	cfg.Codec, cfg.Disks[0].Encrypt = codecs[rnd.IntN(len(codecs))], rnd.IntN(3) == 0
	eng, repo := cursorEngine(t, cfg, rnd.IntN(3) > 0)
	types := []arrow.DataType{arrow.PrimitiveTypes.Int64}
	for all := arrowgen.Types(); len(types) < 2+rnd.IntN(4); {
		types = append(types, all[rnd.IntN(len(all))])
	}
	runs := make([]cursorRun, 1+rnd.IntN(4))
	partitions := make([]int, len(runs))
	for i := range runs {
		partitions[i] = i * 3
		for range rnd.IntN(4) {
			rows := rnd.IntN(3000)
			whole := gen.Record(arrowgen.Schema(types...), rows+rnd.IntN(50))
			from := rnd.Int64N(whole.NumRows() - int64(rows) + 1)
			rec := whole.NewSlice(from, from+int64(rows))
			in := reservation.AnyInTier(anyKind(rnd))
			if err := repo.Put(t.Context(), partitions[i], rec, repository.WithPlacement(in)); err != nil {
				t.Fatal(err)
			}
			if rows > 0 { // a cursor passes over batches without rows
				runs[i].records = append(runs[i].records, rec)
			}
		}
	}
	repo.CloseInput()
	each := int64(4<<10) << rnd.IntN(6)
	cursors := cursorsOf(t, repo, partitions, each)
	again := func(each int64) { // closes the cursors, and opens others unless each is 0
		for _, c := range cursors {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			_, err := c.Next(t.Context())
			if second := c.Close(); !errors.Is(err, tier.ErrReleased) || !errors.Is(second, tier.ErrReleased) {
				t.Errorf("a closed cursor: %v, %v", err, second)
			}
		}
		for i := range runs {
			runs[i].row = 0
		}
		if cursors = nil; each > 0 {
			cursors = cursorsOf(t, repo, partitions, each)
		}
	}
	for left := len(runs); left > 0; {
		switch i := rnd.IntN(len(runs)); rnd.IntN(12) {
		case 0:
			for b := range repo.Batches(partitions[i]) {
				err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(anyKind(rnd)))
				if rnd.IntN(4) == 0 {
					err = eng.Mover().MoveAs(t.Context(), b, reservation.AnyInTier(tier.GPU), batch.ScatteredImage)
				}
				if err != nil && !errors.Is(err, batch.ErrState) {
					t.Fatal(err)
				}
				break
			}
		case 1:
			again(int64(4<<10) << rnd.IntN(6))
		default:
			rec, err := cursors[i].Next(t.Context())
			run := &runs[i]
			if run.batch < len(run.records) && run.row == run.records[run.batch].NumRows() {
				run.batch, run.row = run.batch+1, 0
			}
			if run.batch == len(run.records) {
				if err != io.EOF {
					t.Fatalf("seed %d: a record or %v after the end", seed, err)
				}
				left = 0
				for i := range runs {
					if runs[i].batch < len(runs[i].records) {
						left++
					}
				}
				continue
			}
			if short, ok := errors.AsType[*reservation.ExceededError](err); ok { // a later batch needs more
				again(short.Requested)
				continue
			}
			if err != nil {
				t.Fatalf("seed %d, %v: %v", seed, types, err)
			}
			want := run.records[run.batch].NewSlice(run.row, run.row+rec.NumRows())
			if err := equal.Records(want, rec); err != nil || rec.NumRows() == 0 {
				t.Fatalf("seed %d, %v, rows from %d on: %v", seed, types, run.row, err)
			}
			run.row += rec.NumRows()
		}
	}
	again(0)
	closeClean(t, eng)
}

// flightsIn puts flights into a repository, in several batches on disk.
func flightsIn(t *testing.T, repo *repository.Repository, partition int, rows ...int) (all []arrow.RecordBatch) {
	t.Helper()
	for i, n := range rows {
		rec := sortedRun(uint64(i), n)
		if err := repo.Put(t.Context(), partition, rec, in(tier.Disk)); err != nil {
			t.Fatal(err)
		}
		all = append(all, rec)
	}
	return all
}

// TestCursorSurvivesEveryFault fails, corrupts and cancels each read of a disk once. The error is that
// fault, which names the batch, and the cursor then goes on with the same rows.
func TestCursorSurvivesEveryFault(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		byRows  bool
		codec   convert.Codec
		encrypt bool
	}{
		{"plain", true, convert.CodecNone, false}, {"zstd", true, convert.CodecZstd, false},
		{"bit packing, long blocks", false, convert.CodecBitpack, false}, {"encrypted", true, convert.CodecNone, true},
		{"both", true, convert.CodecS2, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			cfg := cursorConfig(t, mib, 16*mib, 32*mib)
			files := faultfs.New(cfg.Disks[0].FS, 1)
			cfg.Disks[0].FS, cfg.Codec, cfg.Disks[0].Encrypt = files, c.codec, c.encrypt
			eng, repo := cursorEngine(t, cfg, c.byRows)
			step, partition := testseed.Rounds(1, 5), 0
			if testseed.Raced {
				step = 30
			}
			for _, fault := range []string{"fail", "flip", "cancel"} {
				for skip, hit := 0, true; hit; skip += step {
					hit = cursorFault(t, repo, files, partition, fault, skip, c.codec == convert.CodecNone)
					partition++
				}
			}
			closeClean(t, eng)
		})
	}
}

// cursorFault reads a partition of its own with a fault at one read. It reports whether there were so
// many reads.
func cursorFault(
	t *testing.T, repo *repository.Repository, files *faultfs.FS, partition int, fault string, skip int, sure bool,
) (hit bool) {
	t.Helper()
	records := flightsIn(t, repo, partition, 2_500, 300)
	cursor := cursorsOf(t, repo, []int{partition}, 80<<10)[0]
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	rule := faultfs.Rule{Ops: []string{"read"}, Skip: skip, Times: 1, Hit: func(string, string) { hit = true }}
	switch fault {
	case "fail":
		rule.Effect = faultfs.Fail(syscall.EIO)
	case "flip":
		rule.Effect = faultfs.BitFlip()
	case "cancel":
		rule.Effect = faultfs.Do(func(string, string) { cancel() })
	}
	defer files.Add(rule)()
	failed := false
	var words *array.String // of the first record, as a copy of its rows has them
	for _, want := range records {
		for row := int64(0); row < want.NumRows(); {
			var uses sync.WaitGroup
			uses.Go(func() {
				if words != nil && len(words.Value(0)) != 2 {
					t.Errorf("%s of read %d: a word is %q", fault, skip, words.Value(0))
				}
			})
			rec, err := cursor.Next(ctx)
			uses.Wait()
			if err == nil && words == nil {
				words = rec.Column(int(rec.NumCols()) - 1).(*array.Dictionary).Dictionary().(*array.String)
				words.Retain()
				defer words.Release()
			}
			if err != nil {
				corrupt, isCorrupt := errors.AsType[*convert.CorruptError](err)
				switch {
				case failed || !hit:
					t.Fatalf("%s of read %d: %v", fault, skip, err)
				case fault == "fail" && errors.Is(err, syscall.EIO):
				case fault == "flip" && isCorrupt && corrupt.Batch != 0 && corrupt.Volume != "":
				case fault == "cancel" && errors.Is(err, context.Canceled):
					ctx = t.Context()
				default:
					t.Fatalf("%s of read %d: %v", fault, skip, err)
				}
				failed = true
				continue
			}
			if err := equal.Records(want.NewSlice(row, row+rec.NumRows()), rec); err != nil {
				t.Fatalf("%s of read %d: %v", fault, skip, err)
			}
			row += rec.NumRows()
		}
	}
	if hit && !failed && (fault == "fail" || fault == "flip" && sure) { // a flip may hit what no frame has
		t.Errorf("%s of read %d: no error", fault, skip)
	}
	if err := cursor.Close(); err != nil || repo.Len(partition) != 1 {
		t.Errorf("closing: %v, and %d batches are left", err, repo.Len(partition))
	}
	b, err := repo.Take(t.Context(), partition, batch.Idle)
	if err := errors.Join(err, b.Drop()); err != nil {
		t.Error(err)
	}
	return hit
}

// TestCursorsWaitAndEnd: Next waits for input, and ends with its context, with the input, and with the
// plan. Clear waits for a batch that a cursor has.
func TestCursorsWaitAndEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng, repo := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
		cursors := cursorsOf(t, repo, []int{0, 1, 2}, 64<<10)
		if cursors[0].Schema() != nil {
			t.Error("a schema before the first batch")
		}
		next := func(ctx context.Context, c *repository.Cursor) <-chan error {
			done := make(chan error, 1)
			go func() {
				_, err := c.Next(ctx)
				done <- err
			}()
			synctest.Wait()
			return done
		}
		waits := func(done <-chan error) {
			t.Helper()
			select {
			case err := <-done:
				t.Errorf("it did not wait: %v", err)
			default:
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		canceled, one := next(ctx, cursors[0]), next(t.Context(), cursors[1])
		waits(canceled)
		waits(one)
		cancel()
		if err := <-canceled; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		flightsIn(t, repo, 1, 5_000)
		flightsIn(t, repo, 0, 1_000)
		if err := <-one; err != nil || cursors[1].Schema() == nil {
			t.Errorf("after the input: %v", err)
		}
		if c, err := repo.Claim(t.Context(), 1, 1, repository.NoWait()); c != nil || err != nil {
			t.Errorf("the batch of a cursor was claimed: %v, %v", c, err)
		}
		ended := next(t.Context(), cursors[2])
		repo.CloseInput()
		if err := <-ended; err != io.EOF {
			t.Errorf("the end: %v", err)
		}
		waiting := next(t.Context(), cursors[2]) // there is nothing more
		if err := <-waiting; err != io.EOF {
			t.Errorf("after the end: %v", err)
		}
		if err := repo.Close(t.Context()); err != nil { // also what the cursor has
			t.Error(err)
		}
		for i, c := range cursors {
			if _, err := c.Next(t.Context()); !errors.Is(err, tier.ErrClosed) {
				t.Errorf("cursor %d of a closed repository: %v", i, err)
			}
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		if _, err := repo.Cursors(t.Context(), []int{0}, mib); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("cursors of a closed repository: %v", err)
		}
		closeClean(t, eng)
	})
}

// TestClearWaitsForCursors: Clear and a Close of the engine do not take memory from under a cursor.
func TestClearWaitsForCursors(t *testing.T) {
	eng, _ := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
	plan, err := eng.Plan("another")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("runs", 0)
	if err != nil {
		t.Fatal(err)
	}
	flightsIn(t, repo, 0, 5_000)
	c := cursorsOf(t, repo, []int{0}, 64<<10)[0]
	rec, err := c.Next(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := plan.Manager().Clear(ctx); !errors.Is(err, context.Canceled) || repo.Len(0) != 1 {
		t.Errorf("clearing: %v, and %d batches are left", err, repo.Len(0))
	}
	keyOf(t, rec, int(rec.NumRows())-1)
	leak, ok := errors.AsType[*spillway.LeakError](eng.Close())
	if !ok || !strings.Contains(leak.Error(), "cursors of runs:0") {
		t.Errorf("closing the engine: %v", leak)
	}
	keyOf(t, rec, int(rec.NumRows())-1) // its memory is there still
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// TestRowsOfACursorInUse: a cursor does not overwrite rows that are retained. Writer.Copy releases them.
func TestRowsOfACursorInUse(t *testing.T) {
	eng, repo := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
	source := flightsIn(t, repo, 0, 5_000, 2_000)
	repo.CloseInput()
	c := cursorsOf(t, repo, []int{0}, 64<<10)[0]
	plan, err := eng.Plan("out")
	if err != nil {
		t.Fatal(err)
	}
	out, err := plan.Repository("out", 0)
	if err != nil {
		t.Fatal(err)
	}
	w, err := out.Writer(t.Context(), 0, source[0].Schema(), 4*mib)
	if err != nil {
		t.Fatal(err)
	}
	for {
		rec, err := c.Next(t.Context())
		if errors.Is(err, repository.ErrRowsInUse) {
			if err := w.Copy(t.Context()); err != nil {
				t.Fatal(err)
			}
			rec, err = c.Next(t.Context())
		}
		if err == io.EOF {
			break
		}
		if err == nil {
			err = w.Append(t.Context(), rec, 0, rec.NumRows())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Flush(t.Context()), w.Close(), c.Close()); err != nil {
		t.Fatal(err)
	}
	out.CloseInput()
	rd, err := out.Reader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if !rd.Next() {
		t.Fatal(rd.Err())
	}
	if err := equal.Records(one(t, source), rd.RecordBatch()); err != nil {
		t.Error(err)
	}
	rd.Release()
	closeClean(t, eng)
}

// TestWriterCopyOfTypes: after Writer.Copy a cursor reads on, whatever the type of its rows. They come
// out as they went in.
func TestWriterCopyOfTypes(t *testing.T) {
	t.Parallel()
	for _, dt := range arrowgen.Types() {
		if hard(dt) {
			continue
		}
		t.Run(dt.String(), func(t *testing.T) {
			t.Parallel()
			eng, repo := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
			source := arrowgen.New(7).Record(arrowgen.Schema(arrow.PrimitiveTypes.Int64, dt), 2_000)
			if err := repo.Put(t.Context(), 0, source, in(tier.Disk)); err != nil {
				t.Fatal(err)
			}
			repo.CloseInput()
			out, err := eng.Plan("out")
			if err != nil {
				t.Fatal(err)
			}
			copies, err := out.Repository("out", 0)
			if err != nil {
				t.Fatal(err)
			}
			w, err := copies.Writer(t.Context(), 0, source.Schema(), 2*mib)
			if err != nil {
				t.Fatal(err)
			}
			c := cursorsOf(t, repo, []int{0}, 16<<10)[0]
			for {
				rec, err := c.Next(t.Context())
				if err == nil {
					err = errors.Join(w.Append(t.Context(), rec, 0, rec.NumRows()), w.Copy(t.Context()))
				}
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if err := errors.Join(w.Flush(t.Context()), w.Close(), c.Close()); err != nil {
				t.Fatal(err)
			}
			copies.CloseInput()
			rd, err := copies.Reader(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			if !rd.Next() {
				t.Fatal(rd.Err())
			}
			if err := equal.Records(source, rd.RecordBatch()); err != nil {
				t.Error(err)
			}
			rd.Release()
			closeClean(t, eng)
		})
	}
}

// TestCursorOfNoBytes: a batch that has rows but no bytes is read from each tier.
func TestCursorOfNoBytes(t *testing.T) {
	eng, _ := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
	for i, fields := range [][]arrow.Field{nil, {{Name: "a", Type: arrow.Null, Nullable: true}}} {
		plan, err := eng.Plan(fmt.Sprint(i))
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("rows", 0)
		if err != nil {
			t.Fatal(err)
		}
		rec := arrowgen.New(1).Record(arrow.NewSchema(fields, nil), 100)
		for _, k := range []tier.Kind{tier.GPU, tier.Host, tier.Disk} {
			if err := repo.Put(t.Context(), 0, rec, in(k)); err != nil {
				t.Fatal(err)
			}
		}
		repo.CloseInput()
		c := cursorsOf(t, repo, []int{0}, tier.Page)[0]
		for range 3 {
			if got, err := c.Next(t.Context()); err != nil {
				t.Error(err)
			} else if err := equal.Records(rec, got); err != nil {
				t.Error(err)
			}
		}
		if _, err := c.Next(t.Context()); err != io.EOF {
			t.Errorf("after the last row: %v", err)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	closeClean(t, eng)
}

// TestCursorsRefuse lists what Cursors cannot be made of.
func TestCursorsRefuse(t *testing.T) {
	eng, repo := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
	flightsIn(t, repo, 3, 5_000)
	for _, c := range []struct {
		name       string
		partitions []int
		bytes      int64
		want       error
	}{
		{"no page each", []int{0, 1}, 8191, reservation.ErrExceeded},
		{"too few bytes for the first batch", []int{0, 3}, 64 << 10, reservation.ErrExceeded},
		{"a partition below 0", []int{-1}, mib, repository.ErrPartition},
		{"a partition twice", []int{1, 2, 1}, mib, nil},
		{"more than there is", []int{0}, 1 << 40, reservation.ErrExceeded},
	} {
		cursors, err := repo.Cursors(t.Context(), c.partitions, c.bytes)
		if cursors != nil || err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	if cursors, err := repo.Cursors(t.Context(), nil, 0); len(cursors) != 0 || err != nil {
		t.Errorf("of nothing: %v", err)
	}
	closeClean(t, eng)
}

// TestCursorOfAProgramsOwnForm: a payload of a program is read as an image, by its converter.
func TestCursorOfAProgramsOwnForm(t *testing.T) {
	eng, repo := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
	if err := eng.Registry().Register(asIsIn(tier.Host), convert.ImageIn(tier.Host), imageOf); err != nil {
		t.Fatal(err)
	}
	rec := sortedRun(1, 3_000)
	r, err := eng.Reserve(t.Context(), reservation.AnyInTier(tier.Host), 256<<10)
	if err != nil {
		t.Fatal(err)
	}
	buf, err := r.Alloc(256 << 10)
	if err := errors.Join(err, r.Release()); err != nil {
		t.Fatal(err)
	}
	b, err := eng.NewBatch(&asIs{rec, buf})
	if err := errors.Join(err, repo.PutBatch(0, b)); err != nil {
		t.Fatal(err)
	}
	repo.CloseInput()
	rows := merge(t, cursorsOf(t, repo, []int{0}, 96<<10), func(arrow.RecordBatch, int) {}, func() {})
	if rows != 3_000 {
		t.Errorf("%d rows", rows)
	}
	closeClean(t, eng)
}

// TestCursorsShareDictionaries: a dictionary that batches share comes to host memory once for all
// cursors, stays while one reads a batch that has it, and is not part of their bytes.
func TestCursorsShareDictionaries(t *testing.T) {
	eng, repo := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
	words := wordList(1, 3_000)
	var partitions []int
	var records []arrow.RecordBatch
	for i := range 5 {
		records = append(records, numberedRecord(int64(i)*10_000, 4_000, words))
		if err := repo.Put(t.Context(), i, records[i], in(tier.Disk)); err != nil {
			t.Fatal(err)
		}
		partitions = append(partitions, i)
	}
	repo.CloseInput()
	host := tier.ID{Kind: tier.Host}
	had := int64(0)
	cursors := cursorsOf(t, repo, partitions, 32<<10)
	rows := make([]int64, len(cursors))
	for left := len(cursors); left > 0; {
		for i, c := range cursors {
			if rows[i] == records[i].NumRows() {
				continue
			}
			rec, err := c.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			n := eng.Mover().DictionaryBytes(host)
			if had = max(had, n); n != had || n == 0 {
				t.Fatalf("dictionaries of %d and of %d bytes are in host memory", had, n)
			}
			if err := equal.Records(records[i].NewSlice(rows[i], rows[i]+rec.NumRows()), rec); err != nil {
				t.Fatal(err)
			}
			if rows[i] += rec.NumRows(); rows[i] == records[i].NumRows() {
				left--
			}
		}
	}
	for _, c := range cursors {
		if _, err := c.Next(t.Context()); err != io.EOF {
			t.Errorf("after the last row: %v", err)
		}
	}
	if n := eng.Mover().DictionaryBytes(host); n != 0 {
		t.Errorf("%d bytes of dictionaries are left", n)
	}
	for _, c := range cursors {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	closeClean(t, eng)
}

// TestCursorsAtOnce: goroutines read a cursor each while others put and move batches, in memory that is
// too small for them.
func TestCursorsAtOnce(t *testing.T) {
	t.Parallel()
	const runs, batches, each = 6, 8, 3_000
	var want [batches]arrow.RecordBatch // in each run
	for i := range want {
		want[i] = sortedRun(uint64(i), each)
	}
	cfg := cursorConfig(t, mib, 4*mib, 64*mib)
	cfg.MonitorPeriod, cfg.Codec = time.Millisecond, convert.CodecS2
	eng, repo := cursorEngine(t, cfg, true)
	var partitions []int
	for i := range runs {
		partitions = append(partitions, i)
	}
	cursors := cursorsOf(t, repo, partitions, 80<<10)
	var readers, others sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	others.Go(func() {
		rnd := rand.New(rand.NewPCG(testseed.One(t), 1))
		for ctx.Err() == nil {
			for b := range repo.Batches(rnd.IntN(runs)) {
				err := eng.Mover().Move(ctx, b, reservation.AnyInTier(anyKind(rnd)))
				expected := err == nil || errors.Is(err, batch.ErrState) || errors.Is(err, tier.ErrNoSpace)
				if !expected && ctx.Err() == nil {
					t.Error(err)
				}
				break
			}
		}
	})
	others.Go(func() {
		for i := range runs * batches {
			if err := repo.Put(ctx, i%runs, want[i/runs]); err != nil {
				t.Error(err)
			}
		}
		repo.CloseInput()
	})
	for _, c := range cursors {
		readers.Go(func() {
			rows := 0
			for {
				rec, err := c.Next(t.Context())
				if err != nil {
					if err != io.EOF {
						t.Error(err)
					}
					break
				}
				want := want[rows/each].NewSlice(int64(rows%each), int64(rows%each)+rec.NumRows())
				if err := equal.Records(want, rec); err != nil {
					t.Errorf("rows from %d on: %v", rows, err)
				}
				rows += int(rec.NumRows())
			}
			if err := c.Close(); err != nil || rows != batches*each {
				t.Errorf("%d rows; closing: %v", rows, err)
			}
		})
	}
	readers.Wait()
	cancel()
	others.Wait()
	closeClean(t, eng)
}

// TestCursorKeepsItsRow: a converter gives a batch another form while a cursor reads it, and then an image
// that the cursor has no room for. With an image that fits, the cursor goes on with the same row.
func TestCursorKeepsItsRow(t *testing.T) {
	eng, repo := cursorEngine(t, cursorConfig(t, mib, 16*mib, 32*mib), true)
	small, large := viewsIn(2_000, 0), viewsIn(2_000, 256<<10)
	next := large
	back := func(ctx context.Context, _ batch.Payload, _ *reservation.Reservation) (batch.Payload, error) {
		r, err := eng.Reserve(ctx, reservation.AnyInTier(tier.Host), 512<<10) // as much as the image will need
		if err != nil {
			return nil, err
		}
		buf, err := r.Alloc(512 << 10)
		return &asIs{next, buf}, errors.Join(err, r.Release())
	}
	image := func(ctx context.Context, src batch.Payload, _ *reservation.Reservation) (batch.Payload, error) {
		r, err := eng.Reserve(ctx, reservation.AnyInTier(tier.Host), 512<<10)
		if err != nil {
			return nil, err
		}
		p, err := imageOf(ctx, src, r)
		return p, errors.Join(err, r.Release())
	}
	err := errors.Join(eng.Registry().Register(asIsIn(tier.Host), convert.ImageIn(tier.Host), image),
		eng.Registry().Register(convert.ImageIn(tier.Host), asIsIn(tier.Host), back),
		repo.Put(t.Context(), 0, small, in(tier.Host)))
	if err != nil {
		t.Fatal(err)
	}
	repo.CloseInput()
	b, _ := repo.Peek(0)
	c := cursorsOf(t, repo, []int{0}, 16<<10)[0]
	row := int64(0)
	for row < small.NumRows() {
		rec, err := c.Next(t.Context())
		if next == small && errors.Is(err, reservation.ErrExceeded) {
			t.Fatal(err)
		}
		if next == large && row > 0 {
			if !errors.Is(err, reservation.ErrExceeded) || !strings.Contains(err.Error(), "a cursor needs more") {
				t.Fatalf("an image that is too large: %v", err)
			}
			next = small
			err = eng.Mover().MoveAs(t.Context(), b, reservation.AnyInTier(tier.Host), "as-is")
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := equal.Records(small.NewSlice(row, row+rec.NumRows()), rec); err != nil {
			t.Fatalf("rows from %d on: %v", row, err)
		}
		if row += rec.NumRows(); next == large {
			if err := eng.Mover().MoveAs(t.Context(), b, reservation.AnyInTier(tier.Host), "as-is"); err != nil {
				t.Fatal(err)
			}
		}
	}
	if _, err := c.Next(t.Context()); err != io.EOF {
		t.Errorf("after the last row: %v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// viewsIn returns rows of a number and a view, in a buffer that has some more bytes than the views use.
func viewsIn(rows, more int) arrow.RecordBatch {
	number, views := array.NewInt64Builder(memory.DefaultAllocator), array.NewStringViewBuilder(memory.DefaultAllocator)
	views.SetBlockSize(uint(more + mib))
	for i := range rows {
		number.Append(int64(i))
		views.Append(fmt.Sprintf("row %06d", i%100))
	}
	views.Append("a view that is not inline")
	views.Append(strings.Repeat("!", more+13))
	all := views.NewArray()
	views.Release()
	column := array.NewSlice(all, 2, int64(rows+2)) // the last row has the buffer
	return array.NewRecordBatch(arrow.NewSchema([]arrow.Field{
		{Name: "number", Type: arrow.PrimitiveTypes.Int64}, {Name: "view", Type: arrow.BinaryTypes.StringView},
	}, nil), []arrow.Array{number.NewArray(), column}, int64(rows))
}
