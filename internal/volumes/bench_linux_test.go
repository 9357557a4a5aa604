package volumes_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// pinned returns n bytes as an arena has them: mapped, of huge pages, present.
func pinned(b *testing.B, n int64) []byte {
	b.Helper()
	m, err := unix.Mmap(-1, 0, int(n+2*mib), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Munmap(m) })
	_ = unix.Madvise(m, unix.MADV_HUGEPAGE)
	copy(m, random(n, 1))
	return m[:n:n]
}

// files is the real file system, and remembers the file that was opened last.
type files struct {
	disk.FS
	last disk.File
}

func (f *files) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	file, err := f.FS.OpenAnonymous(dir, direct)
	f.last = file
	return file, err
}

// raw transfers p to or from a memory that lies in one piece as a program would that
// knows the file: goroutines that each take the next request.
func raw(b *testing.B, s disk.Stats, file disk.File, e tier.FileMemory, p []byte, do func(f disk.File, p []byte, off int64) (int, error)) {
	_, _, at := e.Locate(0)
	n := int64(len(p))
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(int64(s.Depth), (n+s.Request-1)/s.Request) {
		wg.Go(func() {
			for {
				off := next.Add(s.Request) - s.Request
				if off >= n {
					return
				}
				q := p[off:min(off+s.Request, n)]
				if k, err := do(file, q, at+off); err != nil || k != len(q) {
					b.Errorf("%d bytes of %d: %v", k, len(q), err)
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkTransfer compares WriteAt and ReadAt with as many requests of the same
// length under way on the bare file, in the same place of it and the same state: files
// that lie elsewhere on the disk differ by more than what is measured here. The two
// take turns; the figures are medians in GiB/s, and their ratio.
func BenchmarkTransfer(b *testing.B) {
	for _, size := range []int64{8 * mib, 64 * mib} {
		for _, state := range []string{"write-fresh", "write-again", "read"} {
			b.Run(fmt.Sprintf("%s/%dMiB", state, size/mib), func(b *testing.B) { benchTransfer(b, state, size, volumes.Config{}) })
		}
	}
}

// BenchmarkRequest is how DefaultRequest and DefaultDepth were chosen.
func BenchmarkRequest(b *testing.B) {
	for _, c := range []struct {
		request int64
		depth   int
	}{{mib, 1}, {mib, 4}, {mib, 8}, {2 * mib, 2}, {2 * mib, 4}, {2 * mib, 8}, {4 * mib, 2}, {4 * mib, 4}} {
		for _, state := range []string{"write-again", "read"} {
			b.Run(fmt.Sprintf("%s/%dMiB×%d", state, c.request/mib, c.depth), func(b *testing.B) {
				benchTransfer(b, state, 64*mib, volumes.Config{Request: c.request, Depth: c.depth})
			})
		}
	}
}

func benchTransfer(b *testing.B, state string, size int64, cfg volumes.Config) {
	ctx := context.Background()
	p := pinned(b, size)
	fsys := &files{FS: disk.OS()}
	cfg.Capacity, cfg.Idle, cfg.FS = size, -1, fsys
	v := open(b, cfg)
	s := v.Stats()
	if !s.Direct || !s.Anonymous {
		b.Skip("needs anonymous files with direct I/O")
	}
	e := alloc(b, v, size)
	var ways [2]func()
	if state == "read" {
		write(b, e, p, 0)
		ways[0] = func() {
			if err := e.ReadAt(ctx, p, 0); err != nil {
				b.Fatal(err)
			}
		}
		ways[1] = func() { raw(b, s, fsys.last, e, p, disk.File.ReadAt) }
	} else {
		write(b, e, p, 0)
		ways[0] = func() { write(b, e, p, 0) }
		ways[1] = func() { raw(b, s, fsys.last, e, p, disk.File.WriteAt) }
	}
	renew := func() {
		if state != "write-fresh" {
			return
		}
		free(v, e)
		if _, err := v.Trim(ctx); err != nil {
			b.Fatal(err)
		}
		e = alloc(b, v, size)
	}
	var took [2][]float64
	b.SetBytes(size)
	turn := 0
	for b.Loop() {
		for i := range 2 { // the order alternates
			renew()
			who := (turn + i) % 2
			begin := time.Now()
			ways[who]()
			took[who] = append(took[who], time.Since(begin).Seconds())
		}
		turn++
	}
	free(v, e)
	rate := func(s []float64) float64 {
		slices.Sort(s)
		return float64(size) / (1 << 30) / s[len(s)/2]
	}
	b.ReportMetric(rate(took[0]), "GiB/s")
	b.ReportMetric(rate(took[1]), "raw-GiB/s")
	b.ReportMetric(rate(took[0])/rate(took[1]), "of-raw")
	b.ReportMetric(0, "MB/s") // of both together: says nothing
	b.ReportMetric(0, "ns/op")
}

// BenchmarkAllocFree is what the books cost when nothing fresh is needed.
func BenchmarkAllocFree(b *testing.B) {
	v := open(b, volumes.Config{Capacity: 1 << 30, Idle: -1})
	var keep, drop []tier.FileMemory
	for i := range 128 {
		e := alloc(b, v, 4*mib)
		if i%2 == 0 {
			keep = append(keep, e)
		} else {
			drop = append(drop, e)
		}
	}
	free(v, drop...)
	for _, size := range []int64{4 * mib, 64 * mib} {
		b.Run(fmt.Sprintf("%dMiB", size/mib), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				m, err := v.Alloc(size, nil)
				if err != nil {
					b.Fatal(err)
				}
				v.Free(m, func() {})
			}
		})
	}
	free(v, keep...)
}

// BenchmarkTrim is what giving room back costs, for 64 MiB that were written.
func BenchmarkTrim(b *testing.B) {
	p := pinned(b, 64*mib)
	v := open(b, volumes.Config{Capacity: 64 * mib, Idle: -1})
	b.SetBytes(64 * mib)
	for b.Loop() {
		b.StopTimer()
		e := alloc(b, v, 64*mib)
		write(b, e, p, 0)
		free(v, e)
		b.StartTimer()
		if _, err := v.Trim(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkEncrypt is what encryption costs: the same memory is written to and read from a
// volume that encrypts and one that does not, alternately, in room that was written
// before. The figures are medians in GiB/s.
func BenchmarkEncrypt(b *testing.B) {
	ctx := context.Background()
	for _, size := range []int64{8 * mib, 64 * mib} {
		for _, read := range []bool{false, true} {
			b.Run(fmt.Sprintf("read=%t/%dMiB", read, size/mib), func(b *testing.B) {
				p := pinned(b, size)
				var es [2]tier.FileMemory
				for i := range es {
					v := open(b, volumes.Config{Capacity: size, Idle: -1, Encrypt: i == 1})
					es[i] = alloc(b, v, size)
					defer free(v, es[i])
					write(b, es[i], p, 0)
				}
				var took [2][]float64
				turn := 0
				for b.Loop() {
					for i := range 2 {
						who := (turn + i) % 2
						do := es[who].WriteAt
						if read {
							do = es[who].ReadAt
						}
						begin := time.Now()
						if err := do(ctx, p, 0); err != nil {
							b.Fatal(err)
						}
						took[who] = append(took[who], time.Since(begin).Seconds())
					}
					turn++
				}
				rate := func(s []float64) float64 {
					slices.Sort(s)
					return float64(size) / (1 << 30) / s[len(s)/2]
				}
				b.ReportMetric(rate(took[0]), "plain-GiB/s")
				b.ReportMetric(rate(took[1]), "encrypted-GiB/s")
				b.ReportMetric(rate(took[1])/rate(took[0]), "of-plain")
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}
