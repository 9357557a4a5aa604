package devpool_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func newDevicePool(t testing.TB, d tier.Device) *devpool.Memory {
	t.Helper()
	p, err := devpool.NewMemory(d)
	ok(t, err)
	t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("closing the pool: %v", err)
		}
	})
	return p
}

func gpuSpace(t testing.TB, capacity int64, p tier.Pool) *tier.Space {
	t.Helper()
	s, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.GPU}, Capacity: capacity, Pool: p,
		Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
	})
	ok(t, err)
	return s
}

// TestDevicePoolFaults refuses operations of the pool's in turn. Whatever
// happens, the space's books and the device's agree, and in the end nothing is
// left.
func TestDevicePoolFaults(t *testing.T) {
	for _, c := range []struct {
		name   string
		alloc  map[sim.OpKind]int // fails while allocating
		free   map[sim.OpKind]int // fails while freeing
		passes bool               // the allocation
		kept   bool               // the free: retired until the next operation
	}{
		{name: "alloc", alloc: map[sim.OpKind]int{sim.OpAlloc: 1}},
		{name: "record after alloc", alloc: map[sim.OpKind]int{sim.OpRecord: 1}},
		{name: "record after alloc and free", alloc: map[sim.OpKind]int{sim.OpRecord: 1, sim.OpFree: 1}},
		{name: "free", free: map[sim.OpKind]int{sim.OpFree: 1}, passes: true, kept: true},
		{name: "record after free", free: map[sim.OpKind]int{sim.OpRecord: 1}, passes: true, kept: true},
		{name: "free and its second attempt", free: map[sim.OpKind]int{sim.OpFree: 2}, passes: true, kept: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			tiertest.NoLeaks(t)
			const capacity, size = 1 << 20, 10_000
			d, f := faultyDevice(t, capacity)
			s := gpuSpace(t, capacity, newDevicePool(t, d))
			charge := s.Charge(size)
			for k, n := range c.alloc {
				f.next(k, n)
			}
			b, err := s.DrawNew(size)
			if c.passes {
				ok(t, err)
				for k, n := range c.free {
					f.next(k, n)
				}
				ok(t, b.Release())
			} else {
				if !errors.Is(err, errFault) || b != nil {
					t.Fatalf("Draw gave %v, %v", b, err)
				}
				usage(t, s, "after a failed draw", 0, 0, 0)
			}
			if c.kept {
				usage(t, s, "with a free that was refused", 0, charge, 0)
			}
			for range 3 { // refused frees are tried again
				draw(t, s, size)
			}
			usage(t, s, "with three buffers", 3*charge, 0, 0)
			if got := d.Outstanding(); got != 3*charge {
				t.Errorf("the device has %d bytes outstanding, the space %d", got, 3*charge)
			}
		})
	}
}

// TestDevicePoolStuckUntilClose: what the device never takes back is told by
// Close, and the books close all the same.
func TestDevicePoolStuckUntilClose(t *testing.T) {
	d, f := faultyDevice(t, 1<<20)
	s := gpuSpace(t, 1<<20, newDevicePool(t, d))
	b := draw(t, s, 1000)
	f.next(sim.OpFree, 2)
	ok(t, b.Release())
	usage(t, s, "with a free that was refused", 0, 1024, 0)
	if err := s.Close(); err == nil {
		t.Error("Close does not tell that the device refuses to take memory back")
	}
	usage(t, s, "after Close", 0, 0, 0)
}

// TestDevicePoolRenewsItsStream: a failure on the pool's stream does not fail
// all that comes.
func TestDevicePoolRenewsItsStream(t *testing.T) {
	d, f := faultyDevice(t, 1<<20)
	spy := &streamSpy{Device: d}
	p := newDevicePool(t, spy)
	spoil(t, d, f, spy.last)
	f.next(sim.OpNewStream, 1)
	if m, err := p.Alloc(1000, nil); !errors.Is(err, errFault) {
		t.Errorf("with a failed stream and no other to be had: %v, %v", m, err)
	}
	m, err := p.Alloc(1000, nil)
	ok(t, err)
	if spy.opened != 2 {
		t.Errorf("%d streams were opened, want the first and one in its place", spy.opened)
	}
	reclaimed := false
	p.Free(m, func() { reclaimed = true })
	ok(t, p.Close())
	if !reclaimed || d.Outstanding() != 0 {
		t.Errorf("reclaimed %v, outstanding %d", reclaimed, d.Outstanding())
	}
}

// streamSpy is a device around another that remembers the last stream.
type streamSpy struct {
	tier.Device
	last   tier.Stream
	opened int
}

func (d *streamSpy) Unwrap() tier.Device { return d.Device }

func (d *streamSpy) NewStream() (tier.Stream, error) {
	s, err := d.Device.NewStream()
	if err == nil {
		d.last, d.opened = s, d.opened+1
	}
	return s, err
}

// lateDevice takes freed memory back when Reap is called, and is done with a
// free when the test says so.
type lateDevice struct {
	tier.Device
	gone   []tier.Addr
	reaps  int
	events chan struct{} // nil: events are the device's
}

func (d *lateDevice) Free(s tier.Stream, a tier.Addr) error {
	d.gone = append(d.gone, a)
	return nil
}

func (d *lateDevice) Reap() (n int64) {
	d.reaps++
	before := d.Device.Outstanding()
	s, err := d.NewStream()
	if err != nil {
		return 0
	}
	defer s.Close()
	for _, a := range d.gone {
		if err := d.Device.Free(s, a); err != nil {
			return 0
		}
	}
	d.gone = nil
	return before - d.Device.Outstanding()
}

func (d *lateDevice) Record(s tier.Stream) (tier.Event, error) {
	if d.events != nil {
		return lateEvent{d.events}, nil
	}
	return d.Device.Record(s)
}

type lateEvent struct{ c chan struct{} }

func (e lateEvent) Done() <-chan struct{} { return e.c }
func (e lateEvent) Err() error            { return nil }

// TestDevicePoolWaitsForTheStream: memory is handed out when the stream that makes it is done, so
// that other streams may use it.
func TestDevicePoolWaitsForTheStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &lateDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20}), events: make(chan struct{})}
		p := newDevicePool(t, d)
		var m tier.Memory
		var err error
		handedOut := make(chan struct{})
		go func() {
			defer close(handedOut)
			m, err = p.Alloc(1000, nil)
		}()
		synctest.Wait()
		select {
		case <-handedOut:
			t.Error("memory was handed out that the device has not made")
		default:
		}
		close(d.events)
		<-handedOut
		ok(t, err)
		p.Free(m, func() {})
	})
}

// TestDevicePoolReaps: a device that refuses is reaped and asked once more.
func TestDevicePoolReaps(t *testing.T) {
	d := &lateDevice{Device: openDevice(t, sim.Config{Memory: 1 << 20})}
	p := newDevicePool(t, d)
	m, err := p.Alloc(1<<20, nil)
	ok(t, err)
	p.Free(m, func() {})
	m, err = p.Alloc(1<<20, nil)
	ok(t, err)
	if d.reaps != 1 {
		t.Errorf("the device was reaped %d times", d.reaps)
	}
	if _, err = p.Alloc(1, nil); !errors.Is(err, tier.ErrNoSpace) || d.reaps != 2 {
		t.Errorf("with nothing to reap: %v after %d reaps", err, d.reaps)
	}
	p.Free(m, func() {})
}

// TestDevicePoolCloseWaitsForTheDevice: reclaimed comes when the device is done,
// and Close waits for that.
func TestDevicePoolCloseWaitsForTheDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		inner, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		d := &lateDevice{Device: inner}
		p := newDevicePool(t, d)
		before, err := p.Alloc(1000, nil)
		ok(t, err)
		after, err := p.Alloc(1000, nil)
		ok(t, err)
		d.events = make(chan struct{})
		reclaimed := false
		p.Free(before, func() { reclaimed = true })
		closed := make(chan error, 1)
		go func() { closed <- p.Close() }()
		synctest.Wait()
		if reclaimed || len(closed) > 0 {
			t.Errorf("before the device is done: reclaimed %v, closed %v", reclaimed, len(closed) > 0)
		}
		close(d.events)
		ok(t, <-closed)
		if !reclaimed {
			t.Error("Close did not wait for the memory")
		}
		// A freed region returns to the device.
		freed := false
		p.Free(after, func() { freed = true })
		if !freed {
			t.Error("a free after Close leaves the bytes behind")
		}
		ok(t, inner.Close())
	})
}

// TestDevicePoolSurvivesPanics: a device that panics fails one allocation, not
// all that follow.
func TestDevicePoolSurvivesPanics(t *testing.T) {
	panics := true
	d := openDevice(t, sim.Config{Memory: 1 << 20}, func(op sim.Op) error {
		if panics && op.Kind == sim.OpAlloc {
			panic("a driver's bug")
		}
		return nil
	})
	s := gpuSpace(t, 1<<20, newDevicePool(t, devpool.Guarded(d)))
	if b, err := s.DrawNew(1000); b != nil || err == nil {
		t.Errorf("DrawNew from a device that panics: %v, %v", b, err)
	}
	usage(t, s, "after a panic", 0, 0, 0)
	panics = false
	b, err := s.DrawNew(1000)
	ok(t, err)
	ok(t, b.Release())
	usage(t, s, "in the end", 0, 0, 0)
}

// TestDevicePoolOutlivesItsDevice: memory of a device that is gone is gone, and
// the books say so.
func TestDevicePoolOutlivesItsDevice(t *testing.T) {
	d := openDevice(t, sim.Config{Memory: 1 << 20})
	s := gpuSpace(t, 1<<20, newDevicePool(t, d))
	b := draw(t, s, 1000)
	ok(t, d.Close())
	ok(t, b.Release())
	usage(t, s, "after the device was closed", 0, 0, 0)
	ok(t, s.Close())
}

func TestWait(t *testing.T) {
	cause := errors.New("no longer wanted")
	ctx, cancel := context.WithCancelCause(t.Context())
	never := lateEvent{make(chan struct{})}
	done := lateEvent{make(chan struct{})}
	close(done.c)
	ok(t, tier.Wait(ctx, done))
	cancel(cause)
	if err := tier.Wait(ctx, never); err != cause {
		t.Errorf("Wait for what never comes, without a context: %v", err)
	}
	ok(t, tier.Wait(ctx, done)) // done is done
}

func draw(t testing.TB, s *tier.Space, size int64) *tier.Buffer {
	t.Helper()
	b, err := s.DrawNew(size)
	ok(t, err)
	return b
}

func usage(t testing.TB, s *tier.Space, when string, live, retired, reserved int64) {
	t.Helper()
	u := s.State().Usage
	if u.Live != live || u.Retired != retired || u.Reserved != reserved {
		t.Errorf("%s: %+v; want live %d, retired %d, reserved %d", when, u, live, retired, reserved)
	}
}
