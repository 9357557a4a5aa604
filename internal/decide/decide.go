// Package decide chooses which batches are evicted from a space, and where to. [Decide] is a pure
// function of a [Snapshot]. Package monitor makes the snapshot, and deals with clocks, locks and
// batches. The command trace replay calls Decide, too.
package decide

import (
	"cmp"
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/tier"
)

// Why a batch is evicted: passed to Mover.Evict, and part of events.
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
	ID    tier.ID
	Place int // the caller's number for it, by which Victim.Copied names it
	// Room is how many bytes could be reserved now, less what requests wait for there. It may be
	// below 0. BelowTrigger is how many more bytes it can have without reaching its trigger; it has
	// no limit in the slowest tier, from which nothing is evicted.
	Room, BelowTrigger int64
	// Headroom is how many bytes evictions to here leave free for batches that consumers fetch, but
	// no more than Spare, which is how many would be free if no batch were at rest.
	Headroom, Spare int64
	// Refused is above 0 if moves from the first space to here are not to be made now for batches that
	// are charged so many bytes or more.
	Refused int64
	Pace    books.Pace
	Charge  func(int64) int64 // what a batch that is charged so much elsewhere is charged here
	// Victims are the batches that could leave, in the policy's order. A space that no batch can
	// leave now has none. More is set if others follow the last one.
	Victims []Victim
	More    bool
}

// Victim is a batch that could be evicted.
type Victim struct {
	N      int      // the caller's number for it
	Bytes  int64    // its charge where it is, so what a move frees there
	Key    [4]int64 // the smallest goes first; compared word by word
	Not    Kinds    // the tiers that it cannot go to now
	Copied Places   // the spaces that have a clean image of it
}

// Set is a set of small numbers; those from 64 on are in none.
type Set[T ~int | ~uint8] uint64

func (s Set[T]) Has(n T) bool    { return s&(1<<n) != 0 }
func (s Set[T]) With(n T) Set[T] { return s | 1<<n }

type (
	Kinds  = Set[tier.Kind] // tiers
	Places = Set[int]       // spaces, by numbers of the caller's
)

// Move is one eviction.
type Move struct {
	Victim *Victim // of the snapshot
	To     int     // index in the snapshot
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
// more, or other targets. Decide is a pure function.
//
// A victim goes to the next tier if that has room. If it has none, and holds a batch that should go
// before this one, that batch goes down to make room (Move.Make). Otherwise the victim skips the
// tier; if no slower tier has room, batches leave the next tier all the same. A victim with a clean
// image further down also skips a tier that it would bring to its trigger, if that holds nothing
// that should go before it: it would soon follow.
func Decide(s Snapshot, need int64) (moves []Move, short bool) {
	p := make(plan, len(s))
	for i := range s {
		p[i].Space = s[i]
	}
	for i := range s[0].Victims {
		v := &s[0].Victims[i]
		if need <= 0 {
			return moves, short
		}
		to, unsure := p.target(v)
		if short = short || unsure; to < 0 {
			continue // there is no place for it; a smaller one may find one
		}
		t, m := &p[to], Move{Victim: v, To: to}
		for lack := t.needs(v) - t.Room; lack > 0 && len(t.Victims) > 0; t.Victims = t.Victims[1:] {
			n := t.Victims[0].Bytes
			t.Room, t.BelowTrigger = t.Room+n, t.BelowTrigger+n
			m.Make, lack = m.Make+n, lack-n
		}
		t.Room, t.BelowTrigger = t.Room-t.Charge(v.Bytes), t.BelowTrigger-t.Charge(v.Bytes)
		t.Pace = t.Pace.After(v.Bytes)
		t.moves++
		for j := range p {
			p[j].dry = false
		}
		moves = append(moves, m)
		need -= v.Bytes
	}
	return moves, short || need > 0 && s[0].More
}

// plan is a snapshot as the moves chosen so far will leave it.
type plan []planned

// planned is a space of a plan. Its victims are those that no move makes leave.
type planned struct {
	Space
	moves int  // that go to the space
	dry   bool // no victim can leave the space: known since the last move was chosen
}

// needs returns how much room the move of v into the space needs: its charge, and the headroom that
// stays free. No room is enough if the space does not take v.
func (s *planned) needs(v *Victim) int64 {
	charge := s.Charge(v.Bytes)
	if v.Not.Has(s.ID.Kind) || s.Refused > 0 && charge >= s.Refused {
		return math.MaxInt64
	}
	return charge + max(0, min(s.Headroom, s.Spare-charge))
}

// target returns the space that v should be moved to, -1 if there is none. It reports whether the
// shortlist of a space was too short to tell.
func (p plan) target(v *Victim) (to int, unsure bool) {
	copied, fallback := -1, -1
	for j := 1; j < len(p) && copied < 0; j++ {
		if v.Copied.Has(p[j].Place) && p[j].needs(v) <= p[j].Room {
			copied = j
		}
	}
	for first, end := 1, 1; first < len(p); first = end {
		// Of the spaces of one tier that have room it is one with a clean image, or else the nearest of
		// memories, and of disks the one that is behind with its share.
		to = -1
		for ; end < len(p) && p[end].ID.Kind == p[first].ID.Kind; end++ {
			t := &p[end]
			if t.needs(v) > t.Room {
				continue
			}
			if to < 0 || end == copied {
				to = end
				continue
			}
			isBehind := cmp.Or(t.Pace.Compare(p[to].Pace), cmp.Compare(t.moves, p[to].moves)) < 0
			if t.ID.Kind.IsStorage() && to != copied && isBehind {
				to = end
			}
		}
		for j := first; j < end && to < 0; j++ {
			can, more := p.canMakeRoom(j, v)
			unsure = unsure || more
			switch {
			case !can:
			case p[j].Victims[0].goesBefore(v):
				to = j
			case fallback < 0:
				fallback = j
			}
		}
		if to < 0 {
			continue
		}
		if t := &p[to]; copied >= end && t.BelowTrigger < t.Charge(v.Bytes) {
			if len(t.Victims) == 0 {
				return copied, unsure || t.More
			}
			if v.goesBefore(&t.Victims[0]) {
				return copied, unsure
			}
		}
		return to, unsure
	}
	return fallback, unsure
}

// goesBefore reports whether the policy evicts v before other, or has no preference.
func (v *Victim) goesBefore(other *Victim) bool { return slices.Compare(v.Key[:], other.Key[:]) <= 0 }

// canMakeRoom reports whether enough victims of space j could leave it for v to have room there,
// and the first of them that could go anywhere can go now; and if not, whether a longer shortlist
// of the space might show otherwise.
func (p plan) canMakeRoom(j int, v *Victim) (can, unsure bool) {
	t := &p[j]
	room, need, sheds := t.Room, t.needs(v), false
	if t.dry || need == math.MaxInt64 {
		return false, false
	}
	for i := range t.Victims {
		w := &t.Victims[i]
		room += w.Bytes
		for k := j + 1; k < len(p) && !sheds; k++ {
			sheds = p[k].ID.Kind > t.ID.Kind && p[k].needs(w) <= p[k].Room
		}
		if sheds && need <= room {
			return true, false
		}
	}
	t.dry = !sheds
	return false, t.More
}
