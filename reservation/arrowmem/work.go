package arrowmem

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/apache/arrow-go/v18/arrow/memory"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// WorkOptions describe a Work. Sizes are bytes.
type WorkOptions struct {
	Operator string               // for errors
	In       reservation.Strategy // required
	// Min is reserved when the Work is made. Max is the most that it may grow to; 0 means the limit
	// of its space.
	Min, Max int64
	// Reclaim gives memory back while other requests wait for room in the space, or in a faster
	// tier, and no batch can be evicted for them. want is how many bytes the oldest lacks. Reclaim
	// puts state at rest away, frees it and calls Work.Shrink; its result is only informational.
	// ctx ends after a second. The request then asks the next Work, and its error names this one if
	// it fails.
	//
	// Reclaim runs on a goroutine of its own, one call at a time, and never for a Grow of the same
	// Work. The first call may come before the Work was returned: one mutex should guard the state
	// and the variable that has the Work. Reclaim must not call Close. Nil means that other requests
	// wait until the operator calls Shrink or Close, for which it can poll Requested.
	Reclaim func(ctx context.Context, want int64) (freed int64)
}

// Work is an operator's own memory in one space: Min bytes, and what Grow adds. A slack of 1 MiB, or
// of 1/16 of Min if that is more, is reserved with Min. An operator builds Arrow arrays there with
// Allocator, or counts there what it keeps elsewhere.
//
// The caller must Close it. It is safe for concurrent use. The reservation.Owner of the context that
// it was made with, if there is one, is the owner of the Work and of its waits.
type Work struct {
	alloc   *Allocator
	manager *reservation.Manager
	name    string
	max     int64
	slack   int64
	cancel  func() // ends Reclaim
	closed  atomic.Bool

	// mu guards size, and is held while the reservation shrinks, but not while it grows. It is the
	// outermost lock.
	mu sync.Mutex
	// size is Min, and what Grow calls have added or will add, without what Shrink gave back. The
	// reservation has that and the slack, without what waits, and somewhat more where the space rounds.
	size int64
}

// NewWork makes a Work, and waits for Min bytes and the slack as reservation.Manager.Reserve does,
// with the same errors. heap counts what its allocator takes from the Go heap; it may be nil.
func NewWork(ctx context.Context, m *reservation.Manager, heap *HeapCounter, o WorkOptions) (*Work, error) {
	w := &Work{
		manager: m, name: "work of " + named.Quoted(o.Operator), cancel: func() {},
		max: cmp.Or(o.Max, math.MaxInt64), slack: max(1<<20, o.Min/16), size: o.Min,
	}
	if o.Min < 0 || w.max < o.Min {
		return nil, fmt.Errorf("%s: Min %d and Max %d: Min must be from 0 to Max, or Max 0", w.name, o.Min, o.Max)
	}
	r, err := m.Reserve(ctx, o.In, min(o.Min, math.MaxInt64-w.slack)+w.slack,
		&reservation.Options{Owner: reservation.OwnerOf(ctx), Name: "work of " + o.Operator})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", w.name, err)
	}
	w.alloc = newAllocator(r, cmp.Or(heap, new(HeapCounter)))
	if o.Reclaim != nil {
		w.cancel = m.OnReclaim(reservation.Reclaimer{
			Reservation: r, Name: w.name, Reclaim: func(ctx context.Context, want int64) { o.Reclaim(ctx, want) },
		})
	}
	return w, nil
}

// Grow adds n bytes, and waits for them as reservation.Reservation.Grow does: batches are evicted,
// and other Works are asked to Reclaim. More than Max, or than the space can ever have, is an error
// that matches reservation.ErrExceeded. The operator should put some of its state away then. If
// nobody is left who could free the bytes, the error matches reservation.ErrDeadlock. After an error
// the Work is as it was.
func (w *Work) Grow(ctx context.Context, n int64) error {
	a := w.alloc
	w.mu.Lock()
	err := w.check(n, w.max-w.size, w.max)
	if err == nil {
		spare := max(0, w.spareLocked())
		w.size += n
		w.mu.Unlock()
		err = a.r.Grow(ctx, n-min(n, spare))
		w.mu.Lock()
		if err != nil {
			w.size -= n
		}
	}
	w.mu.Unlock()
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.heap <= a.r.Unused() && a.unsupported == nil {
		a.mu.overflow = nil
	}
	return nil
}

// Shrink gives n bytes back, which must be in no buffer. More than that, or than the Work has besides
// its slack, is an error that matches reservation.ErrExceeded and changes nothing.
func (w *Work) Shrink(n int64) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.check(n, w.size+min(0, w.spareLocked()), w.size)
	if err == nil {
		err = w.alloc.r.Shrink(n)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", w.name, err)
	}
	w.size -= n
	return nil
}

// check returns an error if n bytes are below 0, or above those of limit that are available. After
// Close the reservation returns another error.
func (w *Work) check(n, available, limit int64) error {
	switch {
	case n < 0:
		return fmt.Errorf("cannot grow or shrink by %d bytes", n)
	case n > available && !w.closed.Load():
		return &reservation.ExceededError{
			Space: w.alloc.r.Space().ID(), Requested: n, Available: available, Limit: limit,
			Hint: "put state away, or raise WorkOptions.Max",
		}
	}
	return nil
}

// spareLocked returns by how much the reservation is larger than the size and the slack, because the
// space charges rounded sizes. Below 0 it is how many bytes Grow calls wait for.
func (w *Work) spareLocked() int64 { return w.alloc.r.Bytes() - w.slack - w.size }

// Requested returns how many bytes other requests that wait for room in the space lack. An operator
// that can put state away should poll it between batches. It does not count requests in faster
// tiers, for which Reclaim may be called.
func (w *Work) Requested() int64 {
	lack := w.manager.Requested(w.alloc.r.Space().ID())
	w.mu.Lock()
	defer w.mu.Unlock()
	return max(0, lack+min(0, w.spareLocked())) // without its own
}

// Allocator returns an Arrow allocator of the Work's bytes and its slack, always the same. It never
// panics for want of memory: arrow-go runs kernels on goroutines of its own, where a panic would end
// the process. Once these bytes are used up it allocates from the Go heap, until some of them are
// free again. Engine.Stats counts that, and Err returns an error. A Work in other than host memory
// has no memory for arrays: all of them are on the Go heap, and Err returns an error that also
// matches tier.ErrNotSupported, which Grow does not clear.
func (w *Work) Allocator() memory.Allocator { return w.alloc }

// Err returns an error that matches reservation.ErrExceeded once the allocator has used the Go heap,
// and nil again after a Grow that makes the Work large enough for all its arrays that are left: the
// operator should Grow, or free arrays and then Grow by what is still missing, which may be 0.
func (w *Work) Err() error {
	a := w.alloc
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mu.overflow == nil {
		return nil
	}
	return fmt.Errorf("%s has %d bytes on the Go heap, free some or Grow: %w: %w",
		w.name, a.mu.heap, reservation.ErrExceeded, a.mu.overflow)
}

// Close returns the memory, and waits for a Reclaim that runs. Arrays that were not released keep
// theirs until they are. A Grow that waits ends with tier.ErrReleased, and so does every later call
// of Grow, Shrink and Close. Close returns the first call of the allocator with memory that was not
// its own. The allocator may still be used, and takes all from the Go heap.
func (w *Work) Close() error {
	if w.closed.Swap(true) {
		return fmt.Errorf("%s: %w", w.name, tier.ErrReleased)
	}
	w.cancel()
	_ = w.alloc.r.Release() // the only release
	w.alloc.mu.Lock()
	defer w.alloc.mu.Unlock()
	return w.alloc.mu.misused
}

// HeapCounter counts the bytes that the allocators of Works have taken from the Go heap. Its zero
// value is ready. It is safe for concurrent use.
type HeapCounter struct {
	mu    sync.Mutex
	stats HeapStats
}

// HeapStats are the figures of a HeapCounter, in bytes.
type HeapStats struct {
	Bytes int64 // of arrays that were not released
	Peak  int64 // the largest Bytes so far
}

// Stats returns the present figures.
func (h *HeapCounter) Stats() HeapStats {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stats
}

func (h *HeapCounter) add(n int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stats.Bytes += n
	h.stats.Peak = max(h.stats.Peak, h.stats.Bytes)
}
