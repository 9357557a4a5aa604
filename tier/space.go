package tier

import (
	"fmt"
	"log/slog"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/copies"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/holds"
	"github.com/spillway-db/spillway/internal/ledger"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// SpaceConfig describes a space. ID, Capacity and Pool are required; zero
// fractions mean the tier's defaults.
type SpaceConfig struct {
	ID        ID
	Capacity  int64 // bytes; above 0
	Fractions Fractions
	Node      int          // the NUMA node it is bound to or nearest to; -1 for unknown
	Backend   string       // "sim", "cuda", "host", "disk": what reports call it
	Pool      Pool         // hands out the memory; the space closes it
	Hint      string       // the setting that would make the space larger, for error messages
	Quota     Quota        // charged for what is reserved here; may be nil, and shared by spaces
	Logger    *slog.Logger // logs panics of listeners; nil means slog.Default
}

// The argument pressed of listeners; see Subscribe.
const (
	released = false
	pressed  = true
)

// A Space is one bounded memory in a tier. Its ledger counts every byte; its pool allocates the
// memory. Bytes are first reserved, then drawn as buffers, and are free again when the buffer is
// released and the device is done with it. A Space does not wait for room: programs reserve through
// a reservation.Manager, which does.
//
// A Space is safe for concurrent use.
type Space struct {
	cfg    SpaceConfig
	paced  paced // the pool, if it is
	ledger *ledger.Ledger

	limit   atomic.Int64 // bytes, as are the others
	trigger atomic.Int64
	stop    atomic.Int64
	foreign atomic.Int64
	held    atomic.Int64 // used for as long as the space is open; see Hold
	lost    atomic.Pointer[LostError]
	fresh   atomic.Pointer[atomic.Int64] // see CountRetired; may be nil

	holds   holds.List   // open handles and records, for lists of holders
	copies  copies.List  // clean images
	evicted atomic.Int64 // see inside.Evicted
	panics  guard.Log    // of the listeners

	listeners atomic.Pointer[[]listener] // copied on write; called without locks

	mu struct {
		lockrank.Mutex[lockrank.Space]
		nextListener int
		closed       bool
		cancels      []func()             // end the subscriptions to the quota and to the loss of the pool
		buffers      map[*Buffer]struct{} // outstanding, for the leak report
	}
}

type listener struct {
	id int
	f  func(s *Space, pressed bool)
}

// NewSpace returns an empty space.
func NewSpace(cfg SpaceConfig) (*Space, error) {
	switch {
	case !cfg.ID.Valid():
		return nil, fmt.Errorf("tier: the space id %v is invalid", cfg.ID)
	case cfg.Capacity <= 0:
		return nil, fmt.Errorf("tier: %s: capacity %d must be above 0 bytes", cfg.ID, cfg.Capacity)
	case cfg.Pool == nil:
		return nil, fmt.Errorf("tier: %s: a pool is required", cfg.ID)
	}
	cfg.Fractions = cfg.Fractions.In(cfg.ID.Kind)
	if err := cfg.Fractions.validateOf(cfg.Capacity); err != nil {
		return nil, fmt.Errorf("%w (space %s)", err, cfg.ID)
	}
	s := &Space{cfg: cfg, ledger: ledger.New(cfg.Capacity)}
	s.panics.Logger = cfg.Logger
	s.mu.buffers = make(map[*Buffer]struct{})
	s.paced, _ = cfg.Pool.(paced)
	s.mark(cfg.Fractions)
	if cfg.Quota == nil { // a quota is called for each byte
		s.ledger.AllowParking()
	}
	if cfg.Quota != nil {
		s.mu.cancels = append(s.mu.cancels, cfg.Quota.Subscribe(func() { s.notify(released) }))
	}
	if pool, ok := cfg.Pool.(Losable); ok { // last: it may be lost already
		s.mu.cancels = append(s.mu.cancels, pool.OnLost(s.lose))
	}
	return s, nil
}

// ID returns the space's name.
func (s *Space) ID() ID { return s.cfg.ID }

// Kind returns the space's tier.
func (s *Space) Kind() Kind { return s.cfg.ID.Kind }

// Node returns the NUMA node that the space is bound to, or -1.
func (s *Space) Node() int { return s.cfg.Node }

// Backend names what hands out the memory: "sim", "cuda", "host", "disk".
func (s *Space) Backend() string { return s.cfg.Backend }

// Pool returns what hands out the memory.
func (s *Space) Pool() Pool { return s.cfg.Pool }

// Capacity returns the size of the space in bytes.
func (s *Space) Capacity() int64 { return s.cfg.Capacity }

// Limit returns how many bytes reservations may take; 0 where the space is lost.
func (s *Space) Limit() int64 { return s.limit.Load() }

// Trigger returns the pressure, in bytes, at which the monitor starts.
func (s *Space) Trigger() int64 { return s.trigger.Load() }

// Stop returns the pressure, in bytes, at which the monitor ends at the latest.
func (s *Space) Stop() int64 { return s.stop.Load() }

// Room returns the largest request that can ever fit: the limit, or the quota's if that is less,
// without the bytes that the engine itself holds. Available returns what is free now.
func (s *Space) Room() int64 {
	room := s.Limit()
	if s.cfg.Quota != nil {
		room = min(room, s.cfg.Quota.Limit())
	}
	return max(0, room-s.Inside().Held())
}

// Ceiling returns the most that Used could be now: the limit, or less if the quota has less left.
// After a limit was lowered it may be below Used.
func (in inside) Ceiling() int64 {
	limit := in.Limit()
	if in.cfg.Quota != nil {
		used := in.ledger.Used()
		limit = max(0, min(limit, used+min(limit, in.cfg.Quota.Remaining()))) // which may be all that an int64 holds
	}
	return limit
}

// SetLimit changes how many bytes reservations may take: 0 < n ≤ capacity. Reservations that are
// open keep their bytes; a lower limit only refuses new ones. The limit of a lost space stays 0,
// and the error is a LostError.
func (s *Space) SetLimit(n int64) error {
	if n <= 0 || n > s.cfg.Capacity {
		return fmt.Errorf("tier: %s: limit %d must be above 0 and at most the capacity, %d",
			s.cfg.ID, n, s.cfg.Capacity)
	}
	changed, err := s.swapLimit(n)
	if changed {
		s.limitChanged()
		if s.Used() > n { // also below the trigger
			s.notify(pressed)
		}
	}
	return err
}

// limitChanged is called with no lock held.
func (s *Space) limitChanged() {
	s.ledger.LimitsChanged()
	s.fitCopies()
	s.notify(released)
}

// SetMarks changes all marks; zero fields mean the tier's defaults. In bytes, stop must be above 0
// and below the trigger. SetMarks replaces a limit that SetLimit set. Open reservations keep their
// bytes; above a lower trigger the monitor begins to evict. The marks of a lost space stay, and the
// error is a LostError.
func (s *Space) SetMarks(f Fractions) error {
	f = f.In(s.Kind())
	if err := f.validateOf(s.cfg.Capacity); err != nil {
		return fmt.Errorf("%w (space %s)", err, s.cfg.ID)
	}
	s.mu.Lock()
	lost := s.Lost()
	if lost == nil {
		s.mark(f)
	}
	s.mu.Unlock()
	if lost != nil {
		return lost
	}
	s.limitChanged()
	s.tellPressure()
	return nil
}

func (s *Space) mark(f Fractions) {
	s.limit.Store(share(s.cfg.Capacity, f.Limit))
	s.trigger.Store(share(s.cfg.Capacity, f.Trigger))
	s.stop.Store(share(s.cfg.Capacity, f.Stop))
}

// swapLimit sets the limit, unless the space is lost, and reports whether that changed it.
func (s *Space) swapLimit(n int64) (changed bool, err error) {
	s.mu.Lock() // lose has it, too
	defer s.mu.Unlock()
	if err := s.Lost(); err != nil {
		return false, err
	}
	return s.limit.Swap(n) != n, nil
}

// Usage returns the counts of the ledger, all at the same moment.
func (s *Space) Usage() Usage { return Usage(s.ledger.Snapshot()) }

// ResetPeak sets Usage.Peak to the bytes in use now, so that the next Usage has the peak of one
// phase of a program.
func (s *Space) ResetPeak() { s.ledger.ResetPeak() }

// Usage is the counts of a space's ledger at one moment, in bytes.
type Usage struct {
	Live     int64 // in buffers that are in use
	Retired  int64 // freed, but the device may still be working on them
	Reserved int64 // promised and not yet drawn
	Cached   int64 // in copies of batches that are current elsewhere; reclaimable at once and not in Used
	Peak     int64 // largest Used since the start or the last ResetPeak
}

// Used is live + retired + reserved.
func (u Usage) Used() int64 { return u.Live + u.Retired + u.Reserved }

// Used returns live + retired + reserved bytes, as one word.
func (s *Space) Used() int64 { return s.ledger.Used() }

// Available returns how many bytes a reservation could take now.
func (s *Space) Available() int64 {
	room := s.Limit() - s.ledger.Used()
	if s.cfg.Quota != nil {
		room = min(room, s.cfg.Quota.Remaining())
	}
	return max(0, room)
}

// Foreign returns how many bytes other programs hold on the device, as last sampled: external bytes
// in the documentation.
func (s *Space) Foreign() int64 { return s.foreign.Load() }

// PressureBytes returns used + foreign bytes: what Trigger and Stop are
// compared with.
func (s *Space) PressureBytes() int64 { return s.ledger.Used() + s.foreign.Load() }

// Charge returns what a buffer of size bytes takes out of the space.
func (s *Space) Charge(size int64) int64 { return s.cfg.Pool.Charge(size) }

// Subscribe calls f after changes, on the goroutine that made them and with no lock held. With
// pressed, used or foreign bytes rose, and the pressure is at the trigger or above it, or more is
// used than a new limit allows: the monitor should evict. Without pressed, they fell or the limit
// changed: a waiter may fit now, or can never fit. Rises below the trigger make no call, and
// neither do releases of bytes that the space parks (see Attend). f must be quick and must not
// block. A panic of f is logged. The returned function ends the subscription; a call that has begun
// may still be running when it returns.
func (in inside) Subscribe(f func(s *Space, pressed bool)) (cancel func()) {
	in.mu.Lock()
	defer in.mu.Unlock()
	id := in.mu.nextListener
	in.mu.nextListener++
	var next []listener
	if old := in.listeners.Load(); old != nil {
		next = slices.Clone(*old)
	}
	next = append(next, listener{id, f})
	in.listeners.Store(&next)
	return func() {
		in.mu.Lock()
		defer in.mu.Unlock()
		next := slices.DeleteFunc(slices.Clone(*in.listeners.Load()), func(l listener) bool { return l.id == id })
		in.listeners.Store(&next)
	}
}

func (s *Space) notify(pressed bool) {
	ls := s.listeners.Load()
	if ls == nil {
		return
	}
	lockrank.AssertNone("a space's listeners are called")
	for i := range *ls {
		s.tell(&(*ls)[i], pressed)
	}
}

// tell calls one listener. If one panics, the others are still called, and the caller, which may be
// serving others, goes on.
func (s *Space) tell(l *listener, pressed bool) {
	defer s.panics.Recover("a listener of a space")
	l.f(s, pressed)
}

// Reserve is ReserveLeaving nothing.
func (in inside) Reserve(n int64) error { return in.ReserveLeaving(n, 0) }

// ReserveLeaving reserves n bytes if spare more stay free below the limit. Otherwise it returns a
// NoSpaceError, or a LostError if the space is lost. The caller must either Draw or Unreserve every
// byte.
func (in inside) ReserveLeaving(n, spare int64) error {
	if n < 0 {
		return fmt.Errorf("tier: %s: cannot reserve %d bytes", in.cfg.ID, n)
	}
	if n == 0 {
		return nil
	}
	if in.cfg.Quota != nil {
		if err := in.cfg.Quota.Charge(n); err != nil {
			return in.refusal(n, err)
		}
	}
	if !in.ledger.Reserve(n, in.Limit()-spare) {
		if in.cfg.Quota != nil {
			in.cfg.Quota.Credit(n)
		}
		return in.refusal(n, nil)
	}
	in.tellPressure()
	return nil
}

// tellPressure calls the listeners, with pressed, if the pressure is at the trigger or above it.
func (s *Space) tellPressure() {
	if s.ledger.UsedOrParked()+s.foreign.Load() >= s.Trigger() && s.PressureBytes() >= s.Trigger() {
		s.notify(pressed)
	}
}

func (s *Space) unreserveAt(at uint32, n int64, below func() int64) {
	if n == 0 {
		return
	}
	switch done, tell := s.ledger.TryPark(at, n, below); {
	case tell:
		s.notify(released)
	case !done:
		s.Inside().Unreserve(n)
	}
}

// parkBelow returns how many bytes may be used for released bytes to be parked: a space that is
// fuller calls its listeners at each release.
func (s *Space) parkBelow() int64 { return min(s.Stop()-s.foreign.Load(), s.Limit()) }

// Unreserve frees n reserved bytes that were not drawn, and calls the listeners.
func (in inside) Unreserve(n int64) {
	if n == 0 {
		return
	}
	in.ledger.Unreserve(n)
	in.credited(n)
}

// credited calls the listeners, because n bytes are free again.
func (s *Space) credited(n int64) {
	if s.cfg.Quota != nil {
		s.cfg.Quota.Credit(n) // which notifies all the spaces that share it, and so this one
		return
	}
	s.notify(released)
}

// Close closes the pool. Buffers that are outstanding stay usable and may be
// released later.
func (s *Space) Close() error {
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	s.mu.closed = true
	cancels := s.mu.cancels
	s.mu.Unlock()
	for _, cancel := range cancels {
		cancel()
	}
	return s.cfg.Pool.Close()
}

// Lost returns a *LostError if the device of the space is lost, and otherwise nil. Reservations
// then skip the space, its Limit is 0, and its buffers can only be released. A lost space stays
// lost.
func (s *Space) Lost() error {
	if lost := s.lost.Load(); lost != nil {
		return lost
	}
	return nil
}

// lose is called by the pool when the device is lost. It sets the limit to 0 and calls the
// listeners, so waiters for room here fail, or go on waiting for other spaces.
func (s *Space) lose(why error) {
	if !s.loseOnce(&LostError{Space: s.cfg.ID, Bytes: s.Used(), Cause: why}) {
		return
	}
	s.limitChanged()
}

func (s *Space) loseOnce(lost *LostError) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost.Load() != nil {
		return false
	}
	s.lost.Store(lost) // first, so that a request refused for the limit finds the reason
	s.limit.Store(0)
	return true
}

// refusal returns the error of a request for n bytes that failed.
func (s *Space) refusal(n int64, cause error) error {
	if err := s.Lost(); err != nil {
		return err
	}
	return &NoSpaceError{Space: s.cfg.ID, Requested: n, Available: s.Available(), Hint: s.cfg.Hint, Cause: cause}
}
