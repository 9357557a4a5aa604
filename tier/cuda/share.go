package cuda

import (
	"context"
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

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
