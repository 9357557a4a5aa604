package simulate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
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
	Policy    monitor.Policy      // nil: the policy of the trace's name
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

// item is a batch and, while busy is set, its move. A busy batch waits for the room of a fetch or is
// being moved, so Decide cannot choose it.
type item struct {
	info   batch.Info
	at     int           // index in simulation.spaces
	copies decide.Places // slower spaces that still have its bytes
	gap    int64         // expected between two uses; 0 before the second
	hint   int64         // as of batch.Batch.Hint; 0 for none
	busy   bool

	to          int // where the move ends; the room there is reserved
	reason      string
	copied      bool
	began, ends time.Duration
}

// space keeps the books of a space. Sizes are in bytes.
type space struct {
	Space
	used    int64 // by batches, and by moves to the space that are under way
	waiting int64 // room that a put or a use waits for
}

// simulation is one engine and its clock. It is sequential: each put and each use happens at its
// recorded time, or when those before it have ended. Meanwhile decide.Decide, with the victims in the
// policy's order, moves batches to slower tiers, one at a time on each edge.
type simulation struct {
	Setting
	start   int64 // unix nanoseconds at the clock's zero
	now     time.Duration
	spaces  []*space
	live    []*item // in the order of their puts
	items   map[uint64]*item
	moving  []*item // by the ends of their moves
	puts    uint64
	numbers map[events.Origin]int // of plans and operators, in the order of their first puts
	habits  decide.Habits
	result  Result
}

// Run replays the puts, uses, hints and drops of a trace with a setting.
func Run(ctx context.Context, t *Trace, set Setting) (*Result, error) {
	s, err := newSimulation(t, set)
	if err != nil {
		return nil, err
	}
	first := time.Duration(-1)
	for i := range t.Events {
		e := &t.Events[i]
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		s.runUntil(time.Duration(e.At))
		begin, it := s.now, s.items[e.Batch]
		switch put := e.Kind == events.BatchPut.String(); {
		case put && it == nil:
			err = s.put(e)
		case put || it == nil:
			continue
		case e.Kind == events.BatchUsed.String():
			err = s.use(it, e)
		case e.Kind == events.BatchHinted.String():
			it.hint = e.Hint
			it.expect()
		case e.Kind == events.BatchDropped.String():
			s.waitForMove(it)
			s.spaces[it.at].used -= it.info.Bytes
			s.habits.Leave(it.info.Uses)
			delete(s.items, e.Batch)
			s.live = slices.DeleteFunc(s.live, func(o *item) bool { return o == it })
		default:
			continue
		}
		if err != nil {
			return nil, err
		}
		if first < 0 {
			first = begin
		}
		s.result.Stalled += s.now - begin
		s.result.Took = s.now - first
		s.decide()
	}
	return &s.result, nil
}

func newSimulation(t *Trace, set Setting) (s *simulation, err error) {
	s = &simulation{
		Setting: set, start: t.Start, items: make(map[uint64]*item), numbers: make(map[events.Origin]int),
	}
	if s.Policy == nil {
		if s.Policy, err = monitor.ByName(t.Policy); err != nil { // it was a program's own
			return nil, fmt.Errorf("%w: %w", ErrSetting, err)
		}
	}
	for _, of := range t.Spaces {
		if want := s.Capacity[of.ID.Kind]; want > 0 && of.Capacity > 0 {
			share := float64(want) / float64(of.Capacity)
			of.Capacity = want
			for _, mark := range []*int64{&of.Limit, &of.Trigger, &of.Stop} {
				*mark = int64(float64(*mark) * share)
			}
		}
		if of.Held > of.Limit {
			return nil, fmt.Errorf(
				"%w: %s of %d bytes has no room for the engine's own %d", ErrSetting, of.ID, of.Capacity, of.Held,
			)
		}
		s.spaces = append(s.spaces, &space{Space: of, used: of.Held})
	}
	slices.SortStableFunc(s.spaces, func(a, b *space) int { return compareIDs(a.ID, b.ID) })
	for _, k := range tier.Kinds() {
		if s.Capacity[k] > 0 && !slices.ContainsFunc(s.spaces, func(of *space) bool { return of.ID.Kind == k }) {
			return nil, fmt.Errorf("%w: it had no %s space", ErrSetting, k)
		}
	}
	s.Bandwidth = bandwidths(t)
	for e, speed := range set.Bandwidth {
		if e.From == e.To || s.indexOf(e.From) < 0 || s.indexOf(e.To) < 0 {
			return nil, fmt.Errorf("%w: it could not move batches from %s to %s", ErrSetting, e.From, e.To)
		}
		s.Bandwidth[e] = speed
	}
	return s, nil
}

func (s *simulation) indexOf(id tier.ID) int {
	return slices.IndexFunc(s.spaces, func(of *space) bool { return of.ID == id })
}

// duration returns how long the move of so many bytes takes.
func (s *simulation) duration(from, to int, bytes int64) time.Duration {
	e := Edge{s.spaces[from].ID, s.spaces[to].ID}
	speed := s.Bandwidth[e]
	if speed == 0 {
		if speed = memoryBandwidth; max(e.From.Kind, e.To.Kind) == tier.Disk {
			speed = diskBandwidth
		}
	}
	return time.Duration(float64(bytes) / speed * float64(time.Second))
}

// clock returns the simulated time in unix nanoseconds.
func (s *simulation) clock() int64 { return s.start + int64(s.now) }

// put makes a batch as soon as there is room for it.
func (s *simulation) put(e *Event) error {
	at := s.indexOf(e.To)
	if at < 0 {
		return nil // no engine emits such an event
	}
	if err := s.waitForRoom(at, e.Bytes); err != nil {
		return err
	}
	s.take(at, e.Bytes)
	number := func(of events.Origin) int {
		if s.numbers[of] == 0 {
			s.numbers[of] = len(s.numbers) + 1
		}
		return s.numbers[of]
	}
	s.puts++
	it := &item{at: at, info: batch.Info{
		ID: batch.ID(e.Batch), Bytes: e.Bytes, Space: e.To, LastUse: s.clock(),
		Place: batch.Place{
			Plan: uint64(number(events.Origin{Plan: e.Plan})),
			Rank: number(events.Origin{Plan: e.Plan, Operator: e.Operator, Port: e.Port}),
			Seq:  s.puts,
		},
	}}
	s.items[e.Batch] = it
	s.live = append(s.live, it)
	s.habits.Enter(0)
	return nil
}

// use fetches a batch, unless it is in the space of the recorded use or in a faster tier.
func (s *simulation) use(it *item, e *Event) error {
	s.waitForMove(it)
	s.result.Accesses++
	if to := s.indexOf(e.To); to < 0 || to == it.at || it.info.Space.Kind < e.To.Kind {
		s.result.Found++
	} else {
		it.busy = true
		if err := s.waitForRoom(to, it.info.Bytes); err != nil {
			return err
		}
		s.begin(it, to, convert.ReasonWork)
		s.runUntil(it.ends)
	}
	now, info := s.clock(), &it.info
	if info.Uses > 0 {
		gap := max(1, now-info.LastUse)
		if it.gap > 0 {
			gap = (gap + 3*it.gap) / 4
		}
		it.gap = gap
	}
	s.habits.Use(info.Uses, now)
	s.habits.Leave(info.Uses)
	info.Uses = min(info.Uses, math.MaxUint8-1) + 1
	s.habits.Enter(info.Uses)
	info.LastUse = now
	if it.hint != batch.Stay {
		it.hint = 0
	}
	it.expect()
	return nil
}

// expect sets the next use as batch.Info has it.
func (it *item) expect() {
	if it.info.NextUse = it.hint; it.hint == 0 && it.gap > 0 {
		it.info.NextUse = it.info.LastUse + it.gap
	}
}

// take reserves room that is there. The copies in it of the batches that were put first go.
func (s *simulation) take(at int, bytes int64) {
	sp := s.spaces[at]
	sp.used += bytes
	over := sp.used - sp.Limit
	for _, it := range s.live {
		if it.copies.Has(at) {
			over += it.info.Bytes
		}
	}
	for _, it := range s.live {
		if over > 0 && it.copies.Has(at) {
			it.copies &^= decide.Places(0).With(at)
			over -= it.info.Bytes
		}
	}
}

func (s *simulation) waitForRoom(at int, bytes int64) error {
	sp := s.spaces[at]
	if bytes > sp.Limit-sp.Held {
		return fmt.Errorf("%w: a batch of %d bytes never fits in %s", ErrStuck, bytes, sp.ID)
	}
	for sp.used+bytes > sp.Limit {
		sp.waiting = bytes
		s.decide()
		if len(s.moving) == 0 {
			return fmt.Errorf(
				"%w after %v: %d bytes are waited for, and nothing can leave %s",
				ErrStuck,
				s.now,
				bytes,
				sp.ID,
			)
		}
		s.runUntil(s.moving[0].ends)
	}
	sp.waiting = 0
	return nil
}

func (s *simulation) waitForMove(it *item) {
	for it.busy {
		s.runUntil(s.moving[0].ends)
	}
}

// begin begins a move. The target must have room.
func (s *simulation) begin(it *item, to int, reason string) {
	it.busy, it.to, it.reason, it.began, it.ends = true, to, reason, s.now, s.now
	if it.copied = it.copies.Has(to); it.copied {
		it.copies &^= decide.Places(0).With(to)
	} else {
		it.ends += s.duration(it.at, to, it.info.Bytes)
	}
	s.take(to, it.info.Bytes)
	s.moving = append(s.moving, it)
	slices.SortStableFunc(s.moving, func(a, b *item) int { return cmp.Compare(a.ends, b.ends) })
}

// runUntil lets time pass, and moves end. A fetch leaves a copy in the slower tier.
func (s *simulation) runUntil(t time.Duration) {
	for len(s.moving) > 0 && s.moving[0].ends <= t {
		it := s.moving[0]
		s.moving = s.moving[1:]
		s.now = max(s.now, it.ends)
		from, to := s.spaces[it.at], s.spaces[it.to]
		from.used -= it.info.Bytes
		if to.ID.Kind < from.ID.Kind {
			it.copies = it.copies.With(it.at)
		}
		it.at, it.info.Space, it.busy = it.to, to.ID, false
		s.result.add(from.ID, to.ID, it.info.Bytes, it.ends-it.began, it.copied, it.reason)
		if it.reason != convert.ReasonWork { // else the use updates the batch before the next decision
			s.decide()
		}
	}
	s.now = max(s.now, t)
}

// decide begins the moves that decide.Decide wants.
func (s *simulation) decide() {
	if !slices.ContainsFunc(s.spaces, func(sp *space) bool { return sp.waiting > 0 || sp.used >= sp.Trigger }) {
		return
	}
	var snapshot decide.Snapshot
	for i, sp := range s.spaces {
		of := decide.Space{
			ID: sp.ID, Limit: sp.Limit, Trigger: sp.Trigger, Stop: sp.Stop, Used: sp.used, Waiting: sp.waiting,
		}
		for j, to := range s.spaces {
			if to.ID.Kind > sp.ID.Kind {
				edge := decide.Edge{To: j, Free: 1}
				for _, it := range s.moving {
					if it.at == i && it.to == j {
						of.Leaving += it.info.Bytes
						edge.UnderWay, edge.Free = 1, 0
					}
				}
				of.Down = append(of.Down, edge)
			}
		}
		for _, v := range s.victims(i, of.Down) {
			of.Victims = append(of.Victims, decide.Victim{
				N: int(v.ID), Bytes: v.Bytes, Key: v.Key, Copied: s.items[uint64(v.ID)].copies,
			})
		}
		snapshot.Spaces = append(snapshot.Spaces, of)
	}
	for _, m := range decide.Decide(snapshot).Moves {
		s.begin(s.items[uint64(m.Victim.N)], m.To, m.Reason)
	}
}

// victims returns the batches of a space that can be moved down, in the policy's order.
func (s *simulation) victims(at int, down []decide.Edge) (list []monitor.Victim) {
	for _, it := range s.live {
		if it.at != at || it.busy || len(down) == 0 {
			continue
		}
		v := monitor.Victim{ID: it.info.ID, Bytes: it.info.Bytes, Key: s.Policy.Key(it.info)}
		to := down[0].To
		if i := slices.IndexFunc(down, func(e decide.Edge) bool { return it.copies.Has(e.To) }); i >= 0 {
			to = down[i].To
		} else {
			v.Down = s.duration(at, to, v.Bytes)
		}
		v.Up = s.duration(to, at, v.Bytes)
		list = append(list, v)
	}
	slices.SortStableFunc(list, func(a, b monitor.Victim) int {
		return cmp.Or(slices.Compare(a.Key[:], b.Key[:]), cmp.Compare(a.ID, b.ID))
	})
	// monitor.CostAware also looks at how all batches are used.
	if p, ok := s.Policy.(interface {
		OrderBy(int64, []monitor.Victim, *decide.Habits)
	}); ok {
		p.OrderBy(s.clock(), list, &s.habits)
	} else {
		s.Policy.Order(s.clock(), list)
	}
	return list
}
