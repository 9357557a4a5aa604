package cuda_test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
)

// What a call costs by way of the thread, beside the call itself. The limit of all is
// BenchmarkCall: the same call on the thread.

func BenchmarkCall(b *testing.B) {
	r := open(b, cudatest.Config{})
	s := r.stream(r.devices[0])
	b.ReportAllocs()
	r.do(func(c *cuda.Calls) error {
		for b.Loop() {
			if _, err := c.StreamDone(s); err != nil {
				return err
			}
		}
		return nil
	})
}

// BenchmarkDo waits for each of its calls, which do nothing.
func BenchmarkDo(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	nothing := func(*cuda.Calls) error { return nil }
	b.ReportAllocs()
	for b.Loop() {
		if err := d.Do(nothing); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDoInParallel(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	nothing := func(*cuda.Calls) error { return nil }
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if err := d.Do(nothing); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkPost does not wait.
func BenchmarkPost(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	nothing := func(*cuda.Calls) {}
	b.ReportAllocs()
	for b.Loop() {
		if err := d.Post(nothing); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkCopy puts a copy of 4 KiB and waits for its mark: what a mover would see of a
// device with no delay.
func BenchmarkCopy(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	s, p := r.stream(d), r.alloc(d, small)
	h := cuda.AddressOf(r.host(d, small))
	b.ReportAllocs()
	for b.Loop() {
		var m *cuda.Mark
		err := d.Here(func(c *cuda.Calls) (err error) {
			if err = c.CopyToDevice(s, p, h, small); err == nil {
				m, err = c.Mark(s)
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
	h := cuda.AddressOf(r.host(d, small))
	b.ReportAllocs()
	for b.Loop() {
		err := d.Here(func(c *cuda.Calls) error { return errors.Join(c.CopyToDevice(s, p, h, small), c.SyncStream(s)) })
		if err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkPostCopy posts copies with marks, a thousand in a row.
func BenchmarkPostCopy(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	s, p := r.stream(d), r.alloc(d, small)
	h := cuda.AddressOf(r.host(d, small))
	const row = 1000
	b.ReportAllocs()
	for b.Loop() {
		last := make(chan *cuda.Mark, row)
		for range row {
			err := d.Post(func(c *cuda.Calls) {
				err := c.CopyToDevice(s, p, h, small)
				m, merr := c.Mark(s)
				if err := errors.Join(err, merr); err != nil {
					b.Error(err)
				}
				last <- m
			})
			if err != nil {
				b.Fatal(err)
			}
		}
		for range row - 1 {
			<-last
		}
		<-(<-last).Done()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/row, "ns/copy")
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

// BenchmarkCopyHere is BenchmarkPostCopy on the caller's thread, with an answer to each copy.
func BenchmarkCopyHere(b *testing.B) {
	r := open(b, cudatest.Config{})
	d := r.devices[0]
	s, p := r.stream(d), r.alloc(d, small)
	h := cuda.AddressOf(r.host(d, small))
	const row = 1000
	b.ReportAllocs()
	for b.Loop() {
		var last *cuda.Mark
		for range row {
			err := d.Here(func(c *cuda.Calls) (err error) {
				if err = c.CopyToDevice(s, p, h, small); err == nil {
					last, err = c.Mark(s)
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
