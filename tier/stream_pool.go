package tier

import (
	"context"
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/waitline"
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
		waiters waitline.Queue[struct{}, Stream]
		closed  bool
	}
}

// NewStreamPool opens size > 0 streams on dev.
func NewStreamPool(dev Device, size int) (*StreamPool, error) {
	if size <= 0 {
		return nil, fmt.Errorf("tier: a stream pool of %d streams", size)
	}
	p := &StreamPool{dev: dev}
	p.mu.lent = make(map[Stream]struct{}, size)
	for range size {
		s, err := p.newStream()
		if err != nil {
			return nil, errors.Join(err, p.Close())
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
// once, with all its work done, also if ctx has ended meanwhile. It returns ctx's cause if
// that ends first, and ErrClosed when the pool is closed.
func (p *StreamPool) Borrow(ctx context.Context) (Stream, error) {
	s, turn, err := p.take(false)
	if turn == nil {
		return s, err
	}
	return p.mu.waiters.Wait(ctx, &p.mu, turn, nil)
}

// BorrowNow lends a stream, and makes the pool larger by one if all are lent.
func (p *StreamPool) BorrowNow() (Stream, error) {
	s, _, err := p.take(true)
	return s, err
}

// take lends an idle stream, or opens one that is missing, or with grow one
// more, or joins the queue.
func (p *StreamPool) take(grow bool) (Stream, *waitline.Turn[struct{}, Stream], error) {
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
		turn := p.mu.waiters.Join(struct{}{})
		p.mu.Unlock()
		return nil, turn, nil
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
	s, err := p.newStream()
	p.mu.Lock()
	if err == nil && !p.mu.closed {
		placeLocked(s)
		p.mu.Unlock()
		return nil
	}
	p.mu.open--
	if err == nil { // closed meanwhile; Close has woken who waited
		p.mu.Unlock()
		return errors.Join(ErrClosed, s.Close())
	}
	if p.mu.open == 0 {
		p.refuseLocked(err)
	}
	p.mu.Unlock()
	return err
}

func (p *StreamPool) newStream() (s Stream, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("tier: opening a stream: %w", err)
		}
	}()
	defer guard.Error(&err, "the device's NewStream")
	return p.dev.NewStream()
}

// refuseLocked ends all waits with an error.
func (p *StreamPool) refuseLocked(err error) {
	for p.mu.waiters.Len() > 0 {
		p.mu.waiters.HandOver(nil, err)
	}
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
		p.lendLocked(s)
		p.mu.Unlock()
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
	if p.mu.waiters.Len() == 0 || p.mu.open >= p.mu.size { // nobody waits for a pool that is closed
		p.mu.Unlock()
		return
	}
	p.mu.open++
	p.mu.Unlock()
	_ = p.openStream(p.lendLocked) // those who wait are told if there is no other stream
}

// lendLocked gives s to who has waited longest, or puts it with the idle ones.
func (p *StreamPool) lendLocked(s Stream) {
	if p.mu.waiters.Len() == 0 {
		p.mu.idle = append(p.mu.idle, s)
		return
	}
	p.mu.lent[s] = struct{}{}
	p.mu.waiters.HandOver(s, nil)
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
	idle := p.mu.idle
	lent, open := len(p.mu.lent), p.mu.open
	p.mu.idle = nil
	p.refuseLocked(ErrClosed)
	p.mu.Unlock()
	var errs []error
	for _, s := range idle {
		errs = append(errs, s.Close())
	}
	if lent > 0 {
		errs = append(errs, fmt.Errorf("tier: %d of %d streams are still borrowed", lent, open))
	}
	return errors.Join(errs...)
}
