package cuda_test

import (
	"bytes"
	"errors"
	"runtime"
	"sync"
	"testing"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier/cuda"
)

// reaping has another goroutine reap for as long as f runs.
func reaping(d *cuda.Device, f func()) {
	stop := make(chan struct{})
	var reaper sync.WaitGroup
	for range 2 {
		reaper.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					d.Reap()
					runtime.Gosched()
				}
			}
		})
	}
	f()
	close(stop)
	reaper.Wait()
}

// What was put on a stream before an event has happened when that is done, even if others reap
// meanwhile: the bytes are there, and what was freed is not outstanding.
func TestEventStandsForAllBeforeItWhileOthersReap(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	const n = 64
	a, err := d.Alloc(s, n)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Fill(s, a, 7, n); err != nil {
		t.Fatal(err)
	}
	held := d.Outstanding()
	want, back := bytes.Repeat([]byte{7}, n), make([]byte, n)
	reaping(d, func() {
		for i := range 800 {
			b, err := d.Alloc(s, n)
			if err != nil {
				t.Fatal(err)
			}
			clear(back)
			if err := errors.Join(d.CopyToHost(s, back, a), d.Free(s, b)); err != nil {
				t.Fatal(err)
			}
			e, err := d.Record(s)
			if err != nil {
				t.Fatal(err)
			}
			<-e.Done()
			if e.Err() != nil || !bytes.Equal(back, want) || d.Outstanding() != held {
				t.Fatalf("round %d: the event is done (%v); the bytes are %x, and %d bytes are outstanding, want %d",
					i, e.Err(), back, d.Outstanding(), held)
			}
		}
	})
}

// The same where events are refused again and again, for all callers.
func TestEventsAreRefusedWhileOthersReap(t *testing.T) {
	r := load(t, cudatest.Config{})
	d := r.open(t, cuda.Config{Memory: 1 << 20})
	s, err := d.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	const n = 64
	a, err := d.Alloc(s, n)
	if err != nil {
		t.Fatal(err)
	}
	if err := d.Fill(s, a, 7, n); err != nil {
		t.Fatal(err)
	}
	reaping(d, func() {
		for i := range 200 {
			b, err := d.Alloc(s, n)
			if err != nil {
				t.Fatal(err)
			}
			back := make([]byte, n)
			if err := errors.Join(d.CopyToHost(s, back, a), d.Free(s, b)); err != nil {
				t.Fatal(err)
			}
			r.ClearFailures()
			r.Fail("cuEventRecord", int64(i%3), driver.ErrInvalidValue, 1)
			if err := s.Sync(); err != nil {
				t.Fatal(err)
			}
			if back[n-1] != 7 {
				t.Fatalf("round %d: the stream is done; the last byte is %d", i, back[n-1])
			}
		}
		r.ClearFailures()
	})
}
