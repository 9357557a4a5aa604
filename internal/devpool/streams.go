// Package devpool has what an engine keeps of a device: [Memory], the pool of a GPU space, and
// [Streams], which are lent for copies.
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

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// Streams lends a device's streams, each to one borrower at a time. It is
// safe for concurrent use.
//
// Borrowers that wait are served in the order of arrival. A stream on which work failed is closed
// when it is returned, and another is opened in its place. So a failure affects only the borrower
// that had it.
type Streams struct {
	dev tier.Device

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		size    int                      // how many streams there should be; does not change
		open    int                      // how many there are or are being opened
		idle    []tier.Stream            // the last returned is lent first
		lent    map[tier.Stream]struct{} // a stream in neither is not ours
		waiters fairqueue.Queue[*borrower]
		closed  bool
	}
}

// A borrower waits for a stream.
type borrower struct {
	done   chan struct{} // closed when stream or err is set
	stream tier.Stream
	err    error
}

// NewStreams opens size > 0 streams on dev.
func NewStreams(dev tier.Device, size int) (*Streams, error) {
	if size <= 0 {
		return nil, fmt.Errorf("devpool: a pool of %d streams", size)
	}
	p := &Streams{dev: dev}
	p.mu.size = size
	p.mu.lent = make(map[tier.Stream]struct{}, size)
	for range size {
		s, err := p.newStream()
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
		p.mu.idle = append(p.mu.idle, s)
		p.mu.open++
	}
	return p, nil
}

// Device returns the device that the streams belong to.
func (p *Streams) Device() tier.Device { return p.dev }

// Borrow lends a stream, and waits for one if it must. The caller must Return it
// once, with all its work done, also if ctx has ended meanwhile. It returns ctx's cause if
// that ends first, and tier.ErrClosed when the pool is closed.
func (p *Streams) Borrow(ctx context.Context) (tier.Stream, error) {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return nil, tier.ErrClosed
	}
	if n := len(p.mu.idle); n > 0 {
		s := p.mu.idle[n-1]
		p.mu.idle = p.mu.idle[:n-1]
		p.mu.lent[s] = struct{}{}
		p.mu.Unlock()
		return s, nil
	}
	b := &borrower{done: make(chan struct{})}
	place := p.mu.waiters.Push(b)
	p.mu.Unlock()
	p.replace()
	select {
	case <-b.done:
	case <-ctx.Done():
		p.mu.Lock()
		if place.Waits() {
			place.Remove()
			b.err = context.Cause(ctx)
		}
		p.mu.Unlock()
	}
	return b.stream, b.err
}

// replace opens a stream in place of one that failed, if a borrower waits for it. Otherwise the
// next borrower opens it. If that fails and there is no other stream, all borrowers get the error:
// no stream would come.
func (p *Streams) replace() {
	p.mu.Lock()
	if p.mu.waiters.Len() == 0 || p.mu.open >= p.mu.size { // a closed pool has no waiters
		p.mu.Unlock()
		return
	}
	p.mu.open++
	p.mu.Unlock()
	s, err := p.newStream()
	p.mu.Lock()
	if err == nil && !p.mu.closed {
		p.lendLocked(s)
		p.mu.Unlock()
		return
	}
	p.mu.open--
	if p.mu.open == 0 {
		p.refuseLocked(err) // if the pool was closed meanwhile, nobody waits
	}
	p.mu.Unlock()
	if err == nil {
		_ = s.Close() // nothing was done on it
	}
}

func (p *Streams) newStream() (s tier.Stream, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("devpool: opening a stream: %w", err)
		}
	}()
	defer guard.Error(&err, "the device's NewStream")
	return p.dev.NewStream()
}

// refuseLocked ends all waits with an error.
func (p *Streams) refuseLocked(err error) {
	for place := range p.mu.waiters.All() {
		place.Remove()
		place.Value.err = err
		close(place.Value.done)
	}
}

// Return gives a borrowed stream back. It panics if s is not borrowed: two
// borrowers would share it. A stream that has failed is replaced.
func (p *Streams) Return(s tier.Stream) {
	failed := s.Err() != nil
	p.mu.Lock()
	if _, ok := p.mu.lent[s]; !ok {
		p.mu.Unlock()
		panic("devpool: a stream was returned to its pool that is not borrowed from it")
	}
	delete(p.mu.lent, s)
	if !failed && !p.mu.closed {
		p.lendLocked(s)
		p.mu.Unlock()
		return
	}
	p.mu.open--
	p.mu.Unlock()
	_ = s.Close() // the waiters for its work got its error
	p.replace()
}

// lendLocked gives s to the oldest waiter, or puts it with the idle ones.
func (p *Streams) lendLocked(s tier.Stream) {
	oldest := p.mu.waiters.Head()
	if oldest == nil {
		p.mu.idle = append(p.mu.idle, s)
		return
	}
	oldest.Remove()
	p.mu.lent[s] = struct{}{}
	oldest.Value.stream = s
	close(oldest.Value.done)
}

// Close closes the streams and wakes the waiters. Its error lists the streams that are still
// borrowed. Those are closed when they are returned.
func (p *Streams) Close() error {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return tier.ErrClosed
	}
	p.mu.closed = true
	idle := p.mu.idle
	lent, open := len(p.mu.lent), p.mu.open
	p.mu.idle = nil
	p.refuseLocked(tier.ErrClosed)
	p.mu.Unlock()
	var errs []error
	for _, s := range idle {
		errs = append(errs, s.Close())
	}
	if lent > 0 {
		errs = append(errs, fmt.Errorf("devpool: %d of %d streams are still borrowed", lent, open))
	}
	return errors.Join(errs...)
}
