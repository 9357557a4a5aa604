package test

import (
	"container/heap"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// countingFS counts the bytes that are read from files: also those that a volume reads for itself.
type countingFS struct {
	disk.FS
	read *atomic.Int64
}

func (f countingFS) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	file, err := f.FS.OpenAnonymous(dir, direct)
	return countingFile{file, f.read}, err
}

func (f countingFS) Create(path string, direct bool) (disk.File, error) {
	file, err := f.FS.Create(path, direct)
	return countingFile{file, f.read}, err
}

type countingFile struct {
	disk.File
	read *atomic.Int64
}

func (f countingFile) ReadAt(p []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(p, off)
	f.read.Add(int64(n))
	return n, err
}

// sortedRun returns rows of flights with sorted keys before them, and behind them the negated keys and
// a word of a small dictionary. Eight rows with consecutive keys follow each other.
func sortedRun(seed uint64, rows int) arrow.RecordBatch {
	rnd := rand.New(rand.NewPCG(seed, 3))
	keys := make([]int64, rows)
	for i := range keys {
		if keys[i] = rnd.Int64() &^ 7; i%8 > 0 {
			keys[i] = keys[i-1] + 1
		}
	}
	slices.Sort(keys)
	word := array.NewDictionaryBuilder(memory.DefaultAllocator, &arrow.DictionaryType{
		IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String,
	}).(*array.BinaryDictionaryBuilder)
	key, negated := array.NewInt64Builder(memory.DefaultAllocator), array.NewInt64Builder(memory.DefaultAllocator)
	words := []string{"AA", "DL", "UA", "WN"}
	for _, k := range keys {
		key.Append(k)
		negated.Append(-k)
		_ = word.AppendString(words[k%4])
	}
	flights := arrowgen.Flights(seed, rows)
	columns := append([]arrow.Array{key.NewArray()}, flights.Columns()...)
	columns = append(columns, negated.NewArray(), word.NewArray())
	var fields []arrow.Field
	for i, c := range columns {
		fields = append(fields, arrow.Field{Name: string(rune('a' + i)), Type: c.DataType(), Nullable: true})
	}
	return array.NewRecordBatch(arrow.NewSchema(fields, nil), columns, int64(rows))
}

// keyOf returns a row's key, after checking that its other columns are those of the key.
func keyOf(t *testing.T, rec arrow.RecordBatch, row int) int64 {
	k := rec.Column(0).(*array.Int64).Value(row)
	last := int(rec.NumCols()) - 1
	words := rec.Column(last).(*array.Dictionary)
	word := words.Dictionary().(*array.String).Value(words.GetValueIndex(row))
	if rec.Column(last-1).(*array.Int64).Value(row) != -k || word != []string{"AA", "DL", "UA", "WN"}[k%4] {
		t.Fatalf("row %d of key %d has %d and %s", row, k, rec.Column(last-1).(*array.Int64).Value(row), word)
	}
	return k
}

// merging is the cursors of a merge, ordered by the keys of their present rows.
type merging struct {
	t     *testing.T
	heads []mergeHead
}

type mergeHead struct {
	cursor *repository.Cursor
	rec    arrow.RecordBatch
	row    int
	key    int64
}

func (m *merging) Len() int           { return len(m.heads) }
func (m *merging) Less(i, j int) bool { return m.heads[i].key < m.heads[j].key }
func (m *merging) Swap(i, j int)      { m.heads[i], m.heads[j] = m.heads[j], m.heads[i] }
func (m *merging) Push(any)           {}
func (m *merging) Pop() any           { m.heads = m.heads[:len(m.heads)-1]; return nil }

// next reads on where the rows of a head have ended; false at the end.
func (m *merging) next(h *mergeHead) bool {
	for h.rec == nil || h.row == int(h.rec.NumRows()) {
		rec, err := h.cursor.Next(m.t.Context())
		if err == io.EOF {
			return false
		}
		if err != nil {
			m.t.Fatal(err)
		}
		h.rec, h.row = rec, 0
	}
	h.key = keyOf(m.t, h.rec, h.row)
	return true
}

// merge merges partitions by one pass of cursors, which it closes. It calls row for each row in order,
// and before it reads on window.
func merge(
	t *testing.T, cursors []*repository.Cursor, row func(rec arrow.RecordBatch, row int), window func(),
) (rows int) {
	t.Helper()
	m := &merging{t: t}
	for _, c := range cursors {
		if h := (mergeHead{cursor: c}); m.next(&h) {
			m.heads = append(m.heads, h)
		}
	}
	heap.Init(m)
	for last := int64(-1); len(m.heads) > 0; rows++ {
		h := &m.heads[0]
		if h.key < last {
			t.Fatalf("row %d has the key %d after %d", rows, h.key, last)
		}
		last = h.key
		row(h.rec, h.row)
		if h.row++; h.row == int(h.rec.NumRows()) {
			window()
		}
		if m.next(h) {
			heap.Fix(m, 0)
		} else {
			heap.Pop(m)
		}
	}
	for _, c := range cursors {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	return rows
}

// cursorPart is which part of the runs and the memory of a merge tests use: all, unless in a hurry.
func cursorPart() int {
	switch {
	case testseed.Raced:
		return 20
	case testing.Short():
		return 4
	}
	return 1
}

// TestMergeOfManyRuns: 200 sorted runs of 1 MiB merge in 64 MiB of host memory in one pass, and no more
// than 1.3 times their bytes are read from the disk. With less on the disk's path, a quarter of the runs
// do in a quarter of the memory.
func TestMergeOfManyRuns(t *testing.T) {
	for _, c := range []struct {
		name    string
		codec   convert.Codec
		encrypt bool
		part    int // of the runs and the memory
	}{
		{"plain", convert.CodecNone, false, 4}, {"zstd", convert.CodecZstd, false, 4},
		{"encrypted", convert.CodecNone, true, 4}, {"both", convert.CodecZstd, true, 1},
	} {
		part := max(c.part, cursorPart())
		runs := 200 / part
		if testseed.Raced && c.name != "both" {
			continue // each row is compared, which takes long
		}
		t.Run(c.name, func(t *testing.T) {
			var read atomic.Int64
			cfg := cursorConfig(t, 8*mib, 64*mib/int64(part), 300*mib)
			cfg.Disks[0].FS, cfg.Disks[0].Encrypt, cfg.Codec = countingFS{cfg.Disks[0].FS, &read}, c.encrypt, c.codec
			eng, repo := cursorEngine(t, cfg, true)
			var partitions []int
			rows, want := 0, int64(0)
			for i := range runs {
				rec := sortedRun(uint64(i), 16_500) // about 1 MiB
				if err := repo.Put(t.Context(), i, rec, in(tier.Disk)); err != nil {
					t.Fatal(err)
				}
				for row := range 16_500 {
					want ^= keyOf(t, rec, row)
				}
				partitions, rows = append(partitions, i), rows+int(rec.NumRows())
				rec.Release()
			}
			repo.CloseInput()
			body, stored := int64(0), repo.Bytes(tier.Disk)
			for i := range runs {
				b, _ := repo.Peek(i)
				body += b.Info().Descriptor.Body
			}
			cursors, err := repo.Cursors(t.Context(), partitions, 48*mib/int64(part))
			if err != nil {
				t.Fatal(err)
			}
			read.Store(0)
			windows := 0
			count := func(rec arrow.RecordBatch, row int) { want ^= keyOf(t, rec, row) }
			merged := merge(t, cursors, count, func() { windows++ })
			if merged != rows || want != 0 {
				t.Errorf("%d of %d rows were merged, or other ones", merged, rows)
			}
			n := read.Load()
			t.Logf("%d MiB, %d MiB stored, %d MiB read (%.3f of the data, %.3f of what is stored) in %d windows", body/mib,
				stored/mib, n/mib, float64(n)/float64(body), float64(n)/float64(stored), windows)
			if n > body*13/10 {
				t.Errorf("%d bytes were read, of %d", n, body)
			}
			closeClean(t, eng)
		})
	}
}

// TestMergeInTwoPasses: 1,000 sorted runs merge in 64 MiB of host memory in two passes. The error of
// Cursors for all of them has what one needs, and so how many can be merged at a time.
func TestMergeInTwoPasses(t *testing.T) {
	if testseed.Raced {
		t.Skip("needs a build without the race detector: one goroutine compares each row, which takes long " +
			"with it; TestCursorsAtOnce reads cursors on several goroutines")
	}
	const each = 900 // rows
	part := cursorPart()
	runs, bytes := 1000/part, int64(32*mib/part)
	eng, repo := cursorEngine(t, cursorConfig(t, 8*mib, 64*mib/int64(part), 300*mib), true)
	plan, err := eng.Plan("second")
	if err != nil {
		t.Fatal(err)
	}
	second, err := plan.Manager().Create(repository.Key{Operator: "second"}, repository.Options{ByRows: true})
	if err != nil {
		t.Fatal(err)
	}
	var partitions []int
	var schema *arrow.Schema
	for i := range runs {
		whole := sortedRun(uint64(i), each+10)
		for _, rec := range []arrow.RecordBatch{whole.NewSlice(0, each), whole.NewSlice(each, each+10)} {
			if err := repo.Put(t.Context(), i, rec, in(tier.Disk)); err != nil {
				t.Fatal(err)
			}
			schema = rec.Schema()
		}
		partitions = append(partitions, i)
	}
	repo.CloseInput()
	_, err = repo.Cursors(t.Context(), partitions, bytes)
	short, ok := errors.AsType[*reservation.ExceededError](err)
	if !ok || short.Available > bytes/int64(runs) || short.Requested <= short.Available || short.Hint == "" {
		t.Fatalf("1,000 cursors: %v", err)
	}
	var groups []int
	for group := range slices.Chunk(partitions, int(bytes/short.Requested)/2) {
		cursors, err := repo.Cursors(t.Context(), group, bytes)
		if err != nil {
			t.Fatal(err)
		}
		w, err := second.Writer(t.Context(), len(groups), schema, mib/4, in(tier.Disk))
		if err != nil {
			t.Fatal(err)
		}
		check := func(err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		var from arrow.RecordBatch // which has the rows first to end-1, which w does not have yet
		var first, end int64
		add := func() {
			if from != nil {
				check(w.Append(t.Context(), from, first, end))
				from = nil
			}
		}
		merge(t, cursors, func(rec arrow.RecordBatch, row int) {
			if rec != from || int64(row) != end {
				add()
				from, first = rec, int64(row)
			}
			end = int64(row) + 1
		}, func() {
			add()
			check(w.Copy(t.Context()))
		})
		check(w.Flush(t.Context()))
		check(w.Close())
		groups = append(groups, len(groups))
	}
	second.CloseInput()
	cursors, err := second.Cursors(t.Context(), groups, bytes)
	if err != nil {
		t.Fatal(err)
	}
	rows := merge(t, cursors, func(arrow.RecordBatch, int) {}, func() {})
	if rows != runs*(each+10) || len(groups) < 2 {
		t.Errorf("%d rows were merged from %d groups", rows, len(groups))
	}
	closeClean(t, eng)
}

// TestCursorOfALargeBatch: a batch of 100 MiB is read through 32 MiB of GPU memory and 48 MiB of host
// memory.
func TestCursorOfALargeBatch(t *testing.T) {
	for _, codec := range []convert.Codec{convert.CodecZstd, convert.CodecNone}[:testseed.Rounds(2, 1)] {
		part := int64(1)
		if testseed.Raced {
			part = 20
		}
		cfg := cursorConfig(t, 32*mib/part, 48*mib/part, 160*mib)
		cfg.Codec = codec
		eng, repo := cursorEngine(t, cfg, true)
		rec := arrowgen.Flights(1, 2_300_000/int(part))
		if err := repo.Put(t.Context(), 0, rec); err != nil {
			t.Fatal(err)
		}
		repo.CloseInput()
		if b, _ := repo.Peek(0); b.Info().Descriptor.Body < 100*mib/part {
			t.Fatalf("a batch of %d bytes", b.Info().Descriptor.Body)
		}
		cursors := cursorsOf(t, repo, []int{0}, 24*mib/part)
		row := int64(0)
		for {
			got, err := cursors[0].Next(t.Context())
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := equal.Records(rec.NewSlice(row, row+got.NumRows()), got); err != nil {
				t.Fatalf("%s, rows from %d on: %v", codec, row, err)
			}
			row += got.NumRows()
		}
		if row != rec.NumRows() || cursors[0].Close() != nil {
			t.Errorf("%s: %d rows", codec, row)
		}
		closeClean(t, eng)
	}
}
