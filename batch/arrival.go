package batch

import "slices"

// arrival is why a batch came to where it is: an index of reasons, and unread.
type arrival uint8

// unread is set when a batch has moved to a slower tier, until it is used.
const unread arrival = 1 << 7

// reasons has the causes of moves, as package convert names them; the first is that of a batch which
// never moved, and the last of causes that are not listed.
var reasons = [...]string{"put", "trigger", "demand", "work", "ahead", "other"}

// ticks is a time in units of some 17 ms, the lowest 32 bits: a batch has no room for more.
type ticks uint32

const tick = 24 // bits of nanoseconds

func ticksOf(ns int64) ticks { return ticks(ns >> tick) }

// before returns the last time up to now that has these ticks.
func (t ticks) before(now int64) int64 { return now - int64(ticksOf(now)-t)<<tick }

// Arrives has the commit of a transit of b note why the batch comes to where it will be, and whether
// that is slower.
func (b inside) Arrives(t *Transit, why string, slower bool) {
	i := slices.Index(reasons[:], why)
	if i <= 0 {
		i = len(reasons) - 1
	}
	if t.why = arrival(i); slower {
		t.why |= unread
	}
}

// Arrival returns why the batch is where it is ("put": it never moved), and since when, by the clock
// of the batch and to some 17 ms.
func (b inside) Arrival() (why string, at int64) {
	now := b.now()
	b.mu.Lock()
	defer b.mu.Unlock()
	return reasons[b.mu.why&^unread], b.mu.came.before(now)
}

// Unread reports whether the batch has moved to a slower tier since it was used.
func (b inside) Unread() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mu.why&unread != 0
}
