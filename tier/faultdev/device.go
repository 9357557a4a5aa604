// Package faultdev injects faults between a device and its user, for tests of programs that spill
// and must handle a failing GPU.
//
//	spillway.GPUConfig.Wrap, or anything that takes a tier.Device
//	        │
//	pools, streams, moves ──▶ faultdev.Device ──▶ tier.Device, of any backend
//	                            rules: which operations, which of them, what happens
//
// A Rule chooses operations by kind, index and chance, and has an Effect: an error of the call, a
// failure of the work, no memory, a flipped bit, a delay, or a call of the test's. An operation
// gets the effect of the first rule that chooses it. The rules are those of tier/disk/faultfs,
// except for paths. Device.Lose makes the device behave as a GPU that is lost for good.
//
// Device.Close closes the wrapped device. A Device is safe for concurrent use if the wrapped one
// is. Its mutex has the rank Device and is not held during operations and hooks.
package faultdev

import (
	"errors"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/faultrule"
	"github.com/spillway-db/spillway/tier"
)

var (
	_ tier.Device  = (*Device)(nil)
	_ tier.Losable = (*Device)(nil)
)

// inner is the wrapped device. Its name keeps the embedded field unexported.
type inner = tier.Device

// device has the methods of the interfaces. Those without faults are the wrapped device's.
type device struct {
	inner
	rules *faultrule.Set[Rule]
	loss  devpool.Loss
}

// OnLost implements tier.Losable. It also reports the loss of the wrapped device if that implements
// tier.Losable.
func (d *device) OnLost(f func(why error)) (cancel func()) {
	own, inner := d.loss.OnLost(f), func() {}
	if l, ok := tier.As[tier.Losable](d.inner); ok {
		inner = l.OnLost(f)
	}
	return func() {
		own()
		inner()
	}
}

// Unwrap returns the wrapped device.
func (d *device) Unwrap() tier.Device { return d.inner }

// Alloc implements tier.Device.
func (d *device) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	if err := d.check(opAlloc, size); err != nil {
		return 0, err
	}
	return d.inner.Alloc(s, size)
}

// Free implements tier.Device. A lost device still frees memory.
func (d *device) Free(s tier.Stream, a tier.Addr) error {
	if err := d.check(opFree, 0); err != nil && d.loss.Err() == nil {
		return err
	}
	return d.inner.Free(s, a)
}

// CopyPeer implements tier.Device. It passes the peer on as it is: the device that copies unwraps
// it.
func (d *device) CopyPeer(s tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	return d.work(opCopyPeer, s, size, place{dev: dstDevice, addr: dst, size: size}, func() error {
		return d.inner.CopyPeer(s, dst, dstDevice, src, size)
	})
}

// CopyRegions implements tier.Device.
func (d *device) CopyRegions(s tier.Stream, regions []tier.Region) error {
	total := int64(0)
	for _, r := range regions {
		total += length(r)
	}
	op := opCopyRegions
	if len(regions) == 1 && regions[0].HostSrc != nil {
		op = opCopyToDevice
	} else if len(regions) == 1 && regions[0].HostDst != nil {
		op = opCopyToHost
	}
	return d.work(op, s, total, d.destination(regions, total), func() error {
		return d.inner.CopyRegions(s, regions)
	})
}

// Fill implements tier.Device.
func (d *device) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) error {
	return d.work(opFill, s, size, place{dev: d.inner, addr: dst, size: size}, func() error {
		return d.inner.Fill(s, dst, value, size)
	})
}

// NewStream implements tier.Device.
func (d *device) NewStream() (tier.Stream, error) {
	if err := d.check(opNewStream, 0); err != nil {
		return nil, err
	}
	return d.inner.NewStream()
}

// Record implements tier.Device.
func (d *device) Record(s tier.Stream) (tier.Event, error) {
	err, why := d.check(opRecord, 0), d.loss.Err()
	if err != nil && why == nil {
		return nil, err
	}
	e, err := d.inner.Record(s)
	if err == nil && why != nil {
		e = lateFailure{e, why}
	}
	return e, err
}

// lateFailure is an event of a device that was lost. It is done once the work before it has ended,
// which uses memory of others, and fails then.
type lateFailure struct {
	tier.Event
	why error
}

// Err implements tier.Event.
func (e lateFailure) Err() error {
	select {
	case <-e.Done():
		return e.why
	default:
		return nil
	}
}

// WaitEvent implements tier.Device.
func (d *device) WaitEvent(s tier.Stream, e tier.Event) error {
	if err := d.check(opWaitEvent, 0); err != nil {
		return err
	}
	return d.inner.WaitEvent(s, e)
}

// work makes a call that puts work on a stream. The work writes to dst.
func (d *device) work(op string, s tier.Stream, bytes int64, dst place, call func() error) error {
	e, err := d.apply(op, bytes)
	if err != nil {
		return err
	}
	if e.work != nil { // the stream fails because it waits for a failed event
		if err = d.inner.WaitEvent(s, failure{e.work}); errors.Is(err, tier.ErrNotSupported) {
			return e.work
		}
		return err
	}
	if err := call(); err != nil || !e.flip {
		return err
	}
	return d.flip(s, dst)
}

// failure is an event whose work has failed.
type failure struct{ err error }

func (f failure) Err() error { return f.err }

// Done implements tier.Event.
func (failure) Done() <-chan struct{} {
	done := make(chan struct{})
	close(done)
	return done
}
