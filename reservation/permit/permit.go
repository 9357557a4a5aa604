// Package permit limits what transfers have under way: bytes of several budgets
// and spill slots, asked for all at once. A Permit is taken for the time of one
// transfer, where a reservation is kept for as long as there is data.
//
//	Request ── Acquire, TryAcquire, With ──▶ Pool ── grants ──▶ Permit ── Release ──┐
//	                                          ▲ budgets, slots, waiters             │
//	                                          └─────────────────────────────────────┘
//
// A Pool has named budgets of bytes in a fixed order, and slots, which limit how many
// transfers write to disk at once. A Request names bytes of some of the budgets, or
// none, and may ask for a slot:
//
//	slots configured   asked   granted     CanSpill   Limited
//	n                  yes     one of n    yes        yes
//	n                  no      none        no         no
//	unlimited          yes     unlimited   yes        no
//	unlimited          no      none        no         no
//
// It is granted all or nothing, under one lock. So two requests for the same two budgets never hold
// one each and wait for the other.
//
// A pool of n slots grants n. An engine's monitor takes slots like its users, and writes without
// one, one transfer at a time, if all are taken: users may wait for the room that it makes.
//
// # Waiting
//
// A waiter is in one line for each budget that the request needs, and in the line of the slots if
// it asks for one. A request passes freely if it needs nothing that others wait for. Each line is
// first come, first served, with a bounded bypass. While the oldest does not fit, others that fit
// may be served before it, but at most Config.Bypass of them. After that, the pool keeps released
// bytes and slots until the oldest fits. A wait ends when the request is granted, when its context
// ends, by Close, or when lowered limits make it impossible to grant.
//
// Waits must point downwards: the holder of a permit must not wait for room in a memory, nor for
// another permit. A caller that needs both takes the room first and the permit last, around the
// transfer only.
//
// # Ownership
//
// The caller owns a Permit and must Release it once, on any goroutine. A Pool belongs to its
// creator. It owns no goroutine. Close wakes the waiters and reports the permits that are still
// held. Those stay valid until they are released.
//
// # Locks
//
// A Pool has one mutex, of the rank Reservation. Nothing is called under it; waiters are woken
// without it.
package permit

import (
	"fmt"
	"math"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// Permit is a granted request, and must be released once. It is a small value; the zero value has
// nothing and is not a permit. Its copies are the same permit. It may be used on any goroutine;
// after its release it has nothing.
type Permit struct {
	rec *record
	gen uint64
}

// record has the books of a permit. The pool uses it again for another permit, which has another
// generation. The pool's mutex guards all of it.
type record struct {
	pool    *Pool // never changes
	gen     uint64
	took    amounts
	held    bool
	limited bool
	stack   invariants.Trace // of the call that took it last
	next    *record          // the next free one
}

// slab is how many records the pool makes at once.
const slab = 32

func (p *Pool) growLocked() {
	records := make([]record, slab)
	p.mu.records = append(p.mu.records, records)
	for i := range records {
		r := &records[i]
		r.pool, r.gen = p, 1
		r.next, p.mu.free = p.mu.free, r
	}
}

func (p *Pool) recordLocked() *record {
	if p.mu.free == nil {
		p.growLocked()
	}
	r := p.mu.free
	p.mu.free, r.next = r.next, nil
	r.held = true
	return r
}

// look runs f with the books of the permit if it is held, and reports whether it is.
func (p Permit) look(f func(*Pool, *record)) bool {
	if p.rec == nil {
		return false
	}
	pool := p.rec.pool
	pool.mu.Lock()
	defer pool.mu.Unlock()
	if p.rec.gen != p.gen {
		return false
	}
	f(pool, p.rec)
	return true
}

// Bytes returns how many bytes of a budget the permit has; after its release 0.
func (p Permit) Bytes(name string) (bytes int64) {
	p.look(func(pool *Pool, r *record) {
		if i := pool.index(name); i >= 0 {
			bytes = r.took[i]
		}
	})
	return bytes
}

// TotalBytes returns how many bytes the permit has of all budgets together. After its release it
// returns tier.ErrReleased; a sum that overflows an int64 is an error.
func (p Permit) TotalBytes() (bytes int64, err error) {
	held := p.look(func(pool *Pool, r *record) { bytes, err = total(r.took[:pool.slots]) })
	if !held {
		return 0, fmt.Errorf("permit: total bytes: %w", tier.ErrReleased)
	}
	return bytes, err
}

func total(took []int64) (sum int64, err error) {
	for _, n := range took {
		var ok bool
		if sum, ok = add(sum, n); !ok {
			return 0, fmt.Errorf("permit: the bytes of all budgets are more than %d", int64(math.MaxInt64))
		}
	}
	return sum, nil
}

// CanSpill reports whether the permit has a slot, so that its holder may write to disk.
func (p Permit) CanSpill() (can bool) {
	p.look(func(pool *Pool, r *record) { can = r.took[pool.slots] > 0 })
	return can
}

// Limited reports whether the permit's slot is one of a limited number.
func (p Permit) Limited() (limited bool) {
	p.look(func(_ *Pool, r *record) { limited = r.limited })
	return limited
}

// Release gives everything back, and serves the requests that wait for it. A second release changes
// nothing and returns tier.ErrReleased, even if the pool has granted other permits since. An
// invariants build panics on it, with the stack that took the permit if that is still known.
// Release of the zero Permit does nothing.
func (p Permit) Release() error {
	if p.rec == nil {
		return nil
	}
	pool := p.rec.pool
	var done over
	pool.mu.Lock()
	if p.rec.gen != p.gen {
		stack := p.rec.stack
		known := p.rec.gen == p.gen+1 && !p.rec.held
		pool.mu.Unlock()
		if invariants.Enabled {
			at := stack.String()
			if !known {
				at = "an unknown place: its record is in use again"
			}
			panic("permit: released twice; it was taken at\n" + at)
		}
		return fmt.Errorf("permit: %w", tier.ErrReleased)
	}
	pool.giveBackLocked(p.rec)
	pool.serveLocked(&done)
	pool.mu.Unlock()
	done.wake()
	return nil
}
