package monitor

import (
	"context"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// space is what the monitor keeps of a space.
type space struct {
	*tier.Space
	place int
	lower decide.Kinds // the tiers of the slower spaces

	// token holds a value while batches are evicted from the space. Tokens of several spaces are
	// taken from the fastest to the slowest.
	token chan struct{}
	asked atomic.Bool // a waiter found the token taken: it is woken when the token is free
	dry   atomic.Bool // the last try to evict from the space moved nothing, and nothing was coming

	pressed   atomic.Bool // Run was woken because the trigger was reached
	high      atomic.Bool // the pressure was at the trigger, and has not been at the stop mark since
	relieving atomic.Bool // Run's goroutine for the space is at work

	// Guarded by the index's mutex.
	edges   map[int]*edge // by the place of the target
	refusal refusal

	// Run's.
	gone       bool      // the event of the space's loss was sent
	relieved   time.Time // when it was last tried to evict batches for the pressure
	stuckSince time.Time
	stuckFor   string   // the reason that was reported; "" if none was
	stuckIdle  bool     // and with it batches that could have been moved
	covered    coverage // when all that is above the stop mark had copies
	search     search   // for batches to pre-clean
}

// below returns the spaces to which batches may be evicted from here: those of the next slower tier
// first, within a tier the nearest first.
func (s *space) below(m *Monitor) (all []*space) {
	var room [16]*tier.Space
	to := room[:0]
	for k := s.Kind() + 1; k.Valid(); k++ {
		to = reservation.ToDowngrade(s.ID(), k).Candidates(m.cfg.Reservations.Spaces(), to)
	}
	for _, t := range to {
		if t.Lost() == nil {
			all = append(all, m.spaces[m.byID[t.ID()]])
		}
	}
	return all
}

// coming returns how many bytes of the space will be free without a move: the device still works on
// them.
func (s *space) coming() int64 { return max(0, s.Usage().Retired-s.Unsure()) }

// take waits for the space's token. It returns false if ctx has ended.
func (s *space) take(ctx context.Context) bool {
	select {
	case s.token <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// give returns the token of a space, and wakes a waiter that found it taken.
func (m *Monitor) give(s *space) {
	<-s.token
	if s.asked.Swap(false) {
		m.cfg.Reservations.Wake(s.ID())
	}
}

// Evict moves batches at rest out of a space, for a request that lacks bytes there. It works on the
// caller's goroutine, returns after one list of moves, and waits for no release. While batches are
// evicted from the space for somebody else it returns at once. If ctx ends, the moves in progress
// are aborted and their batches are whole where they were. A reservation.Config needs it. It must
// be called with no lock held.
func (m *Monitor) Evict(ctx context.Context, id tier.ID, bytes int64) (e reservation.Eviction) {
	place, known := m.byID[id]
	if !known || m.spaces[place].Lost() != nil || ctx.Err() != nil {
		return e
	}
	s := m.spaces[place]
	select {
	case s.token <- struct{}{}:
	default:
		s.asked.Store(true)
		select {
		case s.token <- struct{}{}: // it was given back just now
		default:
			return reservation.Eviction{Coming: true}
		}
	}
	defer m.give(s)
	// The moves are not the waiter's: they have neither its owner nor its origin.
	moving, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() {
		labels.Cancel.Set()
		cancel(context.Cause(ctx))
	})()
	coming := s.coming()
	if coming < bytes {
		e.Moved, e.Again = m.evict(moving, s, bytes-coming, decide.Demand)
	}
	switch {
	case ctx.Err() != nil: // it shows nothing that no more was moved
		return reservation.Eviction{Moved: e.Moved}
	case e.Moved > 0 || e.Again:
		s.dry.Store(false)
		return e
	}
	for _, t := range append([]*space{s}, s.below(m)...) {
		e.Busy = e.Busy || m.index.summary(t.place).moving > 0
	}
	if e.Coming = coming > 0; !e.Coming {
		s.dry.Store(true)
		var why error
		why, e.Broken = m.failing(s)
		e.Why = func() string { return m.whyDry(s, why) }
	}
	return e
}

// relieve evicts batches from a space until its pressure is low enough, or nothing can be moved.
// Between two lists of moves others may have the token.
func (m *Monitor) relieve(ctx context.Context, s *space) {
	defer m.working.Done()
	defer func() {
		s.relieving.Store(false)
		if !s.dry.Load() { // else it would be found dry again: the next step comes in a period
			poke(m.wake)
		}
	}()
	for again := true; again && s.take(ctx); {
		need, moved := m.excess(s), int64(0)
		if again = need > 0; again {
			moved, again = m.evict(ctx, s, need, decide.Trigger)
			again = again || moved > 0
		}
		s.dry.Store(need > 0 && !again)
		m.give(s)
	}
}

// excess returns how many bytes should leave a space because of its pressure, or because a limit was
// lowered.
func (m *Monitor) excess(s *space) int64 {
	if s.lower == 0 || s.Lost() != nil {
		return 0
	}
	over := max(decide.Excess(s.PressureBytes(), s.Trigger(), s.Stop()), s.Used()-s.Ceiling())
	return over - s.coming()
}

// evict moves one list of batches out of a space, of about need bytes. It returns how many bytes
// were freed, and if none were, whether another list may do better because what failed will not be
// chosen again at once. The caller has the space's token.
func (m *Monitor) evict(ctx context.Context, s *space, need int64, reason string) (freed int64, retry bool) {
	used := s.Used()
	if s.Usage().Cached > 0 {
		s.DropSharing(need)
		if freed = used - s.Used(); freed >= need {
			return freed, false
		}
	}
	below := s.below(m)
	if len(below) == 0 || s.Lost() != nil {
		return max(0, freed), false
	}
	m.stats.add(&m.stats.Steps, 1)
	m.putBack(time.Now())
	jobs := make(map[*space]*job)
	var order []*job
	victims, moves := m.choose(s, below, need)
	for _, move := range moves {
		to := below[move.To-1]
		if jobs[to] == nil {
			jobs[to] = &job{
				m: m, from: s, to: to, reason: reason, goal: used - need, until: time.Now().Add(listTime),
				left: make([]Victim, 0, len(moves)),
			}
			order = append(order, jobs[to])
		}
		jobs[to].left = append(jobs[to].left, victims[move.Victim.N])
		jobs[to].make += move.Make
	}
	if len(moves) == 0 && len(victims) > 0 { // clean images that keep dictionaries in use may have the room
		for _, t := range below {
			if before := t.Used(); t.Usage().Cached > 0 {
				t.DropSharing(t.Charge(victims[0].Bytes) - t.Available())
				retry = retry || t.Used() < before
			}
		}
		return max(0, freed), retry
	}
	var others sync.WaitGroup
	for i, j := range order {
		if i == len(order)-1 {
			j.run(ctx)
			break
		}
		others.Go(func() {
			labels.Move.Set()
			j.run(ctx)
		})
	}
	others.Wait()
	for _, j := range order {
		freed += j.freed
		retry = retry || j.retry
	}
	return max(0, freed), retry
}

// A list of moves is short, because waiters and changes are heeded only between two lists: at most
// listBytes for each of the moves at once, and no move begins later than listTime.
const (
	listBytes = 4 << 20
	listTime  = 2 * time.Millisecond
)

// choose returns victims of a space, and the moves of them that decide.Decide chooses. The numbers
// of the moves' victims are indexes of the victims.
func (m *Monitor) choose(s *space, below []*space, need int64) (victims []Victim, moves []decide.Move) {
	demand := m.cfg.Reservations.Demand(nil)
	now := time.Now()
	_, plain := m.cfg.Policy.(ordered)
	_, aware := m.cfg.Policy.(costAware)
	for long := !plain && !aware; ; long = true {
		state := make(decide.Snapshot, 0, 1+len(below))
		places := make([]int, 0, 1+len(below))
		for i, t := range append([]*space{s}, below...) {
			sp := m.observe(s, t, demand, now)
			places = append(places, t.place)
			limit := shortlistMax
			if sum := m.index.summary(t.place); i == 0 && !long {
				average := max(1, sum.bytes/int64(max(1, sum.count)))
				limit = min(shortlistMax, fewVictims+int(min(shortlistMax, need/average)))
			} else if !long {
				limit = fewVictims
			}
			open := func(to *space) bool { return to.Kind() > t.Kind() && !m.isBlocked(t, to, now) }
			if slices.ContainsFunc(below, open) {
				var list []Victim
				list, sp.More = m.victims(t, limit)
				sp.Victims = make([]decide.Victim, 0, len(list))
				for n, v := range list {
					sp.Victims = append(sp.Victims, decide.Victim{
						N: n, Bytes: v.Bytes, Key: v.Key, Not: v.not, Copied: v.copied,
					})
				}
				if i == 0 {
					victims = list
				}
			}
			state = append(state, sp)
		}
		if len(victims) == 0 {
			return nil, nil
		}
		near := 1 // spaces of the next tier
		for near < len(below) && below[near].Kind() == below[0].Kind() {
			near++
		}
		most := int64(near*m.cfg.MovesPerEdge) * max(listBytes, victims[0].Bytes)
		var short bool
		if moves, short = decide.Decide(state, places, min(need, most)); !short || long {
			return victims, moves
		}
	}
}

// isBlocked reports whether moves from s to t are not tried now, because they failed a moment ago.
func (m *Monitor) isBlocked(s, t *space, now time.Time) bool {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	e := s.edges[t.place]
	return e != nil && now.Before(e.until)
}

// hasFailed reports whether the last move from s to t has failed.
func (m *Monitor) hasFailed(s, t *space) bool {
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	return s.edges[t.place].failures > 0
}

// observe describes t, one of the spaces below s, or s itself.
func (m *Monitor) observe(s, t *space, demand []reservation.Demand, now time.Time) decide.Space {
	used := t.Used()
	sp := decide.Space{
		ID: t.ID(), Room: t.Ceiling() - used, Calm: math.MaxInt64,
		Headroom: m.headroom(t), Spare: m.spare(t),
		Pace: t.Pace(), Charge: t.Charge,
	}
	if t.lower != 0 {
		sp.Calm = t.Trigger() - 1 - t.PressureBytes() + t.coming()
	}
	for _, d := range demand {
		if d.Space == t.ID() {
			sp.Room -= min(d.Bytes, t.Limit())
		}
	}
	sp.Blocked = m.isBlocked(s, t, now)
	m.index.mu.Lock()
	defer m.index.mu.Unlock()
	sp.Refused = t.refusal.bound(now, used)
	return sp
}

// victims returns victims of a space in the policy's order, limit at most, and reports whether there
// are more. It adds what the index does not know: clean images, and the cost of a move.
func (m *Monitor) victims(s *space, limit int) (list []Victim, more bool) {
	now := time.Now().UnixNano()
	below := s.below(m)
	var fit byKind
	for _, t := range below {
		fit[t.Kind()] = max(fit[t.Kind()], t.Available()-m.headroom(t))
	}
	list, more = m.index.victims(s.place, fit, limit, now)
	m.findCopies(below, list)
	if _, plain := m.cfg.Policy.(ordered); !plain {
		m.weigh(s, below, list)
	}
	m.index.order(now, list)
	return list, more
}

// findCopies notes of victims in which spaces they have clean images.
func (m *Monitor) findCopies(in []*space, list []Victim) {
	if !slices.ContainsFunc(in, func(s *space) bool { return s.Usage().Cached > 0 }) {
		return
	}
	for k := range list {
		v := &list[k]
		v.Batch.Inside().EachClean(func(p batch.Payload) { v.copied = v.copied.With(m.byID[p.Space().ID()]) })
	}
}

// Assumed costs of moves on an edge that has no measured move yet: memorySpeed between memories,
// storageSpeed with a disk.
const (
	eachMove     = 20 * time.Microsecond
	memorySpeed  = 8 << 30 // bytes a second
	storageSpeed = 1 << 30
)

// weigh estimates what it costs to move victims from a space down and back: to the next tier, or
// onto a clean image, which costs nothing on the way down.
func (m *Monitor) weigh(s *space, below []*space, list []Victim) {
	speed := func(from, to *space) float64 {
		switch known := m.cfg.Speed(from.ID(), to.ID()); {
		case known > 0:
			return float64(known)
		case from.Kind() == tier.Disk || to.Kind() == tier.Disk:
			return storageSpeed
		}
		return memorySpeed
	}
	down, up := make([]float64, len(below)), make([]float64, len(below)) // once, not for each victim
	for i, t := range below {
		down[i], up[i] = speed(s, t), speed(t, s)
	}
	takes := func(bytes int64, speed float64) time.Duration {
		return eachMove + time.Duration(float64(bytes)/speed*float64(time.Second))
	}
	for k := range list {
		v := &list[k]
		for i, t := range below {
			copied := v.copied.Has(t.place)
			if copied || v.Up == 0 && !v.not.Has(t.Kind()) {
				v.Down, v.Up = takes(v.Bytes, down[i]), takes(v.Bytes, up[i])
			}
			if copied {
				v.Down = 0
				break
			}
		}
	}
}

// job is the part of a list of moves that goes from one space to one other. Several goroutines work
// on it, Config.MovesPerEdge at most.
type job struct {
	m        *Monitor
	from, to *space
	reason   string
	make     int64 // bytes that must leave the target first
	goal     int64 // how many used bytes of the source are few enough to end
	until    time.Time

	mu    sync.Mutex
	left  []Victim // not begun yet
	freed int64
	over  bool // a move failed in a way that concerns the others
	retry bool // a failure was recorded, so that another list will have other moves
}

// run moves the batches of a job. If they need room in the target, batches leave that first.
func (j *job) run(ctx context.Context) {
	if j.make > 0 {
		before := j.to.Available()
		if !j.to.take(ctx) {
			return
		}
		if need := j.make - (j.to.Available() - before); need > 0 { // else room was made meanwhile
			freed, retry := j.m.evict(ctx, j.to, need, j.reason)
			j.retry = retry || freed > 0
		}
		j.m.give(j.to)
		if j.to.Charge(j.left[0].Bytes) > j.to.Available() {
			return
		}
	}
	atOnce := min(j.m.cfg.MovesPerEdge, len(j.left))
	if j.m.hasFailed(j.from, j.to) {
		atOnce = 1 // which shows whether others would fail, too; see work
	}
	var others sync.WaitGroup
	for range atOnce - 1 {
		others.Go(func() {
			labels.Move.Set()
			j.work(ctx)
		})
	}
	j.work(ctx)
	others.Wait()
}

// work moves batches of the job until there are none left, one has failed, or enough has left the
// space. It moves small batches to a disk together.
func (j *job) work(ctx context.Context) {
	mover, together := j.m.cfg.Mover.(joiner)
	together = together && j.to.Kind() == tier.Disk && !j.m.hasFailed(j.from, j.to)
	for {
		group := j.next(ctx, together)
		if len(group) == 0 {
			return
		}
		alone := 0 // how many of the group are moved alone
		for over := false; len(group) > 0 && !over; {
			n := 1
			if together && alone == 0 {
				n = j.m.countTogether(mover, group, j.to)
			}
			alone = max(0, alone-1)
			if n < 2 {
				over = j.ended(group[0], j.m.move(ctx, group[0], j.from, j.to, j.reason))
				group = group[1:]
				continue
			}
			// Each that was not moved is moved alone, so that each error concerns its batch.
			var failed []Victim
			for i, err := range j.m.moveTogether(ctx, mover, group[:n], j) {
				if err == nil {
					over = j.ended(group[i], nil)
				} else {
					failed = append(failed, group[i])
				}
			}
			group = group[n:]
			if alone = len(failed); alone > 0 {
				group = append(failed, group...)
			}
		}
	}
}

// next returns the batches that a goroutine is to move next: one, or up to togetherMax small ones.
func (j *job) next(ctx context.Context, together bool) (group []Victim) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for len(j.left) > 0 && !j.over && ctx.Err() == nil && j.from.Used() > j.goal {
		v := j.left[0]
		isSmall := together && v.Bytes < small && !v.copied.Has(j.to.place)
		if len(group) > 0 && (!isSmall || len(group) == togetherMax) {
			return group
		}
		j.left = j.left[1:]
		if now := v.Batch.Info(); !canLeave(&now, j.from) {
			_ = j.m.index.note(v.Batch, &now, false)
			j.retry = true
			continue
		}
		if group = append(group, v); !isSmall {
			return group
		}
	}
	return group
}

// canLeave reports whether a batch may still be moved out of a space.
func canLeave(now *batch.Info, from *space) bool {
	return movable(now) && !now.Leased && now.Space == from.ID()
}

// ended notes the end of a move. It reports whether the job is over.
func (j *job) ended(v Victim, err error) (over bool) {
	kind := j.m.noteMove(v, j.from, j.to, err)
	j.mu.Lock()
	defer j.mu.Unlock()
	if time.Now().After(j.until) {
		j.over = true
	}
	switch kind {
	case moved:
		j.freed += v.Bytes
	case busy, unmovable:
		j.retry = true
	case noRoom:
		j.over = true
		j.m.index.mu.Lock()
		if j.to.refusal.bound(time.Now(), j.to.Used()) > 0 { // another list has other targets
			j.retry = true
		}
		j.m.index.mu.Unlock()
	case failed:
		j.over, j.retry = true, true
	default:
		j.over = true
	}
	return j.over
}
