package test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/equal"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// writerEngine opens an engine with a GPU, host memory and a disk.
func writerEngine(t *testing.T) (*spillway.Engine, *repository.Repository) {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(4 * mib)}},
		HostMemory: spillway.Bytes(8 * mib),
		Disks:      []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 * mib)}},
		Topology:   thisMachine(),
	})
	if err != nil {
		t.Fatal(err)
	}
	return eng, scanOf(t, eng)
}

// one concatenates records.
func one(t *testing.T, records []arrow.RecordBatch) arrow.RecordBatch {
	t.Helper()
	var columns []arrow.Array
	rows := int64(0)
	for _, r := range records {
		rows += r.NumRows()
	}
	for i := range records[0].NumCols() {
		var pieces []arrow.Array
		for _, r := range records {
			pieces = append(pieces, r.Column(int(i)))
		}
		c, err := array.Concatenate(pieces, memory.DefaultAllocator)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Release()
		columns = append(columns, c)
	}
	return array.NewRecordBatch(records[0].Schema(), columns, rows)
}

// TestWriter: the rows of random ranges come out as they went in, in batches of about the bytes that
// were asked for, in the spaces that were asked for. All of it is in reserved memory, which is free
// in the end.
func TestWriter(t *testing.T) {
	t.Parallel()
	words := wordList(1, 100)
	const bytes = 256 << 10
	for seed := range testseed.Each(t, 3) {
		rnd := rand.New(rand.NewPCG(seed, 41))
		eng, repo := writerEngine(t)
		var sources []arrow.RecordBatch
		for i := range int64(5) {
			sources = append(sources, numberedRecord(i*1_000_000, 20_000, words))
		}
		w, err := repo.Writer(t.Context(), 2, sources[0].Schema(), bytes, repository.WithPlacement(reservation.AnyInTier(tier.Host)))
		if err != nil {
			t.Fatal(err)
		}
		var want []arrow.RecordBatch
		for rows := int64(0); rows < 40_000; {
			n := 1 + rnd.Int64N(20)
			if rnd.IntN(100) == 0 {
				n = rnd.Int64N(8_000)
			}
			from := rnd.Int64N(20_000 - n)
			rec := sources[rnd.IntN(len(sources))]
			if err := w.Append(t.Context(), rec, from, from+n); err != nil {
				t.Fatal(err)
			}
			want = append(want, rec.NewSlice(from, from+n))
			rows += n
		}
		if err := w.Flush(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(t.Context()); err != nil { // of nothing
			t.Error(err)
		}
		if heap := eng.Stats().HeapOverflow; heap.Peak != 0 {
			t.Errorf("%d bytes were on the Go heap", heap.Peak)
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		repo.CloseInput()
		n := repo.Len(2)
		for b := range repo.Batches(2) {
			now := b.Info()
			size := now.Descriptor.Body
			if n--; now.Space.Kind != tier.Host || size > 2*bytes || n > 0 && size < bytes/2 {
				t.Errorf("a batch of %d bytes is in %s, and %d follow", size, now.Space, n)
			}
		}
		var got []arrow.RecordBatch
		rd, err := repo.Reader(t.Context(), 2)
		if err != nil {
			t.Fatal(err)
		}
		for rd.Next() {
			rec := rd.RecordBatch()
			rec.Retain()
			got = append(got, rec)
		}
		if rd.Err() != nil {
			t.Error(rd.Err())
		}
		rd.Release()
		all := one(t, got)
		if err := equal.Records(one(t, want), all); err != nil {
			t.Errorf("seed %d: %v", seed, err)
		}
		for _, rec := range append(got, all) {
			rec.Release()
		}
		closeClean(t, eng)
	}
}

// TestWriterOfTypes: rows of each type come out as they went in. Types that arrow-go cannot
// concatenate are an error, after which nothing was put.
func TestWriterOfTypes(t *testing.T) {
	t.Parallel()
	first, step := testseed.Share(t, 2)
	for i, dt := range arrowgen.Types() {
		if i%step != first {
			continue
		}
		t.Run(dt.String(), func(t *testing.T) {
			eng, repo := writerEngine(t)
			rec := arrowgen.New(7).Record(arrowgen.Schema(dt), 300)
			w, err := repo.Writer(t.Context(), 0, rec.Schema(), mib)
			if err != nil {
				t.Fatal(err)
			}
			err = errors.Join(w.Append(t.Context(), rec, 0, 100), w.Append(t.Context(), rec, 100, 101),
				w.Append(t.Context(), rec, 101, 300), w.Flush(t.Context()))
			if err != nil && !hard(dt) {
				t.Error(err)
			}
			if err != nil && repo.Total() != 0 {
				t.Errorf("%d batches were put after %v", repo.Total(), err)
			}
			if err := w.Close(); err != nil {
				t.Error(err)
			}
			repo.CloseInput()
			rd, err := repo.Reader(t.Context(), 0)
			if err == nil {
				for rd.Next() {
					if err := equal.Records(rec, rd.RecordBatch()); err != nil {
						t.Error(err)
					}
				}
				if rd.Err() != nil {
					t.Error(rd.Err())
				}
				rd.Release()
			} else if !hard(dt) {
				t.Error(err)
			}
			closeClean(t, eng)
		})
	}
}

// hard reports whether arrow-go cannot concatenate arrays of a type, or not always.
func hard(dt arrow.DataType) bool {
	return arrowgen.Within(dt, func(dt arrow.DataType) bool {
		switch dt := dt.(type) {
		case arrow.UnionType:
			return true
		case arrow.ExtensionType:
			switch dt.StorageType().(type) {
			case arrow.ExtensionType, *arrow.ListViewType, *arrow.LargeListViewType:
				return true
			}
		}
		return false
	})
}

// TestWriterErrors: what makes no sense is refused; after an error of a put the writer can only be
// closed; rows that were not flushed are dropped, and no memory stays reserved.
func TestWriterErrors(t *testing.T) {
	t.Parallel()
	eng, repo := writerEngine(t)
	rec := numberedRecord(0, 20_000, wordList(1, 100))
	for name, make := range map[string]func() (*repository.Writer, error){
		"no schema":  func() (*repository.Writer, error) { return repo.Writer(t.Context(), 0, nil, mib) },
		"no bytes":   func() (*repository.Writer, error) { return repo.Writer(t.Context(), 0, rec.Schema(), 0) },
		"partition":  func() (*repository.Writer, error) { return repo.Writer(t.Context(), -1, rec.Schema(), mib) },
		"the memory": func() (*repository.Writer, error) { return repo.Writer(t.Context(), 0, rec.Schema(), 1<<40) },
	} {
		if w, err := make(); w != nil || err == nil {
			t.Errorf("%s: %v, %v", name, w, err)
		}
	}
	w, err := repo.Writer(t.Context(), 0, rec.Schema(), 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	var se *repository.SchemaError
	other := rec.NewSlice(0, 1)
	other = array.NewRecordBatch(arrow.NewSchema(other.Schema().Fields()[:1], nil), other.Columns()[:1], 1)
	if err := w.Append(t.Context(), other, 0, 1); !errors.As(err, &se) {
		t.Errorf("another schema: %v", err)
	}
	if err := w.Append(t.Context(), nil, 0, 1); err == nil {
		t.Errorf("no record: %v", err)
	}
	for _, r := range [][2]int64{{-1, 2}, {3, 2}, {0, rec.NumRows() + 1}} {
		if err := w.Append(t.Context(), rec, r[0], r[1]); err == nil {
			t.Errorf("rows %d to %d are no error", r[0], r[1])
		}
	}
	if err := w.Append(t.Context(), rec, 0, 100); err != nil { // the errors above change nothing
		t.Fatal(err)
	}
	if repo.Total() != 0 {
		t.Errorf("%d batches were put early", repo.Total())
	}
	if err := w.Close(); err != nil { // the rows are dropped
		t.Error(err)
	}
	for _, err := range []error{w.Close(), w.Flush(t.Context()), w.Append(t.Context(), rec, 0, 1)} {
		if !errors.Is(err, tier.ErrReleased) {
			t.Errorf("after Close: %v", err)
		}
	}

	w, err = repo.Writer(t.Context(), 0, rec.Schema(), 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	repo.CloseInput()
	if err := w.Append(t.Context(), rec, 0, rec.NumRows()); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("into a closed input: %v", err)
	}
	if err := w.Flush(t.Context()); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("after an error: %v", err)
	}
	if err := w.Close(); err != nil || repo.Total() != 0 {
		t.Errorf("%v, %d batches", err, repo.Total())
	}
	closeClean(t, eng)
}

// TestWriterOfLargeRows: rows that are larger than the batches come one by one, in memory that the
// writer reserves for them.
func TestWriterOfLargeRows(t *testing.T) {
	t.Parallel()
	eng, repo := writerEngine(t)
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{{Name: "b", Type: arrow.BinaryTypes.Binary}}, nil))
	for range 3 {
		b.Field(0).(*array.BinaryBuilder).Append(make([]byte, mib))
	}
	rec := b.NewRecordBatch()
	w, err := repo.Writer(t.Context(), 0, rec.Schema(), 4096)
	if err != nil {
		t.Fatal(err)
	}
	for i := range int64(3) {
		if err := errors.Join(w.Append(t.Context(), rec, i, i+1), w.Flush(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
	if repo.Total() != 3 || eng.Stats().HeapOverflow.Bytes != 0 {
		t.Errorf("%d batches, %d bytes on the Go heap", repo.Total(), eng.Stats().HeapOverflow.Bytes)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestWriterOfSlices: a slice of a record counts the bytes of its rows, not those of the whole.
func TestWriterOfSlices(t *testing.T) {
	t.Parallel()
	eng, repo := writerEngine(t)
	rec := numberedRecord(0, 20_000, wordList(1, 100))
	const bytes = 256 << 10
	w, err := repo.Writer(t.Context(), 0, rec.Schema(), bytes, repository.WithPlacement(reservation.AnyInTier(tier.Host)))
	if err != nil {
		t.Fatal(err)
	}
	for from := int64(0); from < 20_000; from += 50 {
		part := rec.NewSlice(from, from+50)
		if err := w.Append(t.Context(), part, 0, 50); err != nil {
			t.Fatal(err)
		}
		part.Release()
	}
	if err := w.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := repo.Len(0)
	t.Log(n)
	for b := range repo.Batches(0) {
		size := b.Info().Descriptor.Body
		if n--; size > 2*bytes || n > 0 && size < bytes/2 {
			t.Errorf("a batch of %d bytes, and %d follow", size, n)
			break
		}
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestWriterAfterItsContext: the end of a context in the middle of a put leaves no memory and no
// batch behind.
func TestWriterAfterItsContext(t *testing.T) {
	t.Parallel()
	eng, repo := writerEngine(t)
	rec := numberedRecord(0, 20_000, wordList(1, 100))
	w, err := repo.Writer(t.Context(), 0, rec.Schema(), 64<<10)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.Append(ctx, rec, 0, 10); err != nil {
		t.Errorf("rows that are only gathered: %v", err)
	}
	if err := w.Append(ctx, rec, 0, 20_000); !errors.Is(err, context.Canceled) || repo.Total() != 0 {
		t.Errorf("%v, and %d batches were put", err, repo.Total())
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}
