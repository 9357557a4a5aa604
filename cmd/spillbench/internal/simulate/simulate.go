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
	Capacity  map[tier.Kind]int64 // of each space of a tier, in bytes; the marks stay the same shares
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

// item is a batch.
type item struct {
	info   batch.Info
	at     int           // index in simulation.spaces
	copies decide.Places // slower spaces that still have its bytes
	gap    int64         // expected between two uses; 0 before the second
	hint   int64         // as of batch.Batch.Hint; 0 for none
	busy   bool          // it is being moved or fetched, so it cannot be chosen
}

// space keeps the books of a space. Sizes are in bytes.
type space struct {
	Space
	used    int64 // by batches, and by moves to the space that are under way
	waiting int64 // what the put or the use needs that waits for room here
	copies  []*item
	cached  int64 // by copies, which are freed when their room is needed
}

// move is a move to a slower tier that is under way.
type move struct {
	*item
	from, to int
	reason   string
	copied   bool
	began    time.Duration
	ends     time.Duration
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
	moves   []*move // that are under way, by their ends
	puts    uint64
	numbers map[events.Origin]int // of plans and operators
	habits  decide.Habits
	result  Result
}

// observing is a policy that orders by how all batches are used: monitor.CostAware.
type observing interface {
	OrderBy(now int64, list []monitor.Victim, h *decide.Habits)
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
		begin := s.now
		switch it := s.items[e.Batch]; {
		case e.is(events.BatchPut):
			err = s.put(e)
		case it == nil:
			continue
		case e.is(events.BatchUsed):
			err = s.use(it, e)
		case e.is(events.BatchHinted):
			it.hint = e.Hint
			it.expect()
		case e.is(events.BatchDropped):
			s.drop(it)
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

func newSimulation(t *Trace, set Setting) (*simulation, error) {
	s := &simulation{
		Setting: set, start: t.Start, items: make(map[uint64]*item), numbers: make(map[events.Origin]int),
	}
	if s.Policy == nil {
		var err error
		if s.Policy, err = monitor.ByName(t.Policy); err != nil { // it was a program's own
			return nil, fmt.Errorf("%w: %w", ErrSetting, err)
		}
	}
	for _, of := range t.Spaces {
		if want := s.Capacity[of.ID.Kind]; want > 0 && of.Capacity > 0 {
			share := float64(want) / float64(of.Capacity)
			scaled := func(n int64) int64 { return int64(float64(n) * share) }
			of.Capacity, of.Limit, of.Trigger, of.Stop = want, scaled(of.Limit), scaled(of.Trigger), scaled(of.Stop)
		}
		if of.Held > of.Limit {
			return nil, fmt.Errorf(
				"%w: %s of %d bytes has no room for the engine's own %d", ErrSetting, of.ID, of.Capacity, of.Held,
			)
		}
		s.spaces = append(s.spaces, &space{Space: of, used: of.Held})
	}
	slices.SortStableFunc(s.spaces, func(a, b *space) int { return Edge{From: a.ID}.compare(Edge{From: b.ID}) })
	for _, k := range tier.Kinds() {
		if s.Capacity[k] > 0 && !slices.ContainsFunc(s.spaces, func(of *space) bool { return of.ID.Kind == k }) {
			return nil, fmt.Errorf("%w: it had no %s space", ErrSetting, k)
		}
	}
	s.Bandwidth = bandwidths(t)
	for e, speed := range set.Bandwidth {
		for _, end := range [...]tier.ID{e.From, e.To} {
			if s.indexOf(end) < 0 {
				return nil, fmt.Errorf("%w: it had no space %s", ErrSetting, end)
			}
		}
		if e.From == e.To {
			return nil, fmt.Errorf("%w: nothing moves from %s to itself", ErrSetting, e.From)
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

// put makes a batch as soon as there is room for it.
func (s *simulation) put(e *Event) error {
	at := s.indexOf(e.To)
	if at < 0 || s.items[e.Batch] != nil {
		return nil // no engine emits such an event
	}
	if err := s.reserve(at, e.Bytes); err != nil {
		return err
	}
	place := batch.Place{
		Plan: uint64(s.number(events.Origin{Plan: e.Plan})),
		Rank: s.number(events.Origin{Plan: e.Plan, Operator: e.Operator, Port: e.Port}),
	}
	s.puts++
	place.Seq = s.puts
	it := &item{at: at, info: batch.Info{
		ID: batch.ID(e.Batch), Bytes: e.Bytes, Space: e.To, LastUse: s.clock(), Place: place,
	}}
	s.items[e.Batch] = it
	s.live = append(s.live, it)
	s.habits.Enter(0)
	return nil
}

// number numbers plans and operators in the order of their first puts.
func (s *simulation) number(of events.Origin) int {
	if s.numbers[of] == 0 {
		s.numbers[of] = len(s.numbers) + 1
	}
	return s.numbers[of]
}

func (s *simulation) clock() int64 { return s.start + int64(s.now) }

// use fetches a batch, unless it is in the space of the recorded use or in a faster tier.
func (s *simulation) use(it *item, e *Event) error {
	for it.busy {
		s.runUntil(s.moves[0].ends)
	}
	s.result.Accesses++
	to := s.indexOf(e.To)
	if to < 0 || to == it.at || it.info.Space.Kind < e.To.Kind {
		s.result.Found++
	} else {
		it.busy = true
		if err := s.reserve(to, it.info.Bytes); err != nil {
			return err
		}
		from, began := it.at, s.now
		copied := s.dropCopy(it, to)
		if !copied {
			s.runUntil(s.now + s.duration(from, to, it.info.Bytes))
		}
		s.arrive(it, to)
		if s.spaces[to].ID.Kind < s.spaces[from].ID.Kind {
			s.keepCopy(it, from)
		}
		s.result.add(Edge{s.spaces[from].ID, s.spaces[to].ID}, it.info.Bytes, s.now-began, copied, convert.ReasonWork)
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

// arrive makes the space that has the batch its own; its room is reserved.
func (s *simulation) arrive(it *item, to int) {
	s.spaces[it.at].used -= it.info.Bytes
	it.at, it.info.Space, it.busy = to, s.spaces[to].ID, false
}

// drop ends a batch.
func (s *simulation) drop(it *item) {
	for it.busy {
		s.runUntil(s.moves[0].ends)
	}
	for i := range s.spaces {
		s.dropCopy(it, i)
	}
	s.spaces[it.at].used -= it.info.Bytes
	s.habits.Leave(it.info.Uses)
	delete(s.items, uint64(it.info.ID))
	s.live = slices.DeleteFunc(s.live, func(o *item) bool { return o == it })
}

// keepCopy leaves the bytes of a batch in a space.
func (s *simulation) keepCopy(it *item, at int) {
	sp := s.spaces[at]
	it.copies = it.copies.With(at)
	sp.copies = append(sp.copies, it)
	sp.cached += it.info.Bytes
}

// dropCopy frees the copy of a batch in a space, and reports whether there was one.
func (s *simulation) dropCopy(it *item, at int) bool {
	if !it.copies.Has(at) {
		return false
	}
	sp := s.spaces[at]
	it.copies &^= decide.Places(0).With(at)
	sp.copies = slices.DeleteFunc(sp.copies, func(o *item) bool { return o == it })
	sp.cached -= it.info.Bytes
	return true
}

// take reserves room that is there, and frees the oldest copies in it.
func (s *simulation) take(at int, bytes int64) {
	sp := s.spaces[at]
	sp.used += bytes
	for sp.used+sp.cached > sp.Limit && len(sp.copies) > 0 {
		s.dropCopy(sp.copies[0], at)
	}
}

// reserve waits for room and takes it.
func (s *simulation) reserve(at int, bytes int64) error {
	sp := s.spaces[at]
	if bytes > sp.Limit-sp.Held {
		return fmt.Errorf("%w: a batch of %d bytes never fits in %s", ErrStuck, bytes, sp.ID)
	}
	for sp.used+bytes > sp.Limit {
		sp.waiting = bytes
		s.decide()
		if len(s.moves) == 0 {
			return fmt.Errorf("%w after %v: %d bytes are waited for, and nothing can leave %s", ErrStuck, s.now, bytes, sp.ID)
		}
		s.runUntil(s.moves[0].ends)
	}
	sp.waiting = 0
	s.take(at, bytes)
	return nil
}

// runUntil lets time pass, and moves end.
func (s *simulation) runUntil(t time.Duration) {
	for len(s.moves) > 0 && s.moves[0].ends <= t {
		m := s.moves[0]
		s.moves = s.moves[1:]
		s.now = max(s.now, m.ends)
		s.arrive(m.item, m.to)
		s.result.add(Edge{s.spaces[m.from].ID, s.spaces[m.to].ID}, m.info.Bytes, m.ends-m.began, m.copied, m.reason)
		s.decide()
	}
	s.now = max(s.now, t)
}

// decide begins the moves that decide.Decide wants.
func (s *simulation) decide() {
	if !slices.ContainsFunc(s.spaces, func(sp *space) bool { return sp.waiting > 0 || sp.used >= sp.Trigger }) {
		return
	}
	snapshot := decide.Snapshot{Spaces: make([]decide.Space, len(s.spaces))}
	var victims []monitor.Victim
	for i, sp := range s.spaces {
		to := &snapshot.Spaces[i]
		*to = decide.Space{
			ID: sp.ID, Limit: sp.Limit, Trigger: sp.Trigger, Stop: sp.Stop, Used: sp.used, Waiting: sp.waiting,
		}
		for _, m := range s.moves {
			if m.from == i {
				to.Leaving += m.info.Bytes
			}
		}
		for j := i + 1; j < len(s.spaces); j++ {
			if s.spaces[j].ID.Kind > sp.ID.Kind {
				e := decide.Edge{To: j, Free: 1}
				if slices.ContainsFunc(s.moves, func(m *move) bool { return m.from == i && m.to == j }) {
					e.UnderWay, e.Free = 1, 0
				}
				to.Down = append(to.Down, e)
			}
		}
		if len(to.Down) == 0 {
			continue
		}
		for _, v := range s.victims(i, to.Down) {
			to.Victims = append(to.Victims, decide.Victim{
				N: len(victims), Bytes: v.Bytes, Key: v.Key, Copied: s.items[uint64(v.ID)].copies,
			})
			victims = append(victims, v)
		}
	}
	for _, m := range decide.Decide(snapshot).Moves {
		s.begin(s.items[uint64(victims[m.Victim.N].ID)], m.To, m.Reason)
	}
}

// victims returns the batches of a space that can be moved, in the policy's order.
func (s *simulation) victims(at int, down []decide.Edge) (list []monitor.Victim) {
	for _, it := range s.live {
		if it.at != at || it.busy {
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
	if p, ok := s.Policy.(observing); ok {
		p.OrderBy(s.clock(), list, &s.habits)
	} else {
		s.Policy.Order(s.clock(), list)
	}
	return list
}

// begin begins the move of a batch to a slower tier.
func (s *simulation) begin(it *item, to int, reason string) {
	m := &move{item: it, from: it.at, to: to, reason: reason, began: s.now, ends: s.now}
	if m.copied = s.dropCopy(it, to); !m.copied {
		m.ends += s.duration(m.from, to, it.info.Bytes)
	}
	it.busy = true
	s.take(to, it.info.Bytes)
	s.moves = append(s.moves, m)
	slices.SortStableFunc(s.moves, func(a, b *move) int { return cmp.Compare(a.ends, b.ends) })
}
