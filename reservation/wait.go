package reservation

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	exec "runtime/trace"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/waitline"
)

// waiter is a request that waits in the line of each of its candidates.
type waiter struct {
	least, most int64 // bytes asked for
	slots       []slot
	bell        chan struct{} // rung, without locks, when the wait is over or there are waiters to serve; another's afterwards
	over        atomic.Bool   // set under Manager.mu, when the outcome is
	single      [1]slot       // the memory of slots, if there is one candidate
	owner       *Owner        // the task that waits, or nil
	tells       []func()      // called when the wait is over: see DeadlockError.Wait; guarded by Manager.mu until then

	// Guarded by Manager.mu; the outcome may be read when over is set.
	spent      atomic.Bool   // it has waited so long that it leaves no headroom; set under Manager.mu
	seq        uint64        // 0 before it waits
	begun, due time.Duration // since Manager.made; and after how long the wait is reported
	prev, next *waiter       // in Manager.mu.ring
	from       *line         // the line that served it, or nil
	charged    int64
	err        error
	nextOver   *waiter
}

// slot is a request in one of its candidate spaces. If the request waits, place is its position in
// the space's line; a request that does not wait uses the other fields alone.
type slot struct {
	w     *waiter // nil if the request does not wait
	line  *line
	need  int64 // bytes that the space charges
	asked int64 // bytes asked for here
	held  int64 // bytes that the request already has and keeps: Grow; guarded by Manager.mu
	spare int64 // bytes that it leaves free: headroom; see wants. In a line Manager.mu guards it
	keeps bool  // it leaves headroom free
	// upward is whether it may use headroom, and goes ahead of those that leave it free.
	upward bool
	place  waitline.Place[*slot]
}

// in reports whether the slot is in its line; under Manager.mu.
func (s *slot) in() bool { return s.place.In() }

// pushLocked puts s at the end of its line.
func (s *slot) pushLocked() {
	s.line.waits.Push(&s.place, s.wants())
	s.line.attendLocked()
}

// wants returns how many bytes must be free to serve the request: its need and the headroom that it
// leaves, but at most all room that the space can have.
func (s *slot) wants() int64 {
	if s.spare == 0 {
		return s.need
	}
	sp := s.line.space
	return s.need + max(0, min(s.spare, sp.Room()-s.need, sp.Inside().Ceiling()-sp.Inside().Held()-s.need))
}

// spared returns the headroom in wants: what stays free when the request is served.
func (s *slot) spared() int64 { return s.wants() - s.need }

// fits reports whether the request could be served under a limit, were the space
// empty.
func (s *slot) fits(limit int64) bool { return s.need <= limit-s.held }

// calm reports whether serving the request here would not start the monitor: the pressure stays
// below the trigger, or there is no slower tier. Nothing is charged yet, so several requests at the
// same time may reach the trigger together.
func (s *slot) calm() bool {
	sp := s.line.space
	return s.need <= sp.Room() && (s.line.lowest || s.need < sp.Trigger()-sp.PressureBytes())
}

// exceeded returns the error of a request that can no longer fit. It counts the bytes that Grow
// already has.
func (s *slot) exceeded() error { return s.line.exceeded(s.need + s.held) }

// over lists waiters whose waits have ended under the lock, to be woken after unlocking.
type over struct{ first *waiter }

func (o *over) add(w *waiter) { w.nextOver, o.first = o.first, w }

func (o *over) wake() {
	for w := o.first; w != nil; {
		next := w.nextOver
		for _, tell := range w.tells {
			tell()
		}
		w.ring()
		w = next
	}
}

// ring wakes w, which checks whether its wait is over, and otherwise calls serve. It never blocks.
func (w *waiter) ring() {
	select {
	case w.bell <- struct{}{}:
	default: // a wake-up is already pending
	}
}

func newWaiter(slots []slot, least, most int64) *waiter {
	w := &waiter{least: least, most: most}
	w.slots = w.single[:0]
	for _, s := range slots {
		if s.need <= s.line.space.Capacity() { // a limit may rise, a capacity never does
			s.w = w
			w.slots = append(w.slots, s)
		}
	}
	for i := range w.slots {
		w.slots[i].place.Of = &w.slots[i]
	}
	return w
}

// first is w's place in the line of its first candidate.
func (w *waiter) first() *slot { return &w.slots[0] }

// placesLocked yields those of w's slots that are in a line.
func (w *waiter) placesLocked() iter.Seq[*slot] {
	return func(yield func(*slot) bool) {
		for i := range w.slots {
			if s := &w.slots[i]; s.in() && !yield(s) {
				return
			}
		}
	}
}

// placeLocked returns the first of w's slots that is in a line, or nil.
func (w *waiter) placeLocked() *slot {
	for s := range w.placesLocked() {
		return s
	}
	return nil
}

// waitersLocked yields all waiters, the oldest first. The wait of one that was yielded may end.
func (m *Manager) waitersLocked() iter.Seq[*waiter] {
	return func(yield func(*waiter) bool) {
		for w := m.mu.ring.next; w != &m.mu.ring; {
			next := w.next
			if !yield(w) {
				return
			}
			w = next
		}
	}
}

// special reports whether w has several candidates, or leaves headroom free. While there are such
// waiters, Waiting cannot use the sums of the lines.
func (w *waiter) special() bool { return len(w.slots) > 1 || w.first().keeps }

// String is for error messages.
func (w *waiter) String() string {
	s := fmt.Sprintf("waiting for %d bytes in %s", w.first().need, w.first().line.space.ID())
	if n := len(w.slots) - 1; n > 0 {
		s += fmt.Sprintf(" or %d others", n)
	}
	return s
}

// wait puts w into its lines and waits. It returns the line that served w and how many bytes that
// charged, or the error that ended the wait. The owner of the wait is named or, if that is nil, the
// context's, which is looked up only here because a request that is served at once does not need
// it.
//
// The waiting goroutine also serves others: each time its bell rings it calls serve.
func (m *Manager) wait(ctx context.Context, w *waiter, named *Owner) (*line, int64, error) {
	if w.owner = named; named == nil {
		w.owner = OwnerOf(ctx)
	}
	if err := w.owner.join(m); err != nil {
		return nil, 0, err
	}
	w.begun, w.due = time.Since(m.made), longWaitAfter // which is cheaper than time.Now
	w.bell = m.bells.Get().(chan struct{})
	err := m.enqueue(w)
	m.serve() // bytes may have been freed just before w was in line
	if err != nil {
		return nil, 0, err
	}
	waits := !w.over.Load()
	if waits {
		if exec.IsEnabled() {
			defer exec.StartRegion(ctx, "spillway wait for "+w.first().line.space.ID().String()).End()
		}
		m.announce()
		m.say(ctx, w, events.WaitBegun, 0)
		defer func() { m.say(ctx, w, events.WaitEnded, time.Since(m.made)-w.begun) }()
	}
	for !w.over.Load() {
		select {
		case <-w.bell:
			m.serve()
		case <-ctx.Done():
			m.giveUp(ctx, w)
		}
	}
	if waits {
		took := time.Since(m.made) - w.begun
		m.waits.Record(took)
		m.blocked.add(w.owner, took)
	}
	m.bells.Put(w.bell) // a late ring wakes the next user of the bell, which then goes on waiting
	if w.err == nil {
		w.owner.gotPast(w.charged)
	}
	return w.from, w.charged, w.err
}

// enqueue puts w at the end of all its lines. The caller must call serve afterwards.
func (m *Manager) enqueue(w *waiter) error {
	var done over
	defer done.wake()
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed.Load() {
		return closedError()
	}
	if w.over.Load() { // withdrawn before it began
		return w.err
	}
	fits := false
	for i := range w.slots {
		s := &w.slots[i]
		m.refreshLocked(s.line, &done)
		fits = fits || s.fits(s.line.limit.Load())
	}
	if !fits { // a limit was lowered just now
		return w.first().exceeded()
	}
	m.mu.seq++
	w.seq = m.mu.seq
	w.prev, w.next = m.mu.ring.prev, &m.mu.ring
	w.prev.next, w.next.prev = w, w
	m.mu.waiting++
	if w.special() {
		m.mu.special++
	}
	for i := range w.slots {
		s := &w.slots[i]
		if s.fits(s.line.limit.Load()) {
			s.pushLocked()
			s.line.dirty.Store(true)
		}
	}
	m.waitBegunLocked(w)
	if m.config.LongWait != nil && !m.patience.IsSet() {
		m.patience.Start(longWaitAfter, m.reportLong)
	}
	return nil
}

// leaveLocked takes w, whose wait is over, out of all its lines and adds it to
// done. There may be room now for those behind it: the caller must call serve.
func (m *Manager) leaveLocked(w *waiter, done *over) {
	done.add(w)
	w.prev.next, w.next.prev = w.next, w.prev
	m.mu.waiting--
	if w.special() {
		m.mu.special--
	}
	for s := range w.placesLocked() {
		s.line.waits.Remove(&s.place)
		s.line.attendLocked()
		s.line.dirty.Store(true)
	}
	m.waitEndedLocked(w)
	w.over.Store(true) // last, because then w returns
}

// failLocked ends w's wait with an error.
func (m *Manager) failLocked(w *waiter, err error, done *over) {
	w.err = err
	m.leaveLocked(w, done)
}

// end calls f, which may end waits, with the lock held. Then it wakes the waiters that f added to
// done, and serves those behind them.
func (m *Manager) end(f func(done *over)) {
	var done over
	m.mu.Lock()
	f(&done)
	m.mu.Unlock()
	done.wake()
	m.serve()
}

// withdraw ends w's wait with an error, and reports whether it was not over before.
func (m *Manager) withdraw(w *waiter, err error) (was bool) {
	m.end(func(done *over) {
		switch was = !w.over.Load(); {
		case was && w.seq == 0:
			w.err = err
			w.over.Store(true)
		case was:
			m.failLocked(w, err, done)
		}
	})
	return was
}

// serve gives room to the waiters of dirty lines. Only one goroutine at a time does so, because it
// charges spaces without a lock: two could charge two spaces for one waiter, or charge twice for
// the same bytes. A second caller returns at once, and the first goes through the lines again.
func (m *Manager) serve() {
	if m.serving.Add(1) > 1 {
		return
	}
	done := false
	defer func() {
		if !done { // a pool or a quota has panicked: others must still be able to serve
			m.serving.Store(0)
		}
	}()
	for calls := int64(1); ; calls = m.serving.Load() {
		for _, l := range m.lines {
			if l.dirty.Load() && l.dirty.Swap(false) {
				m.serveLine(l)
			}
		}
		if m.serving.CompareAndSwap(calls, 0) {
			done = true
			return
		}
	}
}

// serveLine serves the waiters in l for which there is room.
func (m *Manager) serveLine(l *line) {
	for {
		var done over
		m.mu.Lock()
		m.refreshLocked(l, &done)
		s, door := l.pickLocked()
		spare := int64(0)
		if m.mu.served = nil; s != nil {
			spare = s.place.Need() - s.need // not what it would be by now: s was picked by that
			m.mu.served = s.w
		}
		m.mu.Unlock()
		if done.first != nil {
			done.wake()
			m.serve() // the running serve goes round again: they may have left other lines
		}
		if s == nil {
			return
		}
		m.serveOne(s, door, spare)
	}
}

// serveOne charges s's space for s, which leaves spare bytes free and has a pass of door's. It
// gives the pass back if s cannot be served: a request that did not wait was faster, or s's wait
// has just ended. An error of the space's quota ends the wait: returning it is better than waiting
// on.
func (m *Manager) serveOne(s *slot, door waitline.Door, spare int64) {
	w, l := s.w, s.line
	n, ok, err := s.fillPassing(door, spare, w.least, w.most)
	if err != nil {
		m.withdraw(w, err)
	}
	if !ok {
		l.unpass(door)
		return
	}
	var done over
	m.mu.Lock()
	served := !w.over.Load()
	if served {
		w.from, w.charged = l, n
		m.leaveLocked(w, &done)
	}
	m.mu.Unlock()
	if !served {
		l.space.Inside().Unreserve(n)
		l.unpass(door)
		return
	}
	done.wake()
	m.serve() // the running serve goes round again: w has left its other lines
}

// refillLocked puts the waiters into l's queue anew, each with what it wants now.
func (l *line) refillLocked() {
	limit := l.limit.Load()
	l.waits.Refill(func(push func(*waitline.Place[*slot], int64)) {
		for w := range l.m.waitersLocked() {
			if s := slotIn(w.slots, l); s != nil && s.fits(limit) {
				push(&s.place, s.wants())
			}
		}
	})
	l.attendLocked()
}

// refreshLocked rebuilds l's queue if the space's limit has changed. Waiters that can never fit
// there must not be in it, least of all at its head. Those that fit nowhere any more are refused.
func (m *Manager) refreshLocked(l *line, done *over) {
	limit := l.space.Room()
	if limit == l.limit.Load() {
		return
	}
	l.limit.Store(limit)
	l.refillLocked()
	for w := range m.waitersLocked() {
		if w.placeLocked() == nil {
			m.failLocked(w, cmp.Or(slotIn(w.slots, l), w.first()).exceeded(), done)
		}
	}
}

// slotIn returns the slot for l, or nil.
func slotIn(slots []slot, l *line) *slot {
	for i := range slots {
		if slots[i].line == l {
			return &slots[i]
		}
	}
	return nil
}

// setHeld passes what the reservation promises now to the waiting Grow calls. Calls that would make
// it too large for the space are refused: they would never be served, and would block all others.
func (m *Manager) setHeld(growing []*waiter, held int64) {
	m.end(func(done *over) {
		for _, w := range growing {
			if w.over.Load() {
				continue
			}
			s := w.first()
			s.held = held
			if s.in() && !s.fits(s.line.limit.Load()) {
				m.failLocked(w, s.exceeded(), done)
			}
		}
	})
}
