package host

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"github.com/spillway-db/spillway/tier"
)

// BenchmarkAllocFree is what drawing and freeing a body costs, in an arena that is
// half full of small pieces.
func BenchmarkAllocFree(b *testing.B) {
	a := open(b, Config{Capacity: 1 << 30, Node: -1})
	var rest []tier.HostMemory
	for i := range 8192 {
		m := alloc(b, a, 64<<10)
		if i%2 == 0 {
			defer free(a, m)
		} else {
			rest = append(rest, m)
		}
	}
	free(a, rest...)
	cuts := make([]int64, 1<<9)
	for i := range cuts {
		cuts[i] = int64(i+1) * 64 << 10
	}
	for _, size := range []int64{64 << 10, 32 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				m, err := a.Alloc(size, cuts[:size>>16-1])
				if err != nil {
					b.Fatal(err)
				}
				a.Free(m, func() {})
			}
		})
	}
}

// BenchmarkFirstWrite copies into memory that is new, that is touched ahead of use as far
// as the window goes, that was touched as a whole, and that was written before, which is
// the limit.
func BenchmarkFirstWrite(b *testing.B) {
	const size, piece = 256 << 20, 4 << 20
	src := make([]byte, size)
	for i := range src {
		src[i] = byte(i)
	}
	write := func(b *testing.B, cfg Config) time.Duration {
		cfg.Capacity, cfg.Node, cfg.Huge = size, -1, true
		a := open(b, cfg)
		defer a.Close()
		for cfg.Touch && a.Stats().Touched < min(minAhead, size/16) { // as of an engine that has been open for a moment
			time.Sleep(time.Millisecond)
		}
		begin := time.Now()
		for off := int64(0); off < size; off += piece {
			m := alloc(b, a, piece)
			defer free(a, m)
			copy(m.Extents()[0], src[off:])
		}
		return time.Since(begin)
	}
	whole := func(b *testing.B) time.Duration {
		a := open(b, Config{Capacity: size, Node: -1, Huge: true, Touch: true})
		defer a.Close()
		m := alloc(b, a, size)
		defer free(a, m)
		<-a.touchDone
		begin := time.Now()
		copy(m.Extents()[0], src)
		return time.Since(begin)
	}
	again := open(b, Config{Capacity: size, Node: -1, Huge: true})
	m := alloc(b, again, size)
	defer free(again, m)
	copy(m.Extents()[0], src)
	var fresh, window, touched, limit time.Duration
	n := 0
	for b.Loop() {
		fresh += write(b, Config{})
		window += write(b, Config{Touch: true})
		touched += whole(b)
		begin := time.Now()
		copy(m.Extents()[0], src)
		limit += time.Since(begin)
		n++
	}
	rate := func(d time.Duration) float64 { return float64(n) * size / (1 << 30) / d.Seconds() }
	b.ReportMetric(rate(fresh), "new-GiB/s")
	b.ReportMetric(rate(limit), "limit-GiB/s")
	b.ReportMetric(rate(fresh)/rate(limit), "new/limit")
	b.ReportMetric(rate(window)/rate(limit), "window/limit")
	b.ReportMetric(rate(touched)/rate(limit), "touched/limit")
}

func BenchmarkTrim(b *testing.B) {
	a := open(b, Config{Capacity: 256 << 20, Node: -1, Huge: true})
	b.SetBytes(256 << 20)
	for b.Loop() {
		b.StopTimer()
		m := alloc(b, a, 256<<20)
		for e := m.Extents()[0]; len(e) > 0; e = e[min(len(e), 4096):] {
			e[0] = 1
		}
		free(a, m)
		b.StartTimer()
		trim(a)
	}
}

// BenchmarkRelocate allocates, writes and frees memory that has a free range, and memory that has to
// be relocated.
func BenchmarkRelocate(b *testing.B) {
	const size = 8 << 20
	src := bytes.Repeat([]byte{1}, size)
	for _, name := range []string{"range", "relocated"} {
		b.Run(name, func(b *testing.B) {
			a := open(b, Config{Capacity: 64 << 20, Node: -1, Huge: true})
			if name == "relocated" {
				held := inPieces(b, a)
				defer func() { free(a, held...) }()
			}
			b.SetBytes(size)
			for b.Loop() {
				m := alloc(b, a, size)
				copy(m.Extents()[0], src)
				free(a, m)
			}
		})
	}
}
