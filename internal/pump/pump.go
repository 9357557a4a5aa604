// Package pump runs a job piece by piece, with several pieces in progress. All transfers use this
// loop; the callers' functions move a piece.
//
//	Begin ──▶ Do    of each piece, by one of the lanes
//	  └─ in order, one at a time
//
// A lane is a goroutine that moves one piece after the other. It may have something of its own to
// work in, which it borrows from a Pool: a pinned chunk, or scratch memory. The caller is the first
// lane, so that a single piece starts no goroutine.
package pump

import (
	"context"
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
)

// Panicked is the What of a guard.PanicError that Run returns because a function of a job panicked.
// A function may also return one of its own.
const Panicked = "a transfer"

// Pool lends what lanes work in: an R.
type Pool[R any] interface {
	// Borrow waits for an R.
	Borrow(ctx context.Context) (R, error)
	// TryBorrow is Borrow without waiting. It does not pass waiters.
	TryBorrow() (R, bool)
	// Yield gives r to a waiter, if there is one. It then returns false, unless there is another
	// for the caller.
	Yield(r R) (R, bool)
	// Return takes r back.
	Return(r R)
}

// Job describes the pieces to move, which are numbered from 0, and the functions that move them.
type Job[R any] struct {
	Pieces int
	Lanes  int     // the maximum number of pieces in progress
	Pool   Pool[R] // nil if lanes need nothing

	// Begin, which may be nil, is called before Do, for one piece at a time, in order, and not after
	// it has failed.
	Begin func(r R, piece int) error
	// Do moves a piece, and returns when it is there. Its context ends when that of the job ends, or
	// any piece fails.
	Do func(ctx context.Context, r R, piece int) error

	// Quick, unless it is 0, is the longest time per piece at which more lanes are worth it. Two
	// lanes work at first. Their number doubles while pieces are quick, and is two again when they
	// are not. So a slow device has little in progress, and a cancelled job ends soon.
	Quick time.Duration
}

// Run moves all pieces. It returns the first error, or the cause of ctx's end if pieces were left;
// a panic is a *guard.PanicError whose What is Panicked. All work has ended when it returns. It
// needs one R to go on, and waits only for that one. So jobs that share a pool do not wait for each
// other in a circle. After each piece a lane yields its R.
func (j *Job[R]) Run(ctx context.Context) error {
	if j.Pieces <= 0 {
		return nil
	}
	l := &run[R]{Job: j, ctx: ctx, turn: make(chan struct{}, 1)}
	l.mu.lanes, l.mu.most = 1, j.Lanes
	if j.Quick > 0 {
		l.mu.most, l.mu.since = min(2, j.Lanes), time.Now()
	}
	if j.Pieces > 1 && j.Lanes > 1 {
		l.ctx, l.cancel = context.WithCancelCause(ctx)
		defer l.cancel(nil)
	}
	// The caller's lane stays to the end, and borrows again what it has yielded.
	var r R
	for has, more := false, true; more; {
		if !has && l.Pool != nil {
			err := guarded(func() (err error) { r, err = l.Pool.Borrow(l.ctx); return err })
			if err != nil {
				l.ended(err)
				break
			}
		}
		l.invite()
		more, has = l.piece(r), true
		if l.Pool != nil && more {
			r, has = l.Pool.Yield(r)
		} else if l.Pool != nil {
			l.Pool.Return(r)
		}
	}
	l.others.Wait()
	return l.mu.err
}

// run is a Job under way.
type run[R any] struct {
	*Job[R]
	ctx    context.Context
	cancel context.CancelCauseFunc // nil if there is one lane only
	others sync.WaitGroup
	turn   chan struct{} // holds one while a piece is begun

	mu struct {
		sync.Mutex
		next  int // piece
		lanes int // that work
		most  int // that may
		ended int // pieces, since the pace was measured the last time
		since time.Time
		err   error
	}
}

// invite starts lanes while there is work for more and the pool has an R for each. Such a lane ends
// when it has to yield its R, or when there are more lanes than may work.
func (l *run[R]) invite() {
	for {
		l.mu.Lock()
		short := l.mu.lanes < l.mu.most && l.mu.next+l.mu.lanes < l.Pieces
		l.mu.Unlock()
		if !short {
			return
		}
		var r R
		if l.Pool != nil {
			var ok bool
			if r, ok = l.Pool.TryBorrow(); !ok {
				return
			}
		}
		l.mu.Lock()
		l.mu.lanes++
		l.mu.Unlock()
		l.others.Go(func() {
			labels.Transfer.Set()
			for more, has := true, true; more && has; {
				more = l.piece(r)
				l.mu.Lock()
				more = more && l.mu.lanes <= l.mu.most
				l.mu.Unlock()
				if l.Pool != nil && more {
					r, has = l.Pool.Yield(r)
				} else if l.Pool != nil {
					l.Pool.Return(r)
				}
			}
			l.mu.Lock()
			l.mu.lanes--
			l.mu.Unlock()
		})
	}
}

// piece moves the next piece. It returns false if there is none behind it, or something failed.
func (l *run[R]) piece(r R) bool {
	l.turn <- struct{}{}
	i, ok := l.take()
	if ok && l.Begin != nil {
		if err := guarded(func() error { return l.Begin(r, i) }); err != nil {
			ok = l.ended(err)
		}
	}
	<-l.turn
	return ok && l.ended(guarded(func() error { return l.Do(l.ctx, r, i) }))
}

// take returns the next piece. The end of the context is a failure while there is one.
func (l *run[R]) take() (piece int, ok bool) {
	over := context.Cause(l.ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.next >= l.Pieces || l.mu.err != nil {
		return 0, false
	}
	if l.mu.err = over; over != nil {
		return 0, false
	}
	l.mu.next++
	return l.mu.next - 1, true
}

// ended counts a piece that has ended, and reports whether there may be a next one. It keeps the
// first error, and ends what is under way. After as many pieces as there may be lanes, it changes
// that number by their time; see Job.Quick.
func (l *run[R]) ended(err error) (more bool) {
	l.mu.Lock()
	first := err != nil && l.mu.err == nil
	if first {
		l.mu.err = err
	}
	if l.mu.ended++; l.Quick > 0 && l.mu.ended >= l.mu.most {
		now := time.Now()
		if now.Sub(l.mu.since) < time.Duration(l.mu.most)*l.Quick {
			l.mu.most = min(2*l.mu.most, l.Lanes)
		} else {
			l.mu.most = min(2, l.Lanes)
		}
		l.mu.ended, l.mu.since = 0, now
	}
	more = l.mu.err == nil && l.mu.next < l.Pieces
	l.mu.Unlock()
	if first && l.cancel != nil {
		l.cancel(err)
	}
	return more
}

func guarded(f func() error) (err error) {
	defer guard.Error(&err, Panicked)
	return f()
}
