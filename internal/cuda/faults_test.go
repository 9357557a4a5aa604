package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/extent"
)

// script does some of everything, from loading the library to closing the device, and
// gives back what it took whatever fails.
func script(e *cudatest.Emulator, host []byte) (err error) {
	add := func(more error) bool { err = errors.Join(err, more); return more == nil }
	lib, lerr := cuda.Load(e.Path)
	if !add(lerr) {
		return err
	}
	if _, derr := lib.Devices(); !add(derr) {
		return err
	}
	d, oerr := lib.Open(0, 0)
	if !add(oerr) {
		return err
	}
	defer func() { add(d.Close()) }()
	addr, n := extent.Address(host), int64(len(host))
	if !add(d.Here(func(c *cuda.Calls) error { return c.RegisterHost(addr, n) })) {
		return err
	}
	defer func() {
		add(d.Surely(func(c *cuda.Calls) error { return c.UnregisterHost(addr) }))
	}()
	add(d.Here(func(c *cuda.Calls) error { return onDevice(c, addr, n) }))
	return err
}

func onDevice(c *cuda.Calls, addr uintptr, n int64) (err error) {
	add := func(more error) bool { err = errors.Join(err, more); return more == nil }
	s, serr := c.NewStream()
	if !add(serr) {
		return err
	}
	defer func() { add(c.DestroyStream(s)) }()
	p, perr := c.NewPool()
	if !add(perr) {
		return err
	}
	defer func() { add(c.DestroyPool(p)) }()
	a, aerr := c.AllocAsync(s, p, n)
	if !add(aerr) {
		return err
	}
	defer func() {
		// Freeing in order can be refused; then it is done out of order.
		if !add(c.FreeAsync(s, a)) {
			add(c.Free(a))
		}
	}()
	b, berr := c.Alloc(n)
	if !add(berr) {
		return err
	}
	defer func() { add(c.Free(b)) }()
	add(c.CopyToDevice(s, a, addr, n))
	add(c.CopyOnDevice(s, b, a, n))
	m, merr := c.Mark(s, nil)
	if add(merr) {
		add(c.WaitMark(s, m))
	}
	add(c.CopyToHost(s, addr, b, n))
	add(c.SyncStream(s))
	return err
}

// Any failing call is reported, by its name and code, and nothing is left.
func TestFailEveryCall(t *testing.T) {
	host := mapped(t, small)
	probe := cudatest.New(t, cudatest.Config{})
	ok(t, script(probe, host))
	total := probe.Calls("")
	if total < 30 {
		t.Fatalf("the script makes %d calls: that cannot be all", total)
	}
	for i := range total {
		e := cudatest.New(t, cudatest.Config{})
		e.Fail("", i, 999, 1)
		err := script(e, host)
		var told *cuda.Error
		if !errors.As(err, &told) || told.Code != 999 {
			// A context that could not be popped is the one thing that is not reported: it changes
			// nothing.
			if e.Calls("cuCtxPopCurrent_v2") == 0 || err != nil {
				t.Errorf("call %d of %d failed, and the script said %v", i, total, err)
			}
		}
		for _, leak := range e.Leaks() {
			t.Errorf("after call %d of %d failed (%v): %s", i, total, err, leak)
		}
	}
}

// Failed work is reported by the marks behind it, and on that stream only.
func TestWorkFails(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s, other, behind := r.stream(d), r.stream(d), r.stream(d)
	p := r.alloc(d, small)
	r.FailWork(0, cuda.ErrIllegalAddress, false)
	r.do(func(c *cuda.Calls) error { return c.Fill(s, p, 1, small) })
	if err := r.wait(d, s); !errors.Is(err, cuda.ErrIllegalAddress) {
		t.Errorf("the mark behind work that failed says %v", err)
	}
	r.do(func(c *cuda.Calls) error { return c.Fill(other, p, 1, small) })
	ok(t, r.wait(d, other))
	// What waits for a stream that has failed has failed.
	unblock := r.gate(d, s)
	m := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(s, nil) })
	r.do(func(c *cuda.Calls) error { return c.WaitMark(behind, m) })
	unblock()
	if err := r.wait(d, behind); !errors.Is(err, cuda.ErrIllegalAddress) {
		t.Errorf("what waited for work that failed says %v", err)
	}
}

// When the context is lost every call and every mark says so; the device can be closed, and
// opened anew.
func TestContextIsLost(t *testing.T) {
	e := cudatest.New(t, cudatest.Config{})
	lib, err := cuda.Load(e.Path)
	ok(t, err)
	d, err := lib.Open(0, 0)
	ok(t, err)
	s := of(t, d, (*cuda.Calls).NewStream)
	p := of(t, d, func(c *cuda.Calls) (cuda.Ptr, error) { return c.Alloc(small) })
	e.FailWork(0, cuda.ErrIllegalAddress, true)
	var m *cuda.Mark
	ok(t, d.Here(func(c *cuda.Calls) error {
		ferr := c.Fill(s, p, 1, small)
		var merr error
		if m, merr = c.Mark(s, nil); errors.Is(merr, cuda.ErrIllegalAddress) {
			merr = nil // it was that quick
		}
		return errors.Join(ferr, merr)
	}))
	if m != nil {
		<-m.Done()
		if !errors.Is(m.Err(), cuda.ErrIllegalAddress) {
			t.Errorf("the mark says %v", m.Err())
		}
	}
	e.Settle()
	if err := d.Here(func(c *cuda.Calls) error { return c.Free(p) }); !errors.Is(err, cuda.ErrIllegalAddress) {
		t.Errorf("a call after the context was lost gave %v", err)
	}
	_ = d.Close() // says it, too, if it had an event to destroy
	for _, kind := range []string{"contexts", "streams", "events", "allocations"} {
		if n := e.Live(kind); n != 0 {
			t.Errorf("%d %s outlive the context", n, kind)
		}
	}
	again, err := lib.Open(0, 0)
	ok(t, err)
	s = of(t, again, (*cuda.Calls).NewStream)
	ok(t, again.Here(func(c *cuda.Calls) error { return c.DestroyStream(s) }))
	ok(t, again.Close())
}

// That an event cannot be looked at does not mean that the work before it is over: only if the
// driver says it again and again is that the mark's failure, and never while a graph is recorded.
func TestQueryFails(t *testing.T) {
	r := open(t, cudatest.Config{})
	d := r.devices[0]
	s := r.stream(d)
	r.Fail("cuEventQuery", 0, 999, -1)
	if err := r.wait(d, s); !errors.Is(err, cuda.Code(999)) {
		t.Errorf("the mark says %v", err)
	}
	r.ClearFailures()
	ok(t, r.wait(d, s))
	for code, times := range map[cuda.Code]int64{999: 2, cuda.ErrStreamCaptureUnsupported: 20} {
		unblock := r.gate(d, s)
		before := r.Calls("cuEventQuery")
		r.Fail("cuEventQuery", 0, code, times)
		m := of(t, d, func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(s, nil) })
		for !reached(m) && r.Calls("cuEventQuery") < before+times+1 {
			runtime.Gosched()
		}
		if reached(m) {
			t.Errorf("the mark is reached (%v) with its work under way, for a question was refused with %v", m.Err(), code)
		}
		unblock()
		<-m.Done()
		ok(t, m.Err())
		r.ClearFailures()
	}
}

// Work is seen to be done while another thread of the process records a graph, which nothing here
// disturbs. With a driver that lacks this setting, it is seen when the recording is over.
func TestQueryWhileOthersCapture(t *testing.T) {
	r := open(t, cudatest.Config{})
	s := r.stream(r.devices[0])
	r.Set("capturing", 1)
	ok(t, r.wait(r.devices[0], s))

	old := open(t, cudatest.Config{Without: []string{"cuThreadExchangeStreamCaptureMode"}})
	s = old.stream(old.devices[0])
	old.Set("capturing", 1)
	m := of(t, old.devices[0], func(c *cuda.Calls) (*cuda.Mark, error) { return c.Mark(s, nil) })
	for before := old.Calls("cuEventQuery"); !reached(m) && old.Calls("cuEventQuery") < before+5; {
		runtime.Gosched()
	}
	if reached(m) {
		t.Errorf("the mark is reached (%v) although the driver says nothing", m.Err())
	}
	old.Set("capturing", 0)
	<-m.Done()
	ok(t, m.Err())
}

// The emulator finds what is left; without that the tests above could not fail.
func TestLeaksAreFound(t *testing.T) {
	e := cudatest.New(t, cudatest.Config{})
	lib, err := cuda.Load(e.Path)
	ok(t, err)
	d, err := lib.Open(0, 0)
	ok(t, err)
	reg := mapped(t, small)
	ok(t, d.Here(func(c *cuda.Calls) (err error) {
		for range 2 {
			_, serr := c.NewStream()
			_, eerr := c.NewEvent()
			_, aerr := c.Alloc(1)
			_, perr := c.NewPool()
			_, herr := c.AllocHost(1)
			err = errors.Join(err, serr, eerr, aerr, perr, herr)
		}
		return errors.Join(err, c.RegisterHost(extent.Address(reg), small))
	}))
	counts := func() (s string) {
		for _, kind := range []string{"contexts", "streams", "events", "pools", "allocations", "registrations", "host allocations"} {
			s += fmt.Sprintf("%d ", e.Live(kind))
		}
		return s
	}
	if got, want := counts(), "1 2 2 2 2 1 2 "; got != want {
		t.Errorf("the emulator counts %s, want %s", got, want)
	}
	ok(t, d.Close())
	if got, want := counts(), "0 0 0 0 0 0 0 "; got != want {
		t.Errorf("the emulator counts %s after closing, want %s", got, want)
	}
	if n := len(e.Leaks()); n != 6 { // kinds that were given up
		t.Errorf("leaks are %q", e.Leaks())
	}
}

// Memory that may not be locked any more is refused, and can be again.
func TestRegisterLimit(t *testing.T) {
	r := open(t, cudatest.Config{RegisterLimit: small})
	d := r.devices[0]
	b := mapped(t, 2*small)
	addr := extent.Address(b)
	register := func(off uintptr) error {
		return d.Here(func(c *cuda.Calls) error { return c.RegisterHost(addr+off, small) })
	}
	ok(t, register(0))
	if err := register(small); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("registering beyond the limit: %v", err)
	}
	ok(t, d.Here(func(c *cuda.Calls) error { return c.UnregisterHost(addr) }))
	s, p := r.stream(d), r.alloc(d, small)
	if err := d.Here(func(c *cuda.Calls) error { return c.CopyToDevice(s, p, addr, 1) }); err != cuda.ErrNotPinned {
		t.Errorf("a copy from memory that is not pinned any more: %v", err)
	}
	ok(t, register(small))
	pattern(b, 4)
	r.do(func(c *cuda.Calls) error {
		return errors.Join(c.CopyToDevice(s, p, addr+small, small/2), c.CopyToHost(s, addr+small+small/2, p, small/2))
	})
	ok(t, r.wait(d, s))
	if !bytes.Equal(b[small:small+small/2], b[small+small/2:]) {
		t.Error("the copy differs")
	}
	ok(t, d.Here(func(c *cuda.Calls) error { return c.UnregisterHost(addr + small) }))
}
