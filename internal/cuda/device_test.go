package cuda_test

import (
	"bytes"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
)

// reached says whether m is, without waiting.
func reached(m *cuda.Mark) bool {
	select {
	case <-m.Done():
		return true
	default:
		return false
	}
}

// gate makes s wait for the test. The word is released by open, or by the test's end.
func (r *rig) gate(d *cuda.Device, s cuda.Stream) (open func()) {
	r.t.Helper()
	word := of(r.t, d, func(c *cuda.Calls) (uintptr, error) { return c.AllocHost(4) })
	var at cuda.Ptr
	ok(r.t, d.Here(func(c *cuda.Calls) (err error) {
		if at, err = c.HostDevicePtr(word); err != nil {
			return err
		}
		return c.WaitValue(s, at, 1)
	}))
	open = func() { cuda.StoreWord(word, 1) }
	r.t.Cleanup(func() {
		open()
		ok(r.t, d.Here(func(c *cuda.Calls) error { return c.FreeHost(word) }))
	})
	return open
}

// Each goroutine's calls find the context current, whatever the scheduler does.
func TestContextIsCurrent(t *testing.T) {
	r := open(t, cudatest.Config{Devices: 2})
	var all sync.WaitGroup
	for i := range 8 {
		d := r.devices[i%2]
		all.Go(func() {
			for range 200 {
				var s cuda.Stream
				if err := d.Here(func(c *cuda.Calls) (err error) { s, err = c.NewStream(); return err }); err != nil {
					t.Error(err)
					return
				}
				runtime.Gosched()
				end := func(c *cuda.Calls) error { return c.DestroyStream(s) }
				if err := d.Here(end); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
}

// A thread that is not the device's has no context, which is why there is one.
func TestNoContextElsewhere(t *testing.T) {
	r := open(t, cudatest.Config{})
	var leaked *cuda.Calls
	r.do(func(c *cuda.Calls) error { leaked = c; return nil })
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: no other goroutine may run with its context
		_, err = leaked.NewStream()
	}()
	<-done
	if !errors.Is(err, cuda.ErrInvalidContext) {
		t.Errorf("a call without a context gave %v", err)
	}
}

// A mark is not reached before the work is done, and those of one stream are in their order.
func TestMark(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s, other := r.stream(d), r.stream(d)
	unblock := r.gate(d, s)
	first := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(s, nil) })
	second := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(s, nil) })
	ok(t, r.wait(d, other)) // one stream does not keep the other
	r.do(func(c *cuda.Calls) error { return c.WaitMark(other, second) })
	behind := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(other, nil) })
	if reached(first) || reached(second) || reached(behind) || first.Err() != nil {
		t.Fatal("a mark is reached before the work in front of it is done")
	}
	unblock()
	<-behind.Done()
	if !reached(first) || !reached(second) { // its stream waited for them, and they are looked at first
		<-second.Done()
		if !reached(first) {
			t.Error("the second mark is reached before the first")
		}
	}
	for _, m := range []*cuda.Mark{first, second, behind} {
		ok(t, m.Err())
	}
	r.do(func(c *cuda.Calls) error { return c.WaitMark(other, first) }) // nothing to wait for
	ok(t, r.wait(d, other))
}

// Streams wait for marks of other devices.
func TestMarkOfAnotherDevice(t *testing.T) {
	const n = 1 << 16
	r := open(t, cudatest.Config{Devices: 2})
	from, to := r.devices[0], r.devices[1]
	s, theirs := r.stream(from), r.stream(to)
	a, b := r.alloc(from, n), r.alloc(to, n)
	in, out := r.host(from, n), r.host(to, n)
	for i := range 50 {
		pattern(in, i)
		var there *cuda.Mark
		ok(t, from.Here(func(c *cuda.Calls) (err error) {
			err = errors.Join(c.CopyToDevice(s, a, extent.Address(in), n),
				c.CopyPeer(s, b, to.Context(), a, from.Context(), n))
			m, merr := c.Mark(s, nil)
			there = m
			return errors.Join(err, merr)
		}))
		ok(t, to.Here(func(c *cuda.Calls) error {
			return errors.Join(c.WaitMark(theirs, there), c.CopyToHost(theirs, extent.Address(out), b, n))
		}))
		ok(t, r.wait(to, theirs))
		if !bytes.Equal(in, out) {
			t.Fatalf("round %d: the copy back did not wait for the copy between the devices", i)
		}
		<-there.Done()
	}
}

// What is to be done between work and Done is done there, knows how the work went, and has the last
// word.
func TestMarkThen(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s := r.stream(d)
	p, h := r.alloc(d, 8), r.host(d, 8)
	errMine := errors.New("mine")
	for _, fails := range []bool{false, true} {
		if fails {
			r.FailWork(0, cuda.ErrIllegalAddress, false)
		}
		var seen byte
		var told error
		m := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) {
			err := errors.Join(c.Fill(s, p, 42, 8), c.CopyToHost(s, extent.Address(h), p, 8))
			m, merr := c.Mark(s, func(err error) error { seen, told = h[0], err; return errMine })
			return m, errors.Join(err, merr)
		})
		<-m.Done()
		if m.Err() != errMine || errors.Is(told, cuda.ErrIllegalAddress) != fails || !fails && seen != 42 {
			t.Errorf("the mark says %v; its function was told %v and saw %d", m.Err(), told, seen)
		}
	}
}

// Events are used again, and given up in the end (the rig looks for them).
func TestMarksShareEvents(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s := r.stream(d)
	for range 1000 {
		ok(t, r.wait(d, s))
	}
	if n := r.Live("events"); n > 2 {
		t.Errorf("%d events for marks one after another", n)
	}
}

// Close waits for marks; later calls are refused.
func TestClose(t *testing.T) {
	r := open(t, cudatest.Config{Delay: time.Millisecond})
	d := r.devices[0]
	ran, marks := 0, make(chan *cuda.Mark, 10)
	for range cap(marks) {
		ok(t, d.Here(func(c *cuda.Calls) error {
			ran++
			s, err := c.NewStream()
			if err != nil {
				return err
			}
			p, err := c.Alloc(1)
			m, merr := c.Mark(s, nil)
			marks <- m
			return errors.Join(err, c.Fill(s, p, 1, 1), merr, c.DestroyStream(s), c.Free(p))
		}))
	}
	ok(t, d.Close())
	if ran != cap(marks) {
		t.Errorf("%d of %d tasks ran", ran, cap(marks))
	}
	close(marks)
	for m := range marks {
		if !reached(m) {
			t.Error("Close did not wait for a mark")
		}
	}
	if err := d.Close(); err != cuda.ErrClosed {
		t.Errorf("a second Close: %v", err)
	}
	if err := d.Here(func(*cuda.Calls) error { return nil }); err != cuda.ErrClosed {
		t.Errorf("Here after Close: %v", err)
	}
}

// A call of Here keeps the context, and Close waits.
func TestCloseWaitsForHere(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	var closing sync.WaitGroup
	err := d.Here(func(c *cuda.Calls) error {
		closing.Go(func() {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		})
		for d.Here(func(*cuda.Calls) error { return nil }) == nil { // until it is closed to others
			runtime.Gosched()
		}
		s, err := c.NewStream()
		if err != nil {
			return err
		}
		m, err := c.Mark(s, nil)
		if err == nil {
			<-m.Done()
			err = m.Err()
		}
		return errors.Join(err, c.DestroyStream(s))
	})
	ok(t, err)
	closing.Wait()
	if n := r.Live("contexts"); n != 0 {
		t.Errorf("%d contexts are left", n)
	}
}

// Goroutines of both kinds make marks and wait for each other's; each mark is reached.
func TestMarksEverywhere(t *testing.T) {
	r := open(t, cudatest.Config{Devices: 2})
	var all sync.WaitGroup
	var last struct {
		sync.Mutex
		m *cuda.Mark
	}
	for i := range 6 {
		d := r.devices[i%2]
		s := r.stream(d)
		all.Go(func() {
			for range 200 {
				last.Lock()
				before := last.m
				last.Unlock()
				var m *cuda.Mark
				err := d.Here(func(c *cuda.Calls) (err error) {
					if before != nil {
						err = c.WaitMark(s, before)
					}
					var merr error
					m, merr = c.Mark(s, nil)
					return errors.Join(err, merr)
				})
				if err != nil {
					t.Error(err)
					return
				}
				last.Lock()
				last.m = m
				last.Unlock()
				<-m.Done()
				if before != nil && !reached(before) {
					<-before.Done() // it happened before, and is reported when its device is looked at
				}
				if m.Err() != nil {
					t.Error(m.Err())
				}
			}
		})
	}
	all.Wait()
}

// TestPanic: a panic of a function passed to Here reaches the caller of Here, and the device stays
// usable.
func TestPanic(t *testing.T) {
	r := open(t, cudatest.Config{})
	func() {
		defer func() {
			if p := recover(); p != "on purpose" {
				t.Errorf("Here panicked with %v", p)
			}
		}()
		_ = r.devices[0].Here(func(*cuda.Calls) error { panic("on purpose") })
		t.Error("Here did not panic")
	}()
	s := r.stream(r.devices[0])
	ok(t, r.wait(r.devices[0], s))
}

// A context of the program is used and left alone.
func TestAdopt(t *testing.T) {
	r := open(t, cudatest.Config{})
	d, err := r.lib.Open(0, r.devices[0].Context())
	ok(t, err)
	s := r.stream(r.devices[0])
	ok(t, r.wait(d, s))
	ok(t, d.Close())
	ok(t, r.wait(r.devices[0], s))
	if _, err := r.lib.Open(0, 12345); !errors.Is(err, cuda.ErrInvalidContext) {
		t.Errorf("adopting nonsense: %v", err)
	}
}

// Memory that is freed in a stream's order is there until its turn comes.
func TestStreamOrderedFree(t *testing.T) {
	const memory = 1 << 20
	r := open(t, cudatest.Config{Memory: memory})
	d := r.devices[0]
	s := r.stream(d)
	unblock := r.gate(d, s)
	pool := of(t, d, func(c *cuda.Calls) (cuda.Pool, error) { return c.NewPool() })
	t.Cleanup(func() { r.do(func(c *cuda.Calls) error { return c.DestroyPool(pool) }) })
	p := of(t, d, func(c *cuda.Calls) (cuda.Ptr, error) { return c.AllocAsync(s, pool, memory) })
	r.do(func(c *cuda.Calls) error { return errors.Join(c.Fill(s, p, 1, memory), c.FreeAsync(s, p)) })
	again := func(c *cuda.Calls) (err error) { p, err = c.AllocAsync(s, pool, memory); return err }
	if err := d.Here(again); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Fatalf("allocating what is not free yet: %v", err)
	}
	unblock()
	ok(t, r.wait(d, s))
	ok(t, d.Here(again))
	r.do(func(c *cuda.Calls) error { return c.FreeAsync(s, p) })
	ok(t, r.wait(d, s))
	// What the pool keeps, others cannot have until it is trimmed.
	if err := d.Here(func(c *cuda.Calls) error { _, err := c.Alloc(memory); return err }); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("allocating what a pool keeps: %v", err)
	}
	r.do(func(c *cuda.Calls) error { return c.TrimPool(pool) })
	r.alloc(d, memory)
}
