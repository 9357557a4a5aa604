// Package pump copies many bytes piece by piece, with several pieces in progress: while one is
// fetched, another is put in its place. All transfers use this loop. The callers' functions fetch a
// piece and put it in its place.
//
//	Begin ──▶ wait ──▶ Check ──▶ End    of each piece, by one of the lanes
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
// All but one of the functions may be nil. Their context ends when ctx ends or any of them fails.
type Job[R any] struct {
	Pieces int
	Lanes  int     // the maximum number of pieces in progress
	Pool   Pool[R] // nil if lanes need nothing

	// Begin begins to fetch a piece into r, and returns what waits for it; nil if it is there, or
	// if that fails. It is called for one piece at a time, in order, and not after it has failed.
	Begin func(ctx context.Context, r R, piece int) (wait func() error, err error)
	// Check sees what was fetched. If Ordered is set, it sees one piece after the other.
	Check   func(r R, piece int) error
	Ordered bool
	// End puts a piece in its place, and returns when it is there.
	End func(ctx context.Context, r R, piece int) error

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
	r := &run[R]{Job: j, ctx: ctx, turn: make(chan struct{}, 1), checked: closed}
	r.mu.lanes, r.mu.most = 1, j.Lanes
	if j.Quick > 0 {
		r.mu.most, r.mu.since = min(2, j.Lanes), time.Now()
	}
	if j.Pieces > 1 && j.Lanes > 1 {
		var cancel context.CancelCauseFunc
		r.ctx, cancel = context.WithCancelCause(ctx)
		r.cancel = cancel
		defer cancel(nil)
	}
	r.lane(r.borrow, true)
	r.others.Wait()
	return r.failed()
}

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// run is a Job under way.
type run[R any] struct {
	*Job[R]
	ctx    context.Context
	cancel context.CancelCauseFunc // nil if there is one lane only
	others sync.WaitGroup

	turn    chan struct{} // holds one while a piece is begun
	checked chan struct{} // closed when the piece before the next one is checked; guarded by turn

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

// lane moves pieces until none is left. The first stays to the end.
func (l *run[R]) lane(borrow func() (R, error), first bool) {
	r, err := borrow()
	for err == nil {
		if first {
			l.invite()
		}
		if !l.piece(r) {
			break
		}
		if !first && l.surplus() {
			break
		}
		if l.Pool == nil {
			continue
		}
		var ok bool
		if r, ok = l.Pool.Yield(r); ok {
			continue
		}
		if !first {
			l.leave()
			return
		}
		r, err = l.borrow()
	}
	if err != nil {
		l.fail(err)
	} else if l.Pool != nil {
		l.Pool.Return(r)
	}
	l.leave()
}

func (l *run[R]) borrow() (r R, err error) {
	if l.Pool == nil {
		return r, nil
	}
	defer guard.Error(&err, Panicked)
	return l.Pool.Borrow(l.ctx)
}

func (l *run[R]) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.lanes--
}

// invite starts lanes while there is work for more and the pool has an R for each.
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
			l.lane(func() (R, error) { return r, nil }, false)
		})
	}
}

// surplus reports whether there are more lanes than may work.
func (l *run[R]) surplus() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.lanes > l.mu.most
}

// piece moves the next piece. It returns false if there is none behind it, or something failed.
func (l *run[R]) piece(r R) bool {
	l.turn <- struct{}{}
	i, ok := l.take()
	if !ok {
		<-l.turn
		return false
	}
	var before, mine chan struct{}
	if l.Ordered {
		before, mine = l.checked, make(chan struct{})
		l.checked = mine
	}
	var wait func() error
	var err error
	if l.Begin != nil {
		err = guarded(func() (err error) { wait, err = l.Begin(l.ctx, r, i); return err })
	}
	if err != nil {
		l.stop(err)
	}
	<-l.turn

	if err == nil && wait != nil {
		err = guarded(wait)
	}
	if l.Ordered {
		<-before
	}
	if err == nil && l.Check != nil && l.failed() == nil {
		err = guarded(func() error { return l.Check(r, i) })
	}
	l.fail(err) // before the next piece is checked
	if l.Ordered {
		close(mine)
	}
	if l.End != nil && l.failed() == nil {
		l.fail(guarded(func() error { return l.End(l.ctx, r, i) }))
	}
	l.paced()
	return l.more()
}

// stop is called when a piece could not be begun, and keeps others from beginning. With ordered
// checks an earlier piece may still fail, and its error comes first.
func (l *run[R]) stop(err error) {
	l.mu.Lock()
	l.mu.next = l.Pieces
	l.mu.Unlock()
	if !l.Ordered {
		l.fail(err)
	}
}

// more reports whether there may be a next piece.
func (l *run[R]) more() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.err == nil && l.mu.next < l.Pieces
}

// take returns the next piece. The end of the context is a failure while there is one.
func (l *run[R]) take() (piece int, ok bool) {
	over := context.Cause(l.ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.next >= l.Pieces || l.mu.err != nil {
		return 0, false
	}
	if over != nil {
		l.mu.err = over
		return 0, false
	}
	l.mu.next++
	return l.mu.next - 1, true
}

// paced counts a piece that has ended. After as many pieces as there may be lanes, it changes that
// number by their time; see Job.Quick.
func (l *run[R]) paced() {
	if l.Quick == 0 {
		return
	}
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.ended++; l.mu.ended < l.mu.most {
		return
	}
	if now.Sub(l.mu.since) < time.Duration(l.mu.most)*l.Quick {
		l.mu.most = min(2*l.mu.most, l.Lanes)
	} else {
		l.mu.most = min(2, l.Lanes)
	}
	l.mu.ended, l.mu.since = 0, now
}

// fail keeps the first error, and ends what is under way.
func (l *run[R]) fail(err error) {
	if err == nil {
		return
	}
	l.mu.Lock()
	first := l.mu.err == nil
	if first {
		l.mu.err = err
	}
	l.mu.Unlock()
	if first && l.cancel != nil {
		l.cancel(err)
	}
}

func (l *run[R]) failed() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.err
}

func guarded(f func() error) (err error) {
	defer guard.Error(&err, Panicked)
	return f()
}
