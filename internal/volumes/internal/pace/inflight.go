package pace

import (
	"context"
	"math"
	"time"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/lockrank"
)

const (
	// windowTime is how long the requests under way may take together. A request that
	// the system has begun cannot be cancelled: not by a context, and not by ending the
	// process. So this bounds how long a cancelled transfer, and an interrupted process,
	// waits for a slow disk. A fast disk is not held back: even requests of 100 ms each
	// keep as many under way as there are workers.
	windowTime = 250 * time.Millisecond

	// smallestRequest is what a request is not cut below, and what is always let in: less
	// would cost more on a slow disk than it saves.
	smallestRequest = 64 << 10

	// firstRequest is the length of requests until something has been measured: Depth of
	// them take half a second on a disk of 2 MiB/s.
	firstRequest = 256 << 10
)

// Window bounds the bytes of a volume's running requests to what the disk does in windowTime, as
// measured. Waiters are let in in the order of arrival. It is safe for concurrent use.
type Window struct {
	Request int64 // the most bytes of one request
	Depth   int64 // requests of one transfer

	mu struct {
		lockrank.Mutex[lockrank.Device]
		inside int64     // bytes of the requests under way
		count  int       // of them
		since  time.Time // up to when time is counted, while there are some
		reads  speed     // which may be much faster than writes
		writes speed
		line   fairqueue.Queue[*entering]
	}
}

// entering is a read or a write that waits to begin.
type entering struct {
	bytes int64
	write bool
	begun chan struct{} // closed when it may begin
}

func (w *Window) speedLocked(write bool) *speed {
	if write {
		return &w.mu.writes
	}
	return &w.mu.reads
}

// mostLocked is how many bytes may be under way when a read or a write begins.
func (w *Window) mostLocked(write bool) int64 {
	rate := w.speedLocked(write).bytesPerSecond()
	if rate == 0 {
		return w.Depth * min(w.Request, firstRequest)
	}
	return max(smallestRequest, int64(float64(rate)*windowTime.Seconds()))
}

// Length returns how long the next read or write may be: Request, or on a slow disk so much that
// Depth of them fit.
func (w *Window) Length(write bool) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := w.mostLocked(write) / w.Depth / smallestRequest * smallestRequest // whole units of sealed volumes
	return min(w.Request, max(n, smallestRequest))
}

// Enter waits until a read or write of n bytes may begin. The caller must Leave. If ctx ends
// first, Enter returns its cause, and the request must not begin.
func (w *Window) Enter(ctx context.Context, n int64, write bool) error {
	w.mu.Lock()
	if w.mu.line.Len() == 0 && w.fitsLocked(n, write) {
		w.beginLocked(n)
		w.mu.Unlock()
		return nil
	}
	e := &entering{n, write, make(chan struct{})}
	place := w.mu.line.Push(e)
	w.mu.Unlock()
	select {
	case <-e.begun:
		return nil
	case <-ctx.Done():
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !place.Waits() { // it was admitted at the same moment
		return nil
	}
	place.Remove()
	w.admitLocked() // those behind it may be smaller
	return context.Cause(ctx)
}

// Leave ends what Enter began. ok says that the bytes were transferred: the time of a
// request that failed says nothing of how fast the disk is.
func (w *Window) Leave(n int64, write, ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.endLocked(n, write, ok)
	w.admitLocked()
}

// UnderWay returns how many bytes of requests are under way.
func (w *Window) UnderWay() int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.mu.inside
}

func (w *Window) fitsLocked(n int64, write bool) bool {
	return w.mu.count == 0 || n <= w.mostLocked(write)-w.mu.inside
}

func (w *Window) beginLocked(n int64) {
	if w.mu.count == 0 {
		w.mu.since = time.Now()
	}
	w.mu.count++
	w.mu.inside += n
}

func (w *Window) endLocked(n int64, write, ok bool) {
	now := time.Now()
	if ok {
		w.speedLocked(write).add(float64(n), now.Sub(w.mu.since).Seconds())
	}
	w.mu.since = now
	w.mu.count--
	w.mu.inside -= n
}

// admitLocked begins the oldest requests, as far as they fit.
func (w *Window) admitLocked() {
	for place := range w.mu.line.All() {
		e := place.Value
		if !w.fitsLocked(e.bytes, e.write) {
			return
		}
		place.Remove()
		w.beginLocked(e.bytes)
		close(e.begun)
	}
}

// speed is how many bytes a second passed of late. The zero value has measured nothing.
type speed struct {
	bytes, seconds float64
}

// bytesPerSecond returns what was measured; 0 for nothing yet.
func (s *speed) bytesPerSecond() int64 {
	switch {
	case s.bytes == 0:
		return 0
	case s.bytes >= s.seconds*fastest:
		return fastest
	}
	return max(1, int64(s.bytes/s.seconds))
}

// add adds a sample. What is older counts the less the longer the sample took, or would
// have taken at the speed so far: so a disk that has become slow and one that has become
// fast are found out equally soon.
func (s *speed) add(n, seconds float64) {
	age := seconds
	if old := s.bytesPerSecond(); old > 0 {
		age = max(age, n/float64(old))
	}
	keep := math.Exp(-age / recent.Seconds())
	s.bytes = s.bytes*keep + n
	s.seconds = s.seconds*keep + seconds
}
