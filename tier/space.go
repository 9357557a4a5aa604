package tier

import (
	"cmp"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/guard"
)

// SpaceConfig describes a space. ID, Capacity and Pool are required; zero
// fractions mean the tier's defaults.
type SpaceConfig struct {
	ID       ID
	Capacity int64 // bytes; above 0
	Marks    Marks
	Node     int          // the NUMA node it is bound to or nearest to; -1 for unknown
	Backend  string       // "sim", "cuda", "host", "disk": what reports call it
	Pool     Pool         // hands out the memory; the space closes it
	Hint     string       // the setting that would make the space larger, for error messages
	Quota    Quota        // charged for what is reserved here; may be nil, and shared by spaces
	Logger   *slog.Logger // logs panics of subscribers; nil means slog.Default
}

// A Space is one bounded memory in a tier. Its books count every byte; its pool allocates the
// memory. Bytes are first promised, then drawn as buffers, and are free again when the buffer is
// released and the device is done with it. A Space does not wait for room: programs reserve through
// a reservation.Manager, which does.
//
// A space is open from NewSpace on: promises are made and buffers are drawn up to the limit.
//
// A space is under pressure while used and external bytes reach the trigger. Nothing is refused for that,
// but subscribers are called, so that the monitor evicts until the pressure
// is as far below the trigger as it was above, and at most down to Stop.
//
// A space is lost when its pool, a Losable, has reported the loss of the device. Its limit is 0
// from then on, for good. Promises and draws fail with the LostError; bytes are still given back.
//
// A space is closed after Close. Outstanding buffers stay usable and may be released later.
//
// A Space is safe for concurrent use.
type Space struct {
	SpaceConfig              // does not change; State has the marks as they are now
	Books       *books.Books // counts, promises and holds, for this module's packages

	lost     atomic.Pointer[LostError]
	whenLost chan struct{} // closed when the space is lost
	external atomic.Int64  // bytes that others hold on the device
	held     atomic.Int64  // see Hold
	evicted  atomic.Int64  // see Evicted
	clean    cleanImages
	cancels  []func() // end the subscriptions to the quota and to the loss of the pool

	subscribers guard.List[bool]
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
	marks, err := cfg.Marks.of(cfg.ID, cfg.Capacity)
	if err != nil {
		return nil, err
	}
	s := &Space{SpaceConfig: cfg, Books: books.New(cfg.Capacity, marks), whenLost: make(chan struct{})}
	s.subscribers.Panics.Logger = cfg.Logger
	if cfg.Quota != nil {
		s.cancels = append(s.cancels, cfg.Quota.Subscribe(func() { s.notify(false) }))
	}
	if pool, ok := cfg.Pool.(Losable); ok { // last: it may be lost already
		s.cancels = append(s.cancels, pool.OnLost(s.lose))
	}
	return s, nil
}

// Close closes the pool. Buffers that are outstanding stay usable and may be
// released later.
func (s *Space) Close() error {
	for _, cancel := range s.cancels {
		cancel()
	}
	return s.Pool.Close()
}

// ID returns the space's name.
func (s *Space) ID() ID { return s.SpaceConfig.ID }

// Kind returns the space's tier.
func (s *Space) Kind() Kind { return s.SpaceConfig.ID.Kind }

// Charge returns what a buffer of size bytes takes out of the space.
func (s *Space) Charge(size int64) int64 { return s.Pool.Charge(size) }

// Usage is the counts of a space at one moment, in bytes. Used is live + retired + reserved.
type Usage = books.Usage

// ResetPeak sets Usage.Peak to the bytes in use now, so that the next State has the peak of one
// phase of a program.
func (s *Space) ResetPeak() { s.Books.ResetPeak() }

// State is the counts and the marks of a space at one moment, and what follows from them. Sizes are
// bytes.
type State struct {
	Usage
	Limit    int64 // how many bytes reservations may take; 0 where the space is lost
	Trigger  int64 // the pressure at which the monitor starts to evict
	Stop     int64 // the pressure at which it ends at the latest
	External int64 // what other programs hold on the device, as last sampled
	Pressure int64 // Used and External: what Trigger and Stop are compared with

	// CleanChanges changes when a clean image is made, and when its memory is free or in use again.
	CleanChanges uint64

	// Held are used for as long as the space is open: the engine's own (Hold), and retired bytes of
	// which the pool cannot find out whether the device has freed them, which are Unsure. Room+Held is
	// how many may be used at once.
	Held, Unsure int64

	Available int64 // how many bytes a reservation could take now
	// Room is the largest request that can ever fit: the limit, or the quota's if that is less, without
	// what is Held.
	Room int64
	// Ceiling is the most that Used could be now: the limit, or less if the quota has less left. After
	// a limit was lowered it may be below Used.
	Ceiling int64
}

// State returns what is in the space. The books are read at one moment, and the quota just after.
func (s *Space) State() State {
	now, external := s.Books.Now(), s.external.Load()
	x := State{
		Usage: now.Usage, CleanChanges: now.CleanChanges, Limit: now.Limit, Trigger: now.Trigger, Stop: now.Stop,
		External: external, Pressure: now.Used() + external, Held: s.held.Load(),
		Available: now.Limit - now.Used(), Room: now.Limit, Ceiling: now.Limit,
	}
	if p, ok := s.Pool.(interface{ Unsure() int64 }); ok {
		x.Unsure = p.Unsure()
		x.Held += x.Unsure
	}
	if quota := s.Quota; quota != nil {
		left := quota.Remaining() // which may be all of an int64
		x.Available, x.Room = min(x.Available, left), min(x.Room, quota.Limit())
		x.Ceiling = max(0, min(now.Limit, now.Used()+min(now.Limit, left)))
	}
	x.Available, x.Room = max(0, x.Available), max(0, x.Room-x.Held)
	return x
}

// Room returns State.Room.
func (s *Space) Room() int64 { return s.State().Room }

// Hold marks n of the used bytes as the engine's own, such as staging chunks.
func (s *Space) Hold(n int64) { s.held.Add(n) }

// Pace returns how far a volume is ahead of the others that are written side by side with it; see
// books.Pace. Other spaces have the zero Pace. Reserved bytes count as if they were being written.
func (s *Space) Pace() books.Pace {
	if p, ok := s.Pool.(paced); ok {
		return p.Pace().After(s.Books.Now().Reserved)
	}
	return books.Pace{}
}

// paced is what a Pool implements that is one of several which are written side by
// side, each as fast as it can: a spill volume. Bytes for any of them go to
// the one whose books.Pace is the least. A paced is safe for concurrent use.
type paced interface {
	Pace() books.Pace
	// Promised is called before each Alloc with how many bytes of the space are promised and not
	// drawn. Space.Pace counts them, and so must a caller that checks whether the pool was skipped.
	Promised(n int64)
}

// SetMarks changes all marks; zero fields mean the tier's defaults. In bytes, stop must be above 0
// and below the trigger. SetMarks replaces a limit that SetLimit set. Open reservations keep their
// bytes; above a lower trigger the monitor begins to evict. The marks of a lost space stay, and the
// error is a LostError.
func (s *Space) SetMarks(f Marks) error {
	marks, err := f.of(s.ID(), s.Capacity)
	if err != nil {
		return err
	}
	return s.setMarks(marks)
}

// SetLimit changes how many bytes reservations may take: 0 < n ≤ capacity. Reservations that are
// open keep their bytes; a lower limit only refuses new ones. The limit of a lost space stays 0,
// and the error is a LostError.
func (s *Space) SetLimit(n int64) error {
	if n <= 0 || n > s.Capacity {
		return fmt.Errorf("tier: %s: limit %d must be above 0 and at most the capacity, %d",
			s.ID(), n, s.Capacity)
	}
	return s.setMarks(books.Marks{Limit: n})
}

func (s *Space) setMarks(m books.Marks) error {
	s.Books.SetMarks(m)
	if err := s.Lost(); err != nil {
		return err
	}
	s.fit()
	s.NotifyReserved(s.Books.Now())
	return nil
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

// lose is called by the pool when the device is lost.
func (s *Space) lose(why error) {
	// The error is set first, so that a request which the limit refuses finds the reason.
	if s.lost.CompareAndSwap(nil, &LostError{Space: s.ID(), Bytes: s.Books.Now().Used(), Cause: why}) {
		close(s.whenLost)
		s.Books.SetMarks(books.Marks{})
		s.fit()
	}
}

// WhenLost returns a channel that is closed when the space is lost.
func (s *Space) WhenLost() <-chan struct{} { return s.whenLost }

// Subscribe calls f after changes, on the goroutine that made them and with no lock held. With
// aboveTrigger, used or external bytes rose, and the pressure is at the trigger or above it, or more is
// used than a new limit allows: the monitor should evict. If it is false, they fell, the limit
// changed or the space was lost: a waiter may fit now, or can never fit. Rises below the trigger
// make no call. f must be quick and must not block. A panic of f is logged. The returned function
// ends the subscription; a call that has begun may still be running when it returns.
func (s *Space) Subscribe(f func(aboveTrigger bool)) (cancel func()) { return s.subscribers.Add(f) }

// Subscribers returns how many subscriptions there are: what each change costs, in calls.
func (s *Space) Subscribers() int { return s.subscribers.Len() }

func (s *Space) notify(aboveTrigger bool) { s.subscribers.Call("a listener of a space", aboveTrigger) }

// NotifyReserved calls the subscribers if the pressure is at the trigger or above it, or if more is used
// than a new limit allows. It must be called with no lock held after bytes were reserved through
// Books, with the state of the books then.
func (s *Space) NotifyReserved(now books.State) {
	if now.Used() > min(now.Trigger-s.external.Load()-1, now.Limit) {
		s.notify(true)
	}
}

// NotifyFreed credits the quota with n bytes and calls the subscribers. It must be called with no lock
// held after n bytes became free in Books. If n is 0, it does nothing.
func (s *Space) NotifyFreed(n int64) {
	switch {
	case n == 0:
	case s.Quota != nil:
		s.Quota.Credit(n) // which notifies all the spaces that share it, and so this one
	default:
		s.notify(false)
	}
}

// SetExternal records how many bytes others hold on the device, as sampled. Subscribers are called
// if that presses the space, or if it is less than before. ExternalOn documents the number.
func (s *Space) SetExternal(n int64) {
	n = min(max(0, n), math.MaxInt64-s.Capacity) // so that the pressure is a number
	switch before := s.external.Swap(n); {
	case before > n:
		s.notify(false)
	case before < n:
		s.NotifyReserved(s.Books.Now())
	}
}

// ExternalOn returns how many bytes of the space's capacity others hold on dev, the device
// that the space is on: other processes, other libraries of this one, and other spaces on
// the same device. These bytes are neither free nor in the space's own books. Freed memory
// that the device keeps counts as free, and memory of others that the space has adopted
// as its own. If the device is larger than the space, others may fill the rest
// of it first.
//
// Decorators are looked through, because the limits that they make are not external bytes.
// ok is false if the number cannot be found now: the space is lost, the device does not answer, or
// the space's books change all the time. The call may take as long as the device's driver
// does; it must be made with no lock held.
func (s *Space) ExternalOn(dev Device) (bytes int64, ok bool) {
	for d := range layers(dev) {
		dev = d // the innermost
	}
	for range 4 {
		before := s.Books.Now()
		free, total, err := dev.MemInfo()
		after := s.Books.Now()
		if err != nil || total == 0 || s.Lost() != nil {
			break
		}
		if before.Live == after.Live && before.Retired == after.Retired {
			return max(0, s.Capacity-after.Live-after.Retired-free), true
		}
	}
	return 0, false
}

// Promise reserves n bytes, for code that has no reservation.Manager. It drops clean images where
// they are in the way. The caller must Release the promise. The error is a NoSpaceError, or a
// LostError if the space is lost.
func (s *Space) Promise(n int64) (*books.Promise, error) {
	return s.promise(n, 0, nil)
}

// Occupy is Promise for memory that was in use before the space was made, such as files that
// outlived a process, or that is lent to the space. The limit does not count, because the bytes are
// there; more than the capacity is a NoSpaceError.
func (s *Space) Occupy(n int64) (*books.Promise, error) {
	return s.promise(n, -s.Capacity, books.Occupied)
}

// promise charges the quota, and tries to reserve n bytes for as long as clean images are in the
// way. spare is that of books.Reserve.
func (s *Space) promise(n, spare int64, owner any) (*books.Promise, error) {
	if n < 0 {
		return nil, fmt.Errorf("tier: %s: cannot reserve %d bytes", s.ID(), n)
	}
	var err error
	quota := s.Quota
	if n == 0 {
		quota = nil // which is charged for more
	}
	if quota != nil {
		err = quota.Charge(n)
	}
	for err == nil && s.Lost() == nil {
		p := &books.Promise{By: books.By{Owner: owner}}
		ok, drop, now := s.Books.Reserve(p, n, spare)
		if ok {
			s.NotifyReserved(now)
			return p, nil
		}
		if drop == 0 || !s.DropOldest(drop, now.CleanChanges) {
			break
		}
	}
	if quota != nil && err == nil {
		quota.Credit(n)
	}
	full := &NoSpaceError{Space: s.ID(), Requested: n, Available: s.State().Available, Hint: s.Hint, Cause: err}
	return nil, cmp.Or[error](s.Lost(), full)
}

// Release ends a promise: its unused bytes are free again. A second call returns ErrReleased.
func (s *Space) Release(p *books.Promise) error {
	out := p.Release()
	if out.Released {
		return ErrReleased
	}
	s.NotifyFreed(out.Freed)
	return nil
}
