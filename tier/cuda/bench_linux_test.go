package cuda_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// BenchmarkCopy compares copies by a device, and waiting for them, with the same by the driver's
// own calls, alternately; a ratio of 1 is that the device costs nothing. The emulator is as fast as
// memory.
func BenchmarkCopy(b *testing.B) {
	for _, size := range []int64{64 << 10, 1 << 20, 64 << 20} {
		for _, up := range []bool{true, false} {
			name := "device-host"
			if up {
				name = "host-device"
			}
			b.Run(fmt.Sprintf("%s/%dKiB", name, size>>10), func(b *testing.B) { benchmarkCopy(b, size, up) })
		}
	}
}

func benchmarkCopy(b *testing.B, size int64, up bool) {
	e := cudatest.New(b, cudatest.Config{Memory: 4 * size})
	mem, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
	must(b, err)
	defer func() { must(b, unix.Munmap(mem)) }()
	d, err := cuda.Load(e.Path)
	must(b, err)
	dev, err := d.OpenDevice(cuda.Config{})
	must(b, err)
	defer func() { must(b, dev.Close()) }()
	must(b, dev.Pin(mem))
	s, err := dev.NewStream()
	must(b, err)
	at, err := dev.Alloc(s, size)
	must(b, err)
	ours := func() {
		if up {
			must(b, dev.CopyToDevice(s, at, mem))
		} else {
			must(b, dev.CopyToHost(s, mem, at))
		}
		done, err := dev.Record(s)
		must(b, err)
		must(b, tier.Wait(context.Background(), done))
	}
	lib, err := driver.Load(e.Path)
	must(b, err)
	raw, err := lib.Open(0, 0)
	must(b, err)
	defer func() { must(b, raw.Close()) }()
	var stream driver.Stream
	to := driver.Ptr(at) // the same memory: its pages may be better than others
	must(b, raw.Here(func(c *driver.Calls) (err error) {
		c.KnowHost(extent.Address(mem), size)
		stream, err = c.NewStream()
		return err
	}))
	defer func() {
		must(b, raw.Here(func(c *driver.Calls) error { return c.DestroyStream(stream) }))
	}()
	limit := func() { // the thread waits in the driver
		must(b, raw.Here(func(c *driver.Calls) error {
			if up {
				must(b, c.CopyToDevice(stream, to, extent.Address(mem), size))
			} else {
				must(b, c.CopyToHost(stream, extent.Address(mem), to, size))
			}
			return c.SyncStream(stream)
		}))
	}
	ours()
	limit()
	var ratios, mine []float64
	for i := 0; b.Loop(); i++ {
		var t [2]time.Duration
		for k := range t {
			f := [2]func(){ours, limit}[(k+i)%2]
			began := time.Now()
			f()
			t[(k+i)%2] = time.Since(began)
		}
		ratios = append(ratios, t[1].Seconds()/t[0].Seconds())
		mine = append(mine, t[0].Seconds())
	}
	slices.Sort(ratios)
	slices.Sort(mine)
	b.ReportMetric(ratios[len(ratios)/2], "of-limit")
	b.ReportMetric(float64(size)/mine[len(mine)/2]/(1<<30), "GiB/s")
}
