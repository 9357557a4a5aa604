package cuda_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	driver "github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// program is other code in the process that calls the driver by itself, in the primary context of
// the first GPU.
type program struct {
	t   *testing.T
	dev *driver.Device
}

func newProgram(t *testing.T, r *rig) *program {
	t.Helper()
	lib, err := driver.Load(r.Path)
	must(t, err)
	dev, err := lib.Open(0, 0)
	must(t, err)
	t.Cleanup(func() { must(t, dev.Close()) })
	return &program{t, dev}
}

func (p *program) do(f func(c *driver.Calls) error) {
	p.t.Helper()
	must(p.t, p.dev.Here(f))
}

// stream makes a CUstream, which the test's end destroys.
func (p *program) stream() (s driver.Stream) {
	p.t.Helper()
	p.do(func(c *driver.Calls) (err error) { s, err = c.NewStream(); return err })
	p.t.Cleanup(func() { p.do(func(c *driver.Calls) error { return c.DestroyStream(s) }) })
	return s
}

const nativeBytes = 3000

// A stream of the device's and its CUstream are one queue, whichever side made it: work of both
// sides is done in the order in which it is put, and a failure of the program's work is the
// stream's.
func TestStreamOfBothSides(t *testing.T) {
	for name, adopted := range map[string]bool{"the device's": false, "the program's": true} {
		t.Run(name, func(t *testing.T) {
			r := load(t, cudatest.Config{Delay: 100 * time.Microsecond})
			d, p := r.open(t, cuda.Config{Memory: 1 << 20}), newProgram(t, r)
			var s tier.Stream
			var err error
			if adopted {
				s, err = cuda.AdoptStream(faultdev.New(d, 1), uintptr(p.stream()))
			} else {
				s, err = d.NewStream()
			}
			must(t, err)
			h, err := cuda.StreamOf(s)
			must(t, err)
			handle := driver.Stream(h)
			a, err := d.Alloc(s, nativeBytes)
			must(t, err)
			for i := range byte(10) {
				var got [nativeBytes]byte
				must(t, d.Fill(s, a, i, nativeBytes))
				p.do(func(c *driver.Calls) error { return c.Fill(handle, driver.Ptr(a)+1, i+100, nativeBytes-1) })
				must(t, d.CopyToHost(s, got[:], a))
				p.do(func(c *driver.Calls) error { return c.Fill(handle, driver.Ptr(a), 255, nativeBytes) })
				must(t, s.Sync())
				want := append([]byte{i}, bytes.Repeat([]byte{i + 100}, nativeBytes-1)...)
				if !bytes.Equal(got[:], want) {
					t.Fatalf("round %d: read %d, %d … %d", i, got[0], got[1], got[nativeBytes-1])
				}
			}
			r.FailWork(0, driver.ErrIllegalAddress, false)
			p.do(func(c *driver.Calls) error { return c.Fill(handle, driver.Ptr(a), 1, 1) })
			e, err := d.Record(s)
			must(t, err)
			if <-e.Done(); !errors.Is(e.Err(), driver.ErrIllegalAddress) {
				t.Errorf("work of the program's failed, and the event behind it reports %v", e.Err())
			}
			must(t, errors.Join(d.Free(s, a), s.Close()))
		})
	}
}

// Closing an adopted stream, or its device, waits for the program's work and leaves the CUstream.
func TestAdoptedStreamStaysTheProgramsOwn(t *testing.T) {
	for name, device := range map[string]bool{"stream": false, "device": true} {
		t.Run(name, func(t *testing.T) {
			r := load(t, cudatest.Config{Delay: 100 * time.Microsecond})
			d, p := r.open(t, cuda.Config{Memory: 1 << 20}), newProgram(t, r)
			handle := p.stream()
			var ptr driver.Ptr
			var host uintptr
			p.do(func(c *driver.Calls) (err error) { ptr, err = c.Alloc(1); return err })
			p.do(func(c *driver.Calls) (err error) { host, err = c.AllocHost(1); return err })
			s, err := cuda.AdoptStream(d, uintptr(handle))
			must(t, err)
			p.do(func(c *driver.Calls) error {
				return errors.Join(c.Fill(handle, ptr, 1, 1), c.CopyToHost(handle, host, ptr, 1))
			})
			if device {
				must(t, d.Close())
			} else {
				must(t, s.Close())
			}
			if b := driver.HostBytes(host, 1)[0]; b != 1 {
				t.Errorf("after Close the program's work is not done: %d", b)
			}
			p.do(func(c *driver.Calls) error {
				return errors.Join(c.Fill(handle, ptr, 2, 1), c.SyncStream(handle), c.Free(ptr), c.FreeHost(host))
			})
			if !device {
				again, err := cuda.AdoptStream(d, uintptr(handle))
				must(t, err)
				must(t, again.Close())
			}
		})
	}
}

// Each side's streams wait for the other's events, and no longer.
func TestEventOfBothSides(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2})
	sh := share(t, r) // the event is one that another device has made, which pull lets happen
	s, err := sh.to.NewStream()
	must(t, err)
	free, err := sh.to.Record(s)
	must(t, err)
	e, err := cuda.AdoptEvent(s, sh.event)
	must(t, err)
	must(t, sh.end()) // the wait goes on
	var got [1]byte
	a, err := sh.to.Alloc(s, 1)
	must(t, errors.Join(err, sh.to.Fill(s, a, 7, 1), sh.to.CopyToHost(s, got[:], a), sh.to.Free(s, a)))
	behind, end, err := cuda.ShareEvent(s)
	must(t, err)
	other, err := sh.to.NewStream()
	must(t, err)
	last, err := cuda.AdoptEvent(other, behind)
	must(t, err)
	<-free.Done()
	for name, e := range map[string]tier.Event{"the adopted event": e, "an event behind it": last} {
		select {
		case <-e.Done():
			t.Errorf("%s is done before the work that it is behind", name)
		default:
		}
	}
	sh.pull()
	<-last.Done()
	<-e.Done()
	err = errors.Join(e.Err(), last.Err(), end(), s.Sync(), s.Close(), other.Close(), sh.stream.Close())
	if err != nil || got[0] != 7 {
		t.Errorf("read %d, want 7: %v", got[0], err)
	}
}

// ContextOf returns the context that a device works in, the program's or the GPU's primary one.
func TestContextOf(t *testing.T) {
	r := load(t, cudatest.Config{})
	p := newProgram(t, r)
	for _, c := range []struct {
		set, want uintptr
	}{{0, uintptr(p.dev.Context())}, {uintptr(p.dev.Context()), uintptr(p.dev.Context())}} {
		d := r.open(t, cuda.Config{Memory: 1 << 20, Context: c.set})
		if got, err := cuda.ContextOf(faultdev.New(d, 1)); got != c.want || err != nil {
			t.Errorf("Context %#x: the device works in %#x (%v), want %#x", c.set, got, err, c.want)
		}
	}
}

// TestNativeRefusals: devices and streams of other packages, and handles that a device cannot adopt,
// are refused, and the refusal leaves nothing behind.
func TestNativeRefusals(t *testing.T) {
	r := load(t, cudatest.Config{Devices: 2})
	d, far := r.open(t, cuda.Config{Memory: 1 << 20}), r.open(t, cuda.Config{Memory: 1 << 20, Ordinal: 1})
	p := newProgram(t, r)
	open, err := d.NewStream()
	must(t, err)
	own, err := cuda.StreamOf(open)
	must(t, err)
	closed, err := d.NewStream()
	must(t, err)
	must(t, closed.Close())
	event, end, err := cuda.ShareEvent(open)
	must(t, err)
	none := struct{ tier.Device }{}
	strange := struct{ tier.Stream }{open}
	adopt := func(dev tier.Device, handle uintptr) error { _, err := cuda.AdoptStream(dev, handle); return err }
	wait := func(s tier.Stream, event uintptr) error { _, err := cuda.AdoptEvent(s, event); return err }
	share := func(s tier.Stream) error { _, _, err := cuda.ShareEvent(s); return err }
	of := func(s tier.Stream) error { _, err := cuda.StreamOf(s); return err }
	streams := r.Live("streams")
	_, err = cuda.ContextOf(none)
	for name, c := range map[string]struct {
		err  error
		want error  // nil: any
		says string // with this in it
	}{
		"the context of another backend": {err, tier.ErrNotSupported, "context"},
		"a stream for another backend":   {adopt(none, own), tier.ErrNotSupported, "adopting"},
		"no stream":                      {adopt(d, 0), nil, "0x0"},
		"the legacy stream":              {adopt(d, 1), nil, "cuStreamCreate"},
		"a thread's stream":              {adopt(d, 2), nil, "cuStreamCreate"},
		"a stream of its own":            {adopt(d, own), nil, "has it already"},
		"a stream of another context":    {adopt(far, uintptr(p.stream())), driver.ErrInvalidHandle, "adopting"},
		"the handle of a closed stream":  {of(closed), tier.ErrClosed, ""},
		"the handle of a strange stream": {of(strange), tier.ErrNotSupported, ""},
		"the handle of nil":              {of(nil), tier.ErrNotSupported, ""},
		"an event of a strange stream":   {share(strange), tier.ErrNotSupported, ""},
		"an event of a closed stream":    {share(closed), tier.ErrClosed, ""},
		"a strange stream waits":         {wait(strange, event), tier.ErrNotSupported, ""},
		"a closed stream waits":          {wait(closed, event), tier.ErrClosed, ""},
		"a wait for nothing":             {wait(open, 0), nil, "none"},
		"a wait for no event":            {wait(open, 12345), driver.ErrInvalidHandle, "0x3039"},
	} {
		if c.err == nil || c.want != nil && !errors.Is(c.err, c.want) || !strings.Contains(c.err.Error(), c.says) {
			t.Errorf("%s: %v, want %v with %q", name, c.err, c.want, c.says)
		}
	}
	if n := r.Live("streams"); n != streams+1 {
		t.Errorf("%d streams, want the %d before and the program's", n, streams)
	}
	must(t, errors.Join(end(), open.Close(), far.Close()))
	if err := adopt(far, own); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("a stream for a closed device: %v", err)
	}
}
