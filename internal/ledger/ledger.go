// Package ledger counts the bytes of a space: how many are live, retired, reserved and free. A
// [Ledger] has one word for the used bytes, which is changed by compare and swap, and the accounts
// that make it up. Reservations that come and go at a high rate are parked beside that word
// (parking.go). It has nothing to do with the ledgers of internal/leases, in which processes count
// bytes together.
//
// Its lock is lockrank.Ledger, under which nothing is called.
package ledger

import (
	"fmt"
	"math/bits"
	"runtime"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// Usage is a consistent cut through a ledger, in bytes.
type Usage struct {
	Live     int64 // in buffers that are in use
	Retired  int64 // freed, but the device may still be working on them
	Reserved int64 // promised and not yet drawn
	Cached   int64 // in clean images, which are freed when the room is needed; not in Used
	Peak     int64 // largest Used since the start or the last ResetPeak
}

// Used is live + retired + reserved.
func (u Usage) Used() int64 { return u.Live + u.Retired + u.Reserved }

// Ledger counts one space's bytes. Every byte of the space is either free or in exactly one of four
// accounts. Of these, cached bytes count as free for reservations:
//
//	free ──Reserve──▶ reserved ──Draw──▶ live ──Retire──▶ retired ──Reap──▶ free
//	     ◀─Unreserve─          ◀─Undraw─                     │
//	free ◀──Forget── cached ◀──────────Cache─────────────────┘
//	     reserved ───Revive─▶ live, which takes as much out of cached
//
// Used is one word, changed by compare and swap: check and charge are one step, so it is never over
// the capacity. Reserved is Used without live and retired. So reservations, which come and go far
// more often than memory does, change only that word, and cached bytes do not concern them. Live,
// retired and cached are changed under a lock, behind a sequence number that is odd meanwhile. A
// reader never locks: if the number is odd or has changed, it reads again. While the number stays
// the same, each value of Used together with the accounts is a state that the ledger was in. A
// change that would take an account below zero is a bug in a backend and panics, because wrong
// counts would be worse.
//
// A Ledger is safe for concurrent use.
type Ledger struct {
	capacity int64

	used    atomic.Int64
	peak    atomic.Int64  // raised just after used
	seq     atomic.Uint64 // odd while live, retired or cached is being written
	live    atomic.Int64
	retired atomic.Int64
	cached  atomic.Int64

	mu lockrank.Mutex[lockrank.Ledger] // serializes writers of these three, and sweeps

	park parking
}

// New returns an empty ledger for capacity bytes; capacity must not be
// negative.
func New(capacity int64) *Ledger {
	if capacity < 0 {
		panic(fmt.Sprintf("ledger: a capacity of %d bytes", capacity))
	}
	return &Ledger{capacity: capacity}
}

// Used is live + retired + reserved, as one word.
func (l *Ledger) Used() int64 {
	l.sweep()
	return l.used.Load()
}

// Cached returns the bytes of copies.
func (l *Ledger) Cached() int64 { return l.cached.Load() }

// Memory returns live + retired + cached: the bytes that are memory.
func (l *Ledger) Memory() int64 {
	for tries := 1; ; tries++ {
		before := l.seq.Load()
		n := l.live.Load() + l.retired.Load() + l.cached.Load()
		if before&1 == 0 && l.seq.Load() == before {
			return n
		}
		if tries%16 == 0 { // the writer may have lost its processor
			runtime.Gosched()
		}
	}
}

// UsedOrParked is Used without taking back what is parked: it may be too high by that.
func (l *Ledger) UsedOrParked() int64 { return l.used.Load() }

// Snapshot returns all counts at one moment.
func (l *Ledger) Snapshot() Usage {
	l.sweep()
	for tries := 1; ; tries++ {
		before := l.seq.Load()
		live, retired, used := l.live.Load(), l.retired.Load(), l.used.Load()
		u := Usage{
			Live: live, Retired: retired, Reserved: used - live - retired,
			Cached: l.cached.Load(), Peak: max(used, l.peak.Load()),
		}
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
	l.sweep()
	l.peak.Store(l.used.Load())
	l.raisePeak(l.used.Load()) // of a Reserve that raised it just before it was stored
}

func (l *Ledger) raisePeak(used int64) {
	for {
		peak := l.peak.Load()
		if used <= peak || l.peak.CompareAndSwap(peak, used) {
			return
		}
	}
}

// Reserve promises n bytes if then no more than limit bytes are used, and says
// whether it did. The check and the charge are one step.
func (l *Ledger) Reserve(n, limit int64) bool {
	mustNotBeNegative(n)
	limit = min(limit, l.capacity)
	for swept := false; ; {
		used := l.used.Load()
		if !swept && (n > limit-used || n > l.peak.Load()-used) {
			l.sweep()
			swept = true
			continue
		}
		if n > limit-used {
			return false
		}
		if l.used.CompareAndSwap(used, used+n) {
			l.raisePeak(used + n)
			return true
		}
	}
}

// Unreserve gives n promised bytes back.
func (l *Ledger) Unreserve(n int64) {
	mustNotBeNegative(n)
	for {
		used := l.used.Load()
		if n > used-l.live.Load()-l.retired.Load() {
			l.unreserveSlowly(n)
			return
		}
		if l.used.CompareAndSwap(used, used-n) {
			return
		}
	}
}

// unreserveSlowly is Unreserve while nothing is drawn or reclaimed: the accounts may
// have been read in the middle of such a change, or else there is a bug.
func (l *Ledger) unreserveSlowly(n int64) {
	l.lockToUnreserve(n)
	l.used.Add(-n)
	l.mu.Unlock()
}

// lockToUnreserve locks the books, or panics, with the lock free and the books as they
// were, if less than n bytes are promised.
func (l *Ledger) lockToUnreserve(n int64) {
	mustNotBeNegative(n)
	l.mu.Lock()
	if have := l.used.Load() - l.live.Load() - l.retired.Load(); n > have {
		l.mu.Unlock()
		panic(fmt.Sprintf("ledger: it takes %d of %d reserved bytes", n, have))
	}
}

// Draw turns n promised bytes into live ones.
func (l *Ledger) Draw(n int64) {
	l.lockToUnreserve(n)
	l.changeAndUnlock(n, 0, 0, 0)
}

// Undraw turns n live bytes back into promised ones, after an allocation that
// failed.
func (l *Ledger) Undraw(n int64) {
	l.lockToTake(&l.live, n, "live")
	l.changeAndUnlock(-n, 0, 0, 0)
}

// Retire marks n live bytes as freed by their owner and still in the device's
// hands.
func (l *Ledger) Retire(n int64) {
	l.lockToTake(&l.live, n, "live")
	l.changeAndUnlock(-n, n, 0, 0)
}

// Reap gives n retired bytes back: the device is done with them.
func (l *Ledger) Reap(n int64) {
	l.lockToTake(&l.retired, n, "retired")
	l.changeAndUnlock(0, -n, 0, -n)
}

// Recall turns n retired bytes back into promised ones: the device is done with
// them and the promise that they were drawn from takes them back.
func (l *Ledger) Recall(n int64) {
	l.lockToTake(&l.retired, n, "retired")
	l.changeAndUnlock(0, -n, 0, 0)
}

// Cache turns n retired bytes, whose memory stays as it is, into cached ones.
func (l *Ledger) Cache(n int64) {
	l.lockToTake(&l.retired, n, "retired")
	l.changeAndUnlock(0, -n, n, -n)
}

// CacheRecalled counts n bytes as cached that Recall has returned to their promise, although their
// memory stays as it is.
func (l *Ledger) CacheRecalled(n int64) {
	mustNotBeNegative(n)
	l.mu.Lock()
	l.changeAndUnlock(0, 0, n, 0)
}

// Revive is Draw of n bytes onto the memory of a copy, which is charged as many.
func (l *Ledger) Revive(n int64) {
	l.lockToUnreserve(n)
	if have := l.cached.Load(); n > have {
		l.mu.Unlock()
		panic(fmt.Sprintf("ledger: it revives %d of %d cached bytes", n, have))
	}
	l.changeAndUnlock(n, 0, -n, 0)
}

// Forget gives n cached bytes back: their memory is freed.
func (l *Ledger) Forget(n int64) {
	l.lockToTake(&l.cached, n, "cached")
	l.changeAndUnlock(0, 0, -n, 0)
}

// changeAndUnlock adds to the accounts and to used, as one step for a Snapshot.
func (l *Ledger) changeAndUnlock(live, retired, cached, used int64) {
	l.seq.Add(1)
	l.live.Add(live)
	l.retired.Add(retired)
	l.cached.Add(cached)
	l.used.Add(used)
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
		panic(fmt.Sprintf("ledger: it takes %d of %d %s bytes", n, have, name))
	}
}

func mustNotBeNegative(n int64) {
	if n < 0 {
		panic(fmt.Sprintf("ledger: it is asked to move %d bytes", n))
	}
}

// Left is what Remaining of a tier.Quota returns to the holder of mine of the used bytes, under a
// limit that all holders share. It is what is left. Below 0 it is the caller's share of the excess,
// rounded so that the shares add up to all of it.
func Left(limit, used, mine int64) int64 {
	if used <= limit || mine <= 0 {
		return max(0, limit-used)
	}
	hi, lo := bits.Mul64(uint64(used-limit), uint64(mine))
	share, rest := bits.Div64(hi, lo, uint64(used)) // hi < used, because used-limit ≤ used and mine < 1<<63
	if rest > 0 {
		share++
	}
	return -min(int64(share), mine)
}

// Raise makes peak at least n.
func Raise(peak *atomic.Int64, n int64) {
	for p := peak.Load(); n > p && !peak.CompareAndSwap(p, n); p = peak.Load() {
	}
}
