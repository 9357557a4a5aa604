// Package deadlock finds waits that cannot end, among owners that hold something and wait for more.
// It is pure: it has no locks and no clock, and one callback.
//
//	what is held ─┐
//	who waits    ─┼─▶ Books ── stuck ──▶ Judge ──▶ those of whom one must give way
//	what is free ─┘                       ▲ now, what can be moved
//
// An owner can go on while one of its goroutines runs, or while one of its waits may be served. A
// wait may be served where there is, or may come to be, room for it in one of its lines; behind
// a shut door only the head may be. Owners that cannot go on are stuck
//
//   - for certain: even if all others give back everything that they hold. Two looks that find
//     the same waits are enough, as what is read at two moments may not fit together.
//   - as things stand: all owners wait, nothing that is free is enough for any of them, nothing
//     can be moved, and nothing has changed for Judge.Grace.
//
// A wait without an owner is judged by itself. It is stuck if two things are so. Handles and
// records of unknown owners keep so much in each of its lines that it could not be served whatever
// else became free. And nothing has changed in those lines for Judge.Strangers.
package deadlock

import (
	"slices"
	"time"
)

// Judge decides when stuck waits are to fail. It is called again and again, with the books of the
// moment, by one goroutine at a time.
type Judge struct {
	// Grace is how long nothing may change before owners that all wait count as stuck.
	Grace time.Duration
	// Strangers is Grace for three cases: handles or records of unknown owners keep some of what is
	// waited for, no owner holds anything, and waits without an owner. Below 0 such waits never
	// fail.
	Strangers time.Duration
	// Movable reports whether something may become free in a line without any owner's doing. It is
	// called only when all owners wait; nil means that nothing can.
	Movable func(line int) bool

	certain []uint64 // the owners that were stuck for certain at the last look
	still   stillness
	since   time.Time // that all are stuck and nothing has changed; zero if that is not so
	quiet   []quiet   // by line
}

// helpless is how many times the grace passes where no owner holds anything that is waited for.
// Rolling back helps then only if what an owner holds elsewhere is in the way of moves.
const helpless = 4

// stillness is what must stay the same for all owners to be stuck.
type stillness struct {
	waits   []uint64
	rooms   []room
	changes uint64
	holds   uint64
}

type room struct{ used, available int64 }

func (l *Line) room() room { return room{l.Used, l.Available} }

func (s stillness) equal(o stillness) bool {
	return s.changes == o.changes && s.holds == o.holds && slices.Equal(s.waits, o.waits) && slices.Equal(s.rooms, o.rooms)
}

func (b *Books) stillness(waits []*Wait) stillness {
	s := stillness{waits: seqs(waits), changes: b.Changes}
	for _, l := range b.Lines { // all: what is held in a slower space may be in a batch's way
		s.rooms = append(s.rooms, l.room())
		s.holds += l.Holds
	}
	return s
}

// quiet is since when a line's room, handles and records are what they are.
type quiet struct {
	room  room
	holds uint64
	since time.Time
}

// Owners returns the waits of stuck owners if one of them is to fail now, the oldest first. If
// handles or records of unknown owners are in the way, still is how long nothing has changed.
func (j *Judge) Owners(b *Books, now time.Time) (stuck []*Wait, still time.Duration) {
	// Owners that are stuck for certain stay so, whatever the others give back. The books are not
	// read at one instant. But a wait that was stuck at the last look, too, has lasted ever since,
	// and its owner still holds what it held then.
	before := j.certain
	j.certain = seqs(b.certain)
	if len(b.certain) > 0 && slices.Equal(before, j.certain) {
		return b.certain, 0
	}
	stuck = b.still
	if len(stuck) == 0 || !b.allStuck() || !b.Settled || j.anyMovable(b, stuck) {
		j.still, j.since = stillness{}, time.Time{}
		return nil, 0
	}
	if s := b.stillness(stuck); j.since.IsZero() || !s.equal(j.still) {
		j.still, j.since = s, now
	}
	grace := j.Grace
	switch {
	case slices.ContainsFunc(b.waitedFor(stuck), func(l *Line) bool { return l.unknown > 0 }):
		grace = j.Strangers
		still = now.Sub(j.since)
	case !slices.ContainsFunc(b.Owners, func(o *Owner) bool { return o.Total > 0 }):
		grace = j.Strangers // others have it all, who may go on
	case len(b.holders(stuck)) == 0:
		grace *= helpless
	}
	if grace < 0 || now.Sub(j.since) < grace {
		return nil, 0
	}
	j.since = time.Time{}
	return stuck, still
}

// anyMovable reports whether something in the way of one of the waits can be moved.
func (j *Judge) anyMovable(b *Books, waits []*Wait) bool {
	return j.Movable != nil && slices.ContainsFunc(b.waitedFor(waits), func(l *Line) bool { return j.Movable(l.Index) })
}

// Plain returns the stuck waits without an owner: handles and records of unknown owners block them,
// whatever else becomes free. They must have lasted for Strangers, with no change in their lines.
// The oldest is first; the youngest is to fail. still is how long nothing has changed. lasted
// returns how long a wait has lasted.
func (j *Judge) Plain(b *Books, now time.Time, lasted func(*Wait) time.Duration) (stuck []*Wait, still time.Duration) {
	if len(b.Plain) == 0 {
		return nil, 0
	}
	if j.quiet == nil {
		j.quiet = make([]quiet, len(b.Lines))
	}
	for i, l := range b.Lines {
		if q := &j.quiet[i]; q.since.IsZero() || q.room != l.room() || q.holds != l.Holds {
			*q = quiet{l.room(), l.Holds, now}
		}
	}
	for _, w := range b.Plain {
		if !w.pinned() {
			continue
		}
		since := lasted(w)
		for _, s := range w.Slots {
			since = min(since, now.Sub(j.quiet[s.Line.Index].since))
		}
		if since >= j.Strangers {
			stuck, still = append(stuck, w), max(still, since)
		}
	}
	if len(stuck) == 0 {
		return nil, 0
	}
	sortBySeq(stuck)
	for _, s := range stuck[len(stuck)-1].Slots { // the failed waiter has as long to give something back
		j.quiet[s.Line.Index].since = now
	}
	return stuck, still
}

// Forget is called when no wait is left.
func (j *Judge) Forget() { j.quiet = nil }

func seqs(waits []*Wait) []uint64 {
	out := make([]uint64, len(waits))
	for i, w := range waits {
		out[i] = w.Seq
	}
	slices.Sort(out)
	return out
}
