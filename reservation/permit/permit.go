package permit

import (
	"fmt"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/tier"
)

// Permit is what was granted, and must be released once. It is a small value; the
// zero value has nothing and is no permit. Its copies are the same permit. It may be
// used on any goroutine; after its release it has nothing.
type Permit struct {
	rec *record
	gen uint64
}

// record is a permit's books. It is used again for another permit, which has another
// generation. All of it is guarded by the pool's mutex.
type record struct {
	pool    *Pool // never changes
	gen     uint64
	took    amounts
	held    bool
	limited bool
	monitor bool
	stack   invariants.Trace // where it was taken last
	next    *record          // that is free
}

// slab is how many records are made at once.
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

// look runs f with the books of a permit that is held, and says whether it is.
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

// Bytes returns how many bytes of a budget the permit has: 0 if it has none,
// and after its release.
func (p Permit) Bytes(name string) (bytes int64) {
	p.look(func(pool *Pool, r *record) {
		if i := pool.index(name); i >= 0 {
			bytes = r.took[i]
		}
	})
	return bytes
}

// TotalBytes returns how many bytes the permit has of all budgets together. After its
// release it returns tier.ErrReleased; a sum that no int64 can say is an error.
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
			return 0, fmt.Errorf("permit: the bytes of all budgets are more than an int64 can say")
		}
	}
	return sum, nil
}

// CanSpill says whether the permit has a slot, so that its holder may write to disk.
func (p Permit) CanSpill() (can bool) {
	p.look(func(pool *Pool, r *record) { can = r.took[pool.slots] > 0 })
	return can
}

// Limited says whether the permit's slot is one of a limited number.
func (p Permit) Limited() (limited bool) {
	p.look(func(_ *Pool, r *record) { limited = r.limited })
	return limited
}

// Release gives everything back, and serves those who wait for it. A second release
// changes nothing and returns tier.ErrReleased, also when the pool has granted other
// permits since (an invariants build panics with the stack that took the permit, if
// it is known still). Release of the zero Permit does nothing.
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
				at = "a place that is forgotten: its record is in use again"
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
