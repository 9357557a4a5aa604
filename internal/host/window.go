package host

import "sync/atomic"

// As many bytes are touched ahead of the used ones as are used, at most maxAhead. minAhead bytes, or
// less of a short range, are touched before the first use: an idle range costs no more. A range in use
// gets ahead of its users within a few of their steps, because touching a page takes less time than
// filling it.
const (
	minAhead = 64 << 20
	maxAhead = 512 << 20

	share = 16      // one sixteenth of a range is touched before its first use: minAhead of 1 GiB
	huge  = 2 << 20 // in whole huge pages, so nothing of a range where one is more than that
)

// Window is the part of a range of memory that may be touched ahead of its use: from its beginning to
// some way beyond the highest byte that was ever handed out. Touching all of a range when it is mapped
// takes up to a second of system time for each GiB, even where it is never used. Touching none of it
// makes the first use slow. Users of the range call Reach, and at the same time one goroutine calls
// Wait. Make one with NewWindow.
type Window struct {
	least int64
	used  atomic.Int64  // the offset after the highest byte that was handed out
	grown chan struct{} // holds a value if used has grown
}

// NewWindow returns the window of a range of size bytes, of which nothing has been used.
func NewWindow(size int64) *Window {
	return &Window{least: min(minAhead, size/share/huge*huge), grown: make(chan struct{}, 1)}
}

// Reach notes that the bytes up to the offset end are handed out. It never waits.
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

// end returns the offset up to which the range may be touched.
func (w *Window) end() int64 {
	used := w.used.Load()
	return used + min(max(used, w.least), maxAhead)
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
