package quota

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier"
)

// loggedDevice logs what is allocated and freed through it.
type loggedDevice struct {
	decorator
	logger *slog.Logger
}

// Logged returns dev with a line in log, at slog.LevelDebug, for each call of Alloc and Free, when
// the call returns. Every line has the message "device call" and the attributes device, op, took,
// stream and, where the call has them, bytes, addr and error.
//
// A line reports calls that reach this decorator: not those that a decorator above it refuses, but
// those that one below it refuses, with the error. No lock of this package is held while a line is
// written. While the level is disabled, a call costs no allocation. log must not be nil; a line is
// lost if its handler panics. The returned device has a method Unwrap and is safe for concurrent use.
func Logged(dev tier.Device, log *slog.Logger) tier.Device {
	return &loggedDevice{decorator{dev}, guard.Logger(log).With("device", dev.Info().Name)}
}

var errPanicked = errors.New("it panicked")

// Alloc implements tier.Device.
func (d *loggedDevice) Alloc(s tier.Stream, size int64) (a tier.Addr, err error) {
	err = errPanicked
	defer d.log("alloc", time.Now(), s, size, &a, &err)
	return d.inner.Alloc(s, size)
}

// Free implements tier.Device.
func (d *loggedDevice) Free(s tier.Stream, a tier.Addr) (err error) {
	err = errPanicked
	defer d.log("free", time.Now(), s, 0, &a, &err)
	return d.inner.Free(s, a)
}

// log is deferred: it logs a call that began at that time, with its results.
func (d *loggedDevice) log(op string, began time.Time, s tier.Stream, bytes int64, a *tier.Addr, err *error) {
	if !d.logger.Enabled(context.Background(), slog.LevelDebug) {
		return
	}
	attrs := []any{"op", op, "took", time.Since(began), "stream", fmt.Sprintf("%p", s)}
	if bytes != 0 {
		attrs = append(attrs, "bytes", bytes)
	}
	if *a != 0 {
		attrs = append(attrs, "addr", fmt.Sprintf("%#x", uint64(*a)))
	}
	if *err != nil {
		attrs = append(attrs, "error", (*err).Error())
	}
	d.logger.Debug("device call", attrs...)
}
