package reservation

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// DefaultGrace is how long nothing may change before waiters are taken for
// deadlocked that others could have helped.
const DefaultGrace = 100 * time.Millisecond

const (
	// looksPerGrace is how often the books are looked at within a grace.
	looksPerGrace = 4
	// helplessGraces is how many graces it takes where no owner holds anything that
	// is waited for, so that rolling back would not help: there the monitor refuses
	// waiters, as soon as it knows that all is at rest and cannot move.
	helplessGraces = 4
)

// DefaultStuckAfter is how long nothing may change where handles or records of unknown
// owners keep something of what is waited for. Somebody may work on them, which takes
// longer than moves do, and the waiters would be told for nothing.
const DefaultStuckAfter = 30 * time.Second

// lookShare bounds what looks cost: at most one part in lookShare of a processor.
const lookShare = 20

// progress is how a manager notices that nobody can go on. While an owner waits it
// looks at the books from time to time, on the goroutine of a timer; otherwise
// there is neither. If nothing has changed since the last look, the books are not read
// again.
type progress struct {
	movable func(tier.ID) bool // immutable
	grace   time.Duration      // immutable
	stuck   time.Duration      // immutable; see Config.StuckAfter
	owners  owners
	looks   sync.WaitGroup // one while a look is due or under way
	changes atomic.Uint64  // of what owners hold and wait for

	// Guarded by Manager.mu.
	waits   map[*waiter]struct{}
	owned   int // of waits: those that have an owner
	timer   *time.Timer
	looking bool          // a look is due or under way
	took    time.Duration // by the last look

	// The look's own; there is never more than one.
	books   *books    // of the last look
	mark    mark      // what there was when they were read
	certain []uint64  // who was deadlocked at the last look, whatever others do
	still   stillness // what the books were when all owners waited
	since   time.Time // and since when they are so
	quiet   []quiet   // by line
	reads   int       // how often the books were read
	steps   int       // what that has cost
}

// stillness is what must stay the same for all owners to be stuck.
type stillness struct {
	waits   []uint64
	rooms   []room
	changes uint64
	holds   uint64
}

// mark is the same for as long as nothing has changed that the books depend on.
type mark struct {
	changes uint64
	lines   []lineMark
}

type lineMark struct {
	room
	most, door int64
	holds      uint64
}

func (a mark) equal(b mark) bool { return a.changes == b.changes && slices.Equal(a.lines, b.lines) }

// markNow must be taken before the books are read, so that a change meanwhile shows.
func (m *Manager) markNow() mark {
	k := mark{changes: m.progress.changes.Load(), lines: make([]lineMark, len(m.lines))}
	for i, l := range m.lines {
		k.lines[i] = lineMark{
			room{l.space.Used(), l.space.Available()}, l.space.Room(), int64(l.waits.Door()), l.space.HoldChanges(),
		}
	}
	return k
}

type room struct{ used, available int64 }

func (s stillness) equal(o stillness) bool {
	return s.changes == o.changes && s.holds == o.holds && slices.Equal(s.waits, o.waits) && slices.Equal(s.rooms, o.rooms)
}

// quiet is since when a line's room, handles and records are what they are.
type quiet struct {
	room  room
	holds uint64
	since time.Time
}

// waitBegunLocked notes that w has joined its lines.
func (m *Manager) waitBegunLocked(w *waiter) {
	p := &m.progress
	if w.owner == nil && p.stuck < 0 {
		return
	}
	p.changes.Add(1)
	if p.waits == nil {
		p.waits = make(map[*waiter]struct{})
	}
	p.waits[w] = struct{}{}
	if w.owner != nil {
		p.owned++
		if p.owned == 1 && p.looking && p.timer.Stop() { // the next look is far off
			p.looking = false
			p.looks.Done()
		}
	}
	if !p.looking {
		m.lookLaterLocked()
	}
}

// waitEndedLocked notes that w has left its lines.
func (m *Manager) waitEndedLocked(w *waiter) {
	p := &m.progress
	if _, ok := p.waits[w]; !ok {
		return
	}
	p.changes.Add(1)
	delete(p.waits, w)
	if w.owner != nil {
		p.owned--
	}
	if len(p.waits) == 0 && p.looking && p.timer.Stop() { // else a look is under way, and sees it
		p.looking = false
		p.looks.Done()
	}
}

// lookLaterLocked arranges the next look.
func (m *Manager) lookLaterLocked() {
	p := &m.progress
	p.looking = true
	p.looks.Add(1)
	grace := p.grace
	if p.owned == 0 {
		grace = p.stuck
	}
	after := max(1, grace/looksPerGrace, (lookShare-1)*p.took)
	if p.timer == nil {
		p.timer = time.AfterFunc(after, m.look)
		return
	}
	p.timer.Reset(after)
}

// look is called by the timer.
func (m *Manager) look() {
	p := &m.progress
	defer p.looks.Done()
	lockrank.AssertNone("waiters are looked at")
	began := time.Now()
	b := m.read()
	m.judge(b)
	m.judgePlain(b)
	took := time.Since(began)
	m.mu.Lock()
	defer m.mu.Unlock()
	p.looking, p.took = false, took
	if len(p.waits) > 0 {
		m.lookLaterLocked()
	} else {
		p.books, p.quiet = nil, nil // the books refer to all who waited
	}
}

// read returns the books as they are, with those who are stuck. They are read only if
// something has changed since the last time.
func (m *Manager) read() *books {
	p := &m.progress
	now := m.markNow()
	if p.books != nil && p.books.settled && now.equal(p.mark) {
		return p.books
	}
	b := m.observe()
	b.certain = b.stuck(true)
	b.still = b.stuck(false)
	p.books, p.mark = b, now
	p.reads++
	p.steps += b.steps
	return b
}

// judge tells somebody if that is due.
func (m *Manager) judge(b *books) {
	p := &m.progress
	// Whatever the others give back, those who are stuck now stay so. The books are
	// not read at one instant; but who was stuck at the last look, too, has waited ever
	// since, and what it holds is what it held then.
	stuck := b.certain
	before := p.certain
	p.certain = seqs(stuck)
	b.quiet = 0
	if len(stuck) > 0 && slices.Equal(before, p.certain) {
		m.tell(b, stuck)
		return
	}
	// Or everybody waits, nothing is movable, and nothing happens.
	stuck = b.still
	if len(stuck) == 0 || !b.allStuck() || !b.settled || m.anyMovable(b, stuck) {
		p.still, p.since = stillness{}, time.Time{}
		return
	}
	now := time.Now()
	if still := b.stillness(stuck); p.since.IsZero() || !still.equal(p.still) {
		p.still, p.since = still, now
	}
	grace := p.grace
	switch {
	case b.strangersHold(stuck):
		if grace = p.stuck; grace < 0 {
			return
		}
		b.quiet = now.Sub(p.since)
	case !b.holdsAny(stuck):
		grace *= helplessGraces
	}
	if now.Sub(p.since) >= grace {
		p.since = time.Time{}
		m.tell(b, stuck)
	}
}

// judgePlain tells the youngest of the waits without an owner that handles and records of
// unknown owners stand in the way of, whatever else becomes free, if for Config.StuckAfter it
// has waited and nothing has changed in the spaces that it waits for.
func (m *Manager) judgePlain(b *books) {
	p := &m.progress
	if len(b.plain) == 0 {
		return
	}
	now := time.Now()
	if p.quiet == nil {
		p.quiet = make([]quiet, len(m.lines))
	}
	for i, l := range p.mark.lines {
		if q := &p.quiet[i]; q.since.IsZero() || q.room != l.room || q.holds != l.holds {
			*q = quiet{l.room, l.holds, now}
		}
	}
	var stuck []*waitView
	b.quiet = 0
	for _, v := range b.plain {
		if !v.pinned() {
			continue
		}
		still := time.Since(m.made) - v.begun
		for _, s := range v.slots {
			still = min(still, now.Sub(p.quiet[s.line.index].since))
		}
		if still >= p.stuck {
			stuck, b.quiet = append(stuck, v), max(b.quiet, still)
		}
	}
	if len(stuck) == 0 {
		return
	}
	slices.SortFunc(stuck, func(a, b *waitView) int { return cmp.Compare(a.seq, b.seq) })
	v := stuck[len(stuck)-1]
	m.tellOne(v, stuck, b.errorOf(v, len(stuck), RollBack))
	for _, s := range v.slots { // it has as long to give something back
		p.quiet[s.line.index].since = now
	}
}

// anyMovable says whether something in the way of one of the waits can be moved. Of whom
// it cannot be asked nobody is told.
func (m *Manager) anyMovable(b *books, stuck []*waitView) (movable bool) {
	movable = true
	m.panics.Do("Config.Movable", func() { movable = b.anyMovable(stuck, m.progress.movable) })
	return movable
}

func seqs(waits []*waitView) []uint64 {
	out := make([]uint64, len(waits))
	for i, w := range waits {
		out[i] = w.seq
	}
	slices.Sort(out)
	return out
}
