// Package copies lists what a space holds of batches that lie elsewhere now. A batch never changes,
// so the image that it had in a slower tier stays valid when it moves up. It is kept while nobody
// needs the room.
//
// The lock of a List is lockrank.Space, under which nothing is called.
package copies

import "github.com/spillway-db/spillway/internal/lockrank"

// List is the copies of one space, in the order in which they were added. The zero value is ready.
// It is safe for concurrent use.
type List struct {
	mu struct {
		lockrank.Mutex[lockrank.Space]
		oldest, newest *Copy
		taken          int           // and not yet listed, used or freed
		settled        chan struct{} // closed when taken falls; nil without waiters
	}
}

// Copy is memory that one caller takes out of its List: to use it again, or to free it. It then
// calls Used or Release.
type Copy struct {
	list         *List
	older, newer *Copy
	listed       bool
	shares       bool
	bytes        int64
	release      func()
}

// New returns a copy that is charged bytes. It is the caller's, as if taken, until it is listed.
// shares says that it keeps memory in use that others share. release frees the memory. It is called
// with no lock held, by who takes the copy and does not use it.
func (l *List) New(bytes int64, shares bool, release func()) *Copy {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.taken++
	return &Copy{list: l, shares: shares, bytes: bytes, release: release}
}

// Add lists a new copy.
func (c *Copy) Add() {
	l := c.list
	l.mu.Lock()
	defer l.mu.Unlock()
	c.listed = true
	if c.older = l.mu.newest; c.older == nil {
		l.mu.oldest = c
	} else {
		c.older.newer = c
	}
	l.mu.newest = c
	l.settleLocked()
}

// Bytes returns what the copy is charged.
func (c *Copy) Bytes() int64 { return c.bytes }

// Listed reports whether nobody has taken the copy so far.
func (c *Copy) Listed() bool {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	return c.listed
}

// Take takes the copy for the caller, which calls Used or Release. False means that another has taken it.
func (c *Copy) Take() bool {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	return c.takeLocked()
}

func (c *Copy) takeLocked() bool {
	if !c.listed {
		return false
	}
	c.listed = false
	if c.older == nil {
		c.list.mu.oldest = c.newer
	} else {
		c.older.newer = c.newer
	}
	if c.newer == nil {
		c.list.mu.newest = c.older
	} else {
		c.newer.older = c.older
	}
	c.older, c.newer = nil, nil
	c.list.mu.taken++
	return true
}

// Release frees a copy that the caller has taken.
func (c *Copy) Release() {
	defer c.Used()
	c.release()
}

// Used says that a copy which the caller has taken is none any more.
func (c *Copy) Used() {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	c.list.settleLocked()
}

// settleLocked notes that a copy is taken no more.
func (l *List) settleLocked() {
	l.mu.taken--
	if l.mu.settled != nil {
		close(l.mu.settled)
		l.mu.settled = nil
	}
}

// Settle waits for the end of a copy that is taken: until it is listed, used or freed. It reports whether
// there was one. It must be called with no copy taken, and with no lock held.
func (l *List) Settle() bool {
	l.mu.Lock()
	if l.mu.taken == 0 {
		l.mu.Unlock()
		return false
	}
	if l.mu.settled == nil {
		l.mu.settled = make(chan struct{})
	}
	settled := l.mu.settled
	l.mu.Unlock()
	<-settled
	return true
}

// Drop takes the copy and frees it, unless another has taken it.
func (c *Copy) Drop() {
	if c.Take() {
		c.Release()
	}
}

// TakeOldest is Take of the copy that was added first; nil if there is none. With sharing it is the
// first of those that keep shared memory.
func (l *List) TakeOldest(sharing bool) *Copy {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := l.mu.oldest; c != nil; c = c.newer {
		if c.shares || !sharing {
			c.takeLocked()
			return c
		}
	}
	return nil
}
