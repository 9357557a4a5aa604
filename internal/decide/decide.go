// Package decide chooses which batches are evicted from a space, and where to. [Decide] is a pure
// function of a [Snapshot]. Package monitor makes the snapshot, and deals with clocks, locks and
// batches. The command trace replay calls Decide, too.
package decide

import (
	"cmp"
	"slices"

	"github.com/spillway-db/spillway/internal/stripe"
	"github.com/spillway-db/spillway/tier"
)

// Why a batch is evicted: passed to Mover.Relieve, and part of events.
const (
	Trigger = "trigger" // its space is at the trigger, or above a limit that was lowered
	Demand  = "demand"  // requests wait for room in its space, or for room that a faster space needs there
)

// Snapshot is the space to evict from and the slower spaces, at one moment. The first space is the
// one to evict from. The others follow in the order in which they are preferred: the next tier
// first, and within a tier the nearest space first. A snapshot has no clock: the monitor turns what
// depends on time, such as a pause after an error, into facts.
type Snapshot []Space

// Space is one space of a snapshot. All sizes are bytes.
type Space struct {
	ID tier.ID
	// Room is how many bytes could be reserved now, less what requests wait for there. It may be
	// below 0. Calm is how many bytes more it can have without reaching its trigger; the slowest
	// tier has no trigger for moves.
	Room, Calm int64
	// Headroom is how many bytes evictions to here leave free for batches that consumers fetch, and
	// Spare how many there would be if no batch were at rest: see Keep.
	Headroom, Spare int64
	// Refused is above 0 if the space refused so many bytes a moment ago although it had room.
	Refused int64
	Blocked bool // moves from the first space to here failed a moment ago
	Pace    stripe.Pace
	Charge  func(int64) int64 // what a body charged so much elsewhere is charged here; nil for the same
	// Victims are the batches that could leave, in the policy's order. A space that no batch can
	// leave now has none. More is set if others follow the last one.
	Victims []Victim
	More    bool
}

// Victim is a batch that could be evicted.
type Victim struct {
	N      int       // the caller's number for it
	Bytes  int64     // its charge where it is, so what a move frees there
	Key    [4]uint64 // the smallest goes first; compared word by word
	Not    Kinds     // the tiers that it cannot go to now
	Copied Places    // the spaces that have a clean image of it
}

// goesBefore reports whether the policy evicts v before other, or has no preference.
func (v *Victim) goesBefore(other *Victim) bool { return slices.Compare(v.Key[:], other.Key[:]) <= 0 }

// Kinds is a set of tiers.
type Kinds uint8

func (s Kinds) Has(k tier.Kind) bool   { return s&(1<<k) != 0 }
func (s Kinds) With(k tier.Kind) Kinds { return s | 1<<k }

// Places is a set of spaces, by numbers of the caller's; those from 64 on are in none.
type Places uint64

func (s Places) Has(i int) bool    { return s&(1<<i) != 0 }
func (s Places) With(i int) Places { return s | 1<<i }

// Move is one eviction.
type Move struct {
	Victim Victim
	To     int // index in the snapshot
	// Make is how many bytes must leave the target before the move has room there; 0 for none.
	Make int64
}

// Excess returns how many bytes should leave a space because of its pressure. Below the trigger it
// is 0. At the trigger the pressure is to fall as far below the trigger as it is above, but not
// below the stop mark. So a space that fills slowly does not ask for a move with each batch, and at
// most twice the excess moves.
func Excess(pressure, trigger, stop int64) int64 {
	over := pressure - trigger + 1
	if over <= 0 {
		return 0
	}
	return max(over, min(2*over, pressure-stop))
}

// Decide chooses what to evict from the first space so that need bytes leave it. It takes victims
// in the policy's order until the need is covered, so at most one batch's bytes leave beyond it. It
// reports whether it ended because the shortlist of a space did: with longer ones it might choose
// more, or other targets. places are the caller's numbers of the spaces, by which Victim.Copied
// names them. Decide is a pure function.
//
// A victim goes to the next tier if that has room. If it has none, and holds a batch that should go
// before this one, that batch goes down to make room (Move.Make). Otherwise the victim skips the
// tier; if no slower tier has room, batches leave the next tier all the same. A victim with a clean
// image further down also skips a tier that it would bring to its trigger, if that holds nothing
// that should go before it: it would soon follow.
func Decide(s Snapshot, places []int, need int64) (moves []Move, short bool) {
	p := &planner{
		s: slices.Clone(s), places: places,
		next: make([]int, len(s)), given: make([]int, len(s)), dry: make([]bool, len(s)),
	}
	from := &p.s[0]
	for i := range from.Victims {
		if need <= 0 {
			return moves, p.short
		}
		v := &from.Victims[i]
		to := p.target(v)
		if to < 0 {
			continue // there is no place for it; a smaller one may find one
		}
		t := &p.s[to]
		t.Room -= t.charged(v)
		t.Calm -= t.charged(v)
		t.Pace = t.Pace.After(v.Bytes)
		p.given[to]++
		m := Move{Victim: *v, To: to}
		for lack := t.keep(v) - t.Room; lack > 0 && p.next[to] < len(t.Victims); p.next[to]++ {
			n := t.Victims[p.next[to]].Bytes
			t.Room, t.Calm = t.Room+n, t.Calm+n
			m.Make, lack = m.Make+n, lack-n
		}
		moves = append(moves, m)
		need -= v.Bytes
		clear(p.dry)
	}
	return moves, need > 0 && from.More || p.short
}

// planner is the work of one Decide. It changes the rooms and paces of s as it chooses moves.
type planner struct {
	s      Snapshot
	places []int
	next   []int  // for each space, the first victim that no move makes leave
	given  []int  // for each space, how many moves it was given
	dry    []bool // for each space, it is known since the last move that no victim can leave it
	short  bool   // the shortlist of a target was too short to tell
}

func (s *Space) charged(v *Victim) int64 {
	if s.Charge == nil {
		return v.Bytes
	}
	return s.Charge(v.Bytes)
}

// keep returns how many bytes the move of v into the space leaves free: its headroom, but no more
// than would be free without batches at rest.
func (s *Space) keep(v *Victim) int64 { return max(0, min(s.Headroom, s.Spare-s.charged(v))) }

// target returns the space that v should be moved to, -1 if there is none.
func (p *planner) target(v *Victim) int {
	copied, fallback := -1, -1
	for j := 1; j < len(p.s) && copied < 0; j++ {
		if v.Copied.Has(p.places[j]) && p.fits(j, v) {
			copied = j
		}
	}
	for first := 1; first < len(p.s); {
		end := first + 1
		for end < len(p.s) && p.s[end].ID.Kind == p.s[first].ID.Kind {
			end++
		}
		to := p.withRoom(first, end, v)
		for j := first; j < end && to < 0; j++ {
			if !p.canMakeRoom(j, v) {
				continue
			}
			if fallback < 0 {
				fallback = j
			}
			if p.s[j].Victims[p.next[j]].goesBefore(v) {
				to = j
			}
		}
		if to >= 0 {
			if copied >= end && p.wouldFollow(to, v) {
				return copied
			}
			return to
		}
		first = end
	}
	return fallback
}

// withRoom returns the space of one tier, [first, end), that has room for v and is to be given it:
// one with a clean image of v, the nearest of memories, and of disks the one that is behind with
// its share. It returns -1 if none has room.
func (p *planner) withRoom(first, end int, v *Victim) int {
	best := -1
	for j := first; j < end; j++ {
		t := &p.s[j]
		if !p.fits(j, v) {
			continue
		}
		if v.Copied.Has(p.places[j]) {
			return j
		}
		if best < 0 {
			best = j
			continue
		}
		before := cmp.Or(t.Pace.Compare(p.s[best].Pace), cmp.Compare(p.given[j], p.given[best])) < 0
		if before && t.ID.Kind == tier.Disk {
			best = j
		}
	}
	return best
}

// fits reports whether space j has room for v now, and takes it.
func (p *planner) fits(j int, v *Victim) bool {
	t := &p.s[j]
	need := t.charged(v)
	return !t.Blocked && !v.Not.Has(t.ID.Kind) && need <= t.Room-t.keep(v) && (t.Refused == 0 || need < t.Refused)
}

// canMakeRoom reports whether enough victims of space j could leave it for v to have room there,
// and the first of them that could go anywhere can go now.
func (p *planner) canMakeRoom(j int, v *Victim) bool {
	t := &p.s[j]
	if p.dry[j] || t.Blocked || v.Not.Has(t.ID.Kind) || t.Refused > 0 && t.charged(v) >= t.Refused {
		return false
	}
	room := t.Room - t.keep(v)
	sheds := false
	for i := p.next[j]; i < len(t.Victims); i++ {
		w := &t.Victims[i]
		room += w.Bytes
		for k := j + 1; k < len(p.s) && !sheds; k++ {
			sheds = p.s[k].ID.Kind > t.ID.Kind && p.fits(k, w)
		}
		if sheds && t.charged(v) <= room {
			return true
		}
	}
	p.dry[j] = !sheds
	p.short = p.short || t.More
	return false
}

// wouldFollow reports whether v, which has a clean image further down, would be among the next to
// leave space j.
func (p *planner) wouldFollow(j int, v *Victim) bool {
	t := &p.s[j]
	if t.Calm >= t.charged(v) {
		return false
	}
	p.short = p.short || p.next[j] == len(t.Victims) && t.More
	return p.next[j] == len(t.Victims) || v.goesBefore(&t.Victims[p.next[j]])
}
