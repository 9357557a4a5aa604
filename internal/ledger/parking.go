package ledger

import (
	"runtime"
	"sync/atomic"
)

// parking keeps released promises for the next one of about that size. So goroutines on different
// processors need not contend for the one word of used bytes. The word counts what is parked as
// used. Every query that it could answer wrongly takes all of it back first (sweep): what is used,
// what is promised, whether there is room, whether this is a new peak. Nothing is parked
//
//   - while there are attendants: they wait for room, and so must see each release;
//   - above a mark, so that no pressure and no limit is near;
//   - beyond a small share of the capacity.
//
// An attendant, or a change that lowers a limit, changes the state first and then sweeps. A parking
// goroutine reads the state before and after, and sweeps itself if it has changed. So one of the
// two takes the bytes back. Sweeps hold the ledger's lock. So a sweep that finds nothing parked
// does not miss bytes that another has taken out and not yet subtracted.
//
// While promises come and go, Used may for a moment be too high by what is parked while it is read,
// but never too low, and never over the capacity.
type parking struct {
	stripes []stripe
	most    int64         // bytes in one stripe
	state   atomic.Uint64 // how many attend in the lower half, and how often limits changed in the upper one
	sweeps  atomic.Int64  // under way
	any     atomic.Bool   // set after something was parked, and cleared before it is swept
	_       [64]byte      // stays in the caches of readers
}

// stripe is alone on its cache lines, of which processors fetch two at a time.
type stripe struct {
	bytes atomic.Int64
	_     [120]byte
}

const (
	stripesPerProcessor = 4  // so that two that take any seldom meet
	maxStripes          = 64 // a sweep looks at all
	parkedShare         = 16 // at most 1/16 of the capacity is parked
	attending           = 1<<32 - 1
	limitChanged        = 1 << 32
)

// AllowParking makes room for parked promises. It is called before the ledger is used.
func (l *Ledger) AllowParking() {
	n := 1
	for n < min(maxStripes, stripesPerProcessor*runtime.GOMAXPROCS(0)) {
		n *= 2
	}
	l.park.stripes = make([]stripe, n)
	l.park.most = l.capacity / parkedShare / int64(n)
}

func (l *Ledger) stripe(at uint32) *atomic.Int64 {
	return &l.park.stripes[int(at)&(len(l.park.stripes)-1)].bytes
}

// ReserveAt is Reserve at a stripe where promises are parked.
func (l *Ledger) ReserveAt(at uint32, n, limit int64) bool {
	if len(l.park.stripes) > 0 && n > 0 {
		s := l.stripe(at)
		if have := s.Load(); have >= n && s.CompareAndSwap(have, have-n) {
			return true
		}
	}
	return l.Reserve(n, limit)
}

// TryPark parks n promised bytes, if that is allowed and no more than below bytes are used.
// Otherwise done is false, and the books are as they were. below is called after the state was
// read, so that a limit that changes meanwhile is noticed: then the bytes are free, and tell means
// that the waiters must be woken.
func (l *Ledger) TryPark(at uint32, n int64, below func() int64) (done, tell bool) {
	if n > l.park.most { // also where nothing can be parked
		return false, false
	}
	state := l.park.state.Load()
	if state&attending != 0 || l.used.Load() > below() {
		return false, false
	}
	s := l.stripe(at)
	have := s.Load()
	if n > l.park.most-have || !s.CompareAndSwap(have, have+n) {
		return false, false
	}
	if !l.park.any.Load() {
		l.park.any.Store(true)
	}
	if l.park.state.Load() == state {
		return true, false
	}
	l.sweep() // takes n, unless another has swept it, or reserved it, before
	return true, true
}

// sweep takes back what is parked.
func (l *Ledger) sweep() {
	if !l.park.any.Load() && l.park.sweeps.Load() == 0 {
		return
	}
	l.mu.Lock()
	l.park.sweeps.Add(1)
	l.park.any.Store(false)
	var n int64
	for i := range l.park.stripes {
		if l.park.stripes[i].bytes.Load() > 0 {
			n += l.park.stripes[i].bytes.Swap(0)
		}
	}
	l.used.Add(-n)
	l.park.sweeps.Add(-1)
	l.mu.Unlock()
}

// Attend begins (1) or ends (-1) a time in which nothing is parked.
func (l *Ledger) Attend(n int) {
	l.park.state.Add(uint64(int64(n)))
	if n > 0 {
		l.sweep()
	}
}

// LimitsChanged takes back what was parked under other limits.
func (l *Ledger) LimitsChanged() {
	l.park.state.Add(limitChanged)
	l.sweep()
}
