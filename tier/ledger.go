package tier

import (
	"fmt"
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
	for {
		before := l.seq.Load()
		u := Usage{Live: l.live.Load(), Retired: l.retired.Load(), Reserved: l.reserved.Load(), Peak: l.peak.Load()}
		if before&1 == 0 && l.seq.Load() == before {
			return u
		}
	}
}

// ResetPeak makes the present use the peak.
func (l *Ledger) ResetPeak() { l.change(func() { l.peak.Store(l.used.Load()) }) }

// Reserve promises n bytes if then no more than limit bytes are used, and says
// whether it did. The check and the charge are one step.
func (l *Ledger) Reserve(n, limit int64) bool {
	mustPositive(n)
	ok := false
	l.change(func() {
		used := l.used.Load()
		if n > min(limit, l.capacity)-used {
			return
		}
		ok = true
		l.reserved.Add(n)
		l.used.Store(used + n)
		if used+n > l.peak.Load() {
			l.peak.Store(used + n)
		}
	})
	return ok
}

// Unreserve gives n promised bytes back.
func (l *Ledger) Unreserve(n int64) {
	l.change(func() { l.take(&l.reserved, n, "reserved"); l.used.Add(-n) })
}

// Draw turns n promised bytes into live ones.
func (l *Ledger) Draw(n int64) {
	l.change(func() { l.take(&l.reserved, n, "reserved"); l.live.Add(n) })
}

// Undraw turns n live bytes back into promised ones, after an allocation that
// failed.
func (l *Ledger) Undraw(n int64) {
	l.change(func() { l.take(&l.live, n, "live"); l.reserved.Add(n) })
}

// Retire marks n live bytes as freed by their owner and still in the device's
// hands.
func (l *Ledger) Retire(n int64) {
	l.change(func() { l.take(&l.live, n, "live"); l.retired.Add(n) })
}

// Reap gives n retired bytes back: the device is done with them.
func (l *Ledger) Reap(n int64) {
	l.change(func() { l.take(&l.retired, n, "retired"); l.used.Add(-n) })
}

// Recall turns n retired bytes back into promised ones: the device is done with
// them and the promise that they were drawn from takes them back.
func (l *Ledger) Recall(n int64) {
	l.change(func() { l.take(&l.retired, n, "retired"); l.reserved.Add(n) })
}

func (l *Ledger) change(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seq.Add(1)
	defer l.seq.Add(1)
	f()
}

func (l *Ledger) take(account *atomic.Int64, n int64, name string) {
	mustPositive(n)
	if have := account.Load(); n > have {
		panic(fmt.Sprintf("tier: ledger gives back %d %s bytes and has %d", n, name, have))
	}
	account.Add(-n)
}

func mustPositive(n int64) {
	if n < 0 {
		panic(fmt.Sprintf("tier: ledger asked to move %d bytes", n))
	}
}
