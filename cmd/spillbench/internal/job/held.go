package job

import (
	"context"
	"sync"
	"sync/atomic"
)

// held bounds the bytes of batches that are decoded or wait to be put. It is safe for concurrent
// use.
type held struct {
	most int64 // 0: any

	mu    sync.Mutex
	bytes int64
	less  chan struct{} // closed when there is less; nil without waiters
}

// wait waits until so many bytes more fit, or nothing is held, and counts them as held.
func (h *held) wait(ctx context.Context, bytes int64) error {
	for {
		h.mu.Lock()
		if h.most == 0 || h.bytes == 0 || bytes <= h.most-h.bytes {
			h.bytes += bytes
			h.mu.Unlock()
			return nil
		}
		if h.less == nil {
			h.less = make(chan struct{})
		}
		less := h.less
		h.mu.Unlock()
		select {
		case <-less:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func (h *held) add(bytes int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bytes += bytes
	if bytes < 0 && h.less != nil {
		close(h.less)
		h.less = nil
	}
}

// take counts bytes as held, in place of what was waited for, until each of its users has called the
// function that it returns.
func (h *held) take(bytes, waited int64, users int) (done func()) {
	h.add(bytes - waited)
	var left atomic.Int64
	left.Store(int64(users))
	return func() {
		if left.Add(-1) == 0 {
			h.add(-bytes)
		}
	}
}
