package monitor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/pprof"
	"slices"
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
	// MinPeriod is the shortest period. A look takes about a microsecond for each space, so
	// with a shorter one looks would take more than a few hundredths of a core.
	MinPeriod = 100 * time.Microsecond
	// defaultMovesPerEdge lets one move read while the other writes.
	defaultMovesPerEdge = 2
	// MaxMovesPerEdge is the largest Config.MovesPerEdge. The monitor allocates room for the
	// results of all moves, and more than some tens only wait for each other.
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
	MovesPerEdge int // moves at once from one space to one other, at most MaxMovesPerEdge; 0: 2
	// StallTimeout is how long nothing may change before waiters for room that batches at rest fill
	// are refused; 0: 30 s, below 0: never.
	StallTimeout time.Duration
	Logger       *slog.Logger // gets all events, normal ones at debug level; nil: nothing is logged
	Events       Events       // called, too
	// Base returns the used bytes of a space that belong to no batch: the engine's own, and shared
	// dictionaries; nil: none.
	Base func(tier.ID) int64
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
// batch.Observer; it is a batch.Registrar too. It is safe for concurrent use; it does nothing until
// Run is called.
type Monitor struct {
	cfg    Config
	events eventList
	*index // is embedded for BatchChanged, Register and Knows
	spaces []*space
	byID   map[tier.ID]int

	wake    chan struct{} // a space needs room: take a step at once
	hint    chan struct{} // a change may help a stuck space, or crossed a mark: take a step soon
	starved atomic.Bool   // there is a stuck space, or a step is in progress
	needed  bool          // the last step found that a space needs room; Run's goroutine alone uses it
	running atomic.Bool
	outlook atomic.Pointer[outlook] // nil until a step has looked at what is needed
	stats   counters

	// Guarded by the index's mutex, as are the edges' failures.
	faults  map[*batch.Batch]*fault
	due     time.Time // when the first of the faults ends; zero if there is none
	changes uint64    // what Config.Changes returned last

	// The rest belongs to the goroutine of Run.
	ended     chan []result // of an executor
	executors sync.WaitGroup
	writing   writing
	last      time.Time // of the last step
	demand    []reservation.Demand
	again     []reservation.Demand
	choices   []reservation.Choice
	shortlist []Victim
	targets   []*tier.Space
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
	cfg.StallTimeout = cmp.Or(cfg.StallTimeout, reservation.StallTimeout)
	if cfg.Base == nil {
		cfg.Base = func(tier.ID) int64 { return 0 }
	}
	if cfg.Speed == nil {
		cfg.Speed = func(from, to tier.ID) int64 { return 0 }
	}
	m := &Monitor{
		cfg:    cfg,
		events: eventList{all: []Events{cfg.Events}},
		byID:   make(map[tier.ID]int),
		wake:   make(chan struct{}, 1),
		hint:   make(chan struct{}, 1),
		faults: make(map[*batch.Batch]*fault),
	}
	if cfg.Logger != nil {
		m.events.all = append(m.events.all, slogEvents(cfg.Logger))
	}
	var ids []tier.ID
	for i, s := range cfg.Reservations.Spaces().All() {
		ids = append(ids, s.ID())
		m.byID[s.ID()] = i
		sp := &space{
			Space: s, edges: make(map[int]*edge), clearing: make(chan struct{}, 1), freeing: make(chan struct{}, 1),
		}
		m.spaces = append(m.spaces, sp)
	}
	edges := 0
	for _, s := range m.spaces {
		for _, to := range s.below(cfg.Reservations.Spaces(), nil) {
			s.edges[m.byID[to.ID()]] = &edge{}
			s.lower = s.lower.With(to.Kind())
			edges++
		}
	}
	m.ended = make(chan []result, edges*cfg.MovesPerEdge) // room for all, so that no executor waits for Run
	m.writing.ended = make(chan written, 1)
	m.events.panics.Logger = cfg.Logger
	m.index = newIndex(cfg.Policy, ids, func(i int) decide.Kinds { return m.spaces[i].lower }, m.help)
	m.index.panics.Logger = cfg.Logger
	return m, nil
}

// help makes the monitor take a step soon if a space is stuck.
func (m *Monitor) help() {
	if m.starved.Load() {
		poke(m.hint)
	}
}

// wakeUp makes the monitor take a step at once.
func (m *Monitor) wakeUp() { poke(m.wake) }

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

// idlePeriod is the time between two steps while no space needs room: every need wakes the monitor.
// A retry that only waits for time to pass, as after a failed move, waits for the next need.
const idlePeriod = time.Second

// hintsPerPeriod bounds the steps in a period that hints make the monitor take.
const hintsPerPeriod = 16

func (m *Monitor) watch(ctx context.Context) {
	defer m.finishAll()
	m.stopWriting(time.Now()) // it begins when the monitor has been idle for a while
	for _, s := range m.spaces {
		defer s.Subscribe(func(pressed bool) { m.changed(s, pressed) })()
	}
	defer m.cfg.Reservations.OnEvict(func(context.Context, tier.ID, int64) { m.wakeUp() })()
	period := time.NewTicker(m.cfg.Period)
	defer period.Stop()
	gap := m.cfg.Period / hintsPerPeriod
	later := time.NewTimer(gap)
	defer later.Stop()
	wasIdle := false
	for ctx.Err() == nil {
		m.step(ctx)
		if idle := !m.needed && !m.writing.soon; idle != wasIdle {
			wasIdle = idle
			if period.Reset(m.cfg.Period); idle {
				period.Reset(max(idlePeriod, m.cfg.Period))
			}
		}
	wait:
		for {
			select {
			case <-ctx.Done():
			case <-period.C:
			case <-m.wake:
			case <-later.C:
			case r := <-m.ended:
				m.finish(r)
			case w := <-m.writing.ended:
				m.hasWritten(w)
			case <-m.hint:
				if early := gap - time.Since(m.last); early > 0 {
					later.Reset(early)
					continue wait
				}
			}
			break
		}
		m.drain()
	}
}

// drain notes all moves that have ended, so that the next step sees them together.
func (m *Monitor) drain() {
	for {
		select {
		case r := <-m.ended:
			m.finish(r)
		default:
			return
		}
	}
}

// finishAll ends a Run: nothing that it started is left.
func (m *Monitor) finishAll() {
	m.executors.Wait()
	m.drain()
	if m.writing.cancel != nil {
		m.hasWritten(<-m.writing.ended)
	}
	m.starved.Store(false)
	m.outlook.Store(nil)
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	for b := range m.faults {
		m.index.excludeLocked(b, "", 0)
	}
	clear(m.faults)
	m.due = time.Time{}
}

// changed is the monitor's subscription to a space: it is called after changes, on any goroutine.
// It wakes the monitor if the space is lost, if the pressure reached the trigger or fell to the
// stop mark, and if more is used than a quota now allows.
func (m *Monitor) changed(s *space, pressed bool) {
	switch {
	case pressed: // above the trigger each reservation calls this; only the first wakes the monitor
		if !s.pressed.Swap(true) {
			m.wakeUp()
		}
		return
	case s.Lost() != nil && !s.gone.Load():
		m.wakeUp()
	case s.high.Load() && s.PressureBytes() <= s.Stop(), s.Quota() != nil && s.Used() > s.Ceiling():
		poke(m.hint) // not at once, because each change may come here for a while
	}
	m.help()
}

// step collects what waits and what is used. If a space needs room it calls decide.Decide, begins
// the moves, and reports spaces that are stuck. Otherwise it pre-cleans.
func (m *Monitor) step(ctx context.Context) {
	now := time.Now()
	m.last = now
	m.demand = m.cfg.Reservations.Demand(m.demand[:0])
	needed := len(m.demand) > 0
	for _, d := range m.demand {
		m.dropSharingOf(m.spaces[m.byID[d.Space]], d.Bytes)
	}
	for _, s := range m.spaces {
		if m.isLost(s) {
			continue
		}
		m.dropSharingOf(s, s.PressureBytes()-s.Stop()) // what copies keep is worth no move, and no warning
		pressure, pressing, changed := s.pressing()
		if changed {
			m.events.pressure(Pressure{
				Space: s.ID(), Bytes: pressure, Capacity: s.Capacity(), Trigger: s.Trigger(), Stop: s.Stop(),
				Above: s.high.Load(), Lowest: len(s.edges) == 0,
			})
		}
		needed = needed || pressing || s.Used() > s.Ceiling()
	}
	m.putBack(now)
	m.needed = needed
	m.stats.add(&m.stats.Looks, 1)
	if !needed {
		m.rest()
		m.writeAhead(ctx, now)
		return
	}
	m.stopWriting(now)
	// From here on changes send hints, so that none is missed between this step and the next wait.
	m.starved.Store(true)
	m.stats.add(&m.stats.Steps, 1)
	var long []int
	for try := 0; ; {
		state := m.observe(now, long)
		d := decide.Decide(state)
		if len(d.Cut) > 0 {
			long = append(long, d.Cut...)
			continue
		}
		if m.begin(ctx, d.Moves) && try < 3 {
			try++
			continue // a batch had changed, and the index is up to date now
		}
		if (len(d.Stuck) > 0 || d.Held) && m.dropSharing(state) {
			continue
		}
		m.starved.Store(len(d.Stuck) > 0 || d.Held)
		o := make(outlook, len(m.spaces))
		for i, relief := range decide.Relief(state, d) {
			o[i] = prospect{relief, m.spaces[i].version}
		}
		m.outlook.Store(&o)
		m.reportStuck(now, state, d.Stuck)
		m.refuse(now, state)
		m.cfg.Reservations.Reconsider()
		return
	}
}

// dropSharing drops clean images that keep shared dictionaries in use, in the spaces where victims
// find no room: as many as one victim needs. It reports whether there is more room now.
func (m *Monitor) dropSharing(state decide.Snapshot) (freed bool) {
	first := len(m.spaces) // with waiters
	for _, d := range m.demand {
		first = min(first, m.byID[d.Space])
	}
	for i := first + 1; i < len(m.spaces); i++ {
		s := m.spaces[i]
		before := s.Used()
		m.dropSharingOf(s, state.Missing(first, i))
		freed = freed || s.Used() < before
	}
	return freed
}

// dropSharingOf drops such clean images of one space until bytes are free. It does so on another
// goroutine, because for batches that persist it waits for the disk's journal, and itself waits for
// at most a period. Only one such goroutine runs for a space.
func (m *Monitor) dropSharingOf(s *space, bytes int64) {
	if bytes <= 0 || s.Usage().Cached == 0 {
		return
	}
	select {
	case s.freeing <- struct{}{}:
	default:
		return
	}
	done := make(chan struct{})
	m.executors.Add(1)
	go func() {
		labels.DropCopies.Set()
		defer m.executors.Done()
		defer func() { <-s.freeing; close(done) }()
		s.DropSharing(bytes)
	}()
	late := time.NewTimer(m.cfg.Period)
	defer late.Stop()
	select {
	case <-done:
	case <-late.C:
	}
}

// rest resets what only counts while a space needs room.
func (m *Monitor) rest() {
	m.starved.Store(false)
	m.outlook.Store(nil)
	for _, s := range m.spaces {
		s.stuckSince, s.stuckFor, s.linger.since = time.Time{}, "", time.Time{}
	}
	m.forgive()
}

// begin starts the moves that Decide chose, on new goroutines: one for each executor, which moves
// its batches one after the other. It returns whether a batch had changed, so that its move was not
// begun.
func (m *Monitor) begin(ctx context.Context, moves []decide.Move) (outdated bool) {
	var jobs [][]choice
	type executor struct {
		edge *edge
		slot int
	}
	at := make(map[executor]int, 2) // the index in jobs
	for _, move := range moves {
		c := choice{m.shortlist[move.Victim.N], move.From, move.To, move.Reason}
		b := c.Victim.Batch
		from, to := m.spaces[c.From], m.spaces[c.To]
		e := from.edges[c.To]
		if now := b.Info(); !m.canLeave(now, from.ID()) {
			_ = m.index.note(b, &now, false)
			outdated = true
			continue
		}
		m.index.setAside(b, true)
		from.leaving += c.Victim.Bytes
		from.moving++
		to.moving++
		if i, ok := at[executor{e, move.Slot}]; ok {
			jobs[i] = append(jobs[i], c)
			continue
		}
		e.underWay++
		at[executor{e, move.Slot}] = len(jobs)
		jobs = append(jobs, []choice{c})
	}
	for _, job := range jobs {
		m.executors.Add(1)
		go func() {
			labels.Move.Set()
			m.execute(ctx, job)
		}()
	}
	return outdated
}

// choice is a move that was decided on.
type choice struct {
	Victim   Victim
	From, To int // indexes in Monitor.spaces
	Reason   string
}

// result is the end of a move.
type result struct {
	choice
	usedBefore int64 // in the target, when the move began
	err        error
}

// execute moves the batches of a job, which all have one edge and one reason. It runs on a
// goroutine of its own. It moves small ones to a disk together until one of these fails, and then
// each alone, so that each error concerns its batch. It does not begin the remaining moves
// (errGivenBack) after one that failed alone, when the job has taken longer than jointlyFor, or
// when no waiter needs them any more.
func (m *Monitor) execute(ctx context.Context, job []choice) {
	defer m.executors.Done()
	from, to := m.spaces[job[0].From].ID(), m.spaces[job[0].To].ID()
	results := make([]result, len(job))
	of := pprof.Labels(labels.Key, labels.Move.String(),
		"edge", from.String()+"→"+to.String(), "reason", job[0].Reason)
	pprof.Do(ctx, of, func(ctx context.Context) {
		begin := time.Now()
		mover, together := m.cfg.Mover.(joiner)
		together = together && to.Kind == tier.Disk
		done := make([]bool, len(job))
		for i, c := range job {
			results[i] = result{choice: c, usedBefore: m.spaces[c.To].Used()}
			if done[i] {
				continue
			}
			if i > 0 {
				late := results[i-1].err != nil || time.Since(begin) > jointlyFor
				if late || !m.wanted(c) || !m.canLeave(c.Victim.Batch.Info(), from) {
					results[i].err = errGivenBack
					continue
				}
			}
			if together {
				if n := m.countTogether(mover, job[i:]); n >= 2 {
					for k, err := range m.moveTogether(ctx, mover, job[i:i+n]) {
						done[i+k] = err == nil
						together = together && err == nil
					}
				}
			}
			if !done[i] {
				results[i].err = m.move(ctx, c.Victim, from, to, c.Reason)
			}
		}
	})
	m.ended <- results
}

// wanted reports whether a move is still needed. One for demand is while requests wait in its space
// or a faster one; one for the trigger always is.
func (m *Monitor) wanted(c choice) bool {
	fastEnough := func(d reservation.Demand) bool { return m.byID[d.Space] <= c.From }
	return c.Reason != decide.Demand || slices.ContainsFunc(m.cfg.Reservations.Demand(nil), fastEnough)
}

// canLeave reports whether a batch may still be moved out of a space.
func (m *Monitor) canLeave(now batch.Info, from tier.ID) bool {
	return movable(&now) && !now.Leased && now.Space == from
}

// errGivenBack is the result of a move that execute did not begin.
var errGivenBack = errors.New("monitor: the move was not begun")

// move moves one batch and reports it. A panic of the mover is an error of the move, because
// nothing else would end it.
func (m *Monitor) move(ctx context.Context, v Victim, from, to tier.ID, reason string) error {
	mv := Move{Batch: v.ID, From: from, To: to, Bytes: v.Bytes, Reason: reason}
	m.events.moveBegun(mv)
	start := time.Now()
	err := func() (err error) {
		defer guard.Error(&err, "the mover")
		return m.cfg.Mover.Relieve(ctx, v.Batch, to, reason)
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

// finish notes the end of what an executor did.
func (m *Monitor) finish(job []result) {
	m.spaces[job[0].From].edges[job[0].To].underWay--
	for _, r := range job {
		m.finishMove(r)
	}
}

func (m *Monitor) finishMove(r result) {
	now := time.Now()
	b := r.Victim.Batch
	from, to := m.spaces[r.From], m.spaces[r.To]
	e := from.edges[r.To]
	from.leaving -= r.Victim.Bytes
	from.moving--
	to.moving--
	if r.err == errGivenBack {
		m.index.setAside(b, false)
		return
	}
	kind := kindOf(r.err, to.ID())
	m.stats.count(kind, r.Victim.Bytes)
	switch kind {
	case moved:
		m.index.mu.Lock()
		e.failures = 0
		if m.faults[b] != nil {
			delete(m.faults, b)
			m.index.excludeLocked(b, "", 0)
		}
		m.index.mu.Unlock()
		if r.Victim.Bytes >= to.refusal.bytes {
			to.refusal = refusal{}
		}
	case noRoom:
		to.refusal.note(now, m.cfg.Period, r.Victim.Bytes, max(r.usedBefore, to.Used()))
		to.refusal.why = causeOf(r.err)
	case busy, failed, unmovable:
		m.fault(r, kind, now)
	}
	m.index.setAside(b, false)
}

// ErrEnding is matched by the error of a move that was broken off because the context of Run, or
// of Clear, ended: nothing has failed.
var ErrEnding = errors.New("monitor: the monitor is ending")

// Stats are counts since the monitor was made.
type Stats struct {
	Looks     int64 // at the spaces: each Config.Period, or each second while nothing is needed
	Steps     int64 // looks that found something to do
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
	return m.stats.Stats
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
