package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// defaultPeriod is the time between two steps when nothing wakes the monitor.
	defaultPeriod = 50 * time.Millisecond
	// idlePeriod is that while no space needs room: every need wakes the monitor.
	idlePeriod = time.Second
	// retryPeriods is how many periods pass at least before another list of moves is looked for
	// because of the pressure of a space from which nothing could leave.
	retryPeriods = 3
	// MinPeriod is the shortest period. A step takes about a microsecond for each space, so with a
	// shorter one steps would take more than a few hundredths of a core.
	MinPeriod = 100 * time.Microsecond
	// defaultMovesPerEdge lets one move read while the other writes.
	defaultMovesPerEdge = 2
	// MaxMovesPerEdge is the largest Config.MovesPerEdge: more than some tens only wait for each other.
	MaxMovesPerEdge = 1024
)

// Mover moves batches: convert.Mover.
type Mover interface {
	// Evict moves the first of these batches to a space, or several at once, as many from the first on as
	// it can move so in much less time for each. It returns the errors of those that it has tried to move,
	// at least of the first. reason is for events. Evict must not wait for room, nor for other users of
	// a batch: that is a *tier.NoSpaceError of the target, or a *batch.StateError, at once. An error that
	// matches batch.ErrUnmovable is about the batch alone: others are moved between the same spaces. After
	// any error the batch is whole where it was; and after an error of several, Evict may still move it
	// when it is passed alone.
	Evict(ctx context.Context, all []*batch.Batch, to tier.ID, reason string) []error
}

// Config describes a Monitor. Reservations and Mover are required.
type Config struct {
	Reservations *reservation.Manager
	Mover        Mover
	Policy       Policy // which batches go first; nil: CostAware
	// Period is the time between looks that nothing asked for, at least MinPeriod; 0: 50 ms. It is
	// a second while nothing is needed.
	Period       time.Duration
	MovesPerEdge int          // moves at once from one space to one other, at most MaxMovesPerEdge; 0: 2
	Logger       *slog.Logger // gets all events, normal ones at debug level; nil: nothing is logged
	// Events is called with PressureRose, PressureFell, Stuck, Unmovable and Lost, with no lock held:
	// Unmovable on the goroutines that move, several at once, and the others on Run's. The mover reports
	// the moves. Nil: none. It must not panic.
	//
	// Stuck is reported once, until the space has got what it needs or moves again; and once more when
	// the bytes at rest have risen from 0. Unmovable is reported once for each batch and form, and Lost
	// for each space.
	Events func(events.Event)
	// Changes returns another number when batches that could not be converted may be convertible;
	// nil: never.
	Changes func() uint64
	// Speed returns how many bytes a second a move makes from one space to another, 0 if that is
	// not known; nil: it never is.
	Speed func(from, to tier.ID) int64

	// WriteAhead copies a batch to a disk while it stays where it is, and returns how many bytes
	// that were, or with an error may have been; 0 without an error for one that is left out. An
	// error that matches context.Canceled means that others use the disks, or have within the time
	// quiet. AheadRate is how many bytes a second are copied so at most, while nothing is needed.
	// Nil, or 0: none.
	WriteAhead func(ctx context.Context, b *batch.Batch, quiet time.Duration) (bytes int64, err error)
	AheadRate  int64
}

func (c Config) validate() error {
	switch {
	case c.Reservations == nil:
		return errors.New("monitor: a reservation manager is required")
	case c.Mover == nil:
		return errors.New("monitor: a mover is required")
	case c.Period != 0 && c.Period < MinPeriod:
		return fmt.Errorf("monitor: a period of %v: want at least %v, or 0 for %v", c.Period, MinPeriod, defaultPeriod)
	case c.MovesPerEdge < 0 || c.MovesPerEdge > MaxMovesPerEdge:
		return fmt.Errorf("monitor: %d moves per edge: want 1 to %d, or 0 for %d",
			c.MovesPerEdge, MaxMovesPerEdge, defaultMovesPerEdge)
	}
	return nil
}

// Monitor keeps spaces below their marks, and makes room for waiters, by moving batches down. One
// serves all plans of an engine. Its batches are those that are made with it as their
// batch.Observer; it is a batch.Registrar too. It is safe for concurrent use. Evict and Clear work
// without Run; nothing else does.
type Monitor struct {
	cfg    Config
	spaces []*space
	byID   map[tier.ID]*space

	mu struct { // also guards the fields of each space that say so
		lockrank.Mutex[lockrank.Monitor]
		entries map[batch.ID]*entry
		faults  map[*entry]*fault // of the batches whose last moves failed
		due     time.Time         // when the first of their pauses ends; zero if there is none
		changes uint64            // what Config.Changes returned last
		stats   Stats             // of moves
	}
	looks, steps atomic.Int64 // for Stats

	wake    chan struct{} // take a step at once
	running atomic.Bool
	working sync.WaitGroup // goroutines of Run

	cleaner cleaner
}

// New returns a monitor of the manager's spaces.
func New(cfg Config) (*Monitor, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	switch cfg.Policy.(type) {
	case nil:
		cfg.Policy = CostAware()
	case costAware, ordered:
	default:
		cfg.Policy = guarded{cfg.Policy, &guard.Log{Logger: cfg.Logger}}
	}
	cfg.Period = cmp.Or(cfg.Period, defaultPeriod)
	cfg.MovesPerEdge = cmp.Or(cfg.MovesPerEdge, defaultMovesPerEdge)
	cfg.Logger = cmp.Or(cfg.Logger, slog.New(slog.DiscardHandler))
	if cfg.Speed == nil {
		cfg.Speed = func(from, to tier.ID) int64 { return 0 }
	}
	m := &Monitor{cfg: cfg, byID: make(map[tier.ID]*space), wake: make(chan struct{}, 1)}
	m.mu.entries, m.mu.faults = make(map[batch.ID]*entry), make(map[*entry]*fault)
	all := cfg.Reservations.Spaces().All()
	for i, s := range all {
		sp := &space{
			Space: s, place: i, edges: make([]edge, len(all)), token: make(chan struct{}, 1),
			victims: btree.NewG(16, isLess), small: btree.NewG(16, isLess), sizes: btree.NewG(16, isLess),
		}
		for _, to := range all {
			if to.Kind() > s.Kind() {
				sp.lower = sp.lower.With(to.Kind())
			}
		}
		m.byID[s.ID()], m.spaces = sp, append(m.spaces, sp)
	}
	return m, nil
}

// poke puts a token into c. It never blocks.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // a wake-up is already pending
	}
}

// Run watches until ctx ends, waits for the moves that are under way, which are
// cancelled, and returns the cause of ctx's end. It may be called again after
// that, but not while it runs.
func (m *Monitor) Run(ctx context.Context) error {
	if m.running.Swap(true) {
		return errors.New("monitor: Run is running already")
	}
	defer m.running.Store(false)
	defer m.working.Wait()
	labels.Monitor.Set()
	defer pprof.SetGoroutineLabels(ctx) // the caller's
	for _, s := range m.spaces {
		// It is called after changes, on any goroutine, and above the trigger at each reservation. It wakes
		// Run if the pressure reached the trigger or fell to the stop mark, if the space is lost, and if
		// more is used than a quota now allows.
		defer s.Subscribe(func(aboveTrigger bool) {
			switch {
			case aboveTrigger && s.aboveTrigger.Swap(true): // Run was woken before
			case aboveTrigger, s.Lost() != nil:
				poke(m.wake)
			case s.high.Load() || s.Quota != nil:
				now := s.State()
				if s.high.Load() && now.Pressure <= now.Stop || s.Quota != nil && now.Used() > now.Ceiling {
					poke(m.wake)
				}
			}
		})()
	}
	m.cleaner.pause, m.cleaner.needed = pause{}, time.Now() // it begins when the monitor has been idle for a while
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-time.After(m.step(ctx)):
		case <-m.wake:
		}
	}
	return context.Cause(ctx)
}

// step looks at all spaces. It starts to evict from those that are above their marks, and if none
// needs room, it pre-cleans. It returns the time until the next step.
//
// Requests evict for themselves (Evict). But while some wait, steps come each period, because nothing
// else reports what is stuck.
func (m *Monitor) step(ctx context.Context) time.Duration {
	now := time.Now()
	m.looks.Add(1)
	demand := m.cfg.Reservations.Demand(nil)
	needed := len(demand) > 0
	for _, s := range m.spaces {
		if err := s.Lost(); err != nil {
			if !s.gone {
				s.gone = true
				s.high.Store(false)
				m.report(slog.LevelDebug, "a space is lost", events.Event{Kind: events.Lost, To: s.ID(), Err: err})
			}
			continue
		}
		is := s.State()
		if over := is.Pressure - is.Stop; over > 0 && is.Cached > 0 {
			s.DropSharing(over) // what clean images keep is worth no move, and no warning
			is = s.State()
		}
		if is.Pressure < is.Trigger && s.aboveTrigger.Swap(false) {
			is = s.State() // from now on a crossing wakes the monitor; one before is seen here
		}
		pressure := is.Pressure
		isHigh := pressure >= is.Trigger || s.high.Load() && pressure > is.Stop
		if s.high.Swap(isHigh) != isHigh {
			e := events.Event{Kind: events.PressureFell, To: s.ID(), Bytes: pressure}
			level, text := slog.LevelDebug, "pressure fell to the stop mark"
			if isHigh {
				e.Kind, text = events.PressureRose, "pressure rose to the trigger"
			}
			if isHigh && s.lower == 0 { // a warning, once
				e.Text = "there is no slower tier"
				if !s.warned {
					s.warned, level = true, slog.LevelWarn
				}
			}
			m.report(level, text, e, slog.Int64("capacity", s.Capacity),
				slog.Int64("trigger", is.Trigger), slog.Int64("stop", is.Stop))
		}
		needed = needed || pressure >= is.Trigger || is.Used() > is.Ceiling
		dry := s.dry.Load()
		isDue := dry == nil || now.Sub(dry.begun) > retryPeriods*m.cfg.Period
		if m.excess(s) > 0 && isDue && !s.relieving.Swap(true) {
			m.working.Go(func() {
				labels.Move.Set()
				m.evictToStop(ctx, s)
			})
		}
		m.reportStuck(now, s, demand)
	}
	m.putBack(now)
	if c := &m.cleaner; needed { // pre-cleaning ends, and begins later
		if c.needed = now; c.cancel != nil {
			c.cancel()
		}
		return m.cfg.Period
	}
	m.preClean(ctx, now)
	return max(m.cfg.Period, idlePeriod)
}

// Each calls f with all batches, with no lock held. Those that come, or go, meanwhile may be left
// out.
func (m *Monitor) Each(f func(*batch.Batch)) {
	m.mu.Lock()
	all := slices.Collect(maps.Values(m.mu.entries))
	m.mu.Unlock()
	for _, e := range all {
		f(e.b)
	}
}

// Stats are counts since the monitor was made.
type Stats struct {
	Looks     int64 // at the spaces: each Config.Period, or each second while nothing is needed
	Steps     int64 // lists of moves that were looked for, by waiters and at a trigger
	Moves     int64 // that succeeded
	Bytes     int64 // that those freed
	NoRoom    int64 // moves that found no room after all
	Busy      int64 // moves that found the batch in use
	Unmovable int64 // moves of batches that could not be converted
	Failed    int64 // moves that failed otherwise
	Refused   int64 // waiters sent away because everything was full
}

// Stats returns what the monitor has done so far.
func (m *Monitor) Stats() Stats {
	m.mu.Lock()
	s := m.mu.stats
	m.mu.Unlock()
	s.Looks, s.Steps, s.Refused = m.looks.Load(), m.steps.Load(), m.cfg.Reservations.Waits().Refused
	return s
}

// Headroom returns how many bytes of a space requests leave free, so that consumers can fetch batches
// when all tiers are full of batches at rest: what the largest batch of the other spaces would take
// there, of those that have at most half of the space's bytes. It is 0 for a disk, where consumers fetch
// nothing. But a request leaves no more than what it does not need of spare, which is how many bytes
// would be free without the batches at rest, and without those that are being put. A
// reservation.Config needs it.
func (m *Monitor) Headroom(id tier.ID) (n, spare int64) {
	s := m.byID[id]
	if s == nil || s.Kind().IsStorage() {
		return 0, 0
	}
	var largest int64
	now := s.State()
	m.mu.Lock()
	for _, other := range m.spaces {
		if other == s || other.Lost() != nil {
			continue
		}
		other.sizes.DescendLessOrEqual(listed{key: Key{now.Ceiling / 2, 1}}, func(l listed) bool {
			largest = max(largest, l.e.size)
			return false
		})
	}
	rest := s.rest
	m.mu.Unlock()
	return s.Charge(largest), now.Ceiling - max(0, now.Used()-rest-m.cfg.Reservations.Arriving(s.ID()))
}
