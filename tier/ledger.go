package tier

import (
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// Usage is a consistent cut through a ledger, in bytes.
type Usage struct {
	Live     int64 // in buffers that are in use
	Retired  int64 // freed, but the device may still be working on them
	Reserved int64 // promised and not yet drawn
	Peak     int64 // largest Used since the start or the last ResetPeak
}

// Used is live + retired + reserved.
func (u Usage) Used() int64 { return u.Live + u.Retired + u.Reserved }

// Ledger keeps one space's books. Every byte of the space is either free or in
// exactly one of three accounts:
//
//	free ──Reserve──▶ reserved ──Draw──▶ live ──Retire──▶ retired ──Reap──▶ free
//	     ◀─Unreserve─          ◀─Undraw─
//
// Used is one word and never over the capacity, not even for an instant.
// Snapshot is a consistent cut: a sequence number is odd while a change is
// being written, so a reader that meets one tries again and never locks.
// A change that would take an account below zero is a bug in a backend and
// panics: books that are wrong would be worse.
//
// A Ledger is safe for concurrent use.
type Ledger struct {
	capacity int64

	seq      atomic.Uint64 // odd while a change is being written
	used     atomic.Int64
	live     atomic.Int64
	retired  atomic.Int64
	reserved atomic.Int64
	peak     atomic.Int64

	mu lockrank.Mutex[lockrank.Ledger] // serializes writers
}

// NewLedger returns an empty ledger for capacity bytes; capacity must not be
// negative.
func NewLedger(capacity int64) *Ledger {
	if capacity < 0 {
		panic(fmt.Sprintf("tier: ledger with a capacity of %d bytes", capacity))
	}
	return &Ledger{capacity: capacity}
}

// Capacity is the number of bytes that the ledger hands out at most.
func (l *Ledger) Capacity() int64 { return l.capacity }

// Used is live + retired + reserved, as one word.
func (l *Ledger) Used() int64 { return l.used.Load() }

// Snapshot returns a consistent cut.
func (l *Ledger) Snapshot() Usage {
	for tries := 1; ; tries++ {
		before := l.seq.Load()
		u := Usage{Live: l.live.Load(), Retired: l.retired.Load(), Reserved: l.reserved.Load(), Peak: l.peak.Load()}
		if before&1 == 0 && l.seq.Load() == before {
			return u
		}
		if tries%16 == 0 { // the writer may have lost its processor
			runtime.Gosched()
		}
	}
}

// ResetPeak makes the present use the peak.
func (l *Ledger) ResetPeak() {
	l.mu.Lock()
	l.seq.Add(1)
	l.peak.Store(l.used.Load())
	l.seq.Add(1)
	l.mu.Unlock()
}

// Reserve promises n bytes if then no more than limit bytes are used, and says
// whether it did. The check and the charge are one step.
func (l *Ledger) Reserve(n, limit int64) bool {
	mustNotBeNegative(n)
	l.mu.Lock()
	used := l.used.Load()
	if n > min(limit, l.capacity)-used {
		l.mu.Unlock()
		return false
	}
	l.seq.Add(1)
	l.reserved.Add(n)
	l.used.Store(used + n)
	if used+n > l.peak.Load() {
		l.peak.Store(used + n)
	}
	l.seq.Add(1)
	l.mu.Unlock()
	return true
}

// Unreserve gives n promised bytes back.
func (l *Ledger) Unreserve(n int64) { l.give(&l.reserved, n, "reserved") }

// Draw turns n promised bytes into live ones.
func (l *Ledger) Draw(n int64) { l.move(&l.reserved, &l.live, n, "reserved") }

// Undraw turns n live bytes back into promised ones, after an allocation that
// failed.
func (l *Ledger) Undraw(n int64) { l.move(&l.live, &l.reserved, n, "live") }

// Retire marks n live bytes as freed by their owner and still in the device's
// hands.
func (l *Ledger) Retire(n int64) { l.move(&l.live, &l.retired, n, "live") }

// Reap gives n retired bytes back: the device is done with them.
func (l *Ledger) Reap(n int64) { l.give(&l.retired, n, "retired") }

// Recall turns n retired bytes back into promised ones: the device is done with
// them and the promise that they were drawn from takes them back.
func (l *Ledger) Recall(n int64) { l.move(&l.retired, &l.reserved, n, "retired") }

// move takes n bytes from one account to another.
func (l *Ledger) move(from, to *atomic.Int64, n int64, name string) {
	l.lockToTake(from, n, name)
	l.seq.Add(1)
	from.Add(-n)
	to.Add(n)
	l.seq.Add(1)
	l.mu.Unlock()
}

// give makes n bytes of an account free.
func (l *Ledger) give(from *atomic.Int64, n int64, name string) {
	l.lockToTake(from, n, name)
	l.seq.Add(1)
	from.Add(-n)
	l.used.Add(-n)
	l.seq.Add(1)
	l.mu.Unlock()
}

// lockToTake locks the books, or panics, with the lock free and the books as
// they were, if the account does not have n bytes.
func (l *Ledger) lockToTake(account *atomic.Int64, n int64, name string) {
	mustNotBeNegative(n)
	l.mu.Lock()
	if have := account.Load(); n > have {
		l.mu.Unlock()
		panic(fmt.Sprintf("tier: ledger takes %d of %d %s bytes", n, have, name))
	}
}

func mustNotBeNegative(n int64) {
	if n < 0 {
		panic(fmt.Sprintf("tier: ledger asked to move %d bytes", n))
	}
}
