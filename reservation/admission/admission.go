// Package admission decides which tasks may start. A task states the memory that it will need.
// It starts when so much is reserved for it, so that tasks that run together fit together.
//
//	Estimate -- input, output, overhead --> Admitter -- Grant --> task -- draws --> Reservation
//	   ^                                    |      ^               |
//	   | twice as much, after               |      +-- Measured ---+
//	   + running out of memory              |
//	                                        +-- reserves --> reservation.Manager
//	                                        +-- learns ----> Estimator
//
// # The rule
//
// A task is a reservation with inputs. Its need in a space is the bytes of its inputs that are not
// there yet, plus its output, plus its overhead, as the space charges them. It may start if
//
//	need ≤ min(threshold × capacity − external, limit) − used
//
// or if no task runs in the space and the need can be reserved: then it is admitted alone. No more
// tasks run at once than there are threads. The need is reserved, and counts as used for all
// requests from then on.
//
// The inputs are known, and so are output and overhead if the caller states them. A task is refused
// if these do not fit in any space, even if that were empty. Estimates of the Estimator and of Run
// are guesses. A guess above the largest space counts as the size of that space.
//
// # Order
//
// Tasks wait in one queue (internal/fairqueue) in the order of arrival. Only the oldest, the head,
// waits in the manager: it stands in the line of each candidate space, so the monitor sees its
// demand and makes room. While the head cannot start, younger tasks that fit may bypass it,
// Rules.Bypass of them. After that only the head is admitted. The count starts again with each
// head. So a head that is larger than the threshold gets its turn: the running tasks end, and then
// no task runs in some space.
//
// The goroutine of Admit does all the work for its waiter, which is in one of three states:
//
// Looking. It plans its need in each space. If it is the waiter to serve next, it tries to reserve
// that. Before a waiter has looked for the first time it counts as one that fits, so no
// younger task starts before it.
//
// Asleep. It cannot start, and sleeps until its bell is rung. Each change rings the head and the
// waiter that fairqueue serves next according to the last plans. A change is the end of a task or
// of a wait, a new threshold or number of threads, a release of bytes, a new limit, or the loss of
// a space. A waiter that looks and is not the one to serve next rings that one.
//
// Reserving. The head waits in Manager.Reserve. It asks for its need and for the bytes between the
// threshold and the limit, which it gives back at once. So it is served when its need fits under
// the threshold. A change interrupts the wait only if the head has to ask for more or for less now.
//
// A wait ends with the grant, with its context, by Close, or with the error with which the
// reservation ended: tier.ErrNoSpace when the monitor has found that nothing could ever become free
// and no task runs.
//
// # Tasks that run out of memory
//
// Run admits and runs a function, and retries it with a higher estimate when that ran out of
// memory: at most Rules.MaxAttempts times. The function restores the inputs when it fails, and Run
// releases the grant before it asks for the next one.
//
// # Ownership
//
// The caller of Admit owns the Grant and must end it once, by Done or Release. It holds a thread
// and a reservation, from which buffers are drawn. The buffers may outlive it. An Admitter owns
// neither the spaces nor the reservations' manager, and starts no goroutines. Close it before the
// manager.
//
// # Locks
//
// The mutexes of Admitter, Grant and Ratios are of rank Reservation. None of them is held together
// with another of that rank. Under the Admitter's, only counters of spaces are read, and under a
// Grant's only counters of its reservation. Strategies, estimators, inputs and tasks are called
// with no lock held.
//
//	… → Batch → Registry → [Reservation] → Space → …
package admission

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/fairqueue"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// defaultThreshold is the share of a space's capacity that tasks are admitted up to.
const defaultThreshold = 0.9

// Rules decide which tasks may start. The zero value means the defaults.
type Rules struct {
	// Strategy names the spaces that tasks may run in whose Estimate names none; nil means any GPU.
	// If a task needs the same in several spaces, it takes the first of them that has room.
	Strategy reservation.Strategy
	// Threshold is the share of a space's capacity that tasks are admitted up to: above 0 and at
	// most 1; 0 means 0.9. The space's own limit holds as well.
	Threshold float64
	// Threads is how many tasks run at once at most; 0 means GOMAXPROCS, because each task has a
	// goroutine that works.
	Threads int
	// Bypass is how many tasks may bypass the oldest that waits and cannot start yet; 0 means 16.
	// Below 0, no task may.
	Bypass int
	// MaxAttempts is how often Run tries a task; 0 means 10.
	MaxAttempts int
	// Estimator estimates the output and overhead of tasks; nil means Ratios.
	Estimator Estimator
	// Policy applies when a task draws more than was reserved for it.
	Policy reservation.LimitPolicy
}

// Validate returns the error that New would return for the rules, except for an invalid Policy.
func (r Rules) Validate() error {
	if r.Threads < 0 || r.MaxAttempts < 0 {
		return fmt.Errorf("admission: %d threads and %d attempts: neither may be negative", r.Threads, r.MaxAttempts)
	}
	return checkThreshold(cmp.Or(r.Threshold, defaultThreshold))
}

func checkThreshold(f float64) error {
	if f > 0 && f <= 1 { // neither holds for NaN
		return nil
	}
	return fmt.Errorf("admission: a threshold of %v must be above 0 and at most 1", f)
}

// Config describes an Admitter. Reservations is required.
type Config struct {
	Reservations *reservation.Manager
	Rules        Rules
	// Logger gets the panics of the Estimator; nil means slog.Default.
	Logger *slog.Logger
}

// Admitter decides which tasks may start, by the rule in the package doc. It is safe for concurrent
// use. It must be closed.
type Admitter struct {
	reservations *reservation.Manager
	rules        Rules     // with defaults; mu guards Threshold and Threads
	panics       guard.Log // of the estimator
	cancels      []func()  // end the subscriptions to the spaces
	closed       atomic.Bool

	mu      lockrank.Mutex[lockrank.Reservation] // guards all below
	waiting fairqueue.Queue[*waiter]
	running map[*tier.Space]int // how many tasks run in each space
	stats   Stats               // except for Waiting
}

// Stats count tasks and attempts.
type Stats struct {
	Running  int
	Waiting  int
	Admitted int64 // tasks that started
	Alone    int64 // of them only because no task ran in their space
	Passed   int64 // of them before an older one
	Retried  int64 // attempts that ran out of memory and were followed by another
}

// New returns an admitter. The caller keeps the manager, and closes it afterwards.
func New(cfg Config) (*Admitter, error) {
	m, rules := cfg.Reservations, cfg.Rules
	if m == nil {
		return nil, errors.New("admission: a reservation manager is required")
	}
	if err := rules.Validate(); err != nil {
		return nil, err
	}
	// An invalid policy is an error of each request.
	nothing, err := m.TryReserve(reservation.AnyInTier(tier.Disk), 0, &reservation.Options{Policy: rules.Policy})
	if err != nil && !errors.Is(err, reservation.ErrNoCandidate) {
		return nil, fmt.Errorf("admission: Policy: %w", err)
	}
	_ = nothing.Release()
	rules.Strategy = cmp.Or(rules.Strategy, reservation.AnyInTier(tier.GPU))
	rules.Threshold = cmp.Or(rules.Threshold, defaultThreshold)
	rules.Threads = cmp.Or(rules.Threads, runtime.GOMAXPROCS(0))
	rules.MaxAttempts = cmp.Or(rules.MaxAttempts, 10)
	rules.Estimator = cmp.Or[Estimator](rules.Estimator, new(Ratios))
	a := &Admitter{
		reservations: m,
		rules:        rules,
		panics:       guard.Log{Logger: cfg.Logger},
		waiting:      fairqueue.Queue[*waiter]{Bypass: max(0, cmp.Or(rules.Bypass, 16))},
		running:      make(map[*tier.Space]int),
	}
	for _, s := range m.Spaces().All() {
		a.cancels = append(a.cancels, s.Subscribe(func(aboveTrigger bool) {
			if !aboveTrigger {
				a.change(func() {})
			}
		}))
	}
	return a, nil
}

// SetThreshold changes the share of a space's capacity that tasks are admitted up to: above 0 and
// at most 1. Running tasks go on.
func (a *Admitter) SetThreshold(f float64) error {
	if err := checkThreshold(f); err != nil {
		return err
	}
	a.change(func() { a.rules.Threshold = f })
	return nil
}

// SetThreads changes how many tasks run at once at most: 1 or more. Running tasks go on.
func (a *Admitter) SetThreads(n int) error {
	if n < 1 {
		return fmt.Errorf("admission: %d threads: there must be one at least", n)
	}
	a.change(func() { a.rules.Threads = n })
	return nil
}

// change makes a change that may let tasks start, and wakes waiters: the head, and the one to serve
// next.
func (a *Admitter) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	head := a.waiting.Head()
	if head != nil && !a.mayStartLocked(head.plans) {
		head.interrupt()
	}
	ring(head)
	ring(a.waiting.Next(a.fitsLocked))
}

// Close ends all waits with tier.ErrClosed, and Admit returns that error from now on. Grants stay
// good and must be ended. A second Close returns tier.ErrClosed.
func (a *Admitter) Close() error {
	if a.closed.Swap(true) {
		return tier.ErrClosed
	}
	a.change(func() {}) // the head leaves, and rings the next one
	for _, cancel := range a.cancels {
		cancel()
	}
	return nil
}

// Stats returns a consistent picture.
func (a *Admitter) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := a.stats
	s.Waiting = len(a.waiting.Waiters)
	return s
}

// Strategy returns Rules.Strategy.
func (a *Admitter) Strategy() reservation.Strategy { return a.rules.Strategy }

// Estimator returns the estimator of the output and overhead of tasks.
func (a *Admitter) Estimator() Estimator { return a.rules.Estimator }
