package arrowgen

import (
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// unvalidated reports whether array.ValidateFull rejects valid arrays of a type. It demands more of
// unions and dictionaries than the format does.
func unvalidated(dt arrow.DataType) bool {
	switch dt.ID() {
	case arrow.DENSE_UNION: // demands increasing offsets
		return true
	case arrow.EXTENSION: // ignores the dictionary of the storage
		return true
	}
	if n, ok := dt.(arrow.NestedType); ok {
		for _, f := range n.Fields() {
			if unvalidated(f.Type) {
				return true
			}
		}
	}
	if d, ok := dt.(*arrow.DictionaryType); ok {
		return unvalidated(d.ValueType)
	}
	return false
}

// TestArraysAreValid validates arrays of all types with arrow-go and checks that their memory is
// freed.
func TestArraysAreValid(t *testing.T) {
	for _, dt := range Types() {
		for _, nulls := range []float64{0, 0.3, 1} {
			for _, plain := range []bool{true, false} {
				for _, rows := range []int{0, 1, 33} {
					mem := memory.NewCheckedAllocator(memory.NewGoAllocator())
					g := New(uint64(rows))
					g.Mem, g.Nulls, g.Plain = mem, nulls, plain
					a := g.Array(dt, rows)
					if a.Len() != rows {
						t.Errorf("%s: %d rows, want %d", dt, a.Len(), rows)
					}
					if !unvalidated(dt) {
						if err := array.ValidateFull(a); err != nil {
							t.Errorf("%s (nulls %v, plain %v): %v", dt, nulls, plain, err)
						}
					}
					a.Release()
					mem.AssertSize(t, 0)
				}
			}
		}
	}
}

// TestEveryType fails if a new version of arrow-go has a type that Types lacks.
func TestEveryType(t *testing.T) {
	seen := make(map[arrow.Type]bool)
	for _, dt := range Types() {
		seen[dt.ID()] = true
	}
	for id := arrow.NULL; id <= arrow.DECIMAL64; id++ {
		if !seen[id] {
			t.Errorf("no %s", id)
		}
	}
	if next := (arrow.DECIMAL64 + 1).String(); next[:5] != "Type(" {
		t.Errorf("arrow-go has a type beyond DECIMAL64: %s", next)
	}
}

func TestSameSeedSameData(t *testing.T) {
	a, b := New(7).RandomRecord(6, 50, 3), New(7).RandomRecord(6, 50, 3)
	defer a.Release()
	defer b.Release()
	if a.NumCols() != b.NumCols() || a.NumRows() != b.NumRows() || !a.Schema().Equal(b.Schema()) {
		t.Errorf("%v and %v", a.Schema(), b.Schema())
	}
}

func TestTables(t *testing.T) {
	for _, rec := range []arrow.RecordBatch{Flights(1, 100), Strings(1, 100, 3), Ints(1, 100, 2)} {
		if err := array.ValidateRecordFull(rec); err != nil {
			t.Error(err)
		}
		if rec.NumRows() != 100 {
			t.Errorf("%d rows", rec.NumRows())
		}
		rec.Release()
	}
}
