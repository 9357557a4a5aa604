package permit

import (
	"context"
	"slices"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/waitline"
)

// line has the waiters for one resource. dirty is set if one of them might be granted.
//
// A request that takes some of the resource before the head passes the head. A head counts its
// passes in all its lines together. At the bound, no other request takes of these resources. The
// oldest waiter of all is the head of all its lines. So the pool keeps the resources that it needs
// in the end, and each other waiter becomes the oldest in turn.
type line struct {
	waitline.Line[*waiter]
	dirty bool
}

// lookAhead is how many of a line are examined when some of its resource is released. It bounds the
// time under the lock when many wait. Waiters further back are examined when they have come nearer.
const lookAhead = 256

type waiter struct {
	ask
	done chan struct{} // closed, without the lock, when the wait is over

	// Guarded by Pool.mu; the outcome may be read when done is closed.
	places [maxResources]waitline.Place[*waiter]
	passes int // how often it may still be passed as a head
	over   bool
	got    Permit
	err    error
	next   *waiter // of over
}

// over lists waiters whose wait is over, to be woken when the lock is not held.
type over struct{ first *waiter }

func (o *over) wake() {
	for w := o.first; w != nil; {
		next := w.next
		close(w.done)
		w = next
	}
}

// wait returns when the request of w is granted, or when its wait ends otherwise.
func (p *Pool) wait(ctx context.Context, w *waiter) (Permit, error) {
	lockrank.AssertNone("a permit is waited for")
	select {
	case <-w.done:
		return w.got, w.err
	case <-ctx.Done():
	}
	var done over
	p.mu.Lock()
	if !w.over {
		p.failLocked(w, ended(ctx), &done)
		p.serveLocked(&done) // the door may have been shut for w
	}
	got, err := w.got, w.err
	p.mu.Unlock()
	done.wake()
	return got, err
}

// enqueueLocked puts a new waiter at the end of the line of each resource that a needs. It also
// joins the line of the slots while they are unlimited, because that may change.
func (p *Pool) enqueueLocked(a *ask) *waiter {
	w := &waiter{ask: *a, done: make(chan struct{}), passes: p.bypass}
	p.mu.waiting++
	for r := range p.slots + 1 {
		if a.needs[r] > 0 {
			p.pushLocked(r, w)
		}
	}
	return w
}

func (p *Pool) pushLocked(line int, w *waiter) {
	at := &w.places[line]
	at.Of = w
	p.mu.lines[line].Push(at, 0)
}

// remove takes a place out of the line. Requests may pass the new head again.
func (l *line) remove(at *waitline.Place[*waiter]) {
	if l.Head() == at {
		l.dirty = true
	}
	l.Remove(at)
}

// leaveLocked takes w out of its lines when its wait is over.
func (p *Pool) leaveLocked(w *waiter, done *over) {
	for i := range w.places {
		if at := &w.places[i]; at.In() {
			p.mu.lines[i].remove(at)
		}
	}
	p.mu.waiting--
	w.over = true
	w.next, done.first = done.first, w
}

func (p *Pool) failLocked(w *waiter, err error, done *over) {
	w.err = err
	p.leaveLocked(w, done)
}

// headLocked returns the waiter that a request of w, or one without a waiter, would pass in the
// line of a resource, or nil.
func (p *Pool) headLocked(r int, w *waiter) *waiter {
	head := p.mu.lines[r].Head()
	if head == nil || head.Of == w {
		return nil
	}
	return head.Of
}

// shutLocked reports whether a resource is kept for an older waiter.
func (p *Pool) shutLocked(r int, w *waiter) bool {
	head := p.headLocked(r, w)
	return head != nil && head.passes == 0
}

// passLocked takes a pass from each waiter that the grant of a passes. A waiter that is passed in
// several lines loses one pass.
func (p *Pool) passLocked(a *ask, w *waiter) {
	var passed [maxResources]*waiter
	n := 0
	for r := range p.slots + 1 {
		if p.needLocked(a, r) == 0 {
			continue
		}
		if head := p.headLocked(r, w); head != nil && !slices.Contains(passed[:n], head) {
			passed[n] = head
			n++
			head.passes--
		}
	}
}

// serveLocked grants the requests that fit in the dirty lines, in order of arrival.
func (p *Pool) serveLocked(done *over) {
	for again := p.mu.waiting > 0; again; {
		again = false
		for i := range p.slots + 1 {
			if l := &p.mu.lines[i]; l.dirty {
				l.dirty = false
				again = true
				p.serveLineLocked(i, done)
			}
		}
	}
}

func (p *Pool) serveLineLocked(i int, done *over) {
	l, looked := &p.mu.lines[i], 0
	for at := l.Head(); at != nil && looked < lookAhead && !p.usedUpLocked(i); looked++ {
		w := at.Of
		at = l.Next(at) // w may leave
		if got, ok := p.takeLocked(&w.ask, w); ok {
			w.got = got
			p.leaveLocked(w, done)
		}
	}
}

// usedUpLocked reports that nothing of a resource is free.
func (p *Pool) usedUpLocked(r int) bool {
	return p.availableLocked(r) < 1 && !(r == p.slots && p.mu.unlimited)
}

// change sets a limit of a resource. It refuses the waiters that can never be granted any more, and
// serves the others.
func (p *Pool) change(r int, set func() error) error {
	var done over
	p.mu.Lock()
	if err := set(); err != nil {
		p.mu.Unlock()
		return err
	}
	for at := p.mu.lines[r].Head(); at != nil; {
		w := at.Of
		at = p.mu.lines[r].Next(at)
		if l, never := p.neverLocked(&w.ask); never {
			p.failLocked(w, p.lackError(l), &done)
		}
	}
	p.mu.lines[r].dirty = true
	p.serveLocked(&done)
	p.mu.Unlock()
	done.wake()
	return nil
}
