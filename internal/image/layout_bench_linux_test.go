package image

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/internal/arrowgen"
)

// touched returns n bytes of anonymous memory in huge pages, as a host arena
// has them, all of which exist.
func touched(b *testing.B, n int64) []byte {
	b.Helper()
	m, err := syscall.Mmap(-1, 0, int(n), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		b.Skip("needs address space: ", err)
	}
	b.Cleanup(func() { syscall.Munmap(m) })
	_ = syscall.Madvise(m, 14) // MADV_HUGEPAGE; without it the benchmark is only slower
	for i := 0; i < len(m); i += 4096 {
		m[i] = 1
	}
	return m
}

// beside runs work in turn with its limit, and reports the median of the
// limit's time over the work's.
func beside(b *testing.B, limit, work func()) {
	b.Helper()
	b.ReportAllocs()
	limit()
	work()
	var ratios []float64
	for b.Loop() {
		b.StopTimer()
		t := time.Now()
		limit()
		least := time.Since(t)
		b.StartTimer()
		t = time.Now()
		work()
		ratios = append(ratios, least.Seconds()/time.Since(t).Seconds())
	}
	slices.Sort(ratios)
	b.ReportMetric(ratios[len(ratios)/2], "of-memmove")
}

// BenchmarkLayout lays tables out in an arena, planning included. The limit,
// beside which it runs, is one memmove of as many bytes from Go's heap to another
// such arena.
func BenchmarkLayout(b *testing.B) {
	slice := func(rec arrow.RecordBatch) arrow.RecordBatch { return rec.NewSlice(1001, rec.NumRows()-77) }
	for _, c := range []struct {
		name string
		make func() arrow.RecordBatch
	}{
		{"flights", func() arrow.RecordBatch { return arrowgen.Flights(1, 2_500_000) }},
		{"flights-slice", func() arrow.RecordBatch { return slice(arrowgen.Flights(1, 2_500_000)) }},
		{"strings20", func() arrow.RecordBatch { return arrowgen.Strings(1, 500_000, 20) }},
		{"strings20-slice", func() arrow.RecordBatch { return slice(arrowgen.Strings(1, 500_000, 20)) }},
		{"ints", func() arrow.RecordBatch { return arrowgen.Ints(1, 2_000_000, 8) }},
		{"ints-slice", func() arrow.RecordBatch { return slice(arrowgen.Ints(1, 2_000_000, 8)) }},
		{"flights-8MiB", func() arrow.RecordBatch { return arrowgen.Flights(1, 180_000) }},
		{"flights-64KiB", func() arrow.RecordBatch { return arrowgen.Flights(1, 1_400) }},
	} {
		rec := c.make()
		l, err := NewLayout(rec, MaxInline)
		if err != nil {
			b.Fatal(err)
		}
		size := l.Desc.Body
		l.Close()
		source := make([]byte, size)
		for i := range source {
			source[i] = byte(i >> 7)
		}
		other, arena := touched(b, size), touched(b, size)
		memmove := func() { copy(other, source) }
		for _, way := range []string{"sums", "no-sums", "pieces"} {
			b.Run(fmt.Sprintf("%s/%s", c.name, way), func(b *testing.B) {
				b.SetBytes(size)
				beside(b, memmove, func() {
					l, err := NewLayout(rec, MaxInline)
					if err != nil {
						b.Fatal(err)
					}
					switch way {
					case "sums":
						err = l.WriteTo([][]byte{arena})
					case "no-sums":
						fill(arena, 0, l.pieces)
						l.pos = l.Desc.Body
					case "pieces":
						for at := int64(0); at < size && err == nil; {
							end := min(size, at+8<<20)
							err = l.Write(arena[at:end], at)
							at = end
						}
					}
					if err != nil {
						b.Fatal(err)
					}
					if _, err := l.Descriptor(); err != nil {
						b.Fatal(err)
					}
					l.Close()
				})
			})
		}
		rec.Release()
	}
}

// BenchmarkOpen opens and releases a record of string columns. There is no copy
// to compare it with: the limit is nothing.
func BenchmarkOpen(b *testing.B) {
	for _, cols := range []int{1, 20} {
		rec := arrowgen.Strings(1, 1000, cols)
		d, body, _ := LaidOut(b, rec)
		b.Run(fmt.Sprintf("strings%d", cols), func(b *testing.B) {
			b.ReportAllocs()
			extents := [][]byte{body}
			for b.Loop() {
				back, err := Open(d, extents, nil)
				if err != nil {
					b.Fatal(err)
				}
				back.Release()
			}
		})
		rec.Release()
	}
}

// BenchmarkPlan is what a layout costs before a byte is written.
func BenchmarkPlan(b *testing.B) {
	for _, rows := range []int{1000, 1_000_000} {
		rec := arrowgen.Flights(1, rows)
		b.Run(fmt.Sprintf("flights/%d", rows), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				l, err := NewLayout(rec, MaxInline)
				if err != nil {
					b.Fatal(err)
				}
				l.Close()
			}
		})
		rec.Release()
	}
}
