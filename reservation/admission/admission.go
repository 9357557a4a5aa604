// Package admission decides which tasks may start. A task says what it will need;
// it starts when that much memory can be promised to it, so that tasks which run
// together do not find out half-way that they do not fit together.
//
//	Estimate ─ input, output, overhead ─▶ ┌──────────┐ ── Grant ──▶ task ── draws ──▶ Reservation
//	   ▲                                  │ Admitter │
//	   │ twice as much, after             └──────────┘ ◀── Measured ──┘
//	   └ running out of memory               │    ▲
//	                                 reserves│    │ learns
//	                                         ▼    │
//	                          reservation.Manager   Estimator
//
// # The rule
//
// A task's need in a space is the bytes of its inputs that are not there yet, plus
// its output, plus its overhead, as the space charges them. It is admitted if
//
//	need ≤ min(threshold × capacity, limit) − used
//
// or if no task runs in the space and it can have the need, or if no task runs at all. The latter
// cases are logged if the former does not hold. It reserves the need or, if that is less, all that
// the space's limit leaves beside the task's inputs that are there.
// The need is reserved, not only compared: from then on it counts as used for all. No more tasks
// run at once than there are threads.
//
// # Order
//
// Tasks wait in one queue in the order of arrival. Only the oldest, the head, reserves with
// waiting. It is in the line of each candidate space and is served there like any other request. So
// the monitor sees its demand and makes room. While the head cannot start, others that can may pass
// it, Rules.Bypass of them. After that only the head is admitted. The count starts again with each
// head. So a head that is larger than the threshold gets its turn: when no task may pass, the
// running ones end, and then no task runs in some space.
//
// A wait ends with the grant, with its context, by Close, or with the error with
// which the reservation ended: tier.ErrNoSpace when the monitor has found that
// nothing could ever become free, and each space was asked. Some are not while tasks run there.
//
// # Tasks that run out of memory
//
// Run admits and runs a function, and tries it again with a higher estimate when
// that ran out of memory: at most Rules.MaxAttempts times. Before the next try is
// admitted the inputs are restored and all that the grant held is released.
//
// # Ownership
//
// The caller of Admit owns the Grant and must end it once, by Done or Release. It holds a thread
// and a reservation, from which buffers are drawn. The buffers may outlive it. An Admitter owns
// neither the spaces nor the reservations' manager. Its only goroutines are those that wait in a
// call of Admit. Close it before the manager.
//
// # Locks
//
// The Admitter's mutex and that of Ratios are of rank Reservation. They are never held together
// with another of that rank, and only counters of spaces are read under them. Strategies,
// estimators, inputs, tasks and the logger are called with no lock held. Waiters are woken with
// none.
//
//	… → Batch → Registry → [Reservation] → Space → Ledger → …
package admission

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/waitline"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// defaultThreshold is the share of a space's capacity that tasks are admitted up to.
	defaultThreshold = 0.9
	// defaultBypass is how many tasks may pass the oldest that waits.
	defaultBypass = 16
	// defaultMaxAttempts is how often Run tries a task.
	defaultMaxAttempts = 10
)

// Rules say which tasks may start. The zero value means the defaults.
type Rules struct {
	// Strategy names the spaces that tasks may run in; nil means any GPU.
	Strategy reservation.Strategy
	// Threshold is the share of a space's capacity that tasks are admitted up to: above
	// 0 and at most 1; 0 means 0.9. The space's own limit holds beside it.
	Threshold float64
	// Threads is how many tasks run at once at most; 0 means GOMAXPROCS, for each task
	// has a goroutine that works.
	Threads int
	// Bypass is how many tasks may pass the oldest that waits and cannot start yet; 0
	// means 16, below 0 that none may.
	Bypass int
	// MaxAttempts is how often Run tries a task; 0 means 10.
	MaxAttempts int
	// Estimator says what tasks take beside their inputs; nil means Ratios.
	Estimator Estimator
	// Policy is what happens when a task draws more than was reserved for it.
	Policy reservation.LimitPolicy
}

// Validate says what New would refuse, except for a Policy that cannot be had.
func (r Rules) Validate() error {
	switch {
	case r.Threshold != 0 && !validThreshold(r.Threshold):
		return thresholdError(r.Threshold)
	case r.Threads < 0:
		return fmt.Errorf("admission: %d threads are negative", r.Threads)
	case r.MaxAttempts < 0:
		return fmt.Errorf("admission: %d attempts are negative", r.MaxAttempts)
	}
	return nil
}

func validThreshold(f float64) bool { return f > 0 && f <= 1 } // neither if it is no number

func thresholdError(f float64) error {
	return fmt.Errorf("admission: a threshold of %v must be above 0 and at most 1", f)
}

func (r Rules) withDefaults() Rules {
	if r.Strategy == nil {
		r.Strategy = reservation.AnyInTier(tier.GPU)
	}
	if r.Threshold == 0 {
		r.Threshold = defaultThreshold
	}
	if r.Threads == 0 {
		r.Threads = runtime.GOMAXPROCS(0)
	}
	if r.Bypass == 0 {
		r.Bypass = defaultBypass
	}
	r.Bypass = max(0, r.Bypass)
	if r.MaxAttempts == 0 {
		r.MaxAttempts = defaultMaxAttempts
	}
	if r.Estimator == nil {
		r.Estimator = new(Ratios)
	}
	return r
}

// Config describes an Admitter. Reservations is required.
type Config struct {
	Reservations *reservation.Manager
	Rules        Rules
	// Logger gets a record of each task that is admitted only because no other runs, of each that
	// is retried, and of each whose reservation other code has released. nil means no log.
	Logger *slog.Logger
}

func (c Config) validate() error {
	if c.Reservations == nil {
		return errors.New("admission: a reservation manager is required")
	}
	return errors.Join(c.Rules.Validate(), c.checkPolicy())
}

// checkPolicy refuses a policy with which nothing can be reserved.
func (c Config) checkPolicy() error {
	spaces := c.Reservations.Spaces().All()
	if len(spaces) == 0 || c.Rules.Policy == reservation.Fail() {
		return nil
	}
	r, err := c.Reservations.TryReserve(in{spaces[len(spaces)-1]}, 0, reservation.WithPolicy(c.Rules.Policy))
	if err != nil {
		return fmt.Errorf("admission: Policy: %w", err)
	}
	return r.Release()
}

// Admitter decides which tasks may start, by the rule in the package doc. It is safe for concurrent
// use. It must be closed.
type Admitter struct {
	reservations *reservation.Manager
	rules        Rules // except for threshold and threads, which are in mu
	log          *slog.Logger
	panics       guard.Log
	cancels      []func() // end the subscriptions to the spaces

	// What a change of a space reads without a lock: whether a task waits, and the room below which
	// no task that may pass can start.
	waiting atomic.Int64
	least   atomic.Int64
	seen    atomic.Int64 // foreign bytes, at the last change

	retries atomic.Int64

	mu struct {
		lockrank.Mutex[lockrank.Reservation]
		threshold float64
		threads   int
		line      waitline.Line[*waiter]
		running   int
		in        map[*tier.Space]int // how many of them in each space
		admitted  int64
		alone     int64
		passed    int64
		closed    bool
	}
}

// New returns an admitter. The caller keeps the manager, and closes it afterwards.
func New(cfg Config) (*Admitter, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	a := &Admitter{reservations: cfg.Reservations, rules: cfg.Rules.withDefaults(), log: slog.New(slog.DiscardHandler)}
	if cfg.Logger != nil {
		a.log = guard.Logger(cfg.Logger)
	}
	a.panics.Logger = a.log
	a.mu.in = make(map[*tier.Space]int)
	a.mu.threshold, a.mu.threads = a.rules.Threshold, a.rules.Threads
	a.mu.line.Bypass = uint32(min(a.rules.Bypass, math.MaxInt32))
	for _, s := range cfg.Reservations.Spaces().All() {
		a.cancels = append(a.cancels, s.Inside().Subscribe(a.changed))
	}
	return a, nil
}

// SetThreshold changes the share of a space's capacity that tasks are admitted up
// to: above 0 and at most 1. Tasks that run go on.
func (a *Admitter) SetThreshold(f float64) error {
	if !validThreshold(f) {
		return thresholdError(f)
	}
	a.change(func() { a.mu.threshold = f })
	return nil
}

// SetThreads changes how many tasks run at once at most: 1 or more. Tasks that run go
// on.
func (a *Admitter) SetThreads(n int) error {
	if n < 1 {
		return fmt.Errorf("admission: %d threads: there must be one at least", n)
	}
	a.change(func() { a.mu.threads = n })
	return nil
}

// change makes a change that may let tasks start, and wakes those.
func (a *Admitter) change(f func()) {
	a.mu.Lock()
	f()
	w := a.updateLocked()
	a.mu.Unlock()
	w.fire()
}

// Close ends all waits with tier.ErrClosed and refuses tasks from now on. Grants stay
// good and must be ended. A second Close returns tier.ErrClosed.
func (a *Admitter) Close() error {
	a.mu.Lock()
	if a.mu.closed {
		a.mu.Unlock()
		return tier.ErrClosed
	}
	a.mu.closed = true
	var all wakes
	for at := a.mu.line.Head(); at != nil; at = a.mu.line.Next(at) {
		all.interruptLocked(at.Of)
	}
	cancels := a.cancels
	a.cancels = nil
	a.mu.Unlock()
	all.fire()
	for _, cancel := range cancels {
		cancel()
	}
	return nil
}

func closedError() error { return fmt.Errorf("admission: the admitter is %w", tier.ErrClosed) }

// Stats are what an Admitter does and has done.
type Stats struct {
	Running  int
	Waiting  int
	Admitted int64 // all that started
	Alone    int64 // of them only because no task ran, at least in their space
	Passed   int64 // of them before an older one
	Retried  int64 // attempts that ran out of memory and were followed by another
}

// Stats returns a consistent picture.
func (a *Admitter) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Stats{
		Running: a.mu.running, Waiting: a.mu.line.Len(),
		Admitted: a.mu.admitted, Alone: a.mu.alone, Passed: a.mu.passed, Retried: a.retries.Load(),
	}
}

// Strategy returns what names the spaces that tasks may run in.
func (a *Admitter) Strategy() reservation.Strategy { return a.rules.Strategy }

// Estimator returns what says what tasks take beside their inputs.
func (a *Admitter) Estimator() Estimator { return a.rules.Estimator }

// Grant is the right to run a task, with the memory that was promised to it. It is
// safe for concurrent use. It must be ended once, by Done or Release.
type Grant struct {
	a        *Admitter
	r        reservation.Reservation
	owner    *reservation.Owner
	operator string
	input    int64
	need     int64
	work     int64
	alone    bool
	over     atomic.Bool

	base   atomic.Int64 // drawn for inputs
	here   atomic.Bool  // the inputs are
	peak   atomic.Int64 // drawn at most, inputs too
	output atomic.Int64
	told   atomic.Bool // output was
}

// Reservation returns what the task draws from, in the space where it runs. It must not be
// released: the grant does that.
func (g *Grant) Reservation() reservation.Reservation { return g.r }

// Owner returns whose the grant is: tasks that hold and wait in a circle are found by it.
// It has one goroutine unless SetWorkers says otherwise; what is waited for with its
// Context is the task's.
func (g *Grant) Owner() *reservation.Owner { return g.owner }

// Need returns the estimated need of the task in bytes, as charged; math.MaxInt64 if the sum
// overflows. The reservation is smaller if the space can never have so much.
func (g *Grant) Need() int64 { return g.need }

// Alloc draws a buffer from the reservation and notes how much is drawn then.
func (g *Grant) Alloc(size int64) (*tier.Buffer, error) {
	b, err := g.r.Alloc(size)
	if err == nil {
		g.note()
	}
	return b, err
}

// note measures how much is drawn from the reservation.
func (g *Grant) note() {
	drawn := g.drawn()
	for {
		peak := g.peak.Load()
		if drawn <= peak || g.peak.CompareAndSwap(peak, drawn) {
			return
		}
	}
}

func (g *Grant) drawn() int64 { return max(0, g.r.Bytes()-g.r.Unused()) }

// InputsHere says that all inputs have been brought and that what is drawn now is
// theirs, which does not count for the peak.
func (g *Grant) InputsHere() {
	drawn := g.drawn()
	g.base.Store(drawn)
	g.peak.Store(drawn)
	g.here.Store(true)
}

// Peak returns the most that was drawn at once beside the inputs. It is measured by Alloc and by
// Peak: a caller that draws from the reservation itself calls Peak after a large draw.
func (g *Grant) Peak() int64 {
	if !g.over.Load() {
		g.note()
	}
	return max(0, g.peak.Load()-g.base.Load())
}

// Produced says that the task has made so many bytes of output. The sum is what is
// learned, unless Done says otherwise. A task that makes none says 0.
func (g *Grant) Produced(bytes int64) {
	g.output.Add(max(0, bytes))
	g.told.Store(true)
}

// measured is what the grant itself knows.
func (g *Grant) measured() Measured {
	m := Measured{Output: None}
	if g.told.Load() {
		m.Output = g.output.Load()
	}
	return m
}

// Done ends a task that has succeeded: the estimator learns from it, and everything
// is released. What the task has drawn and not freed stays until it is freed. A second
// end changes nothing and returns tier.ErrReleased (an invariants build panics).
func (g *Grant) Done(m Measured) error {
	if m.Input == 0 {
		m.Input = g.input
	}
	m.Peak = max(m.Peak, g.Peak())
	if err := g.Release(); err != nil {
		return err
	}
	g.a.panics.Do("Estimator.Observe", func() { g.a.rules.Estimator.Observe(g.operator, m) }) // the task has succeeded
	return nil
}

// Release is Done for a task from which nothing is to be learned.
func (g *Grant) Release() error {
	if g.over.Swap(true) {
		if invariants.Enabled {
			panic("admission: a grant was ended twice")
		}
		return fmt.Errorf("admission: the grant was %w", tier.ErrReleased)
	}
	a, s := g.a, g.r.Space()
	err := g.r.Release() // first, so that the woken waiter finds the room
	a.change(func() {
		a.mu.running--
		if a.mu.in[s]--; a.mu.in[s] == 0 {
			delete(a.mu.in, s)
		}
	})
	return err
}
