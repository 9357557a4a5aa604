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

// loggedDevice logs the calls that reach a device, and passes streams, events and peers on as
// they are.
type loggedDevice struct {
	inner
	log  *slog.Logger
	name string
}

var (
	_ tier.Device   = (*loggedDevice)(nil)
	_ tier.Computer = (*loggedDevice)(nil)
)

// logLevel is the level of each line. A refused allocation is no mishap but how a budget works. The
// caller decides what deserves a warning.
const logLevel = slog.LevelDebug

// Logged returns dev with a line in log, at slog.LevelDebug, for each call that
// allocates, frees, moves, computes, or opens, orders or closes something, when it
// returns. Every line has the message "device call" and the attributes device, op,
// took and, where the call has them, bytes, stream, addr and error. Reap has a line
// if it took something back; questions such as MemInfo have none.
//
// What a decorator above it refuses never comes here and is not logged; what one
// below refuses is logged with its error. No lock of this package is held while a
// line is written. While the level is disabled, a call costs no more than asking.
// log must not be nil; a line is lost when its handler panics. The device that is returned has
// a method Unwrap, implements tier.Computer, and is safe for concurrent use.
func Logged(dev tier.Device, log *slog.Logger) tier.Device {
	return &loggedDevice{inner: dev, log: guard.Logger(log), name: dev.Info().Name}
}

// Unwrap returns the device whose calls are logged.
func (d *loggedDevice) Unwrap() tier.Device { return d.inner }

func (d *loggedDevice) enabled() bool { return d.log.Enabled(context.Background(), logLevel) }

// call describes a call for its line.
type call struct {
	op     string
	stream tier.Stream
	bytes  int64
	addr   tier.Addr
}

var errPanicked = errors.New("it panicked")

// do makes a call and logs it, also if it panics. Only the enabled come here.
func (d *loggedDevice) do(c call, f func() error) (err error) {
	begin := time.Now()
	err = errPanicked
	defer func() { d.line(c, time.Since(begin), err) }()
	err = f()
	return err
}

func (d *loggedDevice) line(c call, took time.Duration, err error) {
	lockrank.AssertNone("a device's call is logged")
	attrs := make([]slog.Attr, 0, 7)
	attrs = append(attrs, slog.String("device", d.name), slog.String("op", c.op))
	if c.bytes != 0 {
		attrs = append(attrs, slog.Int64("bytes", c.bytes))
	}
	if c.stream != nil {
		attrs = append(attrs, slog.String("stream", fmt.Sprintf("%p", c.stream)))
	}
	if c.addr != 0 {
		attrs = append(attrs, slog.String("addr", fmt.Sprintf("%#x", uint64(c.addr))))
	}
	attrs = append(attrs, slog.Duration("took", took))
	if err != nil {
		attrs = append(attrs, slog.String("error", err.Error()))
	}
	d.log.LogAttrs(context.Background(), logLevel, "device call", attrs...)
}

// Alloc implements tier.Device.
func (d *loggedDevice) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	if !d.enabled() {
		return d.inner.Alloc(s, size)
	}
	begin := time.Now()
	err = errPanicked
	defer func() { d.line(call{"alloc", s, size, a}, time.Since(begin), err) }()
	a, err = d.inner.Alloc(s, size)
	return a, err
}

// Free implements tier.Device.
func (d *loggedDevice) Free(s tier.Stream, a tier.Addr) error {
	if !d.enabled() {
		return d.inner.Free(s, a)
	}
	return d.do(call{op: "free", stream: s, addr: a}, func() error { return d.inner.Free(s, a) })
}

// CopyToDevice implements tier.Device.
func (d *loggedDevice) CopyToDevice(s tier.Stream, dst tier.Addr, src []byte) error {
	if !d.enabled() {
		return d.inner.CopyToDevice(s, dst, src)
	}
	return d.do(call{"copy to device", s, int64(len(src)), dst}, func() error { return d.inner.CopyToDevice(s, dst, src) })
}

// CopyToHost implements tier.Device.
func (d *loggedDevice) CopyToHost(s tier.Stream, dst []byte, src tier.Addr) error {
	if !d.enabled() {
		return d.inner.CopyToHost(s, dst, src)
	}
	return d.do(call{"copy to host", s, int64(len(dst)), src}, func() error { return d.inner.CopyToHost(s, dst, src) })
}

// CopyPeer implements tier.Device. The peer is handed on as it is: the device that
// copies unwraps it.
func (d *loggedDevice) CopyPeer(s tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	if !d.enabled() {
		return d.inner.CopyPeer(s, dst, dstDevice, src, size)
	}
	return d.do(call{"copy to peer", s, size, dst}, func() error { return d.inner.CopyPeer(s, dst, dstDevice, src, size) })
}

// CopyRegions implements tier.Device.
func (d *loggedDevice) CopyRegions(s tier.Stream, regions []tier.Region) error {
	if !d.enabled() {
		return d.inner.CopyRegions(s, regions)
	}
	var n int64
	for _, r := range regions {
		n += max(r.Size, int64(len(r.HostDst)), int64(len(r.HostSrc)))
	}
	return d.do(call{op: "copy regions", stream: s, bytes: n}, func() error { return d.inner.CopyRegions(s, regions) })
}

// Fill implements tier.Device.
func (d *loggedDevice) Fill(s tier.Stream, dst tier.Addr, value byte, size int64) error {
	if !d.enabled() {
		return d.inner.Fill(s, dst, value, size)
	}
	return d.do(call{"fill", s, size, dst}, func() error { return d.inner.Fill(s, dst, value, size) })
}

// Digest implements tier.Computer: ErrNotSupported if the wrapped device does not
// compute.
func (d *loggedDevice) Digest(s tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	if !d.enabled() {
		return digest(d.inner, s, src, size, first, out)
	}
	return d.do(call{"digest", s, size, src}, func() error { return digest(d.inner, s, src, size, first, out) })
}

// NewStream implements tier.Device.
func (d *loggedDevice) NewStream() (s tier.Stream, err error) {
	if !d.enabled() {
		return d.inner.NewStream()
	}
	begin := time.Now()
	err = errPanicked
	defer func() { d.line(call{op: "new stream", stream: s}, time.Since(begin), err) }()
	s, err = d.inner.NewStream()
	return s, err
}

// Record implements tier.Device.
func (d *loggedDevice) Record(s tier.Stream) (e tier.Event, err error) {
	if !d.enabled() {
		return d.inner.Record(s)
	}
	err = d.do(call{op: "record", stream: s}, func() (err error) { e, err = d.inner.Record(s); return err })
	return e, err
}

// WaitEvent implements tier.Device.
func (d *loggedDevice) WaitEvent(s tier.Stream, e tier.Event) error {
	if !d.enabled() {
		return d.inner.WaitEvent(s, e)
	}
	return d.do(call{op: "wait event", stream: s}, func() error { return d.inner.WaitEvent(s, e) })
}

// Reap implements tier.Device.
func (d *loggedDevice) Reap() int64 {
	begin := time.Now()
	n := d.inner.Reap()
	if n != 0 && d.enabled() {
		d.line(call{op: "reap", bytes: n}, time.Since(begin), nil)
	}
	return n
}

// Close implements tier.Device.
func (d *loggedDevice) Close() error {
	if !d.enabled() {
		return d.inner.Close()
	}
	return d.do(call{op: "close"}, d.inner.Close)
}
