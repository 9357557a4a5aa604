// Package faultdev puts faults between a device's user and the device: for tests of
// programs that spill, which should know what they do when a GPU fails.
//
//	spillway.GPUConfig.Wrap, or anything that takes a tier.Device
//	        │
//	pools, streams, moves ──▶ faultdev.Device ──▶ tier.Device, of any backend
//	                            rules: which operations, which of them, what happens
//
// A Rule chooses operations by kind, by index and by chance, and has an Effect: an error
// of the call, a failure of the work, no memory, a flipped bit, a delay, or a call of the
// test's. The first rule that chooses an operation is applied to it. The rules are those
// of tier/disk/faultfs, except for paths. Device.Lose makes it a GPU that is lost for good.
//
// A Device owns the device that it wraps no more than its caller does: Close closes that.
// It is safe for concurrent use, as far as that is. Its mutex has the rank Device and is
// not held while anything is done.
package faultdev

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/faultrule"
	"github.com/spillway-db/spillway/internal/loss"
	"github.com/spillway-db/spillway/tier"
)

var (
	_ tier.Device   = (*Device)(nil)
	_ tier.Computer = (*Device)(nil)
	_ tier.Losable  = (*Device)(nil)
)

// device has the methods of the interfaces.
type device struct {
	inner tier.Device
	rules *faultrule.Set[Rule]
	loss  loss.Signal
}

// OnLost implements tier.Losable, also for the device that is wrapped, if that does.
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

// Unwrap returns the device that is wrapped.
func (d *device) Unwrap() tier.Device { return d.inner }

// Info implements tier.Device.
func (d *device) Info() tier.DeviceInfo { return d.inner.Info() }

// Charge implements tier.Device.
func (d *device) Charge(size int64) int64 { return d.inner.Charge(size) }

// Alloc implements tier.Device.
func (d *device) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	e, err := d.ask(opAlloc, size)
	if err != nil {
		return 0, err
	}
	if e.full {
		return 0, &tier.NoSpaceError{Requested: size}
	}
	return d.inner.Alloc(s, size)
}

// Free implements tier.Device.
func (d *device) Free(s tier.Stream, a tier.Addr) error {
	if _, err := d.ask(opFree, 0); err != nil && d.loss.Err() == nil {
		return err
	}
	return d.inner.Free(s, a)
}

// CopyToDevice implements tier.Device.
func (d *device) CopyToDevice(s tier.Stream, dst tier.Addr, src []byte) error {
	n := int64(len(src))
	return d.work(opCopyToDevice, s, n, place{dev: d.inner, addr: dst, size: n}, func() error { return d.inner.CopyToDevice(s, dst, src) })
}

// CopyToHost implements tier.Device.
func (d *device) CopyToHost(s tier.Stream, dst []byte, src tier.Addr) error {
	return d.work(opCopyToHost, s, int64(len(dst)), place{host: dst}, func() error { return d.inner.CopyToHost(s, dst, src) })
}

// CopyPeer implements tier.Device. The peer is handed on as it is: the device that
// copies unwraps it.
func (d *device) CopyPeer(s tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	return d.work(opCopyPeer, s, size, place{dev: dstDevice, addr: dst, size: size, elsewhere: true}, func() error {
		return d.inner.CopyPeer(s, dst, dstDevice, src, size)
	})
}

// CopyRegions implements tier.Device.
func (d *device) CopyRegions(s tier.Stream, regions []tier.Region) error {
	total := int64(0)
	for _, r := range regions {
		total += length(r)
	}
	return d.work(opCopyRegions, s, total, d.oneOf(regions, total), func() error { return d.inner.CopyRegions(s, regions) })
}

// Fill implements tier.Device.
func (d *device) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) error {
	return d.work(opFill, s, size, place{dev: d.inner, addr: dst, size: size}, func() error { return d.inner.Fill(s, dst, value, size) })
}

// Digest implements tier.Computer: ErrNotSupported if the wrapped device does not
// compute.
func (d *device) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	computer, ok := d.inner.(tier.Computer)
	if !ok {
		return fmt.Errorf("faultdev: %s cannot compute: %w", d.inner.Info().Name, tier.ErrNotSupported)
	}
	return d.work(opDigest, s, size, place{}, func() error { return computer.Digest(s, src, size, first, out) })
}

// NewStream implements tier.Device.
func (d *device) NewStream() (tier.Stream, error) {
	if _, err := d.ask(opNewStream, 0); err != nil {
		return nil, err
	}
	return d.inner.NewStream()
}

// Record implements tier.Device.
func (d *device) Record(s tier.Stream) (tier.Event, error) {
	_, err := d.ask(opRecord, 0)
	if why := d.loss.Err(); why != nil {
		e, err := d.inner.Record(s)
		if err != nil {
			return nil, err
		}
		return lateFailure{e, why}, nil
	}
	if err != nil {
		return nil, err
	}
	return d.inner.Record(s)
}

// lateFailure is an event of a device that was lost: done when nothing is under way any more, which
// uses memory of others.
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
	if _, err := d.ask(opWaitEvent, 0); err != nil {
		return err
	}
	return d.inner.WaitEvent(s, e)
}

// MemInfo implements tier.Device.
func (d *device) MemInfo() (free, total int64) { return d.inner.MemInfo() }

// Outstanding implements tier.Device.
func (d *device) Outstanding() int64 { return d.inner.Outstanding() }

// Reap implements tier.Device.
func (d *device) Reap() int64 { return d.inner.Reap() }

// Close implements tier.Device: it closes the device that is wrapped.
func (d *device) Close() error { return d.inner.Close() }

// work makes a call that puts work on a stream, which writes to dst.
func (d *device) work(op string, s tier.Stream, bytes int64, dst place, call func() error) error {
	e, err := d.apply(op, bytes)
	switch {
	case err != nil:
		return err
	case e.work != nil:
		return d.failWork(s, e.work)
	}
	if err := call(); err != nil {
		return err
	}
	if e.flip {
		return d.flip(s, dst)
	}
	return nil
}

// failWork makes a stream fail: it waits for what has failed already.
func (d *device) failWork(s tier.Stream, cause error) error {
	err := d.inner.WaitEvent(s, failure{cause})
	if errors.Is(err, tier.ErrNotSupported) {
		return cause
	}
	return err
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
