package cuda

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// ContextOf returns the CUcontext that dev works in. The program owns it if it is Config.Context.
// Otherwise dev owns it, and the handle is valid until dev is closed and all loans of its memory
// have ended (tier.Lender); ContextOf does not check that. For a device that neither is of this
// package nor wraps one the error is tier.ErrNotSupported.
func ContextOf(dev tier.Device) (uintptr, error) {
	d, err := wrapped(dev)
	if err != nil {
		return 0, fmt.Errorf("cuda: the context of a device: %w", err)
	}
	return uintptr(d.dev.Context()), nil
}

// StreamOf returns the CUstream of s, on which other code may put work of its own while s is open.
// Events that the device records on s are behind that work, and report its failures. Only s.Close
// destroys the CUstream, and not even that if the stream is from AdoptStream. Like the methods of s,
// the other code must not use it on several goroutines at once. A stream of another package is
// tier.ErrNotSupported; a closed one is tier.ErrClosed.
func StreamOf(s tier.Stream) (uintptr, error) {
	mine, err := ours(s)
	if err != nil {
		return 0, err
	}
	defer mine.dev.gate.Leave()
	return uintptr(mine.handle), nil
}

// AdoptStream returns a stream of dev whose work goes to handle, a CUstream of the program's in
// dev's context, in one order with what the program puts there. The CUstream stays the program's.
// It must exist until the returned stream, or dev, is closed. Close waits for the work on it, also
// for the program's.
//
// The special streams 0, 1 and 2 are refused, and so is one that dev has already, because two
// goroutines could work with it at once. A CUstream of another context is an error of the driver.
// A device that is none of this package and wraps none is tier.ErrNotSupported.
func AdoptStream(dev tier.Device, handle uintptr) (tier.Stream, error) {
	d, err := wrapped(dev)
	if err != nil {
		return nil, fmt.Errorf("cuda: adopting a stream: %w", err)
	}
	if handle <= 2 { // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are 1 and 2
		return nil, fmt.Errorf("cuda: adopting the stream %#x: want one that cuStreamCreate made", handle)
	}
	if !d.gate.Enter() {
		return nil, tier.ErrClosed
	}
	defer d.gate.Leave()
	s := &stream{dev: d, handle: cuda.Stream(handle), adopted: true, turn: make(chan struct{}, 1)}
	d.mu.Lock()
	for other := range d.mu.streams {
		if other.handle == s.handle {
			d.mu.Unlock()
			return nil, fmt.Errorf("cuda: adopting the stream %#x: the device has it already", handle)
		}
	}
	d.mu.streams[s] = struct{}{}
	d.mu.Unlock()
	if _, err := s.record(); err != nil { // the driver compares the stream's context with the event's
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.mu.streams, s)
		return nil, fmt.Errorf("cuda: adopting the stream %#x: %w", handle, err)
	}
	return s, nil
}

// ShareEvent records a CUevent behind the work put on s so far and returns it, for other code in
// the process to wait for. It is the device's: end, and not cuEventDestroy, destroys it. Others may
// use it until end is called, once, or the device is closed; while memory of the device is lent
// (tier.Lender), beyond that. A stream that has failed returns its error.
func ShareEvent(s tier.Stream) (event uintptr, end func() error, err error) {
	mine, err := ours(s)
	if err != nil {
		return 0, nil, err
	}
	defer mine.dev.gate.Leave()
	return mine.dev.ShareEvent(s)
}

// AdoptEvent makes work put on s afterwards wait for event, a CUevent of the program's in any
// context, and returns an event behind it, to wait for on the host or on another stream. The
// CUevent stays the program's, which may destroy it, or record it again, when AdoptEvent has
// returned. One that was never recorded holds up nothing. If the work before it fails in the
// context of s, s fails, too.
func AdoptEvent(s tier.Stream, event uintptr) (tier.Event, error) {
	mine, err := ours(s)
	if err != nil {
		return nil, err
	}
	defer mine.dev.gate.Leave()
	if event == 0 {
		return nil, errors.New("cuda: adopting an event: it is 0, which is none")
	}
	return mine.behind(cuda.Event(event))
}

// ours returns s as an open stream of this package, and holds its device open until the caller
// leaves the gate, unless there is an error.
func ours(s tier.Stream) (*stream, error) {
	mine, ok := s.(*stream)
	if !ok || mine == nil {
		return nil, fmt.Errorf("cuda: a stream of type %T is not one of this package: %w", s, tier.ErrNotSupported)
	}
	return mine.dev.own(s)
}

// ShareEvent records a CUevent behind the work put on s so far and returns it, for others in the
// process to wait for. They may do so until end is called, once, or the device is closed; while the
// device's memory is lent (Lend), beyond that.
func (d *gpu) ShareEvent(ts tier.Stream) (event uintptr, end func() error, err error) {
	s, err := d.own(ts)
	if err != nil {
		return 0, nil, err
	}
	defer d.gate.Leave()
	if err := s.Err(); err != nil {
		return 0, nil, fmt.Errorf("cuda: an event behind work that failed: %w", err)
	}
	var e cuda.Event
	err = d.dev.Here(func(c *cuda.Calls) (err error) {
		if e, err = c.NewEvent(); err != nil {
			return err
		}
		if err = c.Record(e, s.handle); err != nil {
			_ = c.DestroyEvent(e) // the reason is returned
		}
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.shared[&e] = struct{}{}
	return uintptr(e), func() error { return d.endShared(&e) }, nil
}

// endShared destroys an event of ShareEvent at the first call. Its handle may be that of another
// event afterwards.
func (d *gpu) endShared(e *cuda.Event) error {
	open := d.gate.Enter()
	if open {
		defer d.gate.Leave()
	}
	d.mu.Lock()
	_, there := d.mu.shared[e]
	if open {
		delete(d.mu.shared, e)
	}
	d.mu.Unlock()
	switch {
	case open && there:
		return d.dev.Surely(func(c *cuda.Calls) error { return c.DestroyEvent(*e) })
	case open:
		return tier.ErrReleased
	case there: // it ends with what is lent
		return nil
	}
	return tier.ErrClosed // which has ended it
}

// AwaitShared waits until the work before event is done, a CUevent that other code in the process
// has recorded. If ctx ends first it returns the cause; the device cannot be closed then until the
// event has happened.
func (d *gpu) AwaitShared(ctx context.Context, event uintptr) error {
	ts, err := d.NewStream()
	if err != nil {
		return err
	}
	if !d.gate.Enter() {
		return tier.ErrClosed // which has closed the stream
	}
	defer d.gate.Leave()
	s := ts.(*stream)
	done, err := s.behind(cuda.Event(event))
	if err == nil {
		err = tier.Wait(ctx, done)
	}
	// Closing a stream waits for what it waits for: not here, and not after ctx's end.
	d.waits.Go(func() { // ends with the event; the device's Close waits for it
		labels.GPU.Set()
		_ = s.Close()
	})
	return err
}

// behind makes s wait for the work before a CUevent of other code, and returns an event behind
// that.
func (s *stream) behind(e cuda.Event) (tier.Event, error) {
	if err := s.dev.dev.Here(func(c *cuda.Calls) error { return c.WaitEvent(s.handle, e) }); err != nil {
		return nil, fmt.Errorf("cuda: waiting for the event %#x of others: %w", uintptr(e), err)
	}
	s.dev.mu.Lock()
	s.busy = true
	s.dev.mu.Unlock()
	return s.record()
}
