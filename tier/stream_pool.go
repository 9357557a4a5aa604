package tier

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// StreamPool lends a device's streams, each to one borrower at a time. It is
// safe for concurrent use.
type StreamPool struct {
	dev  Device
	free chan Stream
	all  []Stream

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		closed bool
	}
}

// NewStreamPool opens size > 0 streams on dev.
func NewStreamPool(dev Device, size int) (*StreamPool, error) {
	if size <= 0 {
		return nil, fmt.Errorf("tier: a stream pool of %d streams", size)
	}
	p := &StreamPool{dev: dev, free: make(chan Stream, size)}
	for range size {
		s, err := dev.NewStream()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("tier: opening a stream: %w", err), p.Close())
		}
		p.all = append(p.all, s)
		p.free <- s
	}
	return p, nil
}

// Device returns the device that the streams belong to.
func (p *StreamPool) Device() Device { return p.dev }

// Borrow waits for a stream. The caller must Return it once, with all its work
// done.
func (p *StreamPool) Borrow(ctx context.Context) (Stream, error) {
	select {
	case s := <-p.free:
		return s, nil
	default:
	}
	select {
	case s := <-p.free:
		return s, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// Return gives a borrowed stream back.
func (p *StreamPool) Return(s Stream) {
	select {
	case p.free <- s:
	default:
		panic("tier: a stream was returned to its pool twice")
	}
}

// Close closes all streams, which must have been returned.
func (p *StreamPool) Close() error {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	p.mu.closed = true
	p.mu.Unlock()
	if len(p.free) != len(p.all) {
		return fmt.Errorf("tier: %d of %d streams are still borrowed", len(p.all)-len(p.free), len(p.all))
	}
	var errs []error
	for _, s := range p.all {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}
