package convert

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// stage is one piece of work under way; a tier.Event is one.
type stage interface {
	Done() <-chan struct{}
	Err() error
}

// finished is a stage that is over.
type finished struct{ err error }

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (f finished) Done() <-chan struct{} { return closed }
func (f finished) Err() error            { return f.err }

// task is a stage that a goroutine runs.
type task struct {
	done chan struct{}
	err  error
}

func (t *task) Done() <-chan struct{} { return t.done }
func (t *task) Err() error            { return t.err }

// run starts f on a goroutine, which the pipeline waits for.
func run(f func() error) stage {
	t := &task{done: make(chan struct{})}
	go func() {
		defer close(t.done)
		defer func() {
			if p := recover(); p != nil {
				t.err = panicked(p)
			}
		}()
		t.err = f()
	}()
	return t
}

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
	return fmt.Errorf("convert: a transfer panicked: %v", p)
}

// pieces lends the pinned memory that a pipeline passes its chunks through.
type pieces interface {
	Borrow(ctx context.Context) ([]byte, error)
	TryBorrow() ([]byte, bool)
	Return([]byte)
	Chunk() int64
}

// pipeline passes size bytes through pinned chunks, up to depth at a time:
// fetch fills a chunk with the bytes at off, drain empties it; both only start
// the work. Fetches are started in order, and drains in that order too, each
// when its fetch is done, so that fetching and draining overlap. check, which may
// be nil, sees the bytes in order between the two.
//
// Whatever happens, nothing is under way when pipeline returns, so that the
// chunks and what the stages use are the caller's again. A pipeline needs one
// chunk to go on and waits only for that one, so several share a pool of chunks
// without holding each other up for ever.
func pipeline(ctx context.Context, pool pieces, size int64, depth int,
	fetch, drain func(p []byte, off int64) (stage, error), check func(p []byte, off int64) error) (err error) {

	type slot struct {
		chunk []byte // as borrowed
		p     []byte // the part in use
		off   int64
		stage stage
	}
	var fetching, draining []slot
	defer func() {
		for _, s := range append(fetching, draining...) {
			<-s.stage.Done()
			if e := s.stage.Err(); e != nil && err == nil {
				err = e
			}
			pool.Return(s.chunk)
		}
	}()
	// retire takes the oldest drain off the queue when it is over.
	retire := func() error {
		s := draining[0]
		<-s.stage.Done()
		draining = draining[1:]
		pool.Return(s.chunk)
		return s.stage.Err()
	}
	for next := int64(0); next < size || len(fetching)+len(draining) > 0; {
		if err := context.Cause(ctx); err != nil {
			return err
		}
		for next < size && len(fetching)+len(draining) < depth {
			chunk, ok := pool.TryBorrow()
			if !ok {
				if len(fetching)+len(draining) > 0 {
					break
				}
				if chunk, err = pool.Borrow(ctx); err != nil {
					return err
				}
			}
			n := min(size-next, int64(len(chunk)))
			s := slot{chunk: chunk, p: chunk[:n], off: next}
			if err = safely(func() (err error) { s.stage, err = fetch(s.p, s.off); return err }); err != nil {
				pool.Return(chunk)
				return err
			}
			fetching = append(fetching, s)
			next += n
		}
		for len(draining) > 0 && over(draining[0].stage) {
			if err := retire(); err != nil {
				return err
			}
		}
		if len(fetching) == 0 {
			if len(draining) > 0 {
				if err := retire(); err != nil {
					return err
				}
			}
			continue
		}
		s := fetching[0]
		if !over(s.stage) && len(draining) > 0 {
			// Whichever comes first: a chunk to drain, or one to fetch into.
			select {
			case <-s.stage.Done():
			case <-draining[0].stage.Done():
				continue
			}
		}
		<-s.stage.Done()
		fetching = fetching[1:]
		err := s.stage.Err()
		if err == nil && check != nil {
			err = check(s.p, s.off)
		}
		if err == nil {
			err = safely(func() (err error) { s.stage, err = drain(s.p, s.off); return err })
		}
		if err != nil {
			pool.Return(s.chunk)
			return err
		}
		draining = append(draining, s)
	}
	return nil
}

func over(s stage) bool {
	select {
	case <-s.Done():
		return true
	default:
		return false
	}
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
	for range half {
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
