package convert

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/internal/transfer"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// BenchmarkMove times Mover.Move, with everything that belongs to it, along every edge of one batch
// of a flights-like table. Beside each is the limit, measured alternately in the same run. It is
// memmove between two pinned regions, or direct I/O. The latter has as many concurrent requests of
// the same length, on the same place of the same file, which has been written before. Figures are
// medians in GiB/s, and the median of the ratios pair by pair.
func BenchmarkMove(b *testing.B) {
	for _, c := range []struct {
		rows int
		name string
	}{{350_000, "16MiB"}, {1_400_000, "64MiB"}} {
		for _, e := range []struct{ from, to tier.Kind }{
			{tier.GPU, tier.Host}, {tier.Host, tier.GPU}, {tier.Host, tier.Disk},
			{tier.Disk, tier.Host}, {tier.GPU, tier.Disk}, {tier.Disk, tier.GPU},
		} {
			b.Run(fmt.Sprintf("%s-%s/%s", e.from, e.to, c.name), func(b *testing.B) { benchMove(b, e.from, e.to, c.rows) })
		}
	}
}

// lastFile is the real file system, and remembers the file that was opened last.
type lastFile struct {
	disk.FS
	file disk.File
}

func (f *lastFile) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	file, err := f.FS.OpenAnonymous(dir, direct)
	f.file = file
	return file, err
}

func benchMove(b *testing.B, from, to tier.Kind, rows int) {
	rec := arrowgen.Flights(1, rows)
	defer rec.Release()
	l, err := image.NewLayout(rec, image.MaxInline)
	if err != nil {
		b.Fatal(err)
	}
	size := l.Desc.Body
	l.Close()
	files := &lastFile{FS: disk.OS()}
	m := newMachine(b, machineConfig{
		gpu: size, host: size + 16<<20, disk: size, chunk: 1 << 19, files: files, fast: true,
	})
	x := m.put(b, rec, from)
	move := func(k tier.Kind) {
		if err := m.mover.Move(b.Context(), x, reservation.AnyInTier(k)); err != nil {
			b.Fatal(err)
		}
	}
	place := func() int64 { // where in the file the batch lies
		t, err := x.TryTransit()
		if err != nil {
			b.Fatal(err)
		}
		_, _, at := t.Payload().(*batch.Image).Buffer().Memory().(tier.FileMemory).Locate(0)
		if err := t.Abort(); err != nil {
			b.Fatal(err)
		}
		return at
	}
	region := [2][]byte{pinned(b, size), pinned(b, size)}
	var limit func()
	if from != tier.Disk && to != tier.Disk {
		limit = func() { copy(region[0], region[1]) }
	}
	var took [2][]float64
	clock := func(who int, f func()) {
		begin := time.Now()
		f()
		took[who] = append(took[who], time.Since(begin).Seconds())
	}
	b.SetBytes(size)
	for round := 0; b.Loop(); round++ {
		m.settle() // what the last round freed is the limit's business in neither
		switch {
		case limit != nil:
			for i := range 2 { // the order alternates
				who := (round + i) % 2
				clock(who, []func(){func() { move(to) }, limit}[who])
			}
			move(from)
			// As the batch's, the region's bytes were last written by a copy, so
			// that both are read from as near or far.
			copy(region[1], region[0])
		case to == tier.Disk:
			clock(0, func() { move(to) })
			at := place()
			each(b, region[0], func(p []byte, off int64) (int, error) { return files.file.ReadAt(p, at+off) })
			clock(1, func() {
				each(b, region[0], func(p []byte, off int64) (int, error) { return files.file.WriteAt(p, at+off) })
			})
			move(from)
		default:
			at := place()
			clock(1, func() {
				each(b, region[0], func(p []byte, off int64) (int, error) { return files.file.ReadAt(p, at+off) })
			})
			clock(0, func() { move(to) })
			move(from)
		}
	}
	ratios := make([]float64, len(took[0]))
	for i := range ratios {
		ratios[i] = took[1][i] / took[0][i]
	}
	rate := func(s []float64) float64 { return float64(size) / (1 << 30) / median(s) }
	b.ReportMetric(rate(took[0]), "GiB/s")
	b.ReportMetric(rate(took[1]), "limit-GiB/s")
	b.ReportMetric(median(ratios), "of-limit")
	b.ReportMetric(0, "MB/s") // of everything in the loop: says nothing
	b.ReportMetric(0, "ns/op")
}

func median(s []float64) float64 {
	s = slices.Sorted(slices.Values(s))
	return s[len(s)/2]
}

// each does what a program would that knows the file: eight requests of 1 MiB
// under way.
func each(b *testing.B, p []byte, do func(p []byte, off int64) (int, error)) {
	const request = 1 << 20
	var next atomic.Int64
	var wg sync.WaitGroup
	for range transfer.StagedUnderWay {
		wg.Go(func() {
			for {
				off := next.Add(request) - request
				if off >= int64(len(p)) {
					return
				}
				q := p[off:min(off+request, int64(len(p)))]
				if n, err := do(q, off); err != nil || n != len(q) {
					b.Errorf("%d bytes of %d: %v", n, len(q), err)
				}
			}
		})
	}
	wg.Wait()
}

// pinned returns n bytes as an arena has them: mapped, of huge pages, present.
func pinned(b *testing.B, n int64) []byte {
	b.Helper()
	m, err := unix.Mmap(-1, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = unix.Munmap(m) })
	_ = unix.Madvise(m, unix.MADV_HUGEPAGE) // without them it is slower, and works
	for i := 0; i < len(m); i += tier.Page {
		m[i] = 1
	}
	return m
}
