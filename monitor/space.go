package monitor

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// space is what the monitor keeps of a space from step to step. Only pressed, high, gone, clearing
// and freeing are used by other goroutines than Run's.
type space struct {
	*tier.Space
	pressed atomic.Bool // the monitor was woken because the trigger was reached
	high    atomic.Bool // the pressure was at the trigger, and has not been at the stop mark since
	gone    atomic.Bool // the event of the space's loss was sent
	// clearing has a token while a Clear of the space runs.
	clearing chan struct{}
	freeing  chan struct{} // has a token while clean images are dropped; see dropSharingOf

	edges   map[int]*edge   // by the index of the target
	lower   decide.Kinds    // the tiers of the targets
	leaving int64           // bytes of the moves in progress from here
	moving  int             // moves in progress from here or to here
	refusal refusal         // the last move to here that found no room
	linger  lingering       // the age of retired bytes
	victims []decide.Victim // of the last step; the memory is used again

	covered coverage // when all that is above the stop mark had copies
	search  search   // for batches to copy ahead

	version    uint64    // of the index's part for this space, at the last step
	seen       progress  // what it was at the last step with waiters
	stillSince time.Time // since when there have been waiters somewhere, and no progress; zero if that is not so
	stuckSince time.Time
	stuckFor   string // the reason that was reported; "" if none was
	stuckIdle  bool   // and with it batches that could have been moved
}

// below appends the spaces to which batches may be evicted from here: those of the next slower tier
// first, within a tier the nearest first.
func (s *space) below(spaces *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	for k := s.Kind() + 1; k.Valid(); k++ {
		dst = reservation.ToDowngrade(s.ID(), k).Candidates(spaces, dst)
	}
	return dst
}

// pressing returns the pressure, and whether it is at the trigger. It updates high, and reports
// whether that changed.
func (s *space) pressing() (pressure int64, is, changed bool) {
	pressure = s.PressureBytes()
	if pressure < s.Trigger() && s.pressed.Load() {
		// A crossing of the trigger from now on wakes the monitor. An earlier one is seen here.
		s.pressed.Store(false)
		pressure = s.PressureBytes()
	}
	is = pressure >= s.Trigger()
	was := s.high.Load()
	if is {
		s.pressed.Store(true)
	}
	high := is || was && pressure > s.Stop()
	s.high.Store(high)
	return pressure, is, high != was
}

// refusal records that a space had no room for a move although its ledger had: the file system is
// full, the room is in pieces, or it is kept for others.
type refusal struct {
	bytes int64
	used  int64 // at that time
	until time.Time
	times int   // in a row
	why   error // of the last, if it was not the space's own size
}

func (f *refusal) note(now time.Time, period time.Duration, bytes, used int64) {
	f.times++
	f.bytes, f.used, f.until = bytes, used, now.Add(backoff(period, f.times))
}

// bound returns how many bytes would be refused still, 0 for none. When less is
// used than then it is worth another try at once; but only the first time, because a
// file system that is full stays so, however often moves to it give back what
// they took.
func (f *refusal) bound(now time.Time, used int64) int64 {
	if !now.Before(f.until) || f.times == 1 && used < f.used {
		f.bytes = 0
	}
	return f.bytes
}

// lingering estimates how many retired bytes a device keeps for long.
type lingering struct {
	since  time.Time // since when somebody has needed room; zero if nobody does
	before int64     // at most so many bytes were retired then and are still
	begun  time.Time // when the present period began
	least  int64     // the least that was retired in it
	late   int64     // the least that was retired in the last one
}

// note is called with what is retired at each step. It returns about how many bytes have been
// retired for at least a period, and how many of them were retired before somebody needed room.
func (l *lingering) note(retired int64, now time.Time, period time.Duration, needed bool) (late, before int64) {
	if !needed {
		l.since = time.Time{}
		return 0, 0
	}
	if l.since.IsZero() {
		*l = lingering{since: now, before: retired, begun: now, least: retired}
	}
	l.before, l.least = min(l.before, retired), min(l.least, retired)
	if now.Sub(l.begun) >= period {
		l.begun, l.late, l.least = now, l.least, retired
	}
	late = min(l.late, retired)
	return late, min(late, l.before)
}

// isLost reports whether s is lost, so that nothing can be moved from it or to it. The first time
// it sends the event.
func (m *Monitor) isLost(s *space) bool {
	err := s.Lost()
	if err == nil {
		return false
	}
	if !s.gone.Swap(true) {
		s.high.Store(false)
		m.events.lost(Lost{Space: s.ID(), Err: err})
	}
	return true
}

// observe makes a cut through everything that a step reads. The books are read between two reads of
// the demand, and the smaller demand counts. So a waiter that was served in between is not counted
// both as waiting and as using.
//
// Shortlists are as long as what is needed asks for. Those of the spaces in long, and of policies
// that may rearrange them, have shortlistMax.
func (m *Monitor) observe(now time.Time, long []int) decide.Snapshot {
	state := decide.Snapshot{Spaces: make([]decide.Space, len(m.spaces))}
	aside := m.aside()
	for i, s := range m.spaces {
		unsure := s.Unsure() // first: they were retired before
		u := s.Usage()
		retired := max(0, u.Retired-unsure)
		sp := &state.Spaces[i]
		if m.isLost(s) { // no room, no need, and no way down
			*sp = decide.Space{ID: s.ID(), Moving: s.moving}
			continue
		}
		*sp = decide.Space{
			ID: s.ID(), Limit: s.Limit(), Trigger: s.Trigger(), Stop: s.Stop(),
			Used: u.Used(), Retired: retired, Foreign: s.Foreign(), Withheld: s.Limit() - s.Ceiling(),
			Leaving: s.leaving, Moving: s.moving,
			Pace: s.Pace(), Refused: s.refusal.bound(now, u.Used()),
			Charge: s.Charge, Base: m.cfg.Base(s.ID()) + unsure, Aside: aside[i], Headroom: m.headroom(s),
			Arriving: m.cfg.Reservations.Arriving(s.ID()),
		}
		m.targets = s.below(m.cfg.Reservations.Spaces(), m.targets[:0])
		for _, to := range m.targets {
			j := m.byID[to.ID()]
			sp.Down = append(sp.Down, s.edges[j].state(j, now, m.cfg.MovesPerEdge))
		}
	}
	m.again, m.choices = m.cfg.Reservations.Waiting(m.again[:0], m.choices[:0])
	for _, d := range m.demand {
		i := slices.IndexFunc(m.again, func(a reservation.Demand) bool { return a.Space == d.Space })
		if i >= 0 {
			state.Spaces[m.byID[d.Space]].Waiting = min(d.Bytes, m.again[i].Bytes+m.again[i].Headroom)
		}
	}
	for _, c := range m.choices {
		var of []decide.Want
		for _, d := range c {
			i := m.byID[d.Space]
			of = append(of, decide.Want{Space: i, Bytes: d.Bytes + d.Headroom})
			state.Spaces[i].Wanted += min(d.Bytes+d.Headroom, math.MaxInt64-state.Spaces[i].Wanted)
		}
		state.Choices = append(state.Choices, of)
	}
	m.observeBatches(&state, long)
	return state
}

// observeBatches adds what the index has. Shortlists are only made if something may be needed of
// the space: it needs room, or a faster space does.
func (m *Monitor) observeBatches(state *decide.Snapshot, long []int) {
	m.shortlist = m.shortlist[:0]
	wanted, lacking := false, false
	for i, s := range m.spaces {
		sp := &state.Spaces[i]
		sum := m.index.summary(i)
		lacking = lacking || sp.Waiting > 0 || sp.Wanted > 0 || sp.Room() < 0
		wanted = wanted || lacking || sp.Over() > 0
		sp.Late, sp.Lingering = s.linger.note(sp.Retired, m.last, m.cfg.Period, lacking)
		if wanted && len(sp.Down) > 0 {
			var fit byKind
			for _, e := range sp.Down {
				to := &state.Spaces[e.To]
				fit[to.ID.Kind] = max(fit[to.ID.Kind], to.Room()-to.Keep(0))
			}
			begin := len(m.shortlist)
			m.shortlist, sp.More = m.victims(m.shortlist, i, fit, m.enough(sp, sum, slices.Contains(long, i)))
			s.victims = s.victims[:0]
			for n, v := range m.shortlist[begin:] {
				s.victims = append(s.victims, decide.Victim{
					N: begin + n, Bytes: v.Bytes, Key: v.Key, Not: v.not, Copied: v.copied,
				})
			}
			sp.Victims = s.victims
		}
		sp.Rest = sum.rest
		for j := range sp.Down {
			e := &sp.Down[j]
			e.Smallest = sum.smallest[state.Spaces[e.To].ID.Kind]
		}
		s.version = sum.changes
		if p := (progress{sp.Withheld, sum.changes}); p != s.seen {
			s.seen, s.stillSince = p, time.Time{}
		}
	}
}

// victims appends victims of space i to dst, in the policy's order, and reports whether there are
// more: see index.victims. It adds what only a step knows: clean images, and the cost of a move.
func (m *Monitor) victims(dst []Victim, i int, fit byKind, limit int) ([]Victim, bool) {
	begin, now := len(dst), time.Now().UnixNano()
	dst, more := m.index.victims(dst, i, fit, limit, now)
	list := dst[begin:len(dst):len(dst)]
	targets := m.spaces[i].below(m.cfg.Reservations.Spaces(), nil)
	m.findCopies(targets, list)
	if _, plain := m.cfg.Policy.(ordered); !plain {
		m.weigh(m.spaces[i].ID(), targets, list)
	}
	m.index.order(now, list)
	return dst, more
}

// findCopies notes of victims in which of the spaces they have copies.
func (m *Monitor) findCopies(in []*tier.Space, list []Victim) {
	if !slices.ContainsFunc(in, func(s *tier.Space) bool { return s.Usage().Cached > 0 }) {
		return
	}
	for k := range list {
		v := &list[k]
		v.Batch.Inside().EachClean(func(p batch.Payload) { v.copied = v.copied.With(m.byID[p.Space().ID()]) })
	}
}

// weigh estimates what it costs to move victims from a space down and back: to the next tier, or
// onto a copy.
func (m *Monitor) weigh(from tier.ID, targets []*tier.Space, list []Victim) {
	type way struct {
		to       int // its index
		kind     tier.Kind
		down, up int64 // bytes a second
	}
	ways := make([]way, 0, len(targets)) // looked up once, not for each victim
	for _, to := range targets {
		id := to.ID()
		ways = append(ways, way{m.byID[id], id.Kind, m.speed(from, id), m.speed(id, from)})
	}
	for k := range list {
		v := &list[k]
		for _, w := range ways {
			copied := v.copied.Has(w.to)
			if copied || v.Up == 0 && !v.not.Has(w.kind) {
				v.Down, v.Up = takes(w.down, v.Bytes), takes(w.up, v.Bytes)
			}
			if copied {
				v.Down = 0
				break
			}
		}
	}
}

// What moves are taken to need before there was one: a transfer between memories, or with a disk.
const (
	eachMove     = 20 * time.Microsecond
	memorySpeed  = 8 << 30 // bytes a second
	storageSpeed = 1 << 30
)

// speed returns how many bytes a second moves make from one space to another.
func (m *Monitor) speed(from, to tier.ID) int64 {
	if known := m.cfg.Speed(from, to); known > 0 {
		return known
	}
	if from.Kind == tier.Disk || to.Kind == tier.Disk {
		return storageSpeed
	}
	return memorySpeed
}

// takes estimates the time of a move.
func takes(speed, bytes int64) time.Duration {
	return eachMove + time.Duration(float64(bytes)/float64(speed)*float64(time.Second))
}

// enough returns how many victims a shortlist should have, of batches as large as they are on
// average.
func (m *Monitor) enough(sp *decide.Space, of summary, long bool) int {
	_, plain := m.cfg.Policy.(ordered)
	_, aware := m.cfg.Policy.(costAware)
	if long || !plain && !aware {
		return shortlistMax
	}
	need := max(0, sp.Waiting-sp.Room(), sp.Wanted-sp.Room(), 2*sp.Over())
	return min(shortlistMax, fewVictims+int(min(shortlistMax, need/max(1, of.bytes/int64(max(1, of.count))))))
}

// progress changes whenever something may still free room for a waiter: with what others hold of a
// quota, and with the changes of batches other than the monitor's failed tries.
type progress struct {
	withheld int64
	changes  uint64
}

// reportStuck reports once that a space is stuck, when it has been so for a period: a shorter time
// is only two steps that followed each other closely. It reports it again if work in progress was
// to free room then, and the batches at rest are not in use now.
func (m *Monitor) reportStuck(now time.Time, state decide.Snapshot, stuck []decide.Shortage) {
	for i, s := range m.spaces {
		at := slices.IndexFunc(stuck, func(w decide.Shortage) bool { return w.Space == i })
		if at < 0 {
			s.stuckSince, s.stuckFor, s.stuckIdle = time.Time{}, "", false
			continue
		}
		w := stuck[at]
		if s.stuckSince.IsZero() {
			s.stuckSince = now
		}
		resting := m.index.summary(i).idle
		reported := (s.stuckFor == w.Reason || s.stuckFor == decide.Demand) && (s.stuckIdle || resting == 0)
		if reported || now.Sub(s.stuckSince) < m.cfg.Period {
			continue
		}
		if s.stuckFor != decide.Demand {
			s.stuckFor = w.Reason
		}
		s.stuckIdle = s.stuckIdle || resting > 0
		sp := &state.Spaces[i]
		ev := Stuck{
			Space: sp.ID, Reason: w.Reason, Need: w.Bytes, Used: sp.Used, Limit: sp.Limit, Capacity: s.Capacity(),
			Resting: resting,
		}
		for _, d := range append(slices.Concat(m.choices...), m.again...) {
			if d.Space == sp.ID {
				ev.Waiters += d.Waiters
			}
		}
		for _, e := range sp.Down {
			to := &state.Spaces[e.To]
			ev.Below = append(ev.Below, Room{Space: to.ID, Available: max(0, to.Room())})
		}
		m.events.stuck(ev)
	}
}

// refuseHint is part of the error of refused waiters.
const refuseHint = "batches at rest fill it, and no slower tier has room for them: " +
	"consume or drop some, or make the slower tiers larger"

// whyRefused returns refuseHint, or, where moves out of the full spaces fail, why: then
// larger tiers would not help, and what is wrong is known here alone.
func (m *Monitor) whyRefused(state decide.Snapshot, full []tier.ID) string {
	for i, s := range m.spaces {
		if !slices.Contains(full, s.ID()) {
			continue
		}
		cannot := m.cannotMove(i)
		someMovable := func(e decide.Edge) bool { return e.Smallest > 0 }
		if cannot != "" && !slices.ContainsFunc(state.Spaces[i].Down, someMovable) {
			return "all that is left there at rest cannot be moved: " + cannot +
				": register a converter, or consume or drop them"
		}
		if cannot != "" {
			cannot = "; " + cannot
		}
		for _, e := range state.Spaces[i].Down {
			why := error(nil)
			if to := &state.Spaces[e.To]; e.Broken {
				why = s.edges[e.To].why
			} else if to.Refused > 0 {
				why = m.spaces[e.To].refusal.why
			}
			if why != nil {
				return fmt.Sprintf("batches at rest fill it, and cannot be moved down: %v%s", why, cannot)
			}
		}
		if cannot != "" {
			return refuseHint + cannot
		}
	}
	return refuseHint
}

// refuse refuses waiters that nobody is left to serve. All that is used in their spaces belongs to
// batches at rest that can go nowhere (see fullForGood). And for Config.StallTimeout there was no
// sign of life in these spaces, or in those below: no batch came, left or was used, and no move
// succeeded. Where moves have failed meanwhile, and there is no other disk, it takes a period only:
// a consumer cannot mend a disk. Then the headroom stays free for consumers.
func (m *Monitor) refuse(now time.Time, state decide.Snapshot) {
	if !slices.ContainsFunc(state.Spaces, func(sp decide.Space) bool { return sp.Waiting > 0 || sp.Wanted > 0 }) {
		m.forgive()
		return
	}
	full := decide.FullForGood(state)
	var forGood []tier.ID
	early := make(map[tier.ID]bool)           // of those in forGood: before Config.StallTimeout
	for i := len(m.spaces) - 1; i >= 0; i-- { // slower spaces first
		s, sp := m.spaces[i], &state.Spaces[i]
		if sp.Held() || s.stillSince.IsZero() {
			s.stillSince = now
		}
		since, broken, others := s.stillSince, false, false
		for _, e := range sp.Down {
			if below := m.spaces[e.To].stillSince; e.Broken {
				broken = broken || s.edges[e.To].last.After(s.stillSince)
			} else if e.Smallest > 0 {
				others = others || state.Spaces[e.To].ID.Kind == tier.Disk
				if below.After(since) {
					since = below
				}
			}
		}
		patience, soon := m.cfg.StallTimeout, broken && !others && m.cfg.Period < m.cfg.StallTimeout
		if soon {
			patience = m.cfg.Period
		}
		if full[i] && patience >= 0 && now.Sub(since) >= patience {
			forGood = append(forGood, s.ID())
			early[s.ID()] = soon
		}
	}
	if len(forGood) == 0 {
		return
	}
	n := m.cfg.Reservations.Refuse(func(id tier.ID) (full, soon bool) {
		soon, full = early[id]
		return full, soon
	}, m.whyRefused(state, forGood))
	if n > 0 {
		m.stats.add(&m.stats.Refused, n)
		m.events.refused(Refused{Waiters: n, Spaces: forGood})
	}
}

// forgive forgets how long waiters have waited for nothing.
func (m *Monitor) forgive() {
	for _, s := range m.spaces {
		s.stillSince = time.Time{}
	}
}

// outlook is what the last step, in which something was needed, knew of each space. It is published
// for callers that decide whether waiting can help.
type outlook []prospect

// prospect is one space's part of an outlook.
type prospect struct {
	relief  bool   // bytes are on their way out, or will be when something else has moved
	version uint64 // of the index
}

// Movable reports whether bytes of a space with waiters may become free because batches move: a
// reservation.Config needs that. It is false only if the last step found nothing, and no batch
// there has changed since. Unknown spaces, lost ones, and all while Run is not running, have
// nothing that moves. It must be called with no lock held.
func (m inside) Movable(id tier.ID) bool {
	i, known := m.byID[id]
	if !known || !m.running.Load() || m.spaces[i].Lost() != nil {
		return false
	}
	o := m.outlook.Load()
	return o == nil || (*o)[i].relief || m.index.summary(i).changes != (*o)[i].version
}
