package tier

import (
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/copies"
)

// KeepClean makes the memory of bufs a clean image. From now on it is cached: it counts as free,
// and the space drops it, the oldest images first, when a promise needs the room. shares means that
// it keeps shared dictionaries in use. The image is in a list, from which one caller takes it, to
// use the memory again (Revive) or to drop it (Copy.Release, which calls release; that must release
// bufs).
//
// KeepClean returns nil, and has done nothing, if a lease is open, if the reservation that a buffer
// was drawn from is open, if the space is lost, and in a space with a quota, because other spaces
// or processes may be waiting for the bytes.
func (s *Space) KeepClean(bufs []*Buffer, shares bool, release func()) *copies.Copy {
	if s.cfg.Quota != nil || s.Lost() != nil {
		return nil
	}
	var bytes int64
	for i, b := range bufs {
		_, open := b.promise.View()
		if open || !b.holders.CompareAndSwap(owned, owned|cached) {
			for _, b := range bufs[:i] {
				b.holders.And(^int64(cached))
			}
			return nil
		}
		bytes += b.charge
	}
	c := s.clean.New(bytes, shares, release)
	for _, b := range bufs {
		if b.reclaimed != nil {
			b.reclaimed(b.charge)
			b.reclaimed = nil
		}
	}
	s.books.Cache(bytes)
	c.Add()
	s.fit() // the limit may have fallen, or the space may be lost
	return c
}

// Revive makes the buffers of a clean image usable again: it is Draw without an allocation. The
// caller has taken c, and has drawn its bytes from p. bufs are those that KeepClean got.
func (s *Space) Revive(c *copies.Copy, bufs []*Buffer, p *books.Promise) {
	s.books.Uncache(c.Bytes()) // the same bytes are drawn: until here they counted twice
	for _, b := range bufs {
		b.promise = p
		b.holders.And(^int64(cached))
	}
	c.Used()
}

// fit drops clean images until all memory is within the limit, which has changed, and calls the
// subscribers.
func (s *Space) fit() {
	now := s.books.Now()
	s.dropClean(min(now.Cached, now.Used()+now.Cached-now.Limit))
	s.notify(false)
}

// dropClean drops the oldest clean images, until n bytes were dropped or none is left, and returns
// how many that were.
func (s *Space) dropClean(n int64) (dropped int64) {
	for dropped < n {
		c := s.clean.TakeOldest(false)
		if c == nil {
			break
		}
		c.Release()
		dropped += c.Bytes()
	}
	return dropped
}

// CopyChanges returns a number that changes with each change of the space's clean images.
func (s *Space) CopyChanges() uint64 { return s.clean.Changes() }

// DropOldest drops the oldest clean images, until n bytes were dropped or none is left. If others
// are about to drop the last ones, it waits for that. It reports whether an image was dropped or
// used since CopyChanges returned seen: then it makes sense to try again what needs the room.
func (s *Space) DropOldest(n int64, seen uint64) bool {
	dropped := s.dropClean(n)
	s.evicted.Add(dropped)
	return dropped > 0 || s.clean.Settle() || s.CopyChanges() != seen
}

// DropAllClean drops all clean images that are listed now. One that is held (Copy.Hold) is dropped
// when its holder lets it go.
func (s *Space) DropAllClean() {
	s.clean.DropHeld()
	s.dropClean(s.Usage().Cached)
}

// DropSharing drops clean images that keep shared dictionaries in use, the oldest first, until used
// bytes have fallen by at least bytes or none is left. bytes may be 0 or less.
func (s *Space) DropSharing(bytes int64) {
	for before := s.Used(); s.Used() > before-bytes; {
		c := s.clean.TakeOldest(true)
		if c == nil {
			return
		}
		c.Release()
	}
}

// Evicted returns how many bytes of clean images were dropped so far because a promise or an
// allocation needed the room. It does not count evicted batches.
func (s *Space) Evicted() int64 { return s.evicted.Load() }
