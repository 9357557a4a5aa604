package tier

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// StreamPool lends a device's streams, each to one borrower at a time. It is
// safe for concurrent use.
//
// Borrowers that wait are served in the order in which they came. A stream on
// which work failed is closed when it is returned, and another one opened in
// its place, so that a failure stays with the borrower who had it.
type StreamPool struct {
	dev Device

	mu struct {
		lockrank.Mutex[lockrank.Backend]
		size    int                 // how many streams there should be
		open    int                 // how many there are or are being opened
		idle    []Stream            // the last returned is lent first
		lent    map[Stream]struct{} // who is in neither is not ours
		waiters []chan loan         // first come, first served; each has room for one
		closed  bool
	}
}

type loan struct {
	stream Stream
	err    error
}

// NewStreamPool opens size > 0 streams on dev.
func NewStreamPool(dev Device, size int) (*StreamPool, error) {
	if size <= 0 {
		return nil, fmt.Errorf("tier: a stream pool of %d streams", size)
	}
	p := &StreamPool{dev: dev}
	p.mu.lent = make(map[Stream]struct{}, size)
	for range size {
		s, err := dev.NewStream()
		if err != nil {
			return nil, errors.Join(fmt.Errorf("tier: opening a stream: %w", err), p.Close())
		}
		p.mu.idle = append(p.mu.idle, s)
		p.mu.open++
		p.mu.size++
	}
	return p, nil
}

// Device returns the device that the streams belong to.
func (p *StreamPool) Device() Device { return p.dev }

// Size returns how many streams the pool has or, where one failed, should have.
func (p *StreamPool) Size() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.size
}

// Borrow lends a stream, and waits for one if it must. The caller must Return it
// once, with all its work done. It returns ctx's cause if that ends first, and
// ErrClosed when the pool is closed.
func (p *StreamPool) Borrow(ctx context.Context) (Stream, error) {
	s, wait, err := p.take(false)
	if wait == nil {
		return s, err
	}
	select {
	case l := <-wait:
		return l.stream, l.err
	case <-ctx.Done():
	}
	if p.leave(wait) {
		return nil, context.Cause(ctx)
	}
	if l := <-wait; l.err == nil { // served at the same moment
		p.Return(l.stream)
	}
	return nil, context.Cause(ctx)
}

// BorrowNow lends a stream, and makes the pool larger by one if all are lent.
func (p *StreamPool) BorrowNow() (Stream, error) {
	s, _, err := p.take(true)
	return s, err
}

// take lends an idle stream, or opens one that is missing, or with grow one
// more, or joins the queue.
func (p *StreamPool) take(grow bool) (Stream, chan loan, error) {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return nil, nil, ErrClosed
	}
	if n := len(p.mu.idle); n > 0 {
		s := p.mu.idle[n-1]
		p.mu.idle = p.mu.idle[:n-1]
		p.mu.lent[s] = struct{}{}
		p.mu.Unlock()
		return s, nil, nil
	}
	if p.mu.open >= p.mu.size && !grow {
		w := make(chan loan, 1)
		p.mu.waiters = append(p.mu.waiters, w)
		p.mu.Unlock()
		return nil, w, nil
	}
	p.mu.open++
	p.mu.Unlock()
	var lent Stream
	err := p.openStream(func(s Stream) {
		lent = s
		p.mu.lent[s] = struct{}{}
		p.mu.size = max(p.mu.size, p.mu.open) // grown
	})
	return lent, nil, err
}

// openStream opens a stream, which the caller has counted, and gives it to
// placeLocked. If that cannot be done and there is no other, those who wait are
// told: nothing would come.
func (p *StreamPool) openStream(placeLocked func(Stream)) error {
	s, err := p.dev.NewStream()
	p.mu.Lock()
	if err == nil && !p.mu.closed {
		placeLocked(s)
		p.mu.Unlock()
		return nil
	}
	p.mu.open--
	var told []chan loan
	if p.mu.open == 0 {
		told, p.mu.waiters = p.mu.waiters, nil
	}
	p.mu.Unlock()
	if err == nil { // closed meanwhile; Close has woken who waited
		return errors.Join(ErrClosed, s.Close())
	}
	err = fmt.Errorf("tier: opening a stream: %w", err)
	for _, w := range told {
		w <- loan{err: err}
	}
	return err
}

// leave takes w out of the queue, and says whether it was there.
func (p *StreamPool) leave(w chan loan) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.mu.waiters, w)
	if i >= 0 {
		p.mu.waiters = slices.Delete(p.mu.waiters, i, i+1)
	}
	return i >= 0
}

// Return gives a borrowed stream back. It panics if s is not borrowed: two
// borrowers would share it. A stream that has failed is replaced.
func (p *StreamPool) Return(s Stream) {
	failed := s.Err() != nil
	p.mu.Lock()
	if _, ok := p.mu.lent[s]; !ok {
		p.mu.Unlock()
		panic("tier: a stream was returned to its pool that is not borrowed from it")
	}
	delete(p.mu.lent, s)
	if !failed && !p.mu.closed {
		w := p.lendLocked(s)
		p.mu.Unlock()
		if w != nil {
			w <- loan{stream: s}
		}
		return
	}
	p.mu.open--
	p.mu.Unlock()
	_ = s.Close() // why it failed was told to who waited for its work
	p.replace()
}

// replace opens a stream in place of one that failed, if somebody waits for it;
// otherwise who borrows next does.
func (p *StreamPool) replace() {
	p.mu.Lock()
	if len(p.mu.waiters) == 0 || p.mu.open >= p.mu.size { // nobody waits for a pool that is closed
		p.mu.Unlock()
		return
	}
	p.mu.open++
	p.mu.Unlock()
	var w chan loan
	var s Stream
	err := p.openStream(func(opened Stream) { s = opened; w = p.lendLocked(s) })
	if err == nil && w != nil {
		w <- loan{stream: s}
	}
}

// lendLocked gives s to who has waited longest, and returns where to send it; or
// puts it with the idle ones.
func (p *StreamPool) lendLocked(s Stream) chan loan {
	if len(p.mu.waiters) == 0 {
		p.mu.idle = append(p.mu.idle, s)
		return nil
	}
	w := p.mu.waiters[0]
	p.mu.waiters = slices.Delete(p.mu.waiters, 0, 1)
	p.mu.lent[s] = struct{}{}
	return w
}

// Close closes the streams and wakes who waits for one. Streams that are still
// borrowed are told in its error, and closed when they are returned.
func (p *StreamPool) Close() error {
	p.mu.Lock()
	if p.mu.closed {
		p.mu.Unlock()
		return ErrClosed
	}
	p.mu.closed = true
	idle, waiters := p.mu.idle, p.mu.waiters
	lent, open := len(p.mu.lent), p.mu.open
	p.mu.idle, p.mu.waiters = nil, nil
	p.mu.Unlock()
	for _, w := range waiters {
		w <- loan{err: ErrClosed}
	}
	var errs []error
	for _, s := range idle {
		errs = append(errs, s.Close())
	}
	if lent > 0 {
		errs = append(errs, fmt.Errorf("tier: %d of %d streams are still borrowed", lent, open))
	}
	return errors.Join(errs...)
}
