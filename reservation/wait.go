package reservation

import (
	"cmp"
	"context"
	"fmt"
	"math"
	exec "runtime/trace"
	"slices"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// neverFits is the charge of a request that can never fit: more than any space has.
const neverFits = math.MaxInt64

// charge returns what a space charges for a buffer of bytes. It returns neverFits if that is
// more than the capacity or the space is lost; a pool then need not round a number that overflows.
func charge(s *tier.Space, bytes int64) int64 {
	if bytes > s.Capacity || s.Lost() != nil {
		return neverFits
	}
	return s.Charge(bytes)
}

// request is a call of Reserve or Grow, or of Alloc for more than was promised. If there is no room for
// it, it waits in the line of each of its candidates and leaves them all when it is served from one.
// Its own goroutine does all the work for it (Manager.wait): others only wake it.
type request struct {
	candidates []candidate
	owner      *Owner       // the task that waits; nil if it is unknown
	opens      *Reservation // to open; nil for other requests
	grows      *Reservation // gets more; nil for new ones

	wake    chan struct{} // has one place
	begun   time.Time     // of the wait
	due     time.Duration // how long the wait has taken when it is reported next
	refused bool          // a quota has refused what it reports as free

	// Guarded by Manager.mu.
	waits  bool
	err    error        // set when the wait has failed
	over   []func()     // called when the wait is over: see DeadlockError.Wait
	passed []*reclaimer // have been asked for memory, and gave too little back in time
}

// candidate is a request in one of the spaces that may serve it.
type candidate struct {
	request *request // set when it waits
	line    *line
	upward  bool // it may use headroom, and goes ahead of those that leave it free

	// Guarded by Manager.mu while the request waits. Only its goroutine changes need, asked, keeps and
	// headroom.
	need     int64 // bytes that the space charges; they change if the request is Sized
	asked    int64 // bytes asked for here
	keeps    bool  // it leaves headroom free
	headroom int64 // bytes that it leaves free
	woken    bool  // the line has woken it, and it must wake the next one if it is not served
	inLine   bool  // it is in the line's queue
}

// leavesFree returns how much stays free when the request is served: its headroom, but no more than the
// space can have. now is the space's state.
func (c *candidate) leavesFree(now *tier.State) int64 {
	if c.headroom == 0 || c.need == neverFits {
		return 0
	}
	return max(0, min(c.headroom, now.Room-c.need, now.Ceiling-now.Held-c.need))
}

// fits reports whether the request could ever be served from its candidate c, with room bytes in the
// empty space. A reservation that grows keeps what it has.
func (w *request) fits(c *candidate, room int64) bool {
	if w.grows != nil {
		room -= w.grows.Bytes()
	}
	return c.need <= room
}

// firstLocked returns the first candidate of w that waits in a line; nil if none does.
func (w *request) firstLocked() *candidate {
	for i := range w.candidates {
		if w.candidates[i].inLine {
			return &w.candidates[i]
		}
	}
	return nil
}

// wakeUp makes w look again. It never blocks.
func (w *request) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default: // a wake-up is already pending
	}
}

func (w *request) String() string {
	s := fmt.Sprintf("waiting for %d bytes in %s", w.candidates[0].need, w.candidates[0].line.space.ID())
	if n := len(w.candidates) - 1; n > 0 {
		s += fmt.Sprintf(" or %d others", n)
	}
	return s
}

// tick is how often the head of a line looks whether it can still be served.
const tick = 25 * time.Millisecond

// retryEvict is after how many ticks a waiter makes room again although nothing has woken it: a pause
// after a failed move may be over.
const retryEvict = 4

// wait waits until one of w's candidates has room, and takes it; or returns the error that ended the
// wait. The head of a line makes room on this goroutine: see makeRoom. It also looks for deadlocks
// (watch).
func (m *Manager) wait(ctx context.Context, w *request) (err error) {
	if w.owner == nil {
		w.owner = OwnerOf(ctx)
	}
	w.wake = make(chan struct{}, 1)
	w.begun = time.Now()
	w.due = longWaitAfter
	// It joins all lines, except those where it could never be served, and looks for room then: a release
	// does it the other way round.
	m.mu.Lock()
	m.waiting.Add(1) // first, so that no change of a limit is missed after its line was filled
	for i := range w.candidates {
		m.refillLocked(w.candidates[i].line)
	}
	w.waits = true
	m.mu.waiters.Waiters = append(m.mu.waiters.Waiters, w)
	w.owner.wait(1)
	for i := range w.candidates {
		c := &w.candidates[i]
		if c.inLine = w.fits(c, c.line.room); c.inLine {
			c.line.queue.Waiters = append(c.line.queue.Waiters, c)
			c.line.joined++
		}
	}
	if w.firstLocked() == nil {
		m.failLocked(w, w.exceeded(nil))
	}
	failed := w.err
	m.mu.Unlock()
	begun := false
	defer func() { // also if a function of the program's has panicked, or ended the goroutine
		took := time.Since(w.begun)
		m.mu.Lock()
		m.leaveLocked(w)
		if begun {
			m.countBlockedLocked(w.owner, took)
		}
		m.mu.Unlock()
		if begun {
			m.waits.Record(took)
			m.emit(ctx, w, events.WaitEnded, took, err)
		}
	}()
	if failed != nil {
		return failed
	}
	ok, err := m.take(w) // what was freed before w was in line
	if ok || err != nil {
		return err
	}
	if exec.IsEnabled() {
		defer exec.StartRegion(ctx, "spillway wait for "+w.candidates[0].line.space.ID().String()).End()
	}
	begun = true
	m.emit(ctx, w, events.WaitBegun, 0, nil)
	var ticks <-chan time.Time
	for quiet := 0; ; { // ticks since something has changed
		again, isHead := false, false
		if quiet%retryEvict == 0 {
			again, isHead = m.makeRoom(ctx, w)
		}
		if (isHead || w.refused) && ticks == nil {
			ticker := time.NewTicker(tick)
			defer ticker.Stop()
			ticks = ticker.C
		}
		wake := w.wake
		if w.refused { // what the quota credits when it refuses would wake w again and again
			wake = nil
		}
		if !again {
			select {
			case <-wake:
				quiet = 0
			case <-ticks:
				quiet++
				m.watch(w)
			case <-ctx.Done():
				return m.giveUp(ctx, w)
			}
		}
		if ok, err = m.take(w); ok {
			return nil
		}
		m.mu.Lock()
		err = cmp.Or(w.err, err)
		fits := func(c candidate) bool { return w.fits(&c, c.line.space.State().Room) }
		if err == nil && !slices.ContainsFunc(w.candidates, fits) { // its size, what it has, or the room has changed
			err = w.exceeded(nil)
		}
		// Another request may have taken what w was woken for. The rest may be enough for waiters that were
		// not woken.
		for i := range w.candidates {
			if c := &w.candidates[i]; c.woken && c.line.nextLocked() != c {
				c.woken = false
				c.line.wakeLocked(false)
			}
		}
		m.mu.Unlock()
		if err != nil {
			return err
		}
	}
}

// leaveLocked takes w, whose wait is over, out of all lines, and wakes those that can be served
// now, and the new heads. It does nothing for a request that does not wait.
func (m *Manager) leaveLocked(w *request) {
	if !w.waits {
		return
	}
	w.waits = false
	m.mu.waiters.Remove(w)
	m.waiting.Add(-1)
	w.owner.wait(-1)
	for _, f := range w.over {
		f()
	}
	for i := range w.candidates {
		if c := &w.candidates[i]; c.inLine {
			c.inLine = false
			c.line.queue.Remove(c)
			c.line.joined++
			c.line.wakeLocked(true)
		}
	}
}

// failLocked ends w's wait with an error.
func (m *Manager) failLocked(w *request, err error) {
	w.err = cmp.Or(w.err, err)
	m.leaveLocked(w)
	w.wakeUp()
}

// Grow promises n bytes more, rounded as the space charges them, and waits for
// them as Reserve does: in the reservation's own space, and last in line. An error leaves the
// reservation as it was. One that could never be so large is an ExceededError, also when that
// comes about while it waits. Two that grow may wait for each other: one of them gets a
// DeadlockError then.
func (r *Reservation) Grow(ctx context.Context, n int64) error { return r.grow(ctx, true, n) }

// TryGrow is Grow without waiting: no room now is a tier.NoSpaceError.
func (r *Reservation) TryGrow(n int64) error { return r.grow(context.Background(), false, n) }

func (r *Reservation) grow(ctx context.Context, wait bool, n int64) error {
	if r == nil {
		return errReleased("grow")
	}
	m, space := r.manager, r.line.space
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot grow by %d bytes", space.ID(), n)
	}
	if ctx.Err() != nil {
		return ended(ctx, "not grown")
	}
	v := r.promise.View()
	if !v.Open {
		return errReleased("grow")
	}
	need := charge(space, n)
	if whole := charge(space, v.Promised+n); need != neverFits && whole != neverFits {
		// Both together, drawn as one, may be charged more than each by itself.
		need = max(need, whole-charge(space, v.Promised))
	}
	owner, _ := v.Owner.(*Owner)
	if wait {
		m.growing.Add(1)
		defer m.growing.Add(-1)
	}
	own := [1]candidate{{line: r.line, need: need, asked: n}}
	if err := m.serve(ctx, wait, request{grows: r, owner: owner}, own[:]); err != nil {
		return err
	}
	out := r.promise.Resize(need)
	if out.Released {
		space.Books.Unreserve(need)
		space.NotifyFreed(need)
		return errReleased("grow")
	}
	space.NotifyFreed(out.Freed)
	r.changed()
	return nil
}

// changed makes the Grow calls that wait look again, after the promise has changed or was released:
// those that can never be served now, and would keep all others from being served, fail.
func (r *Reservation) changed() {
	m := r.manager
	if m.growing.Load() == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.mu.waiters.Waiters {
		if w.grows == r {
			w.wakeUp()
		}
	}
}

// emit calls Config.Events for a wait, with no lock held.
func (m *Manager) emit(ctx context.Context, w *request, kind events.Kind, took time.Duration, err error) {
	if m.config.Events == nil {
		return
	}
	c := &w.candidates[0]
	e := events.Event{
		Kind: kind, At: time.Now(), Context: ctx, Origin: events.From(ctx), To: c.line.space.ID(), Bytes: c.need,
		Took: took, Err: err,
	}
	if name := w.owner.Name(); w.owner != nil && name != e.Task {
		e.Task, e.TaskID = name, 0
	}
	m.panics.Do("Config.Events", func() { m.config.Events(e) })
}
