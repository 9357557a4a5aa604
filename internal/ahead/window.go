// Package ahead decides how much of a range of memory is touched ahead of its use. To
// touch all of it when it is mapped costs up to a second of system time for each GiB, also
// where it is never used; not to touch it makes its first use slow.
package ahead

import "sync/atomic"

// What lies ahead of what has been used is as long as that, and at most Most. Least, or less of a
// short range, is there before the first use and is all that an idle range costs. A
// range in use gets ahead of its users within a few of their steps, as touching a page
// takes less time than filling it.
const (
	Least = 64 << 20
	Most  = 512 << 20

	share = 16      // of a range, one part is touched before its first use: Least of 1 GiB
	huge  = 2 << 20 // in huge pages, so that nothing is touched where one is more than the share
)

// Window is how far a range may be touched: from its beginning to some way behind the
// highest byte that was ever handed out. Its users call Reach and one goroutine calls
// Wait, at the same time. Make one with New.
type Window struct {
	least int64
	used  atomic.Int64  // the highest byte that was handed out, and one
	grown chan struct{} // holds one thing if used has grown
}

// New returns the window of a range of size bytes, of which nothing has been used.
func New(size int64) *Window {
	return &Window{least: min(Least, size/share/huge*huge), grown: make(chan struct{}, 1)}
}

// Reach notes that what ends at the offset end is handed out. It never waits.
func (w *Window) Reach(end int64) {
	for used := w.used.Load(); end > used; used = w.used.Load() {
		if w.used.CompareAndSwap(used, end) {
			select {
			case w.grown <- struct{}{}:
			default:
			}
			return
		}
	}
}

// end is up to where the range may be touched.
func (w *Window) end() int64 {
	used := w.used.Load()
	return used + min(max(used, w.least), Most)
}

// Wait returns true when the page at off is in the window, and false when stop is closed.
func (w *Window) Wait(off int64, stop <-chan struct{}) bool {
	for {
		select {
		case <-stop:
			return false
		default:
		}
		if off < w.end() {
			return true
		}
		select {
		case <-stop:
			return false
		case <-w.grown:
		}
	}
}
