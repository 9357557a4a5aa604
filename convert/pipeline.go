package convert

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// stage is one piece of work under way; a tier.Event is one.
type stage interface {
	Done() <-chan struct{}
	Err() error
}

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// safely makes a panic of a device or a layout an error, so that what is under way
// is waited for and what was taken is given back.
func safely(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = panicked(p)
		}
	}()
	return f()
}

// panicked makes a panic an error, but for a broken lock order, which an
// invariants build must not hide.
func panicked(p any) error {
	if v, ok := p.(lockrank.Violation); ok {
		panic(v)
	}
	return &batch.UnmovableError{Err: fmt.Errorf("convert: a transfer panicked: %v", p)}
}

// noPanic is safely for the rest of the function that defers it: behind what gives back
// when *err is set.
func noPanic(err *error) {
	if p := recover(); p != nil {
		*err = panicked(p)
	}
}

// pieces lends the pinned memory that a pipeline passes its chunks through.
type pieces interface {
	Borrow(ctx context.Context) ([]byte, error)
	TryBorrow() ([]byte, bool)
	Return([]byte)
	Chunk() int64
}

// fetch starts to fill p with the bytes at off, and returns what waits for that; nil if
// it is done already. drain empties p.
type (
	fetch func(p []byte, off int64) (wait func() error, err error)
	drain func(p []byte, off int64) error
)

// pipeline passes a body through pinned chunks, so that fetching and draining overlap.
// It has lanes, each with a chunk of its own that it fills, has checked and empties, again
// and again; chunks that are used in turn stay in the caches.
type pipeline struct {
	ctx   context.Context
	pool  pieces
	size  int64
	lanes int
	// fetch is called by one lane at a time, in the order of the bytes.
	fetch fetch
	drain drain
	// check, which may be nil, sees what was fetched; if ordered is set one chunk after
	// the other.
	check   func(p []byte, off int64) error
	ordered bool

	next    atomic.Int64 // the first byte that no lane has taken
	token   chan struct{}
	checked chan struct{} // closed when the chunk before next has been; guarded by token
	others  sync.WaitGroup

	mu struct {
		sync.Mutex
		running int // lanes
		err     error
	}
}

// run passes all bytes. Whatever happens, nothing is under way when it returns, so that
// the chunks and what the lanes work on are the caller's again. It needs one chunk to go on
// and waits only for that one, so several share a pool of chunks without holding each
// other up for ever; and after each turn a lane offers its chunk to those who wait.
func (l *pipeline) run() error {
	l.token = make(chan struct{}, 1)
	l.checked = closed
	l.mu.running = 1
	l.lane(nil, true)
	l.others.Wait()
	return l.failed()
}

func (l *pipeline) lane(chunk []byte, first bool) {
	defer func() {
		if chunk != nil {
			l.pool.Return(chunk)
		}
	}()
	for {
		if chunk == nil {
			var err error
			if chunk, err = l.pool.Borrow(l.ctx); err != nil {
				l.fail(err)
				return
			}
		}
		if first {
			l.invite()
		}
		if !l.turn(chunk) {
			return
		}
		l.pool.Return(chunk)
		var ok bool
		if chunk, ok = l.pool.TryBorrow(); !ok {
			chunk = nil
			if !first {
				l.mu.Lock()
				l.mu.running--
				l.mu.Unlock()
				return
			}
		}
	}
}

// invite starts lanes for the chunks that are there, as long as there is work for them.
func (l *pipeline) invite() {
	for {
		l.mu.Lock()
		more := l.mu.running < l.lanes && l.next.Load()+int64(l.mu.running)*l.pool.Chunk() < l.size
		l.mu.Unlock()
		if !more {
			return
		}
		chunk, ok := l.pool.TryBorrow()
		if !ok {
			return
		}
		l.mu.Lock()
		l.mu.running++
		l.mu.Unlock()
		l.others.Go(func() { l.lane(chunk, false) })
	}
}

// turn passes one chunk; false if there is none left, or it failed.
func (l *pipeline) turn(chunk []byte) bool {
	l.token <- struct{}{}
	off := l.next.Load()
	if err := context.Cause(l.ctx); err != nil && off < l.size {
		l.fail(err)
	}
	if off >= l.size || l.failed() != nil {
		<-l.token
		return false
	}
	p := chunk[:min(l.size-off, int64(len(chunk)))]
	l.next.Store(off + int64(len(p)))
	var before, mine chan struct{}
	if l.ordered {
		before, mine = l.checked, make(chan struct{})
		l.checked = mine
	}
	var wait func() error
	err := safely(func() (err error) { wait, err = l.fetch(p, off); return err })
	<-l.token

	if err == nil && wait != nil {
		err = safely(wait)
	}
	if l.ordered {
		<-before
	}
	if err == nil && l.check != nil && l.failed() == nil {
		err = safely(func() error { return l.check(p, off) })
	}
	if err != nil {
		l.fail(err) // before the next lane's check
	}
	if l.ordered {
		close(mine)
	}
	if l.failed() == nil {
		if err := safely(func() error { return l.drain(p, off) }); err != nil {
			l.fail(err)
		}
	}
	return l.failed() == nil
}

// fail keeps the first error.
func (l *pipeline) fail(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.err == nil {
		l.mu.err = err
	}
}

func (l *pipeline) failed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.err
}

// window keeps copies of one stream under way, for transfers that need no chunks;
// they end in order. It begins with two, so that a cancelled move ends soon on a slow
// device, and goes up to most while they take no longer than quickCopy each: a device
// that is fast would be held up by waking the goroutine that feeds it.
type window struct {
	most   int
	size   int // 0 at the start
	stages []stage
	begun  time.Time // of the oldest wave
}

const quickCopy = 5 * time.Millisecond

// add puts s into the window and, if it is full then, waits for the older half.
func (w *window) add(s stage) error {
	if w.size == 0 {
		w.size, w.begun = 2, time.Now()
	}
	w.stages = append(w.stages, s)
	if len(w.stages) < w.size {
		return nil
	}
	half := w.size / 2
	<-w.stages[half-1].Done()
	if now := time.Now(); now.Sub(w.begun) < time.Duration(w.size)*quickCopy {
		w.size, w.begun = min(2*w.size, w.most), now
	} else {
		w.size, w.begun = 2, now
	}
	for n := 0; n < half || len(w.stages) >= w.size; n++ { // after a larger window more than half of this one
		if err := w.oldest(); err != nil {
			return err
		}
	}
	return nil
}

func (w *window) oldest() error {
	s := w.stages[0]
	w.stages = w.stages[1:]
	<-s.Done()
	return s.Err()
}

// wait waits for all stages and returns the first error.
func (w *window) wait() error {
	var errs []error
	for len(w.stages) > 0 {
		errs = append(errs, w.oldest())
	}
	return errors.Join(errs...)
}
