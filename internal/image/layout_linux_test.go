package image

import (
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/arrowgen"
)

// TestWideOffsets lays out strings of more than 4 GiB, of which only the pages
// that are looked at exist: every position is computed in 64 bits.
func TestWideOffsets(t *testing.T) {
	const n, value = 5, 1 << 30
	values, err := syscall.Mmap(-1, 0, 3+n*value, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	if err != nil {
		t.Skip("needs address space: ", err)
	}
	defer syscall.Munmap(values)
	offsets := make([]int64, n+1)
	for i := range offsets {
		offsets[i] = 3 + int64(i)*value
	}
	copy(values[3+4*value:], "far away")
	d := array.NewData(arrow.BinaryTypes.LargeString, n, bufs(nil, offsets, nil), nil, 0, 0)
	d.Buffers()[2] = memory.NewBufferBytes(values)
	defer d.Release()
	col := array.NewLargeStringData(d)
	defer col.Release()
	whole := array.NewRecordBatch(arrowgen.Schema(arrow.BinaryTypes.LargeString), []arrow.Array{col}, n)
	defer whole.Release()
	rec := whole.NewSlice(1, n)
	defer rec.Release()
	l, err := NewLayout(rec, MaxInline)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Desc.Body != 4096+4*value || fmt.Sprint(l.Desc.Cuts()) != "[4096]" {
		t.Errorf("%d bytes, cuts %v", l.Desc.Body, l.Desc.Cuts())
	}
	page := make([]byte, 4096)
	fill(page, 0, l.pieces)
	if got := arrow.Int64Traits.CastFromBytes(page[:40]); !slices.Equal(got, []int64{0, value, 2 * value, 3 * value, 4 * value}) {
		t.Errorf("%v", got)
	}
	fill(page, 4096+3*value, l.pieces[1:])
	if string(page[:8]) != "far away" {
		t.Errorf("%q", page[:8])
	}
}
