package reservation

import (
	"cmp"
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
	"github.com/spillway-db/spillway/internal/books"
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

	// grace is how long nothing may change before owners that all wait count as deadlocked.
	grace = 100 * time.Millisecond

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
	// StallTimeout is how long nothing may change before a wait fails with ErrDeadlock where reservations,
	// handles or records without an owner hold some of the wanted bytes. 0 means 30 s, below 0 that these
	// waits never fail with ErrDeadlock. Where only owners hold them, all of which wait, it is 100 ms.
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
	// data is not going to be used at once: an Incoming one, or one From a faster tier.
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

// Manager promises bytes of a fixed set of spaces. It is safe for concurrent use. The package
// documentation describes its fairness and its locks.
type Manager struct {
	spaces *Spaces
	lines  []*line // one for each of spaces.all, in the same order
	config Config

	waits   histogram.Durations
	panics  guard.Log    // of the functions of config
	closed  atomic.Bool  // set under mu
	waiting atomic.Int64 // how many wait, so that calls take no lock while nobody does
	growing atomic.Int64 // Grow calls that wait
	refused atomic.Int64 // requests that failed because batches at rest fill their spaces
	looking atomic.Bool  // a wait that has ended looks up the holders of what it waited for

	reporting atomic.Bool    // a call of Config.LongWait is under way
	calls     sync.WaitGroup // of Config.LongWait and of Reclaimers

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		waiters  fairqueue.Queue[*request] // all, in order of arrival; nobody is bypassed here
		reclaim  []*reclaimer
		nextLook time.Time          // for deadlocks
		blocked  map[string]Blocked // by name
		cancels  []func()           // end the subscriptions to the spaces
	}
}

// line is a space and the requests that wait for its room. A request waits in the lines of all its
// candidates that could ever have room for it.
type line struct {
	manager *Manager
	space   *tier.Space
	// lowest is whether there is no slower tier, so that nothing can be evicted from the space.
	lowest bool

	arriving atomic.Int64 // see Manager.Arriving

	// Guarded by Manager.mu.
	queue    fairqueue.Queue[*candidate]
	room     int64     // tier.State.Room when the queue was last filled
	joined   uint64    // how often a waiter has joined or left
	changes  uint64    // of the line and of its space, when the oldest waiter last looked for deadlocks
	since    time.Time // since when these are the same
	eviction Eviction  // the outcome of the last call of Evict
	dry      bool      // that moved nothing, and nothing was coming
}

// NewManager returns a manager of the spaces in cfg. The caller keeps the spaces, and closes them
// after the manager.
func NewManager(cfg Config) (*Manager, error) {
	if cfg.Bypass > maxBypass {
		return nil, fmt.Errorf("reservation: a bypass of %d requests is above %d", cfg.Bypass, maxBypass)
	}
	spaces, err := newSpaces(cfg.Spaces, cfg.Distance, cfg.Paired)
	if err != nil {
		return nil, err
	}
	cfg.Bypass = max(0, cmp.Or(cfg.Bypass, defaultBypass))
	cfg.StallTimeout = cmp.Or(cfg.StallTimeout, StallTimeout)
	m := &Manager{spaces: spaces, config: cfg}
	m.mu.blocked = make(map[string]Blocked)
	m.panics.Logger = cfg.Logger
	slowest := spaces.all[len(spaces.all)-1].Kind()
	for _, sp := range spaces.all {
		l := &line{manager: m, space: sp, lowest: sp.Kind() == slowest, room: sp.State().Room, dry: cfg.Evict == nil}
		l.queue.Bypass = cfg.Bypass
		m.lines = append(m.lines, l)
		m.mu.cancels = append(m.mu.cancels, sp.Subscribe(l.changed))
	}
	return m, nil
}

// Spaces returns the manager's spaces.
func (m *Manager) Spaces() *Spaces { return m.spaces }

// Reserve promises bytes in the first of the strategy's candidates that stays below its trigger (the
// slowest tier needs only room), or else in the first that has room, and waits for any of them if none
// has. A space charges what a buffer of that size takes; with Options.Sized a request takes another
// size in each candidate.
// The caller must Release the reservation.
//
// A request that would not fit any candidate even if that were empty fails at once with an
// ExceededError, or with a tier.LostError if all candidates are lost. A wait is ended by ctx, with
// an error that matches its cause and its Err; by Close, with tier.ErrClosed; by a
// tier.NoSpaceError if batches at rest fill the spaces and none can leave; by a DeadlockError; by
// limits that were lowered below the request, with an ExceededError; and by the loss of its last
// candidate. Nothing is reserved then.
func (m *Manager) Reserve(ctx context.Context, s Strategy, bytes int64, o *Options) (*Reservation, error) {
	return m.reserve(ctx, true, s, bytes, o)
}

// TryReserve is Reserve without waiting: if there is no room now, or the room is kept for an older
// request, it returns a tier.NoSpaceError.
func (m *Manager) TryReserve(s Strategy, bytes int64, o *Options) (*Reservation, error) {
	return m.reserve(context.Background(), false, s, bytes, o)
}

// ReserveUpTo is Reserve of least bytes, and promises as much more as there is in that space, up to
// most. If least is 0, it does not wait, and prefers spaces that have room for a byte.
// Reservation.Bytes returns the result. Options.Sized is an error.
func (m *Manager) ReserveUpTo(
	ctx context.Context, s Strategy, least, most int64, o *Options,
) (*Reservation, error) {
	if o != nil && o.Sized != nil || least < 0 || most < least {
		return nil, fmt.Errorf("reservation: %v: cannot reserve %d to %d bytes: the second must not be "+
			"less, and the request must not have a size of its own", s, least, most)
	}
	r, err := m.reserve(ctx, least > 0, s, min(max(1, least), most), o)
	if least == 0 && (errors.Is(err, tier.ErrNoSpace) || errors.Is(err, ErrExceeded)) {
		r, err = m.reserve(ctx, false, s, 0, o)
	}
	if err != nil {
		return nil, err
	}
	space, has := r.Space(), r.Bytes()
	if all := size.Largest(space.Charge, has, most, has+max(0, space.State().Available-r.headroom)); all > has {
		_ = r.TryGrow(all - has) // others may have been faster
	}
	if r.arriving > 0 {
		grown := r.Bytes() - has
		r.arriving += grown
		r.line.arriving.Add(grown)
	}
	return r, nil
}

func (m *Manager) reserve(ctx context.Context, wait bool, s Strategy, bytes int64, o *Options) (*Reservation, error) {
	if o == nil {
		o = &Options{}
	}
	padding := o.Policy.padding
	switch {
	case o.Policy.kind == policyIncrease && !(padding >= 1 && padding <= math.MaxFloat64):
		return nil, fmt.Errorf("reservation: a padding of %v must be a number from 1", padding)
	case s == nil:
		return nil, errors.New("reservation: a strategy is required")
	case bytes < 0:
		return nil, fmt.Errorf("reservation: cannot reserve %d bytes", bytes)
	case ctx.Err() != nil:
		return nil, ended(ctx, "not begun")
	}
	r := &Reservation{
		manager: m, padding: padding, policy: o.Policy.kind, purpose: o.Purpose, sized: o.Sized,
	}
	r.promise.Moves = o.Moving
	switch {
	case o.Owner != nil:
		r.promise.Owner = o.Owner
	case o.Name != "":
		r.promise.Owner = label(o.Name)
	}
	r.noClearing.Store(o.NoClearing)
	if o.OutOfMemory != nil {
		r.memory = &memoryHook{call: o.OutOfMemory}
	}
	var some [2]candidate
	all, err := m.candidates(some[:0], s, bytes, o)
	if err != nil {
		return nil, err
	}
	if err = m.serve(ctx, wait, request{opens: r, owner: o.Owner}, all); err != nil {
		return nil, err
	}
	return r, nil
}

// candidates asks the strategy which spaces may serve a request, and appends them with what it needs in
// each to dst.
func (m *Manager) candidates(dst []candidate, s Strategy, bytes int64, o *Options) (_ []candidate, err error) {
	defer guard.Error(&err, "a strategy")
	var some [8]*tier.Space
	var spaces []*tier.Space
	if own, ok := s.(*order); ok { // whose Candidates lets the compiler keep some on the stack
		spaces = own.Candidates(m.spaces, some[:0])
	} else {
		spaces = s.Candidates(m.spaces, nil)
	}
	for _, sp := range spaces {
		i := slices.Index(m.spaces.all, sp)
		if i < 0 {
			return nil, fmt.Errorf("reservation: %s: %w: it names a space that the manager lacks", s, ErrNoCandidate)
		}
		l := m.lines[i]
		if slices.ContainsFunc(dst, func(c candidate) bool { return c.line == l }) {
			continue
		}
		n := bytes
		if o.Sized != nil {
			var release func()
			if n, release = o.Sized(sp); release != nil {
				release()
			}
			if n < 0 {
				return nil, fmt.Errorf("reservation: %s: cannot reserve %d bytes in %s", s, n, sp.ID())
			}
		}
		purpose := o.Purpose
		switch {
		case o.From == 0 || o.From == sp.Kind():
		case o.From < sp.Kind():
			purpose = Incoming
		default:
			purpose = Consuming
		}
		dst = append(dst, candidate{
			line: l, need: charge(sp, n), asked: n, upward: purpose == Consuming,
			keeps: !l.lowest && (purpose == Incoming || purpose == Early),
		})
	}
	if len(dst) == 0 {
		return nil, fmt.Errorf("reservation: %s: %w", s, ErrNoCandidate)
	}
	return dst, nil
}

// serve takes room for a request from one of its candidates, and waits for it if wait is set. A request
// that need not wait is never on the heap, and nor are its candidates.
func (m *Manager) serve(ctx context.Context, wait bool, w request, all []candidate) error {
	tried := w
	tried.candidates = all
	ok, err := m.take(&tried)
	switch {
	case ok || err != nil:
		return err
	case !wait:
		return tried.noRoom()
	}
	waiter := w
	waiter.candidates = slices.Clone(all)
	for i := range waiter.candidates {
		waiter.candidates[i].request = &waiter
	}
	return m.wait(ctx, &waiter)
}

// take serves a request, which may be waiting, if one of its candidates has room: the first that
// stays below its trigger, or else the first. If ok is false and there is no error, the request must
// wait, or can never be served.
func (m *Manager) take(w *request) (ok bool, err error) {
	w.refused = false
	for _, below := range [...]bool{true, false} {
		if below && len(w.candidates) == 1 {
			continue
		}
		for i := range w.candidates {
			c := &w.candidates[i]
			if below && !c.line.lowest {
				// Nothing is charged yet, so several requests at the same time may reach the trigger together.
				if now := c.line.space.State(); c.need >= now.Trigger-now.Pressure {
					continue
				}
			}
			if ok, err = m.takeIn(w, c); ok || err != nil {
				return ok, err
			}
		}
	}
	return false, nil
}

// takeIn reserves room for w's request in the space of c, if the space has it and the line lets the
// request take it: nobody waits, or the request is the waiter to serve next, or it may bypass the
// oldest waiter. A waiter that is served leaves all lines, and a reservation is opened in the same
// step: a look for deadlocks finds the waiter or the holder. No lock may be held: a quota may take
// its time, and clean images that are in the way are dropped here.
//
// The request may have a size of its own here, which changes while it waits (Options.Sized), and so may
// the headroom that it leaves free: with the batches, and with what is at work.
//
// An error ends a wait.
func (m *Manager) takeIn(w *request, c *candidate) (ok bool, err error) {
	l, space, quota, r := c.line, c.line.space, c.line.space.Quota, w.opens
	if r != nil && r.sized != nil {
		bytes, release := r.sized(space)
		defer func() {
			if ok {
				r.resign = release
			} else if release != nil {
				release()
			}
		}()
		if bytes < 0 {
			return false, fmt.Errorf("reservation: cannot reserve %d bytes in %s", bytes, space.ID())
		}
		if need := charge(space, bytes); need != c.need && space.Lost() == nil {
			m.mu.Lock()
			if c.need, c.asked = need, bytes; w.waits { // it may never fit there now, or fit again
				l.room = -1
				m.refillLocked(l)
			}
			m.mu.Unlock()
		}
	}
	if early := r != nil && r.purpose == Early; c.keeps || early {
		keeps, headroom := c.keeps, int64(0)
		if after := m.config.StallTimeout; after >= 0 && !w.begun.IsZero() && time.Since(w.begun) >= after {
			keeps = false // consumers have had their time
		}
		if keeps && m.config.Headroom != nil && c.need < neverFits {
			m.panics.Do("Config.Headroom", func() { headroom = max(0, m.config.Headroom(space.ID(), c.need)) })
		}
		if early { // it also leaves free what is above the stop mark
			now := space.State()
			headroom = max(headroom, now.Limit-now.Stop+now.External)
		}
		m.mu.Lock()
		c.keeps, c.headroom = keeps, headroom
		m.mu.Unlock()
	}
	if c.need == 0 {
		quota = nil // which is charged for more; and nobody is bypassed
	}
	for c.need < neverFits {
		// Where others may wait for the space, the line decides, under the lock. A waiter joins the line first
		// and looks for room then. So a request that finds nobody in line takes what there was before.
		queues := c.need > 0 && (quota != nil || m.waiting.Load() > 0)
		if queues {
			m.mu.Lock()
		}
		may := true
		switch {
		case m.closed.Load():
			may, err = false, closedError()
		case w.grows != nil && !w.grows.IsOpen():
			may, err = false, errReleased("grow")
		case !queues:
		case c.inLine:
			may = l.nextLocked() == c
		default:
			now := space.State()
			if quota != nil { // what it has left is known when it is charged
				now.Available = now.Limit - now.Used()
			}
			may = c.need+c.leavesFree(&now) <= now.Available &&
				(!l.queue.IsClosed() || c.upward && l.queue.Head().keeps)
		}
		if may && quota != nil {
			m.mu.Unlock()
			if err := quota.Charge(c.need); errors.Is(err, tier.ErrOutOfBudget) {
				now := space.State()
				w.refused = w.refused || c.need+c.leavesFree(&now) <= now.Available
				return false, nil
			} else if err != nil {
				return false, c.refusal(err)
			}
			m.mu.Lock()
		}
		var now books.State
		var drop, free int64
		if may {
			var opens *books.Promise
			if r != nil {
				r.line, opens = l, &r.promise
			}
			if free = c.headroom; free > 0 {
				state := space.State()
				free = c.leavesFree(&state)
			}
			if ok, drop, now = space.Books.Reserve(opens, c.need, free); ok && queues {
				l.queue.Served(nil) // if w is the head itself, its count ends here
				m.leaveLocked(w)
			}
		}
		if queues {
			m.mu.Unlock()
		}
		switch {
		case ok:
			if r != nil && c.keeps {
				r.arriving = c.need
				l.arriving.Add(c.need)
			}
			if r != nil {
				r.headroom = free
			}
			space.NotifyReserved(now)
			return true, nil
		case may && quota != nil:
			quota.Credit(c.need)
		}
		if drop == 0 || !space.DropOldest(drop, now.CleanChanges) {
			break
		}
	}
	return false, err
}

// nextLocked returns the waiter to serve with the present room, or nil: the head, or else the oldest
// that fits, while the head may be bypassed. After that, as long as the head waits only because it
// leaves headroom free, it is the oldest that may use the headroom.
func (l *line) nextLocked() *candidate {
	head, now := l.queue.Head(), l.space.State()
	if head == nil {
		return nil
	}
	next := l.queue.Next(func(c *candidate) bool { return c.need+c.leavesFree(&now) <= now.Available })
	if next == nil && head.keeps {
		for _, c := range l.queue.Waiters {
			if c.upward && c.need <= now.Available {
				return c
			}
		}
	}
	return next
}

// changed is the line's subscription to its space. Unless more is used now, it serves the waiters:
// bytes were freed, a limit has changed, or the space was lost. It is called with no lock held.
func (l *line) changed(aboveTrigger bool) {
	// A waiter joins the line first and looks for room then. A release does it the other way
	// round. So one of the two sees the other.
	m := l.manager
	if aboveTrigger || m.waiting.Load() == 0 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refillLocked(l)
	l.wakeLocked(false)
	for _, faster := range m.lines {
		if faster.space.Kind() < l.space.Kind() { // its batches may have room now
			faster.wakeLocked(true)
		}
	}
}

// wakeLocked wakes the waiter that can be served next. When it has taken its room, or has left, it
// wakes the one after it. With head it also wakes the head, which may be a new one, and makes room.
func (l *line) wakeLocked(head bool) {
	if c := l.nextLocked(); c != nil {
		c.woken = true
		c.request.wakeUp()
	}
	if c := l.queue.Head(); head && c != nil {
		c.request.wakeUp()
	}
}

// refillLocked fills l's queue again if the room that the space can ever have has changed. Waiters
// that can never fit there must not be in it, least of all at its head. Those that fit nowhere any
// more fail.
func (m *Manager) refillLocked(l *line) {
	room := l.space.State().Room
	if room == l.room {
		return
	}
	l.room = room
	l.joined++
	var fit, never []*candidate
	for _, w := range m.mu.waiters.Waiters {
		i := slices.IndexFunc(w.candidates, func(c candidate) bool { return c.line == l })
		if i < 0 {
			continue
		}
		c := &w.candidates[i]
		if c.inLine = w.fits(c, room); c.inLine {
			fit = append(fit, c)
		} else if w.firstLocked() == nil {
			never = append(never, c)
		}
	}
	l.queue.Replace(fit)
	for _, c := range never {
		if w := c.request; w.opens != nil && w.opens.sized != nil {
			w.wakeUp() // it may need less now
		} else {
			m.failLocked(w, w.exceeded(c))
		}
	}
	l.wakeLocked(true)
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
	for m.mu.waiters.Head() != nil {
		m.failLocked(m.mu.waiters.Head(), closedError())
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
