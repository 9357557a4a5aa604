package reservation

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/gate"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/histogram"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/notify"
	"github.com/spillway-db/spillway/tier"
)

// defaultBypass is how many requests may pass the oldest waiter of a space.
const defaultBypass = 16

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
	// request may pass the oldest.
	Bypass int
	// Grace is how long nothing may change before owners that all wait count as deadlocked; 0 means
	// 100 ms. See the package doc.
	Grace time.Duration
	// StuckAfter is the same for waits for room that handles or records of unknown owners keep.
	// 0 means 30 s, below 0 that these waits never end with ErrDeadlock.
	StuckAfter time.Duration
	// Movable reports whether bytes of a space may become free because something is moved out. It
	// is called with no lock held while all owners wait, and must not call Close. Nil means that
	// nothing can be moved.
	Movable func(tier.ID) bool
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
	// Manager.Holdings.
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

	closed   atomic.Bool
	serving  atomic.Int64 // calls of serve since it last found nothing to do; see serve
	waits    histogram.Durations
	blocked  blocked
	made     time.Time  // when the manager was made: waits count from it
	scratch  sync.Pool  // of *scratch
	bells    sync.Pool  // of waiter.bell; one may have been rung
	progress progress   // detects deadlocks
	patience gate.Alarm // calls reportLong while there are waiters
	panics   guard.Log  // of the functions of config, and of subscribers
	open     sync.Map   // of Reservation; only in an invariants build

	subscribers notify.List // see OnDemand

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		seq     uint64   // of the youngest waiter
		ring    waiter   // the anchor of the list of waiters: next is the oldest, prev the youngest
		waiting int64    // length of the list
		served  *waiter  // the one that serve is charging a space for; nil if none
		special int      // waiters with several candidates, or that leave headroom free
		cancels []func() // end the subscriptions to the spaces
	}
}

// scratch holds the candidates of one request. It is pooled, so that a request does not allocate.
type scratch struct {
	spaces []*tier.Space // what the Strategy returned
	slots  []slot        // the request in each of them
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
	m := &Manager{spaces: spaces, config: cfg, made: time.Now()}
	m.bells.New = func() any { return make(chan struct{}, 1) }
	m.progress.configure(m, cfg)
	m.panics.Logger = cfg.Logger
	m.mu.ring.prev, m.mu.ring.next = &m.mu.ring, &m.mu.ring
	m.scratch.New = func() any { return new(scratch) }
	for _, sp := range spaces.all {
		l := newLine(m, sp)
		l.index = len(m.lines)
		m.lines = append(m.lines, l)
		m.mu.cancels = append(m.mu.cancels, sp.Inside().Subscribe(l.changed))
	}
	return m, nil
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
// an error that matches its cause and its Err; by Close, with tier.ErrClosed; by Refuse, with a
// tier.NoSpaceError; by a DeadlockError; by limits that were lowered below the request, with an
// ExceededError; and by the loss of its last candidate. Nothing is reserved then.
func (m *Manager) Reserve(ctx context.Context, s Strategy, bytes int64, opts ...Option) (Reservation, error) {
	return m.reserve(ctx, true, s, bytes, bytes, opts)
}

// TryReserve is Reserve without waiting: if there is no room now, or what there is is kept for
// an older request, it returns a tier.NoSpaceError.
func (m *Manager) TryReserve(s Strategy, bytes int64, opts ...Option) (Reservation, error) {
	return m.reserve(context.Background(), false, s, bytes, bytes, opts)
}

// ReserveUpTo promises what there is, from min to max bytes, in the first candidate that has room
// for min, whatever its trigger. It waits until one of them has. Reservation.Bytes returns the
// result. A Sized strategy is an error.
func (m *Manager) ReserveUpTo(ctx context.Context, s Strategy, min, max int64, opts ...Option) (Reservation, error) {
	return m.reserve(ctx, true, s, min, max, opts)
}

// reserve is Reserve, TryReserve and ReserveUpTo. It charges the first candidate that has room
// (place). If none has and wait is set, it waits (see wait). Then it opens the reservation.
func (m *Manager) reserve(
	ctx context.Context,
	wait bool,
	s Strategy,
	least, most int64,
	opts []Option,
) (Reservation, error) {
	o, err := gather(opts)
	switch {
	case err != nil:
		return Reservation{}, err
	case s == nil:
		return Reservation{}, errors.New("reservation: a strategy is required")
	case least < 0:
		return Reservation{}, fmt.Errorf("reservation: cannot reserve %d bytes", least)
	case most < least:
		return Reservation{}, fmt.Errorf("reservation: cannot reserve %d to %d bytes", least, most)
	case most > least && isSized(s):
		return Reservation{}, fmt.Errorf(
			"reservation: %s: its requests have a size of their own, and cannot be for %d to %d bytes",
			s,
			least,
			most,
		)
	case m.closed.Load():
		return Reservation{}, closedError()
	case ctx.Err() != nil:
		return Reservation{}, ended(ctx, "not begun")
	}
	if err := o.owner.join(m); err != nil {
		return Reservation{}, err
	}
	only, need := m.single(s, least, most)
	if only != nil {
		r := only.record()
		if need == 0 || o.policy.origin == unknown && only.takeAt(r.at, need) {
			return r.open(need, o), nil
		}
		only.records.Put(r)
	}
	q := m.scratch.Get().(*scratch)
	if only != nil {
		q.slots = append(q.slots[:0], slot{line: only, need: need, asked: least})
	} else {
		err = m.candidates(q, s, least)
	}
	var at *line
	var bytes int64 // as charged
	var w *waiter
	if err == nil {
		m.addHeadroom(q.slots, o.policy.origin)
		at, bytes, w, err = q.place(wait, least, most)
	}
	m.scratch.Put(q)
	if w != nil {
		at, bytes, err = m.wait(ctx, w, o.owner)
	}
	if err != nil {
		return Reservation{}, err
	}
	return at.record().open(bytes, o), nil
}

// single is a fast path: it returns the line of a request that has a fixed size and one possible
// space, and what the space charges for it. It returns nil for other requests, and for those that
// never fit.
func (m *Manager) single(s Strategy, least, most int64) (*line, int64) {
	if least != most {
		return nil, 0
	}
	i := -1
	switch s := s.(type) {
	case specific:
		i = m.spaces.index(s.id)
	case anyInTier:
		if k := tier.Kind(s); k.Valid() && m.spaces.kinds[k].to-m.spaces.kinds[k].from == 1 {
			i = m.spaces.kinds[k].from
		}
	}
	if i < 0 {
		return nil, 0
	}
	l := m.lines[i]
	need := l.charge(least)
	if need == nothing {
		return nil, 0
	}
	return l, need
}

// place charges the first candidate that has room below its trigger, or else the first that has
// room, and returns its line and how much it charged. If none has, it returns a new waiter, which
// is not in line yet; without wait, or if the request can never fit, it returns an error.
func (q *scratch) place(wait bool, least, most int64) (*line, int64, *waiter, error) {
	for i := range q.slots {
		c := &q.slots[i]
		if len(q.slots) > 1 && least == most && c.calm() {
			if n, ok := c.take(least, most); ok {
				return c.line, n, nil, nil
			}
		}
	}
	var fits *slot // the first in which the request would fit if it were empty
	for i := range q.slots {
		c := &q.slots[i]
		if !c.fits(c.line.space.Room()) {
			continue
		}
		if n, ok := c.take(least, most); ok {
			return c.line, n, nil, nil
		}
		if fits == nil {
			fits = c
		}
	}
	switch {
	case fits == nil:
		return nil, 0, nil, exceeded(q.slots)
	case fits.need == 0: // nothing was asked for at least, and there is nothing
		return fits.line, 0, nil, nil
	case !wait:
		return nil, 0, nil, fits.full()
	}
	return nil, 0, newWaiter(q.slots, least, most), nil
}

// addHeadroom sets which of the slots leave headroom free and how much, and which may use it. A
// prefetch (early) also leaves free what is above the stop mark.
func (m *Manager) addHeadroom(slots []slot, o origin) {
	for i := range slots {
		s := &slots[i]
		if o != unknown && m.config.Headroom != nil {
			s.keeps, s.upward = o.of(s.line.space)
		}
		if s.keeps && s.need < nothing {
			s.spare = m.headroom(s.line, s.need)
		}
		if sp := s.line.space; o == early {
			s.spare = max(s.spare, sp.Limit()-sp.Stop()+sp.Foreign())
		}
	}
}

// headroom asks how much a request for need bytes leaves free in l.
func (m *Manager) headroom(l *line, need int64) (bytes int64) {
	m.panics.Do("Config.Headroom", func() { bytes = max(0, m.config.Headroom(l.space.ID(), need)) })
	return bytes
}

// candidates asks s and puts into q.slots what the request needs in each space.
func (m *Manager) candidates(q *scratch, s Strategy, bytes int64) (err error) {
	defer guard.Error(&err, "a strategy")
	q.spaces = s.Candidates(m.spaces, q.spaces[:0])
	q.slots = q.slots[:0]
	sized, differs := s.(Sized)
	for _, sp := range q.spaces {
		i := -1
		if sp != nil {
			i = m.spaces.index(sp.ID())
		}
		if i < 0 || m.spaces.all[i] != sp {
			return fmt.Errorf("reservation: %s: %w: it names one that the manager does not have", s, ErrNoCandidate)
		}
		l := m.lines[i]
		if slotIn(q.slots, l) != nil {
			continue
		}
		n := bytes
		if differs {
			if n = sized.BytesIn(sp, bytes); n < 0 {
				return fmt.Errorf("reservation: %s: cannot reserve %d bytes in %s", s, n, sp.ID())
			}
		}
		q.slots = append(q.slots, slot{line: l, need: l.charge(n), asked: n})
	}
	if len(q.slots) == 0 {
		return fmt.Errorf("reservation: %s: %w", s, ErrNoCandidate)
	}
	return nil
}

func isSized(s Strategy) bool {
	_, ok := s.(Sized)
	return ok
}

// exceeded is the error of a request that fits no candidate even when empty. It is about the one
// with the highest limit.
func exceeded(slots []slot) error {
	best := slices.MaxFunc(slots, func(a, b slot) int { return cmp.Compare(a.line.space.Room(), b.line.space.Room()) })
	if best.need == nothing {
		return best.line.exceeded(best.asked)
	}
	return best.line.exceeded(best.need)
}

// WaitStats says how long finished waits took, however they ended, and how many are not over.
// Requests that did not have to wait are not counted.
type WaitStats struct {
	Count int64
	Total time.Duration // of all together; they may overlap
	// P50, P99 and P999 are percentiles, P999 that of 99.9 %. They are at most 1/16 too high.
	P50, P99, P999, Max time.Duration
	// Within is a histogram: how many took less than so long, for the powers of two of nanoseconds
	// from 4 µs to 18 minutes.
	Within  map[time.Duration]int64
	Waiting int64         // that are not over
	Oldest  time.Duration // how long the oldest of them has taken so far
}

// Waits returns how long finished waits took, and how many are not over.
func (m *Manager) Waits() WaitStats {
	sum := m.waits.Summary()
	s := WaitStats{
		Count:  sum.Count,
		Total:  sum.Total,
		P50:    sum.P50,
		P99:    sum.P99,
		P999:   sum.P999,
		Max:    sum.Max,
		Within: sum.Within,
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.Waiting = m.mu.waiting; s.Waiting > 0 {
		s.Oldest = max(0, time.Since(m.made)-m.mu.ring.next.begun)
	}
	return s
}

// Close ends all waits with tier.ErrClosed and refuses requests from now on.
// Reservations stay good and must be released. A second Close returns
// tier.ErrClosed.
func (m *Manager) Close() error {
	m.mu.Lock()
	if m.closed.Swap(true) {
		m.mu.Unlock()
		return tier.ErrClosed
	}
	var done over
	for w := range m.waitersLocked() {
		m.failLocked(w, closedError(), &done)
	}
	m.patience.Stop()
	cancels := m.mu.cancels
	m.mu.cancels = nil
	m.mu.Unlock()
	done.wake()
	m.progress.next.Wait()
	m.patience.Wait()
	for _, cancel := range cancels {
		cancel()
	}
	return nil
}
