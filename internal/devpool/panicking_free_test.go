package devpool_test

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// moodyDevice refuses frees, or panics.
type moodyDevice struct {
	tier.Device
	refuses bool            // each free
	free    tier.Addr       // panics when it is freed; 0: none does
	panics  map[string]bool // these calls panic, once
}

func (d *moodyDevice) Unwrap() tier.Device { return d.Device }

func (d *moodyDevice) panicIn(call string) {
	if d.panics[call] {
		delete(d.panics, call)
		panic("in " + call)
	}
}

func (d *moodyDevice) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	d.panicIn("Alloc")
	return d.Device.Alloc(s.(moodyStream).Stream, size)
}

func (d *moodyDevice) Record(s tier.Stream) (tier.Event, error) {
	d.panicIn("Record")
	return d.Device.Record(s.(moodyStream).Stream)
}

func (d *moodyDevice) Free(s tier.Stream, a tier.Addr) error {
	d.panicIn("Free")
	switch {
	case d.refuses:
		return errFault
	case a == d.free:
		panic("in Free")
	}
	return d.Device.Free(s.(moodyStream).Stream, a)
}

func (d *moodyDevice) NewStream() (tier.Stream, error) {
	s, err := d.Device.NewStream()
	return moodyStream{s, d}, err
}

type moodyStream struct {
	tier.Stream
	dev *moodyDevice
}

func (s moodyStream) Close() error {
	s.dev.panicIn("Close")
	return s.Stream.Close()
}

// TestPanickingFrees: a free that panics is in the log, and the release returns. If the event
// behind it panicked, that is tried again with the next operation. Else the bytes are retired until
// the pool closes, which tells of them.
func TestPanickingFrees(t *testing.T) {
	for call, unsure := range map[string]int64{"Free": 2048, "Record": 0} {
		t.Run(call, func(t *testing.T) {
			tiertest.NoLeaks(t)
			d := &moodyDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20}), panics: map[string]bool{}}
			p := newQuietPool(t, d)
			var log bytes.Buffer
			p.Panics.Logger = slog.New(slog.NewTextHandler(&log, nil))
			s := gpuSpace(t, 1<<20, p)
			first, second := draw(t, s, 2000), draw(t, s, 1000)
			d.panics[call] = true
			ok(t, first.Release())
			usage(t, s, "after a free that panicked", 1024, 2048, 0)
			if want := `function=Device.` + call + ` panic="in ` + call + `"`; !strings.Contains(log.String(), want) {
				t.Errorf("the log has %q, and not %q", &log, want)
			}
			ok(t, second.Release())
			usage(t, s, "after another free", 0, 2048, 0)
			ok(t, draw(t, s, 1000).Release())
			usage(t, s, "after another operation", 0, unsure, 0)
			if x := s.State(); x.Held != unsure || x.Room != 1<<20-unsure {
				t.Errorf("%d bytes are held, and there is room for %d", x.Held, x.Room)
			}
			if err := p.Close(); (err != nil) != (unsure > 0) {
				t.Errorf("Close: %v", err)
			}
			usage(t, s, "after Close", 0, 0, 0)
			if n, held := d.Outstanding(), s.State().Held; n != unsure || held != 0 {
				t.Errorf("the device has %d bytes outstanding, and %d are held", n, held)
			}
		})
	}
}

// newQuietPool is newDevicePool for a device that panics: only to a log of the test's own.
func newQuietPool(t *testing.T, d tier.Device) *devpool.Memory {
	p := newDevicePool(t, devpool.Guarded(d))
	p.Panics.Logger = slog.New(slog.DiscardHandler)
	return p
}

// TestRetriedFreePanics: of three frees that the device refused one panics when it is tried again.
// No other free is lost by that, and no allocation fails. That one is never tried again.
func TestRetriedFreePanics(t *testing.T) {
	d := &moodyDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20})}
	p := newQuietPool(t, d)
	mems, reclaimed := refusedFrees(t, d, p)
	d.free = mems[1].(tier.DeviceMemory).Addr()
	first, err := p.Alloc(4096, nil)
	ok(t, err)
	if want := []bool{true, false, true}; !slices.Equal(reclaimed, want) {
		t.Errorf("reclaimed: %v; want %v", reclaimed, want)
	}
	d.free = 0
	second, err := p.Alloc(4096, nil)
	ok(t, err)
	if reclaimed[1] {
		t.Error("the free that panicked was tried again")
	}
	p.Free(first, func() {})
	p.Free(second, func() {})
	if err := p.Close(); err == nil || !reclaimed[1] {
		t.Errorf("Close: %v, reclaimed: %v", err, reclaimed[1])
	}
	if n := d.Outstanding(); n != 4096 {
		t.Errorf("the device has %d bytes outstanding, and the free of 4096 panicked", n)
	}
}

// TestCloseAfterAFreeThatPanicked: Close tells of it, and the books close all the same.
func TestCloseAfterAFreeThatPanicked(t *testing.T) {
	d := &moodyDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20})}
	p := newQuietPool(t, d)
	m, err := p.Alloc(4096, nil)
	ok(t, err)
	d.free = m.(tier.DeviceMemory).Addr()
	reclaimed := false
	p.Free(m, func() { reclaimed = true })
	d.free = 0
	if n := p.Unsure(); n != 4096 {
		t.Errorf("the pool is unsure of %d bytes", n)
	}
	if err := p.Close(); err == nil || !reclaimed || p.Unsure() != 0 {
		t.Errorf("Close: %v, reclaimed: %v, unsure: %d", err, reclaimed, p.Unsure())
	}
}

// TestRetry: what the device refused is reclaimed without an allocation, also if the pool's stream
// has failed. A closed pool does not call its device.
func TestRetry(t *testing.T) {
	inner, f := faultyDevice(t, 1<<20)
	spy := &streamSpy{Device: inner}
	p := newDevicePool(t, spy)
	m, err := p.Alloc(4096, nil)
	ok(t, err)
	f.next(sim.OpFree, 2)
	reclaimed := false
	p.Free(m, func() { reclaimed = true })
	p.Retry()
	if reclaimed {
		t.Error("reclaimed though the device has refused it twice")
	}
	spoil(t, inner, f, spy.last)
	p.Retry()
	if !reclaimed || inner.Outstanding() != 0 || spy.opened != 2 {
		t.Errorf("reclaimed: %v, outstanding: %d, %d streams were opened", reclaimed, inner.Outstanding(), spy.opened)
	}
	ok(t, p.Close())
	p.Retry()
}

// panicsAfterDevice panics, once, after it has freed.
type panicsAfterDevice struct {
	tier.Device
	panics bool
}

func (d *panicsAfterDevice) Unwrap() tier.Device { return d.Device }

func (d *panicsAfterDevice) Free(s tier.Stream, a tier.Addr) error {
	err := d.Device.Free(s, a)
	if d.panics {
		d.panics = false
		panic("after the free")
	}
	return err
}

// TestPanicAfterFree: a free that panics after the device has freed is not tried again, because it
// would free what another allocation got there.
func TestPanicAfterFree(t *testing.T) {
	d := &panicsAfterDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20})}
	p := newQuietPool(t, d)
	s := gpuSpace(t, 1<<20, p)
	first := draw(t, s, 2000)
	d.panics = true
	ok(t, first.Release())
	second := draw(t, s, 2000)
	before := d.Outstanding()
	p.Retry()
	if n := d.Outstanding(); n != before {
		t.Errorf("a buffer of %d bytes is in use, and the device has %d bytes outstanding, was %d", 2048, n, before)
	}
	if err := second.Release(); err != nil {
		t.Error(err)
	}
	third := draw(t, s, 100)
	ok(t, third.Release())
	p.Retry()
	usage(t, s, "in the end", 0, 2048, 0)
	if err := p.Close(); err == nil {
		t.Error("Close does not tell of the free that panicked")
	}
	usage(t, s, "after Close", 0, 0, 0)
}

// TestCloseBesideAnotherPool: Close of a pool one of whose frees panicked after the device had
// freed does not free what another pool of the device got there since.
func TestCloseBesideAnotherPool(t *testing.T) {
	d := &panicsAfterDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20})}
	p, q := newQuietPool(t, d), newQuietPool(t, d)
	m, err := p.Alloc(4096, nil)
	ok(t, err)
	d.panics = true
	p.Free(m, func() {})
	other, err := q.Alloc(4096, nil)
	ok(t, err)
	before := d.Outstanding()
	if err := p.Close(); err == nil {
		t.Error("Close does not tell of the free that panicked")
	}
	if n := d.Outstanding(); n != before {
		t.Errorf("%d bytes of another pool are in use, and the device has %d outstanding", before, n)
	}
	q.Free(other, func() {})
	ok(t, q.Close())
}

// TestFreesWhenAnAllocationPanics: those that were tried again before it are reclaimed.
func TestFreesWhenAnAllocationPanics(t *testing.T) {
	d := &moodyDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20})}
	p := newQuietPool(t, d)
	_, reclaimed := refusedFrees(t, d, p)
	d.panics = map[string]bool{"Alloc": true}
	if m, err := p.Alloc(4096, nil); err == nil {
		t.Errorf("an allocation that panicked: %v", m)
	}
	if slices.Contains(reclaimed, false) {
		t.Errorf("reclaimed: %v", reclaimed)
	}
}

// TestAllocationWhoseEventPanics: the device gets its memory back, unless the free panics, too.
func TestAllocationWhoseEventPanics(t *testing.T) {
	for _, free := range []bool{false, true} { // panics, too
		d := &moodyDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20}), panics: map[string]bool{"Record": true, "Free": free}}
		p := newQuietPool(t, d)
		if m, err := p.Alloc(4096, nil); err == nil {
			t.Errorf("an allocation whose event panicked: %v", m)
		}
		m, err := p.Alloc(4096, nil)
		ok(t, err)
		p.Free(m, func() {})
		want := int64(0)
		if free {
			want = 4096
		}
		if err := p.Close(); (err != nil) != free {
			t.Errorf("Close: %v", err)
		}
		if n := d.Outstanding(); n != want {
			t.Errorf("the device has %d bytes outstanding, want %d", n, want)
		}
	}
}

// TestCloseOfAStreamPanics: the last free returns, and what the device refuses is reclaimed as far
// as the books go.
func TestCloseOfAStreamPanics(t *testing.T) {
	d := &moodyDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20}), panics: map[string]bool{"Close": true}}
	p := newQuietPool(t, d)
	_, reclaimed := refusedFrees(t, d, p)
	d.refuses = true
	if err := p.Close(); err == nil || slices.Contains(reclaimed, false) {
		t.Errorf("Close: %v, reclaimed: %v", err, reclaimed)
	}
}

// refusedFrees has the device refuse three frees, which it would accept from then on.
func refusedFrees(t *testing.T, d *moodyDevice, p *devpool.Memory) (mems []tier.Memory, reclaimed []bool) {
	reclaimed = make([]bool, 3)
	for range reclaimed {
		m, err := p.Alloc(4096, nil)
		ok(t, err)
		mems = append(mems, m)
	}
	d.refuses = true
	for i, m := range mems {
		p.Free(m, func() { reclaimed[i] = true })
	}
	d.refuses = false
	return mems, reclaimed
}
