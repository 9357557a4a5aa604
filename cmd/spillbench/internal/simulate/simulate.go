package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/decide"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
)

// Setting is what differs from the recorded engine. Its zero value changes nothing.
type Setting struct {
	Policy    string              // as of monitor.ByName; "" for the policy of the trace
	Capacity  map[tier.Kind]int64 // of each space of a tier, in bytes; the watermarks stay the same shares
	Bandwidth map[Edge]float64    // in bytes a second
}

var (
	// ErrSetting is matched by the error of a setting that the recorded engine cannot have.
	ErrSetting = errors.New("the engine cannot have this setting")
	// ErrStuck is matched by the error of a simulation in which a batch never gets room.
	ErrStuck = errors.New("the workload cannot go on")
)

// Bandwidths of edges that neither the trace nor the setting has, in bytes a second.
const (
	memoryBandwidth = 8 << 30
	diskBandwidth   = 1 << 30
)

// item is a batch. While it is busy it waits for the room of its fetch or is being moved, so Decide
// cannot choose it.
type item struct {
	batch.Info
	at     int           // index in simulation.spaces
	copies decide.Places // slower spaces that still have its bytes
	gap    int64         // expected between two uses, in nanoseconds; 0 before the second
	busy   bool
	to     int           // where the last move ends; the room there is reserved from its beginning
	ends   time.Duration // when the last move ends
}

// space is one space of the simulated engine. All sizes are bytes.
type space struct {
	ID                   tier.ID
	Limit, Trigger, Stop int64
	Used, Waiting        int64 // Waiting is what the put or the use at hand needs
	Base                 int64 // used bytes of no batch
}

// simulation is one engine and its clock. It is sequential: each put and each use happens at its
// recorded time, or when those before it have ended. Meanwhile decide.Decide, with the victims in the
// policy's order, moves batches to slower tiers, one at a time on each edge.
type simulation struct {
	policy    monitor.Policy
	bandwidth map[Edge]float64 // in bytes a second
	start     int64            // unix nanoseconds at the clock's zero
	now       time.Duration
	spaces    []space
	live      []*item  // in the order of their puts
	moving    []*item  // by the ends of their moves
	origins   []Origin // of plans and repositories, in the order of their first puts
	out       Trace    // the events of the simulated engine
}

// Run replays the puts, uses, hints and drops of a trace with a setting.
func Run(ctx context.Context, t *Trace, set Setting) (*Result, error) {
	s, err := newSimulation(t, set)
	if err != nil {
		return nil, err
	}
	var stalled time.Duration
	for _, e := range t.Events {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		s.runUntil(time.Duration(e.At))
		begin := s.now
		i := slices.IndexFunc(s.live, func(it *item) bool { return it.ID == batch.ID(e.Batch) })
		put := e.Kind == events.BatchPut.String()
		switch {
		case put == (i >= 0):
			continue
		case put:
			err = s.put(e)
		case e.Kind == events.BatchUsed.String():
			err = s.use(s.live[i], e.To)
		case e.Kind == events.BatchHinted.String():
			s.live[i].expect(e.Hint)
		case e.Kind == events.BatchDropped.String():
			it := s.live[i]
			s.runUntil(it.ends)
			s.spaces[it.at].Used -= it.Bytes
			s.live = slices.Delete(s.live, i, i+1)
		default:
			continue
		}
		if err != nil {
			return nil, err
		}
		stalled += s.now - begin
		e.At = int64(s.now)
		s.out.Events = append(s.out.Events, e)
		s.decide()
	}
	res := Measured(&s.out)
	res.Stalled = stalled
	return res, nil
}

func newSimulation(t *Trace, set Setting) (*simulation, error) {
	policy, err := monitor.ByName(cmp.Or(set.Policy, t.Policy))
	if err != nil { // it was a program's own
		return nil, fmt.Errorf("%w: %w", ErrSetting, err)
	}
	s := &simulation{policy: policy, bandwidth: make(map[Edge]float64), start: t.Start}
	missing := maps.Clone(set.Capacity)
	for _, of := range t.Spaces {
		delete(missing, of.ID.Kind)
		sp := space{
			ID: of.ID, Limit: of.Limit, Trigger: of.Trigger, Stop: of.Stop, Used: of.Held, Base: of.Held,
		}
		if want := set.Capacity[of.ID.Kind]; want > 0 && of.Capacity > 0 {
			for _, mark := range []*int64{&sp.Limit, &sp.Trigger, &sp.Stop} {
				*mark = int64(float64(*mark) / float64(of.Capacity) * float64(want))
			}
		}
		if sp.Base > sp.Limit {
			return nil, fmt.Errorf("%w: %s of %d bytes has no room for the engine's own %d",
				ErrSetting, sp.ID, sp.Limit, sp.Base)
		}
		s.spaces = append(s.spaces, sp)
	}
	for k := range missing {
		return nil, fmt.Errorf("%w: it had no %s space", ErrSetting, k)
	}
	for _, m := range Measured(t).Moves {
		if m.Moving > 0 {
			s.bandwidth[Edge{m.From, m.To}] = float64(m.Bytes) / m.Moving.Seconds()
		}
	}
	for e, speed := range set.Bandwidth {
		if e.From == e.To || s.indexOf(e.From) < 0 || s.indexOf(e.To) < 0 {
			return nil, fmt.Errorf("%w: it could not move batches from %s to %s", ErrSetting, e.From, e.To)
		}
		s.bandwidth[e] = speed
	}
	return s, nil
}

func (s *simulation) indexOf(id tier.ID) int {
	return slices.IndexFunc(s.spaces, func(sp space) bool { return sp.ID == id })
}

// duration returns how long the move of so many bytes takes.
func (s *simulation) duration(from, to int, bytes int64) time.Duration {
	e := Edge{s.spaces[from].ID, s.spaces[to].ID}
	speed := s.bandwidth[e]
	if speed == 0 {
		if speed = memoryBandwidth; max(e.From.Kind, e.To.Kind).IsStorage() {
			speed = diskBandwidth
		}
	}
	return time.Duration(float64(bytes) / speed * float64(time.Second))
}

// put makes a batch as soon as there is room for it.
func (s *simulation) put(e Event) error {
	at := s.indexOf(e.To)
	if at < 0 {
		return nil // no engine emits such an event
	}
	if err := s.waitForRoom(at, e.Bytes); err != nil {
		return err
	}
	s.take(at, e.Bytes)
	number := func(of Origin) int {
		if !slices.Contains(s.origins, of) {
			s.origins = append(s.origins, of)
		}
		return slices.Index(s.origins, of)
	}
	s.live = append(s.live, &item{at: at, Info: batch.Info{
		ID: batch.ID(e.Batch), Bytes: e.Bytes, LastUse: s.start + int64(s.now),
		Place: batch.Place{
			Plan:     uint64(number(Origin{Plan: e.Plan})),
			Rank:     number(Origin{Plan: e.Plan, Operator: e.Operator, Port: e.Port}),
			Seq:      e.Batch,
			Operator: e.Operator,
		},
	}})
	return nil
}

// use fetches a batch, unless it is in the space of the recorded use or in a faster tier.
func (s *simulation) use(it *item, in tier.ID) error {
	s.runUntil(it.ends)
	if to := s.indexOf(in); to >= 0 && to != it.at && s.spaces[it.at].ID.Kind >= in.Kind {
		it.busy = true
		if err := s.waitForRoom(to, it.Bytes); err != nil {
			return err
		}
		s.begin(it, to, convert.ReasonWork)
		s.runUntil(it.ends)
	}
	now := s.start + int64(s.now)
	if it.Uses > 0 {
		gap := max(1, now-it.LastUse)
		it.gap = (gap + 3*cmp.Or(it.gap, gap)) / 4
	}
	it.Uses = min(it.Uses, math.MaxUint8-1) + 1
	it.LastUse = now
	if it.NextUse != batch.Stay {
		it.expect(0)
	}
	return nil
}

// expect sets the next use as batch.Info has it.
func (it *item) expect(hint int64) {
	if it.NextUse = hint; hint == 0 && it.gap > 0 {
		it.NextUse = it.LastUse + it.gap
	}
}

// take reserves room that is there. Copies stay in what is left, those of the latest batches first.
func (s *simulation) take(at int, bytes int64) {
	s.spaces[at].Used += bytes
	left := s.spaces[at].Limit - s.spaces[at].Used
	for _, it := range slices.Backward(s.live) {
		if it.copies.Has(at) {
			if left -= it.Bytes; left < 0 {
				it.copies &^= 1 << at
			}
		}
	}
}

func (s *simulation) waitForRoom(at int, bytes int64) error {
	sp := &s.spaces[at]
	if bytes > sp.Limit-sp.Base {
		return fmt.Errorf("%w: a batch of %d bytes never fits in %s", ErrStuck, bytes, sp.ID)
	}
	for sp.Used+bytes > sp.Limit {
		sp.Waiting = bytes
		s.decide()
		if len(s.moving) == 0 {
			return fmt.Errorf("%w after %v: %d bytes are waited for, and nothing can leave %s",
				ErrStuck, s.now, bytes, sp.ID)
		}
		s.runUntil(s.moving[0].ends)
	}
	sp.Waiting = 0
	return nil
}

// begin begins a move. The target must have room.
func (s *simulation) begin(it *item, to int, reason string) {
	e := Event{
		Kind: events.MoveEnded.String(), Batch: uint64(it.ID), From: s.spaces[it.at].ID, To: s.spaces[to].ID,
		Bytes: it.Bytes, Reason: reason, Copy: it.copies.Has(to),
	}
	if !e.Copy {
		e.Took = int64(s.duration(it.at, to, it.Bytes))
	}
	it.busy, it.to, it.ends = true, to, s.now+time.Duration(e.Took)
	e.At = int64(it.ends)
	s.out.Events = append(s.out.Events, e)
	it.copies &^= 1 << to
	s.take(to, it.Bytes)
	s.moving = append(s.moving, it)
	slices.SortStableFunc(s.moving, func(a, b *item) int { return cmp.Compare(a.ends, b.ends) })
}

// runUntil lets time pass, and moves end. A fetch leaves a copy in the slower tier. A batch stays
// busy for the decision at the end of its own move, so that a fetch is not undone before its use.
func (s *simulation) runUntil(t time.Duration) {
	for len(s.moving) > 0 && s.moving[0].ends <= t {
		it := s.moving[0]
		s.moving = s.moving[1:]
		s.now = max(s.now, it.ends)
		from := &s.spaces[it.at]
		from.Used -= it.Bytes
		place := it.at
		it.at, it.busy = it.to, false
		switch cmp.Compare(s.spaces[it.at].ID.Kind, from.ID.Kind) {
		case -1:
			it.copies = it.copies.With(place)
		case 1: // after a fetch the use comes first
			s.decide()
		}
	}
	s.now = max(s.now, t)
}

// decide begins the moves that decide.Decide wants: for the put or use that waits, and for spaces that
// are above their triggers.
func (s *simulation) decide() {
	for i := len(s.spaces) - 1; i >= 0; i-- { // what leaves slower spaces makes room for the others
		sp := &s.spaces[i]
		if sp.Waiting > 0 {
			s.evict(i, sp.Used+sp.Waiting-sp.Limit-s.leaving(i), decide.Demand)
		}
		if i+1 < len(s.spaces) {
			s.evict(i, decide.Excess(sp.Used, sp.Trigger, sp.Stop)-s.leaving(i), decide.Trigger)
		}
	}
}

// leaving returns how many bytes of a space are being moved out of it.
func (s *simulation) leaving(from int) (bytes int64) {
	for _, it := range s.moving {
		if it.at == from {
			bytes += it.Bytes
		}
	}
	return bytes
}

// evict begins moves of batches out of a space, as far as its edges are free. A batch for which room
// must be made in a slower space leaves after that.
func (s *simulation) evict(from int, need int64, reason string) {
	if need <= 0 {
		return
	}
	var state decide.Snapshot
	for i, sp := range s.spaces {
		if i != from && sp.ID.Kind <= s.spaces[from].ID.Kind {
			continue
		}
		t := decide.Space{
			ID: sp.ID, Place: i, Room: sp.Limit - sp.Used - sp.Waiting + s.leaving(i),
			Charge:       func(bytes int64) int64 { return bytes },
			BelowTrigger: sp.Trigger - 1 - sp.Used + s.leaving(i), Victims: s.victims(i),
		}
		if sp.ID.Kind == s.spaces[len(s.spaces)-1].ID.Kind {
			t.BelowTrigger, t.Victims = math.MaxInt64, nil
		}
		state = append(state, t)
	}
	moves, _ := decide.Decide(state, need)
	for _, m := range moves {
		it, to := s.live[m.Victim.N], state[m.To].Place
		busy := slices.ContainsFunc(s.moving, func(o *item) bool { return o.at == from && o.to == to })
		switch {
		case m.Make > 0:
			s.evict(to, m.Make-s.leaving(to), reason)
		case !busy && it.Bytes <= s.spaces[to].Limit-s.spaces[to].Used:
			s.begin(it, to, reason)
		}
	}
}

// victims returns the batches that could leave a space, in the policy's order.
func (s *simulation) victims(from int) (victims []decide.Victim) {
	var list []monitor.Victim
	for n, it := range s.live {
		if it.at != from || it.busy {
			continue
		}
		v := monitor.Victim{ID: batch.ID(n), Bytes: it.Bytes, Key: s.policy.Key(it.Info)}
		to := -1
		for i, sp := range s.spaces {
			first := to < 0 || it.copies.Has(i) && !it.copies.Has(to)
			if sp.ID.Kind > s.spaces[from].ID.Kind && first {
				to = i
			}
		}
		if to < 0 {
			return nil // there is no slower tier
		}
		if !it.copies.Has(to) {
			v.Down = s.duration(from, to, it.Bytes)
		}
		v.Up = s.duration(to, from, it.Bytes)
		list = append(list, v)
	}
	slices.SortStableFunc(list, func(a, b monitor.Victim) int { return slices.Compare(a.Key[:], b.Key[:]) })
	s.policy.Order(s.start+int64(s.now), list)
	for _, v := range list {
		victims = append(victims, decide.Victim{N: int(v.ID), Bytes: v.Bytes, Key: v.Key, Copied: s.live[v.ID].copies})
	}
	return victims
}
