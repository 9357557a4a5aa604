// Package copies lists the clean images of a space, which the code calls copies. The bytes of a
// batch never change, so the image that it had in a slower tier stays valid after a fetch. The
// space keeps it while nobody needs the room. Package batch has the copies of one batch
// (batch/copies.go), and tier/clean.go the bytes that they are charged.
//
// The lock of a List is lockrank.Space, under which no lock is taken.
package copies

import (
	"container/list"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// List is the copies of one space, in the order in which they were added. The zero value is ready.
// It is safe for concurrent use.
type List struct {
	changes atomic.Uint64 // see Changes
	mu      struct {
		lockrank.Mutex[lockrank.Space]
		listed  list.List // of *Copy
		sharing int       // of the copies that are listed, those that keep shared memory
		taken   int       // copies that a caller has taken, or has made, and not yet listed, used or freed
		held    map[*Copy]struct{}
		settled chan struct{} // closed when taken falls; nil without waiters
	}
}

// Copy is memory that one caller takes out of its List: to use it again, or to free it. It then
// calls Used or Release.
type Copy struct {
	list    *List
	at      *list.Element // in List.listed; nil if the copy is not listed
	shares  bool
	held    bool // see Hold
	dropped bool // while it was held
	bytes   int64
	release func()
}

// New returns a copy that is charged bytes. It is the caller's, as if taken, until it is listed.
// shares means that it keeps shared dictionaries in use. release frees the memory. The caller that
// takes the copy and does not use it calls release, with no lock held.
func (l *List) New(bytes int64, shares bool, release func()) *Copy {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.taken++
	l.changes.Add(1)
	return &Copy{list: l, bytes: bytes, shares: shares, release: release}
}

// Changes returns a number that is another after each copy that was made, listed, used or freed.
func (l *List) Changes() uint64 { return l.changes.Load() }

// Add lists a new copy.
func (c *Copy) Add() {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	c.addLocked()
}

func (c *Copy) addLocked() {
	l := c.list
	c.at = l.mu.listed.PushBack(c)
	if c.shares {
		l.mu.sharing++
	}
	l.settleLocked()
}

// Bytes returns what the copy is charged.
func (c *Copy) Bytes() int64 { return c.bytes }

// Listed reports whether nobody has taken the copy so far, other than to hold it.
func (c *Copy) Listed() bool {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	return c.at != nil || c.held && !c.dropped
}

// Hold takes the copy for a moment, in which its memory stays: others cannot take it, and Settle
// waits. The caller, which must not wait for room meanwhile, then calls Unhold with no lock held.
// False means that another has taken it.
func (c *Copy) Hold() bool {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	if !c.takeLocked() {
		return false
	}
	c.held = true
	if c.list.mu.held == nil {
		c.list.mu.held = make(map[*Copy]struct{})
	}
	c.list.mu.held[c] = struct{}{}
	return true
}

// Unhold lists a copy that is held, as the newest, or frees it if it was dropped.
func (c *Copy) Unhold() {
	c.list.mu.Lock()
	c.held = false
	delete(c.list.mu.held, c)
	dropped := c.dropped
	if !dropped {
		c.addLocked()
	}
	c.list.mu.Unlock()
	if dropped {
		c.Release()
	}
}

// Take takes the copy for the caller, which calls Used or Release. False means that another has
// taken or holds it.
func (c *Copy) Take() bool {
	c.list.mu.Lock()
	defer c.list.mu.Unlock()
	return c.takeLocked()
}

func (c *Copy) takeLocked() bool {
	if c.at == nil {
		return false
	}
	c.list.mu.listed.Remove(c.at)
	c.at = nil
	if c.shares {
		c.list.mu.sharing--
	}
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
	l.changes.Add(1)
	if l.mu.settled != nil {
		close(l.mu.settled)
		l.mu.settled = nil
	}
}

// Settle waits for the end of a copy that is taken: until it is listed, used or freed. It reports
// whether there was one. It must be called with no copy taken, and with no lock held.
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

// Drop takes the copy and frees it, unless another has taken it. Who holds it frees it then.
func (c *Copy) Drop() {
	c.list.mu.Lock()
	c.dropped = c.held
	taken := c.takeLocked()
	c.list.mu.Unlock()
	if taken {
		c.Release()
	}
}

// DropHeld has the copies that are held now freed by their holders.
func (l *List) DropHeld() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for c := range l.mu.held {
		c.dropped = true
	}
}

// TakeOldest is Take of the copy that was added first; nil if there is none. With sharing it is the
// first of those that keep shared memory.
func (l *List) TakeOldest(sharing bool) *Copy {
	l.mu.Lock()
	defer l.mu.Unlock()
	if sharing && l.mu.sharing == 0 {
		return nil
	}
	for at := l.mu.listed.Front(); at != nil; at = at.Next() {
		if c := at.Value.(*Copy); c.shares || !sharing {
			c.takeLocked()
			return c
		}
	}
	return nil
}
