package budget

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// loggedDevice logs the calls of a device, and passes streams, events and peers on as they are: a
// device that copies to a peer unwraps the peer itself.
type loggedDevice struct {
	decorator
	log *slog.Logger
}

var _ tier.Computer = (*loggedDevice)(nil)

// Logged returns dev with a line in log, at slog.LevelDebug, for each call that allocates, frees,
// moves, computes, or opens, orders or closes something, when the call returns. Every line has the
// message "device call" and the attributes device, op, took and, where the call has them, bytes,
// stream, addr and error. Reap has a line if it took something back; queries such as MemInfo have
// none.
//
// A line reports calls that reach this decorator: not those that a decorator above it refuses, but
// those that one below it refuses, with the error. No lock of this package is held while a line is
// written. While the level is disabled, a call costs no allocation. log must not be nil; a line is
// lost if its handler panics. The returned device has a method Unwrap, implements tier.Computer,
// and is safe for concurrent use.
func Logged(dev tier.Device, log *slog.Logger) tier.Device {
	return &loggedDevice{decorator{dev}, guard.Logger(log).With("device", dev.Info().Name)}
}

var errPanicked = errors.New("it panicked")

// call is what the line of a call contains.
type call struct {
	op     string
	stream tier.Stream
	bytes  int64
	addr   tier.Addr
}

// do makes a call and logs it, also if it panics. f may set what is not known before in c.
func (d *loggedDevice) do(c *call, f func() error) (err error) {
	if !d.log.Enabled(context.Background(), slog.LevelDebug) {
		return f()
	}
	began := time.Now()
	err = errPanicked
	defer func() { d.line(c, time.Since(began), err) }()
	return f()
}

func (d *loggedDevice) line(c *call, took time.Duration, err error) {
	lockrank.AssertNone("a device's call is logged")
	attrs := []any{"op", c.op, "took", took}
	if c.bytes != 0 {
		attrs = append(attrs, "bytes", c.bytes)
	}
	if c.stream != nil {
		attrs = append(attrs, "stream", fmt.Sprintf("%p", c.stream))
	}
	if c.addr != 0 {
		attrs = append(attrs, "addr", fmt.Sprintf("%#x", uint64(c.addr)))
	}
	if err != nil {
		attrs = append(attrs, "error", err.Error())
	}
	d.log.Debug("device call", attrs...)
}

// Alloc implements tier.Device.
func (d *loggedDevice) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	c := call{"alloc", s, size, 0}
	err = d.do(&c, func() (err error) {
		a, err = d.inner.Alloc(s, size)
		c.addr = a
		return err
	})
	return a, err
}

// Free implements tier.Device.
func (d *loggedDevice) Free(s tier.Stream, a tier.Addr) error {
	return d.do(&call{"free", s, 0, a}, func() error { return d.inner.Free(s, a) })
}

// CopyToDevice implements tier.Device.
func (d *loggedDevice) CopyToDevice(s tier.Stream, dst tier.Addr, src []byte) error {
	c := call{"copy to device", s, int64(len(src)), dst}
	return d.do(&c, func() error { return d.inner.CopyToDevice(s, dst, src) })
}

// CopyToHost implements tier.Device.
func (d *loggedDevice) CopyToHost(s tier.Stream, dst []byte, src tier.Addr) error {
	c := call{"copy to host", s, int64(len(dst)), src}
	return d.do(&c, func() error { return d.inner.CopyToHost(s, dst, src) })
}

// CopyPeer implements tier.Device.
func (d *loggedDevice) CopyPeer(s tier.Stream, dst tier.Addr, peer tier.Device, src tier.Addr, size int64) error {
	c := call{"copy to peer", s, size, dst}
	return d.do(&c, func() error { return d.inner.CopyPeer(s, dst, peer, src, size) })
}

// CopyRegions implements tier.Device.
func (d *loggedDevice) CopyRegions(s tier.Stream, regions []tier.Region) error {
	c := call{op: "copy regions", stream: s}
	for _, r := range regions {
		c.bytes += max(r.Size, int64(len(r.HostDst)), int64(len(r.HostSrc)))
	}
	return d.do(&c, func() error { return d.inner.CopyRegions(s, regions) })
}

// Fill implements tier.Device.
func (d *loggedDevice) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) error {
	return d.do(&call{"fill", s, size, dst}, func() error { return d.inner.Fill(s, dst, value, size) })
}

// Digest implements tier.Computer. It returns ErrNotSupported if the wrapped device does not
// compute.
func (d *loggedDevice) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	c := call{"digest", s, size, src}
	return d.do(&c, func() error { return d.decorator.Digest(s, src, size, first, out) })
}

// NewStream implements tier.Device.
func (d *loggedDevice) NewStream() (s tier.Stream, err error) {
	c := call{op: "new stream"}
	err = d.do(&c, func() (err error) {
		s, err = d.inner.NewStream()
		c.stream = s
		return err
	})
	return s, err
}

// Record implements tier.Device.
func (d *loggedDevice) Record(s tier.Stream) (e tier.Event, err error) {
	err = d.do(&call{op: "record", stream: s}, func() (err error) {
		e, err = d.inner.Record(s)
		return err
	})
	return e, err
}

// WaitEvent implements tier.Device.
func (d *loggedDevice) WaitEvent(s tier.Stream, e tier.Event) error {
	return d.do(&call{op: "wait event", stream: s}, func() error { return d.inner.WaitEvent(s, e) })
}

// Reap implements tier.Device.
func (d *loggedDevice) Reap() int64 {
	began := time.Now()
	n := d.inner.Reap()
	if n != 0 {
		d.line(&call{op: "reap", bytes: n}, time.Since(began), nil)
	}
	return n
}

// Close implements tier.Device.
func (d *loggedDevice) Close() error { return d.do(&call{op: "close"}, d.inner.Close) }
