package reservation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/histogram"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

const (
	// defaultBypass is how many requests may be served before the oldest waiter of a space.
	defaultBypass = 16
	maxBypass     = 1 << 20

	// defaultGrace is how long nothing may change before owners that all wait count as deadlocked.
	defaultGrace = 100 * time.Millisecond

	// StallTimeout is the default of Config.StallTimeout. A kernel that works on an open batch
	// may take longer than moves do, and waiters should not fail because of it.
	StallTimeout = 30 * time.Second
)

// Config describes a Manager. Spaces is required; each must have its own id.
type Config struct {
	Spaces []*tier.Space
	// Distance returns how far apart two NUMA nodes are (-1 is unknown); nil means that all
	// nodes but the same are equally far. NewManager alone calls it, and returns its panic.
	Distance func(nodeA, nodeB int) int
	// Paired reports whether two spaces belong together, such as a GPU and host memory for it: of
	// those that are equally near a paired one comes first. Nil means that none do. NewManager
	// alone calls it, and returns its panic.
	Paired func(a, b tier.ID) bool
	// Bypass is how many requests may be served from a space before its oldest waiter, for which
	// there is no room yet. After that all freed bytes are kept for it. 0 means 16. Below 0, no
	// request may bypass the oldest.
	Bypass int
	// Grace is how long nothing may change before a wait fails with ErrDeadlock because all owners
	// that hold the wanted bytes wait. 0 means 100 ms.
	Grace time.Duration
	// StallTimeout is the same where reservations, handles or records without an owner hold some of
	// the bytes. 0 means 30 s, below 0 that these waits never fail with ErrDeadlock.
	StallTimeout time.Duration
	// Evict moves batches out of a space for requests that lack bytes there. It is called by the
	// oldest waiter, on its goroutine and with no lock held, and again as long as it moves something or
	// sets Eviction.Again. It must return soon after ctx has ended, and must not wait for a release of
	// the caller. Nil means that nothing can be evicted. An engine sets Monitor.Evict.
	Evict func(ctx context.Context, space tier.ID, bytes int64) Eviction
	// Clear is called when promised bytes cannot be allocated because the free room is in pieces
	// (tier.NoSpaceError.Largest). It may evict batches from the space, and calls enough after each
	// until enough returns true. It runs on the goroutine that allocates, with no lock held, and
	// must not wait for any release. Nil means that nothing is evicted. An engine sets
	// Monitor.Clear.
	Clear func(space tier.ID, enough func() bool)
	// Headroom returns how many bytes of a space stay free after a request for need bytes whose
	// data is not going to be used at once: an Incoming one, or one MovedFrom a faster tier.
	// Consumers use the headroom to fetch batches when all tiers are full. It is called with no
	// lock held, and must not call Close. Nil means 0.
	Headroom func(space tier.ID, need int64) int64
	// Holders returns the holders of the bytes of a space, for LongWait and for errors of waits
	// that took long. It is called with no lock held, and must not call Close. Nil means
	// tier.Space.Holdings.
	Holders func(tier.ID) (tier.Holdings, bool)
	// LongWait is called for the oldest wait in each space when it has taken 5 s, and again after
	// twice as long, and so on. It runs on a goroutine of its own with no lock held, and must not
	// call Close. It may be nil.
	LongWait func(LongWait)
	// Events is called when a wait begins and when it has ended (events.WaitBegun, WaitEnded), on
	// the goroutine that waits. It may be nil.
	Events func(events.Event)
	// Logger gets the panics of the program's functions; nil means slog.Default.
	Logger *slog.Logger
}

func (c Config) validate() error {
	if c.Bypass > maxBypass {
		return fmt.Errorf("reservation: a bypass of %d requests is above %d", c.Bypass, maxBypass)
	}
	if c.Grace < 0 {
		return fmt.Errorf("reservation: a grace of %v is negative", c.Grace)
	}
	return nil
}

// Manager promises bytes of a fixed set of spaces. It is safe for concurrent use. The package
// documentation describes its fairness and its locks.
type Manager struct {
	spaces *Spaces
	lines  []*line // one for each of spaces.all, in the same order
	config Config

	waits   histogram.Durations
	panics  guard.Log    // of the functions of config
	closed  atomic.Bool  // set under mu
	waiting atomic.Int64 // how many wait, so that a release without waiters takes no lock
	growing atomic.Int64 // Grow calls that wait
	refused atomic.Int64 // requests that failed because batches at rest fill their spaces
	looking atomic.Bool  // a wait that has ended looks up the holders of what it waited for

	reporting atomic.Bool    // a call of Config.LongWait is under way
	calls     sync.WaitGroup // of Config.LongWait and of Reclaimers

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		waiters  fairqueue.Queue[*waiter] // all, in order of arrival
		reclaim  []*reclaimer
		nextLook time.Time // for deadlocks
		blocked  waitsByName
		cancels  []func() // end the subscriptions to the spaces
	}
}

// line is a space and the requests that wait for its room.
type line struct {
	space *tier.Space
	// lowest is whether there is no slower tier, so that nothing can be evicted from the space.
	lowest bool

	arriving atomic.Int64 // see Manager.Arriving

	// Guarded by Manager.mu.
	queue    fairqueue.Queue[*candidate]
	upward   fairqueue.Queue[*candidate] // those of queue that may use headroom
	room     int64                       // Space.Room when the queue was last filled
	joined   uint64                      // how often a waiter has joined or left
	progress progress
	dry      bool      // the last call of Evict moved nothing, and nothing was coming
	tried    time.Time // when that was
	eviction Eviction  // and its outcome
}

// NewManager returns a manager of the spaces in cfg. The caller keeps the spaces, and closes them
// after the manager.
func NewManager(cfg Config) (*Manager, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	spaces, err := newSpaces(cfg.Spaces, cfg.Distance, cfg.Paired)
	if err != nil {
		return nil, err
	}
	if cfg.Bypass == 0 {
		cfg.Bypass = defaultBypass
	}
	if cfg.Grace == 0 {
		cfg.Grace = defaultGrace
	}
	if cfg.StallTimeout == 0 {
		cfg.StallTimeout = StallTimeout
	}
	m := &Manager{spaces: spaces, config: cfg}
	m.mu.blocked = make(waitsByName)
	m.panics.Logger = cfg.Logger
	slowest := spaces.all[len(spaces.all)-1].Kind()
	for _, sp := range spaces.all {
		l := &line{space: sp, lowest: sp.Kind() == slowest, room: sp.Room(), dry: cfg.Evict == nil}
		l.queue.Bypass = max(0, cfg.Bypass)
		l.upward.Bypass = math.MaxInt
		m.lines = append(m.lines, l)
		m.mu.cancels = append(m.mu.cancels, sp.Subscribe(func(pressed bool) {
			if !pressed {
				m.spaceChanged(l)
			}
		}))
	}
	return m, nil
}

// line returns the line of a space, or nil.
func (m *Manager) line(id tier.ID) *line {
	for _, l := range m.lines {
		if l.space.ID() == id {
			return l
		}
	}
	return nil
}

// Spaces returns the manager's spaces.
func (m *Manager) Spaces() *Spaces { return m.spaces }

// Reserve promises bytes in the first of the strategy's candidates that stays below its trigger, or
// else in the first that has room, and waits for any of them if none has. A space charges what a
// buffer of that size takes; a Sized strategy says how many bytes it asks for in each candidate.
// The caller must Release the reservation.
//
// A request that would not fit any candidate even if that were empty fails at once with an
// ExceededError, or with a tier.LostError if all candidates are lost. A wait is ended by ctx, with
// an error that matches its cause and its Err; by Close, with tier.ErrClosed; by a
// tier.NoSpaceError if batches at rest fill the spaces and none can leave; by a DeadlockError; by
// limits that were lowered below the request, with an ExceededError; and by the loss of its last
// candidate. Nothing is reserved then.
func (m *Manager) Reserve(ctx context.Context, s Strategy, bytes int64, opts ...Option) (Reservation, error) {
	return m.reserve(ctx, true, s, bytes, bytes, opts)
}

// TryReserve is Reserve without waiting: if there is no room now, or the room is kept for an older
// request, it returns a tier.NoSpaceError.
func (m *Manager) TryReserve(s Strategy, bytes int64, opts ...Option) (Reservation, error) {
	return m.reserve(context.Background(), false, s, bytes, bytes, opts)
}

// ReserveUpTo promises as much as there is, from min to max bytes, in the first candidate that has
// room for min, whatever its trigger. It waits until one of them has. Reservation.Bytes returns the
// result. A Sized strategy is an error.
func (m *Manager) ReserveUpTo(ctx context.Context, s Strategy, min, max int64, opts ...Option) (Reservation, error) {
	return m.reserve(ctx, true, s, min, max, opts)
}

func (m *Manager) reserve(
	ctx context.Context, wait bool, s Strategy, min, max int64, opts []Option,
) (Reservation, error) {
	o, err := gather(opts)
	_, sized := s.(Sized)
	switch {
	case err != nil:
		return Reservation{}, err
	case s == nil:
		return Reservation{}, errors.New("reservation: a strategy is required")
	case min < 0:
		return Reservation{}, fmt.Errorf("reservation: cannot reserve %d bytes", min)
	case max < min:
		return Reservation{}, fmt.Errorf("reservation: cannot reserve %d to %d bytes", min, max)
	case max > min && sized:
		return Reservation{}, fmt.Errorf(
			"reservation: %s: its requests have a size of their own, and cannot be for %d to %d bytes", s, min, max)
	case ctx.Err() != nil:
		return Reservation{}, ended(ctx, "not begun")
	}
	if min == max {
		if r, ok := m.reserveNow(s, min, &o); ok {
			return r, nil
		}
	}
	kept := o // so that o of the fast path is not on the heap
	w := &waiter{min: min, max: max, owner: o.owner, options: &kept}
	if err := m.candidates(w, s, min); err != nil {
		return Reservation{}, err
	}
	m.addHeadroom(w, o.origin)
	at, bytes, err := m.serve(ctx, wait, w)
	if err != nil {
		return Reservation{}, err
	}
	if w.opened.IsZero() { // of no bytes
		return at.line.open(m, bytes, &o), nil
	}
	return w.opened, nil
}

// serve takes room for a request, and waits for it if wait is set.
func (m *Manager) serve(ctx context.Context, wait bool, w *waiter) (*candidate, int64, error) {
	at, n, err := m.take(w)
	switch {
	case at != nil || err != nil:
		return at, n, err
	case !wait:
		return nil, 0, w.noRoom()
	}
	return m.wait(ctx, w)
}

// reserveNow is a fast path for requests that one space may serve, and that need not wait. It
// reports whether it served the request.
func (m *Manager) reserveNow(s Strategy, bytes int64, o *options) (Reservation, bool) {
	var l *line
	switch s := s.(type) {
	case specific:
		l = m.line(tier.ID(s))
	case anyInTier:
		if all := m.spaces.InTier(tier.Kind(s)); len(all) == 1 {
			l = m.line(all[0].ID())
		}
	}
	if l == nil || l.space.Quota() != nil {
		return Reservation{}, false
	}
	if keeps, _ := o.origin.of(l); keeps || o.origin == early { // see addHeadroom
		return Reservation{}, false
	}
	need := charge(l.space, bytes)
	if need == nothing || need == 0 || m.closed.Load() {
		return Reservation{}, false
	}
	st := l.newState(m, o)
	waits := m.waiting.Load() > 0
	if waits {
		m.mu.Lock()
	}
	ok, used, trigger := false, int64(0), int64(0)
	if !waits || !l.queue.IsClosed() {
		ok, used, trigger = l.space.Books().TryOpen(&st.promise, need, st.owner(), o.moves)
	}
	if waits {
		if ok {
			l.queue.Bypassed()
		}
		m.mu.Unlock()
	}
	if ok && used+l.space.Foreign() >= trigger {
		l.space.Reserved()
	}
	return Reservation{st}, ok
}

// candidates asks the strategy which spaces may serve w, and what it needs in each.
func (m *Manager) candidates(w *waiter, s Strategy, bytes int64) (err error) {
	defer guard.Error(&err, "a strategy")
	var some [8]*tier.Space
	sized, differs := s.(Sized)
	w.candidates = w.one[:0]
	for _, sp := range s.Candidates(m.spaces, some[:0]) {
		i := slices.Index(m.spaces.all, sp)
		if i < 0 {
			return fmt.Errorf("reservation: %s: %w: it names one that the manager does not have", s, ErrNoCandidate)
		}
		if w.in(m.lines[i]) != nil {
			continue
		}
		n := bytes
		if differs {
			if n = sized.BytesIn(sp, bytes); n < 0 {
				return fmt.Errorf("reservation: %s: cannot reserve %d bytes in %s", s, n, sp.ID())
			}
		}
		w.candidates = append(w.candidates, candidate{line: m.lines[i], need: charge(sp, n), asked: n})
	}
	if len(w.candidates) == 0 {
		return fmt.Errorf("reservation: %s: %w", s, ErrNoCandidate)
	}
	for i := range w.candidates {
		w.candidates[i].waiter = w
	}
	return nil
}

// take serves a request that has not waited, if one of its candidates has room: the first that
// stays below its trigger, or else the first. It returns no candidate if the request must wait,
// and an error if it can never be served.
func (m *Manager) take(w *waiter) (*candidate, int64, error) {
	if len(w.candidates) > 1 && w.min == w.max {
		for i := range w.candidates {
			if c := &w.candidates[i]; c.staysCalm() {
				if n, ok, err := m.takeIn(c); ok || err != nil {
					return c, n, err
				}
			}
		}
	}
	var fits *candidate // the first in which the request would fit if it were empty
	for i := range w.candidates {
		c := &w.candidates[i]
		if !c.fits(c.line.space.Room()) {
			continue
		}
		if n, ok, err := m.takeIn(c); ok || err != nil {
			return c, n, err
		}
		if fits == nil {
			fits = c
		}
	}
	switch {
	case fits == nil:
		return nil, 0, w.exceeded()
	case fits.need == 0: // nothing was asked for at least, and there is nothing
		return fits, 0, nil
	}
	return nil, 0, nil
}

// takeIn reserves room for c's request in its space, if the space has it and the line lets the
// request take it. It returns how many bytes it took. It may be called for requests that wait and
// for others; a waiter that is served leaves all lines. No lock may be held: a quota may take its
// time, and clean images that are in the way are dropped here.
//
// An error ends a wait: the wait has failed meanwhile, or the quota cannot report whether there is
// room.
func (m *Manager) takeIn(c *candidate) (n int64, ok bool, err error) {
	space := c.line.space
	quota := space.Quota()
	w := c.waiter
	most := w.max
	for {
		seen := space.CopyChanges()
		n = c.need
		if most > w.min {
			m.mu.Lock()
			room := space.Available() - c.spared()
			m.mu.Unlock()
			n = max(n, space.Charge(size.Largest(space.Charge, w.min, most, room)))
		}
		if n == 0 { // which bypasses nobody
			return 0, w.max == w.min, nil
		}
		m.mu.Lock()
		err, may := m.overLocked(w), false
		if err == nil {
			may = m.mayTakeLocked(c)
		}
		if quota != nil && may {
			m.mu.Unlock()
			if err := quota.Charge(n); errors.Is(err, tier.ErrOutOfBudget) {
				if n > c.need {
					most = w.min
					continue
				}
				m.mu.Lock()
				defer m.mu.Unlock()
				w.refused = w.refused || c.lack() <= 0
				return 0, false, nil
			} else if err != nil {
				return 0, false, c.refusal(err)
			}
			m.mu.Lock()
			err = m.overLocked(w)
		}
		var drop int64
		if err == nil && may {
			if ok, drop = space.Books().Reserve(n, c.spared()); ok {
				if w.options != nil { // here, so that a look for deadlocks finds who holds the bytes
					w.opened = c.line.open(m, n, w.options)
				}
				m.servedLocked(c)
			}
		}
		m.mu.Unlock()
		if ok {
			space.Reserved()
			return n, true, nil
		}
		if quota != nil && may {
			quota.Credit(n)
		}
		switch {
		case err != nil || !may:
			return 0, false, err
		case drop > 0 && !space.DropOldest(drop, seen):
			return 0, false, nil
		}
		// Clean images were dropped, or another request was faster and less is left.
	}
}

// overLocked returns the error that ended w's wait, or that of a closed manager.
func (m *Manager) overLocked(w *waiter) error {
	if w.err == nil && m.closed.Load() {
		return closedError()
	}
	return w.err
}

// mayTakeLocked reports whether the request may take what it needs: there is room, and nobody waits,
// or it is the waiter to serve next, or it may bypass the oldest waiter.
func (m *Manager) mayTakeLocked(c *candidate) bool {
	l := c.line
	lack := c.lack()
	if l.space.Quota() != nil && !c.entry.Waits() { // what the quota has left is known when it is charged
		lack = c.need + c.spared() - (l.space.Limit() - l.space.Used())
	}
	switch {
	case lack > 0:
		return false
	case c.entry.Waits():
		return l.nextLocked() == c.entry
	case c.waiter.waits.Waits(): // it has left this line: it could never be served here
		return false
	case l.queue.Len() == 0:
		return true
	}
	return !l.queue.IsClosed() || c.upward && l.keepsLocked()
}

// servedLocked notes that c was served: as a waiter, which leaves its lines, or as a bypass.
func (m *Manager) servedLocked(c *candidate) {
	if c.waiter.waits.Waits() {
		c.line.queue.Served(c.entry)
		m.leaveLocked(c.waiter)
	} else {
		c.line.queue.Bypassed()
	}
}

// nextLocked returns the entry to serve with the present room, or nil: the head, or else the oldest
// that fits, while the head may be bypassed. After that, as long as the head waits only because it
// leaves headroom free, it is the oldest that may use the headroom.
func (l *line) nextLocked() *fairqueue.Entry[*candidate] {
	if l.queue.Len() == 0 {
		return nil
	}
	room := l.space.Available()
	e := l.queue.Next(func(c *candidate) bool { return c.need+c.spared() <= room })
	if e == nil && l.keepsLocked() {
		if up := l.upward.Next(func(c *candidate) bool { return c.need <= room }); up != nil {
			return up.Value.entry
		}
	}
	return e
}

// keepsLocked reports whether the head leaves headroom free, which others may use.
func (l *line) keepsLocked() bool {
	head := l.queue.Head()
	return head != nil && head.Value.keeps
}

// spaceChanged serves the waiters of a line after bytes were freed, a limit has changed, or the
// space was lost. It is called with no lock held.
func (m *Manager) spaceChanged(l *line) {
	// A waiter joins the line first and looks for room then. A release does it the other way
	// round. So one of the two sees the other.
	if m.waiting.Load() == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.room != l.space.Room() {
		m.refillLocked(l)
	}
	l.wakeLocked()
	for _, faster := range m.lines {
		if faster.space.Kind() < l.space.Kind() { // its batches may have room now
			faster.wakeHeadLocked()
		}
	}
}

// wakeLocked wakes the waiter that can be served next. When it has taken its room, or has left, it
// wakes the one after it.
func (l *line) wakeLocked() {
	if e := l.nextLocked(); e != nil {
		e.Value.woken = true
		e.Value.waiter.wakeUp()
	}
}

// refillLocked fills l's queue again after the room that the space can ever have has changed.
// Waiters that can never fit there must not be in it, least of all at its head. Those that fit
// nowhere any more fail.
func (m *Manager) refillLocked(l *line) {
	l.room = l.space.Room()
	for e := range l.queue.All() {
		e.Value.leaveLocked()
	}
	for e := range m.mu.waiters.All() {
		w := e.Value
		if c := w.in(l); c != nil && c.fits(l.room) {
			c.joinLocked()
		} else if c != nil && w.firstLocked() == nil {
			m.failLocked(w, c.exceeded())
		}
	}
	l.wakeHeadLocked()
}

// wakeHeadLocked wakes the head, which may be a new one and then has more to do than others: see wait.
func (l *line) wakeHeadLocked() {
	if head := l.queue.Head(); head != nil {
		head.Value.waiter.wakeUp()
	}
}

// addHeadroom sets which candidates leave headroom free and how much, and which may use it. A
// prefetch also leaves free what is above the stop mark.
func (m *Manager) addHeadroom(w *waiter, o origin) {
	if o == unknown {
		return
	}
	for i := range w.candidates {
		c := &w.candidates[i]
		sp := c.line.space
		c.keeps, c.upward = o.of(c.line)
		if c.keeps && c.need < nothing {
			c.spare = m.headroom(sp.ID(), c.need)
		}
		if o == early {
			c.spare = max(c.spare, sp.Limit()-sp.Stop()+sp.Foreign())
		}
	}
}

// keepHeadroom asks again how much headroom a waiter leaves free, because that changes with the
// batches and with what is at work. A wait of more than Config.StallTimeout leaves none any more:
// consumers have had their time.
func (m *Manager) keepHeadroom(w *waiter) {
	for i := range w.candidates {
		c := &w.candidates[i]
		if !c.keeps {
			continue
		}
		keeps, spare := m.config.StallTimeout < 0 || time.Since(w.begun) < m.config.StallTimeout, int64(0)
		if keeps {
			spare = m.headroom(c.line.space.ID(), c.need)
		}
		m.mu.Lock()
		c.keeps, c.spare = keeps, spare
		m.mu.Unlock()
	}
}

// headroom asks how much a request for need bytes leaves free in a space.
func (m *Manager) headroom(id tier.ID, need int64) (bytes int64) {
	if m.config.Headroom != nil {
		m.panics.Do("Config.Headroom", func() { bytes = max(0, m.config.Headroom(id, need)) })
	}
	return bytes
}

// Close ends all waits with tier.ErrClosed, refuses requests from now on, and waits for calls of
// Config.LongWait and of Reclaimers. Reservations stay good and must be released. A second Close
// returns tier.ErrClosed.
func (m *Manager) Close() error {
	m.mu.Lock()
	if m.closed.Swap(true) {
		m.mu.Unlock()
		return tier.ErrClosed
	}
	for e := range m.mu.waiters.All() {
		m.failLocked(e.Value, closedError())
	}
	cancels := m.mu.cancels
	m.mu.cancels = nil
	m.mu.Unlock()
	m.calls.Wait()
	for _, cancel := range cancels {
		cancel()
	}
	return nil
}
