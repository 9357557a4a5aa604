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
	}
}

// Copy is memory that one caller takes out of its List: to use it again, or to give it back.
type Copy struct {
	list         *List
	older, newer *Copy
	listed       bool
	shares       bool
	bytes        int64
	release      func()
}

// Add lists a copy that is charged bytes. shares says that it keeps memory in use that others share.
// release frees the memory. It is called with no lock held, by who takes the copy and does not use
// it.
func (l *List) Add(bytes int64, shares bool, release func()) *Copy {
	c := &Copy{list: l, listed: true, shares: shares, bytes: bytes, release: release}
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.older = l.mu.newest; c.older == nil {
		l.mu.oldest = c
	} else {
		c.older.newer = c
	}
	l.mu.newest = c
	return c
}

// Bytes returns what the copy is charged.
func (c *Copy) Bytes() int64 { return c.bytes }

// Listed reports whether nobody has taken the copy so far.
func (c *Copy) Listed() bool {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	return c.listed
}

// Take takes the copy for the caller. False means that another has taken it.
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
	return true
}

// Release frees a copy that the caller has taken.
func (c *Copy) Release() { c.release() }

// Drop takes the copy and frees it, unless another has taken it.
func (c *Copy) Drop() {
	if c.Take() {
		c.Release()
	}
}

// TakeOldest takes the copy that was added first; nil if there is none. With sharing it is the
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
