package reservation

import (
	"context"
	"fmt"
	"math"
	exec "runtime/trace"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/tier"
)

// nothing is the charge of a request that can never fit: more than any space has.
const nothing = math.MaxInt64

// charge returns what a space charges for a buffer of bytes. It returns the constant nothing if that
// is more than the capacity or the space is lost; a pool then need not round a number that
// overflows.
func charge(s *tier.Space, bytes int64) int64 {
	if bytes > s.Capacity() || s.Lost() != nil {
		return nothing
	}
	return s.Charge(bytes)
}

// waiter is a request. If there is no room for it, it waits in the line of each of its candidates
// and leaves them all when it is served from one. Its own goroutine does all the work for it
// (Manager.wait): others only wake it.
type waiter struct {
	min, max   int64 // bytes asked for
	candidates []candidate
	one        [1]candidate // the memory of candidates, if there is one
	owner      *Owner       // the task that waits; nil if it is unknown
	grows      *state       // the reservation that a Grow is for; nil for other requests
	options    *options     // of the reservation to make; nil for other requests
	opened     Reservation  // once it is made

	wake    chan struct{} // has one place
	begun   time.Time     // of the wait
	due     time.Duration // how long the wait has taken when it is reported next
	refused bool          // a quota has refused what it reports as free

	// Guarded by Manager.mu.
	waits  *fairqueue.Entry[*waiter]
	err    error    // set when the wait has failed
	over   []func() // called when the wait is over: see DeadlockError.Wait
	passed []*reclaimer
	asked  *reclaimer // was asked to give memory back, until asks
	asks   time.Time
}

// candidate is a request in one of the spaces that may serve it.
type candidate struct {
	waiter *waiter
	line   *line
	need   int64 // bytes that the space charges
	asked  int64 // bytes asked for here
	upward bool  // it may use headroom, and goes ahead of those that leave it free

	// Guarded by Manager.mu while the request waits.
	keeps bool                         // it leaves headroom free
	spare int64                        // bytes of headroom that it leaves free
	woken bool                         // the line has woken it, and it must wake the next one if it is not served
	entry *fairqueue.Entry[*candidate] // in the line's queue; nil if it was never there
	ahead *fairqueue.Entry[*candidate] // in the line's queue upward
}

// joinLocked puts c at the end of its line.
func (c *candidate) joinLocked() {
	l := c.line
	if c.entry == nil {
		c.entry = l.queue.Push(c)
	} else {
		l.queue.Return(c.entry)
	}
	if c.upward {
		c.ahead = l.upward.Push(c)
	}
	l.joined++
}

// leaveLocked takes c out of its line.
func (c *candidate) leaveLocked() {
	c.entry.Remove()
	c.ahead.Remove()
	c.line.joined++
}

// spared returns how much stays free when the request is served: its headroom, but no more than the
// space can have.
func (c *candidate) spared() int64 {
	if c.spare == 0 || c.need == nothing {
		return 0
	}
	sp := c.line.space
	return max(0, min(c.spare, sp.Room()-c.need, sp.Ceiling()-sp.Held()-c.need))
}

// lack returns how many bytes more must be free before the request can be served. It is called under
// Manager.mu while the request waits.
func (c *candidate) lack() int64 { return c.need + c.spared() - c.line.space.Available() }

// fits reports whether the request could ever be served, with room bytes in the empty space. A
// reservation that grows keeps what it has.
func (c *candidate) fits(room int64) bool {
	if c.waiter.grows != nil {
		v, _ := c.waiter.grows.promise.View()
		room -= v.Promised
	}
	return c.need <= room
}

// staysCalm reports whether serving the request here would not start the monitor: the pressure
// stays below the trigger, or there is no slower tier. Nothing is charged yet, so several requests
// at the same time may reach the trigger together.
func (c *candidate) staysCalm() bool {
	sp := c.line.space
	return c.need <= sp.Room() && (c.line.lowest || c.need < sp.Trigger()-sp.PressureBytes())
}

// in returns w's candidate in l, or nil.
func (w *waiter) in(l *line) *candidate {
	for i := range w.candidates {
		if w.candidates[i].line == l {
			return &w.candidates[i]
		}
	}
	return nil
}

// headsLocked returns the candidates of w that head their lines.
func (w *waiter) headsLocked() (heads []*candidate) {
	for i := range w.candidates {
		if c := &w.candidates[i]; c.entry.Waits() && c.line.queue.Head() == c.entry {
			heads = append(heads, c)
		}
	}
	return heads
}

// firstLocked returns the first candidate of w that waits in a line; nil if none does.
func (w *waiter) firstLocked() *candidate {
	for i := range w.candidates {
		if w.candidates[i].entry.Waits() {
			return &w.candidates[i]
		}
	}
	return nil
}

// wakeUp makes w look again. It never blocks.
func (w *waiter) wakeUp() {
	select {
	case w.wake <- struct{}{}:
	default: // a wake-up is already pending
	}
}

func (w *waiter) String() string {
	s := fmt.Sprintf("waiting for %d bytes in %s", w.candidates[0].need, w.candidates[0].line.space.ID())
	if n := len(w.candidates) - 1; n > 0 {
		s += fmt.Sprintf(" or %d others", n)
	}
	return s
}

// tick is how often the head of a line looks whether it can still be served.
const tick = 25 * time.Millisecond

// wait waits until one of w's candidates has room, takes it, and returns the candidate and how much
// it took; or the error that ended the wait. The head of a line makes room on this goroutine: see
// makeRoom. It also looks for deadlocks (watch).
func (m *Manager) wait(ctx context.Context, w *waiter) (at *candidate, n int64, err error) {
	if w.owner == nil {
		w.owner = OwnerOf(ctx)
	}
	w.wake = make(chan struct{}, 1)
	w.begun = time.Now()
	w.due = longWaitAfter
	if err := m.join(w); err != nil {
		return nil, 0, err
	}
	defer m.leave(w)                                         // a function of the program's may panic, or end the goroutine
	if at, n, err := m.takeAny(w); at != nil || err != nil { // what was freed before w was in line
		return at, n, err
	}
	if exec.IsEnabled() {
		defer exec.StartRegion(ctx, "spillway wait for "+w.candidates[0].line.space.ID().String()).End()
	}
	m.emit(ctx, w, events.WaitBegun, 0, nil)
	defer func() {
		took := time.Since(w.begun)
		m.waits.Record(took)
		m.countBlocked(w.owner, took)
		m.emit(ctx, w, events.WaitEnded, took, err)
	}()
	var ticks <-chan time.Time
	for woken := true; ; {
		again, isHead := m.makeRoom(ctx, w, woken)
		if isHead && ticks == nil {
			ticker := time.NewTicker(tick)
			defer ticker.Stop()
			ticks = ticker.C
		}
		wake, retry := w.wake, (<-chan time.Time)(nil)
		if w.refused { // or what the quota credits when it refuses would wake w again and again
			wake, retry = nil, time.After(tick)
		}
		if woken = true; !again {
			select {
			case <-wake:
			case <-retry:
			case <-ticks:
				woken = false
				m.watch(w)
			case <-ctx.Done():
				return nil, 0, m.giveUp(ctx, w)
			}
		}
		m.keepHeadroom(w)
		if at, n, err := m.takeAny(w); at != nil || err != nil {
			return at, n, err
		}
	}
}

// takeAny serves a waiter from the first of its candidates that has room.
func (m *Manager) takeAny(w *waiter) (*candidate, int64, error) {
	w.refused = false
	for i := range w.candidates {
		c := &w.candidates[i]
		n, ok, err := m.takeIn(c)
		if err != nil {
			m.mu.Lock()
			m.failLocked(w, err)
			m.mu.Unlock()
			return nil, 0, err
		}
		if ok {
			return c, n, nil
		}
	}
	// Another request may have taken the room that w was woken for. The rest may be enough for waiters
	// that were not woken.
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range w.candidates {
		if c := &w.candidates[i]; c.woken && c.line.nextLocked() != c.entry {
			c.woken = false
			c.line.wakeLocked()
		}
	}
	return nil, 0, nil
}

// join puts w at the end of the lines of its candidates, except where it could never be served.
func (m *Manager) join(w *waiter) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.overLocked(w); err != nil {
		return err
	}
	for i := range w.candidates {
		if l := w.candidates[i].line; l.room != l.space.Room() {
			m.refillLocked(l)
		}
	}
	w.waits = m.mu.waiters.Push(w)
	m.waiting.Add(1)
	w.owner.wait(1)
	for i := range w.candidates {
		if c := &w.candidates[i]; c.fits(c.line.room) {
			c.joinLocked()
		}
	}
	switch {
	case w.grows != nil && !(Reservation{w.grows}).IsOpen(): // later a Release finds w: see changed
		m.failLocked(w, errReleased("grow"))
	case w.firstLocked() == nil: // a limit was lowered just now
		m.failLocked(w, w.candidates[0].exceeded())
	}
	return w.err
}

// leave ends w's wait, if it is not over.
func (m *Manager) leave(w *waiter) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leaveLocked(w)
}

// leaveLocked takes w, whose wait is over, out of all lines, and wakes those that can be served
// now, and the new heads.
func (m *Manager) leaveLocked(w *waiter) {
	if !w.waits.Waits() {
		return
	}
	w.waits.Remove()
	m.waiting.Add(-1)
	w.owner.wait(-1)
	for _, f := range w.over {
		f()
	}
	for i := range w.candidates {
		c := &w.candidates[i]
		c.leaveLocked()
		c.line.wakeLocked()
		c.line.wakeHeadLocked()
	}
}

// failLocked ends w's wait with an error.
func (m *Manager) failLocked(w *waiter, err error) {
	if w.err == nil {
		w.err = err
	}
	m.leaveLocked(w)
	w.wakeUp()
}

// Grow promises n bytes more, rounded as the space charges them, and waits for
// them as Reserve does: in the reservation's own space, and last in line. An error leaves the
// reservation as it was. One that could never be so large is an ExceededError, also when that
// comes about while it waits. Two that grow may wait for each other: one of them gets a
// DeadlockError then.
func (r Reservation) Grow(ctx context.Context, n int64) error { return r.grow(ctx, true, n) }

// TryGrow is Grow without waiting: no room now is a tier.NoSpaceError.
func (r Reservation) TryGrow(n int64) error { return r.grow(context.Background(), false, n) }

func (r Reservation) grow(ctx context.Context, wait bool, n int64) error {
	s := r.state
	if s == nil {
		return errReleased("grow")
	}
	m, space := s.manager, s.line.space
	if n < 0 {
		return fmt.Errorf("reservation: %s: cannot grow by %d bytes", space.ID(), n)
	}
	if ctx.Err() != nil {
		return ended(ctx, "not grown")
	}
	v, open := s.promise.View()
	if !open {
		return errReleased("grow")
	}
	need := charge(space, n)
	if whole := charge(space, v.Promised+n); need != nothing && whole != nothing {
		// Both together, drawn as one, may be charged more than each by itself.
		need = max(need, whole-charge(space, v.Promised))
	}
	o, _ := v.Owner.(*Owner)
	w := s.request(n, need)
	w.owner, w.grows = o, s
	if wait {
		m.growing.Add(1)
		defer m.growing.Add(-1)
	}
	_, charged, err := m.serve(ctx, wait, w)
	if err != nil {
		return err
	}
	out := s.promise.Resize(charged)
	if out.Released {
		space.Books().Unreserve(charged)
		space.Freed(charged)
		return errReleased("grow")
	}
	space.Freed(out.Freed)
	s.changed()
	return nil
}

// request returns a request for n bytes more in the reservation's space.
func (s *state) request(n, need int64) *waiter {
	w := &waiter{min: n, max: n}
	w.one[0] = candidate{waiter: w, line: s.line, need: need, asked: n}
	w.candidates = w.one[:]
	return w
}

// changed checks the Grow calls that wait, after the promise has changed or was released: those
// that can never be served now, and would keep all others from being served, fail.
func (s *state) changed() {
	m := s.manager
	if m.growing.Load() == 0 {
		return
	}
	_, open := s.promise.View()
	m.mu.Lock()
	defer m.mu.Unlock()
	for e := range m.mu.waiters.All() {
		switch w := e.Value; {
		case w.grows != s:
		case !open:
			m.failLocked(w, errReleased("grow"))
		case !w.candidates[0].fits(s.line.room):
			m.failLocked(w, w.candidates[0].exceeded())
		}
	}
}

// emit calls Config.Events for a wait, with no lock held.
func (m *Manager) emit(ctx context.Context, w *waiter, kind events.Kind, took time.Duration, err error) {
	if m.config.Events == nil {
		return
	}
	c := &w.candidates[0]
	e := events.Event{
		Kind: kind, At: time.Now(), Context: ctx, Origin: events.From(ctx), To: c.line.space.ID(), Bytes: c.need,
		Took: took, Err: err,
	}
	if name := w.owner.label(); w.owner != nil && name != e.Task {
		e.Task, e.TaskID = name, 0
	}
	m.panics.Do("Config.Events", func() { m.config.Events(e) })
}
