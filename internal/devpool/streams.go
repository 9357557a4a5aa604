// Package devpool has what an engine keeps of a device: [Memory], the pool of a GPU space, and
// [Streams], which are lent for copies. [Guarded] is a device of a program's, whose panics are
// errors. [Loss] tells subscribers that a device has failed for good.
//
//	tier.Space ─▶ Memory ──┐
//	                       ├─▶ tier.Device
//	who copies ─▶ Streams ─┘
//
// Neither owns the device: its opener closes it, after both. The lock of Streams is
// lockrank.Backend. No device is called under it.
package devpool

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Streams lends a device's streams, each to one borrower at a time. It is safe for concurrent use.
//
// Borrowers that wait are served in the order of arrival. A stream on which work failed is closed
// when it is returned, and the next borrower opens another in its place. So a failure affects only
// the borrower that had it.
type Streams struct {
	Device tier.Device // that the streams belong to; does not change

	idle chan tier.Stream // has room for all; nil is a place without a stream

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		lent   map[tier.Stream]struct{} // a stream neither here nor idle is not ours
		closed bool                     // and so is idle
	}
}

// NewStreams opens size > 0 streams on dev, whose methods must not panic; see Guarded.
func NewStreams(dev tier.Device, size int) (*Streams, error) {
	if size <= 0 {
		return nil, fmt.Errorf("devpool: a pool of %d streams", size)
	}
	p := &Streams{Device: dev, idle: make(chan tier.Stream, size)}
	p.mu.lent = make(map[tier.Stream]struct{}, size)
	for range size {
		s, err := dev.NewStream()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("devpool: opening a stream: %w", err), p.Close())
		}
		p.idle <- s
	}
	return p, nil
}

// Borrow lends a stream, and waits for one if it must. The caller must Return it once, with all its
// work done. It returns ctx's cause if that ends while it waits, tier.ErrClosed when the pool is
// closed, and the device's error if a stream that failed cannot be replaced.
func (p *Streams) Borrow(ctx context.Context) (s tier.Stream, err error) {
	var open bool
	select {
	case s, open = <-p.idle: // also if ctx has ended
	default:
		select {
		case s, open = <-p.idle:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
	if !open {
		return nil, tier.ErrClosed
	}
	if s == nil {
		if s, err = p.Device.NewStream(); err != nil {
			p.leaveOpen()
			return nil, fmt.Errorf("devpool: opening a stream: %w", err)
		}
	}
	p.mu.Lock()
	closed := p.mu.closed
	if !closed {
		p.mu.lent[s] = struct{}{}
	}
	p.mu.Unlock()
	if closed {
		return nil, errors.Join(tier.ErrClosed, closeStream(s))
	}
	return s, nil
}

// leaveOpen makes room for another stream, which the next borrower opens.
func (p *Streams) leaveOpen() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.mu.closed {
		p.idle <- nil
	}
}

// Return gives a borrowed stream back. It panics if s is not borrowed: two borrowers would share
// it. A stream that has failed is replaced.
func (p *Streams) Return(s tier.Stream) {
	failed := s.Err() != nil
	p.mu.Lock()
	_, ours := p.mu.lent[s]
	delete(p.mu.lent, s)
	idle := ours && !failed && !p.mu.closed
	if idle {
		p.idle <- s // which has room
	}
	p.mu.Unlock()
	switch {
	case !ours:
		panic("devpool: a stream was returned to its pool that is not borrowed from it")
	case !idle:
		_ = closeStream(s) // the waiters for its work got its error
		p.leaveOpen()      // only now, so that there are never more streams than places
	}
}

// Close closes the streams and wakes the waiters. Its error lists the streams that are still
// borrowed. Those are closed when they are returned.
func (p *Streams) Close() error {
	p.mu.Lock()
	closed, lent := p.mu.closed, len(p.mu.lent)
	if !closed {
		p.mu.closed = true
		close(p.idle)
	}
	p.mu.Unlock()
	if closed {
		return tier.ErrClosed
	}
	var err error
	for s := range p.idle {
		if s != nil {
			err = errors.Join(err, closeStream(s))
		}
	}
	if lent > 0 {
		err = errors.Join(err, fmt.Errorf("devpool: %d of %d streams are still borrowed", lent, cap(p.idle)))
	}
	return err
}

// closeStream closes a stream. The streams of a guarded device are as the device made them.
func closeStream(s tier.Stream) (err error) {
	defer guard.Error(&err, "Stream.Close")
	return s.Close()
}
