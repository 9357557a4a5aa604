package reservation

import (
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
	still   stillness // what the books were when all waited
	since   time.Time // and since when they are so
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
			room{l.space.Used(), l.space.Available()}, l.space.Room(), int64(l.door.Load()), l.space.HoldChanges(),
		}
	}
	return k
}

type room struct{ used, available int64 }

// lasts says whether nothing has changed but that others wait, too.
func (s stillness) lasts(now stillness) bool {
	return s.changes == now.changes && s.holds == now.holds && slices.Equal(s.rooms, now.rooms) &&
		!slices.ContainsFunc(s.waits, func(seq uint64) bool { return !now.has(seq) })
}

func (s stillness) has(seq uint64) bool {
	_, ok := slices.BinarySearch(s.waits, seq)
	return ok
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
	m.judge(m.read())
	took := time.Since(began)
	m.mu.Lock()
	defer m.mu.Unlock()
	p.looking, p.took = false, took
	if len(p.waits) > 0 {
		m.lookLaterLocked()
	} else {
		p.books = nil // which refer to all who waited
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
	b.strangers = false
	if len(stuck) > 0 && slices.Equal(before, p.certain) {
		m.tell(b, stuck)
		return
	}
	// Or everybody waits, nothing is movable, and nothing happens.
	stuck, grace := m.silent(b)
	if len(stuck) == 0 || grace < 0 || !b.allStuck() || !b.settled || m.anyMovable(b, stuck) {
		p.still, p.since = stillness{}, time.Time{}
		return
	}
	now := time.Now()
	if still := b.stillness(stuck); p.since.IsZero() || !p.still.lasts(still) {
		p.still, p.since = still, now
	}
	if b.quiet = now.Sub(p.since); b.quiet >= grace {
		// Who came later has not waited as long.
		stuck = slices.DeleteFunc(stuck, func(v *waitView) bool { return !p.still.has(v.seq) })
		p.since = time.Time{}
		m.tell(b, stuck)
	}
}

// silent returns the waits that may be told when nothing happens for the time that it
// returns; below 0 is never. A wait without an owner is told only if handles and records of
// unknown owners are what it lacks: of nothing else is it known that nobody will free it.
func (m *Manager) silent(b *books) ([]*waitView, time.Duration) {
	var owned, all []*waitView
	for _, v := range b.still {
		if v.owner != nil {
			owned = append(owned, v)
		}
		if v.owner != nil || v.lacksNobodys() {
			all = append(all, v)
		}
	}
	switch {
	case b.strangersHold(owned), len(owned) == 0:
		b.strangers = true
		return all, m.progress.stuck
	case b.holdsAny(owned):
		return owned, m.progress.grace
	}
	return owned, m.progress.grace * helplessGraces
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
