package tier

import (
	"container/list"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// A Clean is a clean image: memory with the bytes of a batch that is current in a faster tier. The
// bytes of a batch never change, so a later move to the space needs no transfer. Package batch
// keeps the clean images of a batch.
//
// Its bytes are cached: they count as free, and the space drops images, the oldest first, when a
// request needs the room. Leases on its buffers keep the memory, and the bytes cached, until they
// end.
//
// An image is listed from KeepClean on, until one goroutine takes it out of the list (Take,
// DropOldest). It is taken until that goroutine has promoted it to a batch's current image
// (Space.Promote) or has dropped it (Clean.release). Requests wait for the end of taken images,
// which call no code that waits for room. Then it is over.
type Clean struct {
	space  *Space
	bufs   []*Buffer
	bytes  int64         // charged
	shares bool          // it keeps shared dictionaries in use
	drop   func()        // releases bufs, with no lock held
	at     *list.Element // in cleanImages.listed; nil unless the image is listed
}

// cleanImages are the clean images of one space. No lock is taken under its mutex.
type cleanImages struct {
	lockrank.Mutex[lockrank.Space]
	listed  list.List     // of *Clean, the oldest first
	sharing int           // of those that are listed, those that share dictionaries
	taken   int           // images that are neither listed nor over
	settled chan struct{} // closed when taken falls; nil without waiters
}

// KeepClean makes the memory of bufs a clean image. drop must release bufs; the space calls it
// once, if it drops the image. shares means that the image keeps shared dictionaries in use. made,
// which may be nil, is called with no lock held before anyone can take the image.
//
// KeepClean returns nil, and has done nothing, if a lease is open, if the reservation that a buffer
// was drawn from is open, if the space is lost, and in a space with a quota, because other spaces
// or processes may be waiting for the bytes.
func (s *Space) KeepClean(bufs []*Buffer, shares bool, made, drop func()) *Clean {
	if s.Quota != nil || s.Lost() != nil {
		return nil
	}
	c := &Clean{space: s, bufs: bufs, shares: shares, drop: drop}
	for i, b := range bufs {
		if b.promise.View().Open || !b.holders.CompareAndSwap(owned, owned|cached) {
			for _, b := range bufs[:i] {
				b.holders.And(^int64(cached))
			}
			return nil
		}
		c.bytes += b.charge
	}
	if made != nil {
		made()
	}
	s.clean.Lock()
	s.clean.taken++ // until it is listed, which its bytes must not be before they are cached
	s.clean.Unlock()
	for _, b := range bufs {
		if b.reclaimed != nil {
			b.reclaimed(b.charge)
			b.reclaimed = nil
		}
	}
	s.Books.Cache(c.bytes)
	s.clean.Lock()
	c.at = s.clean.listed.PushBack(c)
	if shares {
		s.clean.sharing++
	}
	s.clean.Unlock()
	s.clean.settle()
	s.fit() // the limit may have fallen, or the space may be lost
	return c
}

// Bytes returns what the image is charged.
func (c *Clean) Bytes() int64 { return c.bytes }

// Listed reports whether nobody has taken the image so far.
func (c *Clean) Listed() bool {
	c.space.clean.Lock()
	defer c.space.clean.Unlock()
	return c.at != nil
}

// Take takes the image out of the list, for the caller to promote it or drop it. False means that
// another goroutine has taken it.
func (c *Clean) Take() bool {
	c.space.clean.Lock()
	defer c.space.clean.Unlock()
	if c.at == nil {
		return false
	}
	c.space.clean.takeLocked(c)
	return true
}

func (l *cleanImages) takeLocked(c *Clean) {
	l.listed.Remove(c.at)
	c.at = nil
	if c.shares {
		l.sharing--
	}
	l.taken++
}

// takeOldest takes the image that was listed first, nil if there is none. With sharing it is the
// first of those that share dictionaries.
func (l *cleanImages) takeOldest(sharing bool) *Clean {
	l.Lock()
	defer l.Unlock()
	at := l.listed.Front()
	if sharing && l.sharing == 0 {
		at = nil
	}
	for at != nil && sharing && !at.Value.(*Clean).shares {
		at = at.Next()
	}
	if at == nil {
		return nil
	}
	c := at.Value.(*Clean)
	l.takeLocked(c)
	return c
}

// settle notes that an image is no longer taken.
func (l *cleanImages) settle() {
	l.Lock()
	defer l.Unlock()
	l.taken--
	if l.settled != nil {
		close(l.settled)
		l.settled = nil
	}
}

// Promote makes the buffers of a clean image, which the caller has taken, usable again. The caller
// has drawn the image's bytes from p.
func (s *Space) Promote(c *Clean, p *books.Promise) {
	s.Books.Uncache(c.bytes) // the same bytes are drawn: until here they counted twice
	for _, b := range c.bufs {
		b.promise = p
		b.holders.And(^int64(cached))
	}
	s.clean.settle()
}

// Drop frees the image, unless another goroutine has taken it.
func (c *Clean) Drop() {
	if c.Take() {
		c.Release()
	}
}

// Release frees an image that the caller has taken, and will not promote.
func (c *Clean) Release() {
	defer c.space.clean.settle()
	c.drop()
}

// fit drops clean images until all memory is within the limit, which has changed, and calls the
// subscribers.
func (s *Space) fit() {
	now := s.Books.Now()
	s.dropClean(min(now.Cached, now.Used()+now.Cached-now.Limit))
	s.notify(false)
}

// dropClean drops the oldest clean images, until n bytes were dropped or none is left, and returns
// how many that were.
func (s *Space) dropClean(n int64) (dropped int64) {
	for dropped < n {
		c := s.clean.takeOldest(false)
		if c == nil {
			break
		}
		c.Release()
		dropped += c.bytes
	}
	return dropped
}

// DropOldest drops the oldest clean images, until n bytes were dropped or none is left. If others
// have taken the last ones, it waits for the end of one. It reports whether an image was dropped or
// promoted since State.CleanChanges was seen: then the caller should try again what needs the room.
// The caller must hold no lock, and must not have taken an image.
func (s *Space) DropOldest(n int64, seen uint64) bool {
	dropped := s.dropClean(n)
	s.evicted.Add(dropped)
	s.clean.Lock()
	if dropped > 0 || s.clean.taken == 0 {
		s.clean.Unlock()
		return dropped > 0 || s.Books.Now().CleanChanges != seen
	}
	if s.clean.settled == nil {
		s.clean.settled = make(chan struct{})
	}
	settled := s.clean.settled
	s.clean.Unlock()
	<-settled
	return true
}

// DropAllClean drops all clean images that are listed now.
func (s *Space) DropAllClean() { s.dropClean(s.Books.Now().Cached) }

// DropSharing drops clean images that share dictionaries, the oldest first, until used bytes have
// fallen by at least bytes or none is left. bytes may be 0 or less.
func (s *Space) DropSharing(bytes int64) {
	for target := s.Books.Now().Used() - bytes; s.Books.Now().Used() > target; {
		c := s.clean.takeOldest(true)
		if c == nil {
			return
		}
		c.Release()
	}
}

// Evicted returns how many bytes of clean images were dropped so far because a promise or an
// allocation needed the room. It does not count evicted batches.
func (s *Space) Evicted() int64 { return s.evicted.Load() }
