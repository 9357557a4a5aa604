package cuda_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
)

// BenchmarkCall is the limit of all others: a call where the context is current.
func BenchmarkCall(b *testing.B) {
	r := open(b, cudatest.Config{})
	b.ReportAllocs()
	r.do(func(c *cuda.Calls) error {
		for b.Loop() {
			if _, _, err := c.MemInfo(); err != nil {
				return err
			}
		}
		return nil
	})
}

// BenchmarkCopy puts a copy of 4 KiB and waits for its mark: what a mover would see of a
// device with no delay.
func BenchmarkCopy(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	s, p := r.stream(d), r.alloc(d, small)
	h := extent.Address(r.host(d, small))
	b.ReportAllocs()
	for b.Loop() {
		var m *cuda.Mark
		err := d.Here(func(c *cuda.Calls) (err error) {
			if err = c.CopyToDevice(s, p, h, small); err == nil {
				m, err = c.Mark(s, nil)
			}
			return err
		})
		if err != nil {
			b.Fatal(err)
		}
		<-m.Done()
	}
}

// BenchmarkCopyAndSync is the limit of that: a thread is blocked until the copy is done.
func BenchmarkCopyAndSync(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	s, p := r.stream(d), r.alloc(d, small)
	h := extent.Address(r.host(d, small))
	b.ReportAllocs()
	for b.Loop() {
		err := d.Here(func(c *cuda.Calls) error { return errors.Join(c.CopyToDevice(s, p, h, small), c.SyncStream(s)) })
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkHere does nothing on the caller's thread, but with the context.
func BenchmarkHere(b *testing.B) {
	r := open(b, cudatest.Config{})
	nothing := func(*cuda.Calls) error { return nil }
	b.ReportAllocs()
	for b.Loop() {
		if err := r.devices[0].Here(nothing); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCopyHere puts copies with marks, a thousand in a row.
func BenchmarkCopyHere(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	s, p := r.stream(d), r.alloc(d, small)
	h := extent.Address(r.host(d, small))
	const row = 1000
	b.ReportAllocs()
	for b.Loop() {
		var last *cuda.Mark
		for range row {
			err := d.Here(func(c *cuda.Calls) (err error) {
				if err = c.CopyToDevice(s, p, h, small); err == nil {
					last, err = c.Mark(s, nil)
				}
				return err
			})
			if err != nil {
				b.Fatal(err)
			}
		}
		<-last.Done()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/row, "ns/copy")
}
