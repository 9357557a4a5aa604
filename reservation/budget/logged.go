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
	inner
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
	return &loggedDevice{dev, guard.Logger(log).With("device", dev.Info().Name)}
}

// Unwrap returns the device whose calls are logged.
func (d *loggedDevice) Unwrap() tier.Device { return d.inner }

var errPanicked = errors.New("it panicked")

// call is a call of a device, for its line. A method begins it, and defers end.
type call struct {
	log    *slog.Logger // nil if nothing is logged
	op     string
	stream tier.Stream
	bytes  int64
	addr   tier.Addr
	began  time.Time
}

// begin sets *err to the error that is logged if the call panics.
func (d *loggedDevice) begin(err *error, op string, s tier.Stream, bytes int64, addr tier.Addr) call {
	if !d.log.Enabled(context.Background(), slog.LevelDebug) {
		return call{}
	}
	*err = errPanicked
	return call{d.log, op, s, bytes, addr, time.Now()}
}

// end writes the line of a call that returns *err.
func (c call) end(err *error) {
	if c.log == nil {
		return
	}
	lockrank.AssertNone("a device's call is logged")
	attrs := []any{"op", c.op, "took", time.Since(c.began)}
	if c.bytes != 0 {
		attrs = append(attrs, "bytes", c.bytes)
	}
	if c.stream != nil {
		attrs = append(attrs, "stream", fmt.Sprintf("%p", c.stream))
	}
	if c.addr != 0 {
		attrs = append(attrs, "addr", fmt.Sprintf("%#x", uint64(c.addr)))
	}
	if *err != nil {
		attrs = append(attrs, "error", (*err).Error())
	}
	c.log.Debug("device call", attrs...)
}

// Alloc implements tier.Device.
func (d *loggedDevice) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	c := d.begin(&err, "alloc", s, size, 0)
	defer func() {
		c.addr = a
		c.end(&err)
	}()
	return d.inner.Alloc(s, size)
}

// Free implements tier.Device.
func (d *loggedDevice) Free(s tier.Stream, a tier.Addr) (err error) {
	defer d.begin(&err, "free", s, 0, a).end(&err)
	return d.inner.Free(s, a)
}

// CopyToDevice implements tier.Device.
func (d *loggedDevice) CopyToDevice(s tier.Stream, dst tier.Addr, src []byte) (err error) {
	defer d.begin(&err, "copy to device", s, int64(len(src)), dst).end(&err)
	return d.inner.CopyToDevice(s, dst, src)
}

// CopyToHost implements tier.Device.
func (d *loggedDevice) CopyToHost(s tier.Stream, dst []byte, src tier.Addr) (err error) {
	defer d.begin(&err, "copy to host", s, int64(len(dst)), src).end(&err)
	return d.inner.CopyToHost(s, dst, src)
}

// CopyPeer implements tier.Device.
func (d *loggedDevice) CopyPeer(
	s tier.Stream, dst tier.Addr, peer tier.Device, src tier.Addr, size int64,
) (err error) {
	defer d.begin(&err, "copy to peer", s, size, dst).end(&err)
	return d.inner.CopyPeer(s, dst, peer, src, size)
}

// CopyRegions implements tier.Device.
func (d *loggedDevice) CopyRegions(s tier.Stream, regions []tier.Region) (err error) {
	var n int64
	for _, r := range regions {
		n += max(r.Size, int64(len(r.HostDst)), int64(len(r.HostSrc)))
	}
	defer d.begin(&err, "copy regions", s, n, 0).end(&err)
	return d.inner.CopyRegions(s, regions)
}

// Fill implements tier.Device.
func (d *loggedDevice) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) (err error) {
	defer d.begin(&err, "fill", s, size, dst).end(&err)
	return d.inner.Fill(s, dst, value, size)
}

// Digest implements tier.Computer. It returns ErrNotSupported if the wrapped device does not
// compute.
func (d *loggedDevice) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) (err error) {
	defer d.begin(&err, "digest", s, size, src).end(&err)
	return digest(d.inner, s, src, size, first, out)
}

// NewStream implements tier.Device.
func (d *loggedDevice) NewStream() (s tier.Stream, err error) {
	c := d.begin(&err, "new stream", nil, 0, 0)
	defer func() {
		c.stream = s
		c.end(&err)
	}()
	return d.inner.NewStream()
}

// Record implements tier.Device.
func (d *loggedDevice) Record(s tier.Stream) (e tier.Event, err error) {
	defer d.begin(&err, "record", s, 0, 0).end(&err)
	return d.inner.Record(s)
}

// WaitEvent implements tier.Device.
func (d *loggedDevice) WaitEvent(s tier.Stream, e tier.Event) (err error) {
	defer d.begin(&err, "wait event", s, 0, 0).end(&err)
	return d.inner.WaitEvent(s, e)
}

// Reap implements tier.Device.
func (d *loggedDevice) Reap() int64 {
	var err error
	c := d.begin(&err, "reap", nil, 0, 0)
	c.bytes = d.inner.Reap()
	if err = nil; c.bytes != 0 {
		c.end(&err)
	}
	return c.bytes
}

// Close implements tier.Device.
func (d *loggedDevice) Close() (err error) {
	defer d.begin(&err, "close", nil, 0, 0).end(&err)
	return d.inner.Close()
}
