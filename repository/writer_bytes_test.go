package repository

import (
	"testing"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/arrowgen"
)

// TestBytesOf: the bytes of slices add up to about those of the whole, for each type.
func TestBytesOf(t *testing.T) {
	const rows = 512
	for _, dt := range arrowgen.Types() {
		rec := arrowgen.New(3).Record(arrowgen.Schema(dt), rows)
		if bytesOf(rec.NewSlice(0, rows).Columns()) != bytesOf(rec.Columns()) {
			t.Errorf("%s: a slice of all has other bytes than all", dt)
		}
		if arrowgen.Within(dt, unscaled) {
			continue
		}
		whole, parts := bytesOf(rec.Columns()), int64(0)
		for from := int64(0); from < rows; from += 16 {
			parts += bytesOf(rec.NewSlice(from, from+16).Columns())
		}
		if parts < whole/2 || parts > 2*whole {
			t.Errorf("%s: %d bytes, and %d in slices", dt, whole, parts)
		}
	}
}

// unscaled reports whether all children of a slice of the type count. A Writer refuses unions.
func unscaled(dt arrow.DataType) bool {
	_, union := dt.(arrow.UnionType)
	return union || dt.ID() == arrow.RUN_END_ENCODED
}
