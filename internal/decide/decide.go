// Package decide chooses which batches are evicted now, and where to. [Decide] is a pure function
// of a [Snapshot] of all spaces. Package monitor makes the snapshot, and deals with clocks, locks
// and batches. The command trace replay calls Decide, too.
package decide

import (
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/stripe"
	"github.com/spillway-db/spillway/tier"
)

// Why a batch is moved: passed to Mover.Relieve, and part of events.
const (
	Trigger = "trigger" // its space is at the trigger, or above a limit that was lowered
	Demand  = "demand"  // requests wait for room in its space, or for room that a faster space needs there
)

// Snapshot is the input of a step: the spaces, the waiters and the moves in progress at one moment.
// It has no clock; the monitor turns what depends on time, such as backing off after an error, into
// facts.
type Snapshot struct {
	Spaces  []Space  // fastest tier first; edges name spaces by their place here
	Choices [][]Want // requests that any of several spaces may serve, the oldest first
}

// Want is what a request needs in a space that may serve it.
type Want struct {
	Space int // index in Snapshot.Spaces
	Bytes int64
}

// Space is one space's part of a snapshot. All sizes are bytes.
type Space struct {
	ID      tier.ID
	Limit   int64
	Trigger int64
	Stop    int64
	Used    int64 // live + retired + promised
	Retired int64 // part of Used: freed already, but the device may still work on it
	// Late is the part of Retired that has been retired for at least a period, because a device
	// still works on it. Lingering is the part of Late that was retired before the waiters came.
	Late, Lingering int64
	Foreign         int64 // what others hold on the device; part of the pressure
	// Withheld is how much of the limit cannot be used because others hold it of a shared quota, or
	// because the quota is less.
	Withheld int64

	Waiting int64       // the sum of what reservations wait for here and nowhere else
	Wanted  int64       // the sum of what the choices that may be served here need
	Leaving int64       // bytes of the batches that are being moved out
	Moving  int         // moves in progress from here or to here
	Aside   int         // victims that are skipped for some tier, or all, for a moment after an error
	Pace    stripe.Pace // of a volume: the one with the lowest gets the next batch
	Refused int64       // if above 0, a move of so many bytes was refused a moment ago, so larger ones would be

	// Headroom is how many bytes evictions to here leave free, for batches that consumers fetch:
	// see Keep. Arriving is how many used bytes are reserved for batches that will be at rest here.
	Headroom, Arriving int64
	// Charge returns what a body that is charged so much elsewhere would be
	// charged here; nil for the same.
	Charge  func(int64) int64
	Down    []Edge   // to where its batches may go: next tier first, nearest space first within a tier
	Victims []Victim // the shortlist, in the policy's order
	More    bool     // there are victims behind the last of the shortlist

	// For FullForGood.
	Rest int64 // charged for batches at rest: not being read, moved or dropped; Keep needs it, too
	Base int64 // used bytes of no batch: the engine's own, and shared dictionaries
}

// Victim is a batch that could be moved down.
type Victim struct {
	N      int       // the caller's number for it
	Bytes  int64     // what it is charged where it is, so what a move frees there
	Key    [4]uint64 // the smallest goes down first; compared word by word
	Not    Kinds     // the tiers that it cannot be converted for
	Copied Places    // the spaces that have a copy of it
}

// goesBefore reports whether the policy evicts v before other, or has no preference.
func (v Victim) goesBefore(other Victim) bool { return slices.Compare(v.Key[:], other.Key[:]) <= 0 }

// Kinds is a set of tiers.
type Kinds uint8

func (s Kinds) Has(k tier.Kind) bool   { return s&(1<<k) != 0 }
func (s Kinds) With(k tier.Kind) Kinds { return s | 1<<k }

// Places is a set of spaces, by their place in a snapshot; those from 64 on are in none.
type Places uint64

func (s Places) Has(i int) bool    { return s&(1<<i) != 0 }
func (s Places) With(i int) Places { return s | 1<<i }

// Edge is a possible eviction from one space to another in a slower tier.
type Edge struct {
	To       int  // index in Snapshot.Spaces
	UnderWay int  // moves in progress on this edge
	Free     int  // how many more may begin
	Joint    Load // what one executor may move of several victims, one after the other; zero: one victim
	Blocked  bool // it failed a moment ago: it is not used now
	Broken   bool // it failed so often that waiting for it is useless
	// Smallest is the bytes of the smallest batch at rest that could go there, also of those that are
	// no victims; 0 if there is none.
	Smallest int64
}

// Load is how much one executor moves. An executor is a goroutine of the monitor.
type Load struct {
	Batches int
	Bytes   int64
}

// takes reports whether a move that has carried l may carry v, too.
func (most Load) takes(l Load, v Victim) bool {
	return l.Batches < most.Batches && l.Bytes+v.Bytes <= most.Bytes
}

// Move is one move that a step decided on.
type Move struct {
	Victim Victim
	From   int // index in Snapshot.Spaces
	To     int
	Reason string
	Slot   int // which of the executors that begin on this edge moves it, after its other victims
}

// Shortage describes a space that is stuck: it needs room, nothing is on its way out, and no victim
// can be evicted.
type Shortage struct {
	Space  int // index in Snapshot.Spaces
	Bytes  int64
	Reason string
}

// Decision is the outcome of a step.
type Decision struct {
	Moves []Move
	Stuck []Shortage
	// Held is set if a victim waits until its target has room, for which batches leave the target.
	Held bool
	// Cut lists the spaces whose shortlists ended too soon: with longer ones Decide might decide
	// differently. The monitor then repeats the step with longer ones.
	Cut []int
}

// Decide chooses what to evict now. It is a pure function.
//
// For each space it computes how many bytes must leave beyond those that already do. First come
// what waiters lack, and what is above a lowered limit. Then comes what is above the trigger. When
// these needs are covered, as much again follows, but nothing from below the stop mark: so that a
// space which fills slowly does not ask for a move with each batch. Nothing of this is remembered
// from step to step. It takes victims in the policy's order until the need is covered, so that at
// most one batch's bytes leave beyond it. A
// victim that cannot begin yet, because its edge is busy or its target must be relieved first,
// counts as covered too: the next step will find it in its place.
//
// A victim goes to the next tier if that has room without waiters. If not, and that tier holds a
// batch that should go before this one, that batch goes down to make room; otherwise the victim
// skips the tier. It also skips a tier that it would bring to its trigger if it has a copy further
// down, and that tier holds nothing that should go before it: it would soon follow. It does not
// while somebody waits and the edge to the copy is busy.
//
// Room for a request that several spaces may serve is made in one of them: see choose. If that one
// is stuck, another is tried.
func Decide(s Snapshot) Decision { return planStep(s).out }

// planStep plans a step. If a request that several spaces may serve would wait in one that is
// stuck, it plans again without that space, while there are others. It returns the plan in which
// the fewest such requests are stuck.
func planStep(s Snapshot) *planner {
	best := newPlanner(s)
	best.work()
	left := best.stranded()
	cut := best.out.Cut
	for p, now := best, left; len(now) > 0; {
		s.Choices = slices.Clone(p.s.Choices)
		others := false
		for _, k := range now {
			if c := s.Choices[k]; len(c) > 1 {
				s.Choices[k] = slices.DeleteFunc(slices.Clone(c), func(w Want) bool { return w.Space == p.chosen[k] })
				others = true
			}
		}
		if !others {
			break
		}
		p = newPlanner(s)
		p.work()
		cut = append(cut, p.out.Cut...)
		if now = p.stranded(); len(now) < len(left) {
			best, left = p, now
		}
	}
	slices.Sort(cut)
	best.out.Cut = slices.Compact(cut)
	return best
}

// work decides.
func (p *planner) work() {
	s := &p.s
	for i := range s.Spaces {
		p.relieve(i, p.lack(i), p.lackReason(i))
		p.relieve(i, p.above(i, false), Trigger)
	}
	for i := range s.Spaces {
		p.relieve(i, p.lack(i), p.lackReason(i)) // what the spare of faster spaces asks of this one
		p.relieve(i, p.above(i, true), Trigger)
	}
	for i := range s.Spaces {
		p.stuck(i)
	}
}

// stranded lists the choices that wait for room in a space that is stuck.
func (p *planner) stranded() (choices []int) {
	for k, i := range p.chosen {
		if slices.ContainsFunc(p.out.Stuck, func(w Shortage) bool { return w.Space == i && w.Reason == Demand }) {
			choices = append(choices, k)
		}
	}
	return choices
}

// planner holds what changes while a step is worked out.
type planner struct {
	s      Snapshot
	out    Decision
	sp     []plan
	chosen []int // the space of each choice
}

type plan struct {
	waiting int64 // what reservations wait for here, at most the limit
	// balance is the room that is not asked for; below 0 it is what waiters and faster spaces lack.
	balance  int64
	asked    bool  // a faster space needs room here
	keep     int64 // and so much more is to stay free
	urgent   bool  // and there are waiters for that
	planned  int64
	arriving int64    // what comes here by moves of this step
	held     bool     // some of planned waits for relief of a slower space
	next     int      // the first victim not looked at
	rest     int64    // bytes of the victims from next on
	shed     int      // no victim before this one has a place: room below only shrinks within a step
	covered  int64    // what leaves for those that wait so far: whole victims
	cover    int      // the first victim that is not counted in it
	free     []int    // moves that may still begin, for each edge
	begun    [][]slot // that were decided on, for each edge
	busy     int      // moves towards this space
	pace     stripe.Pace
}

// slot is an executor that begins to move victims.
type slot struct {
	Load
	reason string
}

func newPlanner(s Snapshot) *planner {
	p := &planner{s: s, sp: make([]plan, len(s.Spaces))}
	for i := range s.Spaces {
		sp := &s.Spaces[i]
		p.sp[i].balance = sp.Room()
		p.wait(i, sp.Waiting)
		p.sp[i].pace = sp.Pace
		p.sp[i].free, p.sp[i].begun = make([]int, len(sp.Down)), make([][]slot, len(sp.Down))
		for j, e := range sp.Down {
			p.sp[i].free[j] = e.Free
			p.sp[e.To].busy += e.UnderWay
		}
		for _, v := range sp.Victims {
			p.sp[i].rest += v.Bytes
		}
	}
	for _, c := range s.Choices {
		w := p.choose(c)
		p.wait(w.Space, w.Bytes)
		p.chosen = append(p.chosen, w.Space)
	}
	for i := range p.sp {
		p.sp[i].balance = s.Spaces[i].Unrefused(p.sp[i].balance)
	}
	return p
}

// wait adds to what reservations wait for in space i.
func (p *planner) wait(i int, bytes int64) {
	pl := &p.sp[i]
	bytes = min(bytes, p.s.Spaces[i].Limit-pl.waiting)
	pl.waiting += bytes
	pl.balance -= bytes
}

// choose returns where a request is to be served that may be served in several spaces: where there
// will be room soonest. So room for it is made in one of them. Of those where nothing must leave
// the first is chosen. Else it is the one that lacks least: of those where what leaves for others
// is enough, of those from where enough can leave, or something, or of all. Late bytes count as
// something, and as a lack: what leaves there may be late, too, and room be made sooner elsewhere.
func (p *planner) choose(c []Want) Want {
	best, least, most := c[0], int64(math.MaxInt64), -1
	for _, w := range c {
		sp, pl := &p.s.Spaces[w.Space], &p.sp[w.Space]
		lack := w.Bytes - sp.Unrefused(pl.balance) - sp.Coming() + sp.Late
		if lack <= 0 {
			return w
		}
		rank := 0
		switch sheds := p.sheds(w.Space); {
		case lack > w.Bytes && p.leaves(w.Space, lack-w.Bytes) >= lack:
			rank = 3
		case sheds && lack <= pl.rest:
			rank = 2
		case sheds || lack <= sp.Late:
			rank = 1
			p.cut(w.Space)
		default:
			p.cut(w.Space)
		}
		if late := lack + sp.Late; rank > most || rank == most && late < least {
			best, least, most = w, late, rank
		}
	}
	return best
}

// leaves returns how many bytes leave space i if those that wait lack so many there: victims leave
// whole. It is called with ever more.
func (p *planner) leaves(i int, lack int64) int64 {
	sp, pl := &p.s.Spaces[i], &p.sp[i]
	for ; pl.covered < lack && pl.cover < len(sp.Victims); pl.cover++ {
		if edge, _ := p.fit(i, 0, len(sp.Down), sp.Victims[pl.cover], ""); edge >= 0 {
			pl.covered += sp.Victims[pl.cover].Bytes
		}
	}
	if pl.covered < lack {
		p.cut(i)
	}
	return pl.covered
}

func (s *Space) Charged(n int64) int64 {
	if s.Charge == nil {
		return n
	}
	return s.Charge(n)
}

// Room is what could be promised now.
func (s *Space) Room() int64 { return s.Limit - s.Withheld - s.Used }

func (s *Space) pressure() int64 { return s.Used + s.Foreign }

// Over is by how much the pressure is too high, if it is above 0: at the trigger already.
func (s *Space) Over() int64 { return s.pressure() - s.Trigger + 1 }

// Keep returns how many bytes moves of need bytes into the space leave free for its headroom. What
// work keeps in use is no room.
func (s *Space) Keep(need int64) int64 {
	return max(0, min(s.Headroom, s.Limit-s.Withheld-max(0, s.Used-s.Rest-s.Arriving)-need))
}

// Unrefused is how much of some room is not refused.
func (s *Space) Unrefused(room int64) int64 {
	if s.Refused > 0 {
		return min(room, s.Refused-1)
	}
	return room
}

// Coming returns how many bytes will be free without any further move.
func (s *Space) Coming() int64 { return s.Retired + s.Leaving }

// soon is Coming, less what lingers: waiters do not wait for that while something else can leave.
// What left for them counts, however long it takes: else as much would leave again, each period.
func (s *Space) soon() int64 { return s.Coming() - s.Lingering }

// lack returns how many more bytes must leave space i for three needs: its waiters, the batches
// that faster spaces hold back for it, and its limit.
func (p *planner) lack(i int) int64 {
	sp, pl := &p.s.Spaces[i], &p.sp[i]
	if pl.waiting == 0 && !pl.asked && sp.Room() >= 0 {
		return 0
	}
	return pl.keep - pl.balance - sp.soon() - pl.planned
}

func (p *planner) lackReason(i int) string {
	if p.sp[i].waiting > 0 || p.sp[i].urgent {
		return Demand
	}
	return Trigger
}

// above returns how many more bytes must leave for the pressure to be under the trigger, or, with
// spare, as far under it as it is above, but not under the stop mark.
func (p *planner) above(i int, spare bool) int64 {
	sp, pl := &p.s.Spaces[i], &p.sp[i]
	over := sp.Over()
	if len(sp.Down) == 0 || over <= 0 {
		return 0 // nowhere to go to, or no need
	}
	if spare {
		over = max(over, min(2*over, sp.pressure()-sp.Stop))
	}
	return over - sp.Coming() - pl.planned
}

// relieve chooses victims of space i until they have need bytes, and plans their moves.
func (p *planner) relieve(i int, need int64, reason string) {
	sp, pl := &p.s.Spaces[i], &p.sp[i]
	for need > 0 && pl.next < len(sp.Victims) {
		v := sp.Victims[pl.next]
		edge, now := p.target(i, v, reason)
		pl.next++
		pl.rest -= v.Bytes
		if edge < 0 {
			continue // no place for it; a smaller one may find one
		}
		to := sp.Down[edge].To
		p.sp[to].balance -= p.s.Spaces[to].Charged(v.Bytes)
		p.sp[to].arriving += p.s.Spaces[to].Charged(v.Bytes)
		p.sp[to].pace = p.sp[to].pace.After(v.Bytes)
		pl.planned += v.Bytes
		need -= v.Bytes
		if now {
			n := p.slot(i, edge, v, reason)
			if n == len(pl.begun[edge]) {
				pl.begun[edge] = append(pl.begun[edge], slot{reason: reason})
				pl.free[edge]--
				p.sp[to].busy++
			}
			pl.begun[edge][n].Batches++
			pl.begun[edge][n].Bytes += v.Bytes
			p.out.Moves = append(p.out.Moves, Move{Victim: v, From: i, To: to, Reason: reason, Slot: n})
		}
	}
	if need > 0 {
		p.cut(i)
	}
}

// slot returns which executor can move v along an edge: another one if there may be another, else
// the one that has the fewest of those that may have one more; -1 if there is none.
func (p *planner) slot(i, edge int, v Victim, reason string) int {
	begun, best := p.sp[i].begun[edge], -1
	if p.sp[i].free[edge] > 0 {
		return len(begun)
	}
	for n, s := range begun {
		takes := s.reason == reason && p.s.Spaces[i].Down[edge].Joint.takes(s.Load, v)
		if takes && (best < 0 || s.Batches < begun[best].Batches) {
			best = n
		}
	}
	return best
}

// cut adds space i to Decision.Cut if there are more victims behind its shortlist.
func (p *planner) cut(i int) {
	if p.s.Spaces[i].More && !slices.Contains(p.out.Cut, i) {
		p.out.Cut = append(p.out.Cut, i)
	}
}

// target returns the edge on which v should be evicted, -1 if there is none, and whether the move
// may begin now. It tries the tiers in order: a space with room (fit), else one that can make room
// (relievable), else the next tier.
func (p *planner) target(i int, v Victim, reason string) (edge int, now bool) {
	down := p.s.Spaces[i].Down
	fallback := -1
	copied, begin := p.copied(i, v, reason)
	for first := 0; first < len(down); {
		kind := p.s.Spaces[down[first].To].ID.Kind
		end := first + 1
		for end < len(down) && p.s.Spaces[down[end].To].ID.Kind == kind {
			end++
		}
		if edge, now := p.fit(i, first, end, v, reason); edge >= 0 {
			if down[edge].Broken && fallback >= 0 {
				break // it would fail again, and whether a nearer tier can be relieved would stay unknown
			}
			if copied >= end && (begin || !now || reason != Demand) && p.passes(down[edge].To, v) {
				return copied, begin
			}
			return edge, now
		}
		if edge, better := p.relievable(i, first, end, v); edge >= 0 {
			if better && copied >= end && p.passes(down[edge].To, v) {
				return copied, begin
			}
			if better {
				p.hold(i, edge, v, reason)
				return edge, false
			}
			if fallback < 0 {
				fallback = edge
			}
		}
		first = end
	}
	if fallback >= 0 {
		p.hold(i, fallback, v, reason)
	}
	return fallback, false
}

// copied returns the first edge of space i to where v has a copy, -1 if there is none, and whether
// it may begin now.
func (p *planner) copied(i int, v Victim, reason string) (edge int, now bool) {
	if v.Copied == 0 {
		return -1, false
	}
	for j, e := range p.s.Spaces[i].Down {
		if v.Copied.Has(e.To) && !e.Broken {
			if edge, now := p.fit(i, j, j+1, v, reason); edge >= 0 {
				return edge, now
			}
		}
	}
	return -1, false
}

// passes reports whether v, which has a copy further down, is not to be moved to space i: it would
// be among the next to leave that.
func (p *planner) passes(i int, v Victim) bool {
	sp, pl := &p.s.Spaces[i], &p.sp[i]
	if len(sp.Down) == 0 || sp.Over()+pl.arriving+sp.Charged(v.Bytes)-sp.Coming()-pl.planned <= 0 {
		return false
	}
	if pl.next >= len(sp.Victims) {
		p.cut(i)
		return true
	}
	return slices.Compare(sp.Victims[pl.next].Key[:], v.Key[:]) >= 0
}

// fit looks for room for v at the ends of edges [first, end) of space i, which
// lead to one tier. Where a copy of v lies it moves no bytes. Else memory is taken where it is
// nearest, and volumes are used side by side: see preferred.
func (p *planner) fit(i, first, end int, v Victim, reason string) (edge int, now bool) {
	edge = -1
	for j := first; j < end; j++ {
		e := p.s.Spaces[i].Down[j]
		to := &p.s.Spaces[e.To]
		if need := to.Charged(v.Bytes); e.Blocked || v.Not.Has(to.ID.Kind) || need > p.sp[e.To].balance-to.Keep(need) {
			continue
		}
		free := p.slot(i, j, v, reason) >= 0
		if v.Copied.Has(e.To) {
			return j, free
		}
		if to.ID.Kind != tier.Disk && edge >= 0 {
			continue
		}
		if edge < 0 || p.preferred(e.To, p.s.Spaces[i].Down[edge].To, free, now) {
			edge, now = j, free
		}
	}
	return edge, now
}

// preferred reports whether volume a is to be given the next batch rather than b, where a
// move may begin now or not. The one that is behind with its share is, though the batch
// may have to wait for a move to it: where there are more batches to move, they will be
// the other's turn before long, and begin now.
func (p *planner) preferred(a, b int, aNow, bNow bool) bool {
	if c := p.sp[a].pace.Compare(p.sp[b].pace); c != 0 {
		return c < 0
	}
	if aNow != bNow {
		return aNow
	}
	return p.sp[a].busy < p.sp[b].busy
}

// relievable looks for a space at the ends of edges [first, end) that can make room for v, and
// reports whether v should wait for that: room is coming there soon, or a batch lies there that
// should go down before v. It is better to go elsewhere than to wait for what lingers.
func (p *planner) relievable(i, first, end int, v Victim) (edge int, better bool) {
	edge = -1
	for j := first; j < end; j++ {
		e := p.s.Spaces[i].Down[j]
		to, pl := &p.s.Spaces[e.To], &p.sp[e.To]
		if e.Blocked || v.Not.Has(to.ID.Kind) || len(to.Down) == 0 {
			continue
		}
		need, soon := to.Charged(v.Bytes), to.soon()+pl.planned
		room := pl.balance + soon - to.Keep(need)
		if need <= room && soon > 0 {
			return j, true
		}
		sheds := need <= room+pl.rest && p.sheds(e.To)
		if !sheds { // it could never fit there, or not now
			p.cut(e.To)
		} else if to.Victims[pl.next].goesBefore(v) {
			return j, true
		}
		if edge < 0 && (sheds || to.Lingering > 0 && need <= room+to.Lingering) {
			edge = j
		}
	}
	return edge, false
}

// sheds reports whether space i has a victim that could go further down now, or as
// soon as an edge is free.
func (p *planner) sheds(i int) bool {
	sp, pl := &p.s.Spaces[i], &p.sp[i]
	for pl.shed = max(pl.shed, pl.next); pl.shed < len(sp.Victims); pl.shed++ {
		if edge, _ := p.fit(i, 0, len(sp.Down), sp.Victims[pl.shed], ""); edge >= 0 {
			return true
		}
	}
	return false
}

// hold notes that a victim of space i waits until batches have left the target of an edge.
func (p *planner) hold(i, edge int, v Victim, reason string) {
	e := &p.s.Spaces[i].Down[edge]
	to, sp := &p.sp[e.To], &p.s.Spaces[e.To]
	to.asked = true
	to.keep = max(to.keep, sp.Keep(sp.Charged(v.Bytes)))
	to.urgent = to.urgent || reason == Demand
	p.sp[i].held = true
	p.out.Held = true
}

// stuck notes what space i needs if nothing is done about it.
func (p *planner) stuck(i int) {
	sp, pl := &p.s.Spaces[i], &p.sp[i]
	if sp.Coming() > 0 || pl.planned > 0 {
		return
	}
	if need := p.lack(i); need > 0 && pl.waiting > 0 {
		p.out.Stuck = append(p.out.Stuck, Shortage{Space: i, Bytes: need, Reason: Demand})
	} else if need := p.above(i, false); need > 0 {
		p.out.Stuck = append(p.out.Stuck, Shortage{Space: i, Bytes: need, Reason: Trigger})
	}
}
