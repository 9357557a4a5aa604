package monitor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/pprof"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

const (
	// defaultPeriod is the time between two steps when nothing wakes the monitor.
	defaultPeriod = 50 * time.Millisecond
	// MinPeriod is the shortest period. A step takes about a microsecond for each space, so with a
	// shorter one steps would take more than a few hundredths of a core.
	MinPeriod = 100 * time.Microsecond
	// defaultMovesPerEdge lets one move read while the other writes.
	defaultMovesPerEdge = 2
	// MaxMovesPerEdge is the largest Config.MovesPerEdge: more than some tens only wait for each other.
	MaxMovesPerEdge = 1024
)

// Mover moves one batch. convert.Mover.Inside returns the engine's.
type Mover interface {
	// Relieve brings b to a space; reason is for events. It must not wait for room, nor for other
	// users of the batch: that is a *tier.NoSpaceError of the target, or a *batch.StateError, at
	// once. An error that matches batch.ErrUnmovable is about the batch alone: others are moved
	// between the same spaces. After any error the batch is whole where it was.
	Relieve(ctx context.Context, b *batch.Batch, to tier.ID, reason string) error
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
	Events       Events       // called, too
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
	events eventList
	*index // is embedded for BatchChanged, Register and Knows
	spaces []*space
	byID   map[tier.ID]int
	stats  counters

	wake    chan struct{} // take a step at once
	running atomic.Bool
	working sync.WaitGroup // goroutines of Run

	// Guarded by the index's mutex, as are the edges and refusals of the spaces.
	faults  map[*batch.Batch]*fault
	due     time.Time // when the first of their pauses ends; zero if there is none
	changes uint64    // what Config.Changes returned last

	writing writing // Run's
}

// New returns a monitor of the manager's spaces.
func New(cfg Config) (*Monitor, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Policy == nil {
		cfg.Policy = CostAware()
	}
	if cfg.Period == 0 {
		cfg.Period = defaultPeriod
	}
	if cfg.MovesPerEdge == 0 {
		cfg.MovesPerEdge = defaultMovesPerEdge
	}
	if cfg.Speed == nil {
		cfg.Speed = func(from, to tier.ID) int64 { return 0 }
	}
	m := &Monitor{
		cfg: cfg, events: eventList{all: []Events{cfg.Events}}, byID: make(map[tier.ID]int),
		wake: make(chan struct{}, 1), faults: make(map[*batch.Batch]*fault),
	}
	m.events.panics.Logger = cfg.Logger
	if cfg.Logger != nil {
		m.events.all = append(m.events.all, slogEvents(cfg.Logger))
	}
	all := cfg.Reservations.Spaces().All()
	for i, s := range all {
		m.byID[s.ID()] = i
		sp := &space{Space: s, place: i, edges: make(map[int]*edge), token: make(chan struct{}, 1)}
		for j, to := range all {
			if to.Kind() > s.Kind() {
				sp.edges[j] = &edge{}
				sp.lower = sp.lower.With(to.Kind())
			}
		}
		m.spaces = append(m.spaces, sp)
	}
	m.writing.ended = make(chan written, 1)
	m.index = newIndex(cfg.Policy, m.spaces, m.gained)
	m.index.panics.Logger = cfg.Logger
	return m, nil
}

// gained wakes waiters that a new victim of a space may help: those for the space, and for faster
// ones, whose batches may take its place.
func (m *Monitor) gained(place int) {
	for _, s := range m.spaces {
		if s.place == place || s.Kind() < m.spaces[place].Kind() {
			m.cfg.Reservations.Wake(s.ID())
		}
	}
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
	pprof.Do(ctx, pprof.Labels(labels.Key, labels.Monitor.String()), m.watch)
	return context.Cause(ctx)
}

// retryPeriods is after how many periods a space is looked at again from which nothing could leave.
const retryPeriods = 4

// idlePeriod is the time between two steps while no space needs room: every need wakes the monitor.
const idlePeriod = time.Second

func (m *Monitor) watch(ctx context.Context) {
	defer m.stop()
	m.stopWriting(time.Now()) // it begins when the monitor has been idle for a while
	for _, s := range m.spaces {
		defer s.Subscribe(func(pressed bool) { m.changed(s, pressed) })()
	}
	period := time.NewTicker(m.cfg.Period)
	defer period.Stop()
	wasIdle := false
	for ctx.Err() == nil {
		needed := m.step(ctx)
		if idle := !needed && !m.writing.soon; idle != wasIdle {
			wasIdle = idle
			if period.Reset(m.cfg.Period); idle {
				period.Reset(max(idlePeriod, m.cfg.Period))
			}
		}
		select {
		case <-ctx.Done():
		case <-period.C:
		case <-m.wake:
		case w := <-m.writing.ended:
			m.hasWritten(w)
		}
	}
}

// stop ends a Run: no goroutine that it started is left.
func (m *Monitor) stop() {
	m.working.Wait()
	if m.writing.cancel != nil {
		m.hasWritten(<-m.writing.ended)
	}
}

// changed is the monitor's subscription to a space: it is called after changes, on any goroutine.
// It wakes Run if the space is lost, if the pressure reached the trigger or fell to the stop mark,
// and if more is used than a quota now allows.
func (m *Monitor) changed(s *space, pressed bool) {
	switch {
	case pressed: // above the trigger each reservation calls this; only the first wakes the monitor
		if !s.pressed.Swap(true) {
			poke(m.wake)
		}
	case s.high.Load() && s.PressureBytes() <= s.Stop(), s.Lost() != nil, s.Quota() != nil && s.Used() > s.Ceiling():
		poke(m.wake)
	}
}

// step looks at all spaces. It starts to evict from those that are above their marks, and reports
// whether any needs room. If none does, it pre-cleans.
func (m *Monitor) step(ctx context.Context) (needed bool) {
	now := time.Now()
	m.stats.add(&m.stats.Looks, 1)
	demand := m.cfg.Reservations.Demand(nil)
	needed = len(demand) > 0
	for _, s := range m.spaces {
		if err := s.Lost(); err != nil {
			if !s.gone {
				s.gone = true
				s.high.Store(false)
				m.events.lost(Lost{Space: s.ID(), Err: err})
			}
			continue
		}
		if over := s.PressureBytes() - s.Stop(); over > 0 && s.Usage().Cached > 0 {
			s.DropSharing(over) // what clean images keep is worth no move, and no warning
		}
		pressure := s.PressureBytes()
		if pressure < s.Trigger() && s.pressed.Swap(false) {
			pressure = s.PressureBytes() // from now on a crossing wakes the monitor; one before is seen here
		}
		isHigh, was := pressure >= s.Trigger() || s.high.Load() && pressure > s.Stop(), s.high.Load()
		s.high.Store(isHigh)
		if isHigh != was {
			m.events.pressure(Pressure{
				Space: s.ID(), Bytes: pressure, Capacity: s.Capacity(), Trigger: s.Trigger(), Stop: s.Stop(),
				Above: isHigh, Lowest: s.lower == 0,
			})
		}
		needed = needed || pressure >= s.Trigger() || s.Used() > s.Ceiling()
		again := !s.dry.Load() || now.Sub(s.relieved) >= retryPeriods*m.cfg.Period
		if m.excess(s) > 0 && again && !s.relieving.Swap(true) {
			s.relieved = now
			m.working.Add(1)
			go func() {
				labels.Move.Set()
				m.relieve(ctx, s)
			}()
		}
		m.reportStuck(now, s, demand)
	}
	m.putBack(now)
	if !needed {
		m.writeAhead(ctx, now)
		return false
	}
	m.stopWriting(now)
	return true
}

// reportStuck reports once that a space needs room and nothing can be moved for it, when that has
// been so for a period. It reports it again if work in progress was to free room then, and the
// batches at rest are not in use now.
func (m *Monitor) reportStuck(now time.Time, s *space, demand []reservation.Demand) {
	w := Stuck{Space: s.ID(), Used: s.Used(), Limit: s.Limit(), Capacity: s.Capacity()}
	for _, d := range demand {
		if lack := d.Bytes - s.Available(); d.Space == s.ID() && lack > 0 {
			w.Reason, w.Need, w.Waiters = decide.Demand, min(lack, s.Limit()), d.Waiters
		}
	}
	if over := m.excess(s); w.Need == 0 && over > 0 {
		w.Reason, w.Need = decide.Trigger, max(s.PressureBytes()-s.Trigger()+1, s.Used()-s.Ceiling())
	}
	if w.Need <= 0 || !s.dry.Load() {
		s.stuckSince, s.stuckFor, s.stuckIdle = time.Time{}, "", false
		return
	}
	if s.stuckSince.IsZero() {
		s.stuckSince = now
	}
	w.Resting = m.index.summary(s.place).idle
	reported := (s.stuckFor == w.Reason || s.stuckFor == decide.Demand) && (s.stuckIdle || w.Resting == 0)
	if reported || now.Sub(s.stuckSince) < m.cfg.Period {
		return
	}
	if s.stuckFor != decide.Demand {
		s.stuckFor = w.Reason
	}
	s.stuckIdle = s.stuckIdle || w.Resting > 0
	for _, t := range s.below(m) {
		w.Below = append(w.Below, Room{Space: t.ID(), Available: max(0, t.Ceiling()-t.Used())})
	}
	m.events.stuck(w)
}

// move moves one batch and reports it. A panic of the mover is an error of the move, because
// nothing else would end it.
func (m *Monitor) move(ctx context.Context, v Victim, from, to *space, reason string) error {
	mv := Move{Batch: v.ID, From: from.ID(), To: to.ID(), Bytes: v.Bytes, Reason: reason}
	m.events.moveBegun(mv)
	start := time.Now()
	err := func() (err error) {
		defer guard.Error(&err, "the mover")
		return m.cfg.Mover.Relieve(ctx, v.Batch, to.ID(), reason)
	}()
	err = ofEnding(ctx, err)
	m.events.moveEnded(mv, time.Since(start), err)
	return err
}

// ofEnding wraps the error of a move in ErrEnding if ctx has ended. It does not look at the error
// itself, because a file system may return context.Canceled for reasons of its own.
func ofEnding(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ErrEnding, err)
	}
	return err
}

// Each calls f with all batches, with no lock held. Those that come, or go, meanwhile may be left
// out.
func (m *Monitor) Each(f func(*batch.Batch)) {
	m.index.mu.Lock()
	for _, e := range m.index.mu.entries {
		m.index.mu.Unlock()
		f(e.b)
		m.index.mu.Lock()
	}
	m.index.mu.Unlock()
}

// ErrEnding is matched by the error of a move that was broken off because the context of Run, Evict
// or Clear ended: nothing has failed.
var ErrEnding = errors.New("monitor: the move is not needed any more")

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
	m.stats.Lock()
	defer m.stats.Unlock()
	now := m.stats.Stats
	now.Refused = m.cfg.Reservations.Waits().Refused
	return now
}

// counters are the Stats so far. The mutex is a leaf.
type counters struct {
	sync.Mutex
	Stats
}

func (c *counters) add(n *int64, by int) {
	c.Lock()
	defer c.Unlock()
	*n += int64(by)
}

func (c *counters) count(kind outcome, bytes int64) {
	c.Lock()
	defer c.Unlock()
	switch kind {
	case moved:
		c.Moves++
		c.Bytes += bytes
	case noRoom:
		c.NoRoom++
	case busy:
		c.Busy++
	case unmovable:
		c.Unmovable++
	case failed:
		c.Failed++
	}
}
