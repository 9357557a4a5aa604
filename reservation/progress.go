package reservation

import (
	"slices"
	"sync"
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

// progress is how a manager notices that nobody can go on. While an owner waits it
// looks at the books from time to time, on the goroutine of a timer; otherwise
// there is neither.
type progress struct {
	movable func(tier.ID) bool // immutable
	grace   time.Duration      // immutable
	owners  owners
	looks   sync.WaitGroup // one while a look is due or under way

	// Guarded by Manager.mu.
	waits   map[*waiter]struct{} // of those who have an owner
	timer   *time.Timer
	looking bool // a look is due or under way

	// The look's own; there is never more than one.
	certain []uint64  // who was deadlocked at the last look, whatever others do
	still   stillness // what the books were when all owners waited
	since   time.Time // and since when they are so
}

// stillness is what must stay the same for all owners to be stuck.
type stillness struct {
	waits   []uint64
	rooms   []room
	changes uint64
}

type room struct{ used, available int64 }

func (s stillness) equal(o stillness) bool {
	return s.changes == o.changes && slices.Equal(s.waits, o.waits) && slices.Equal(s.rooms, o.rooms)
}

// waitBegunLocked notes that w has joined its lines.
func (m *Manager) waitBegunLocked(w *waiter) {
	if w.owner == nil {
		return
	}
	p := &m.progress
	if p.waits == nil {
		p.waits = make(map[*waiter]struct{})
	}
	p.waits[w] = struct{}{}
	if !p.looking {
		m.lookLaterLocked()
	}
}

// waitEndedLocked notes that w has left its lines.
func (m *Manager) waitEndedLocked(w *waiter) {
	p := &m.progress
	if w.owner == nil {
		return
	}
	delete(p.waits, w)
	if len(p.waits) == 0 && p.looking && p.timer.Stop() { // else a look is under way, and sees it
		p.looking = false
		p.looks.Done()
	}
}

func (m *Manager) lookLaterLocked() {
	p := &m.progress
	p.looking = true
	p.looks.Add(1)
	after := max(1, p.grace/looksPerGrace)
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
	m.judge(m.observe())
	m.mu.Lock()
	defer m.mu.Unlock()
	p.looking = false
	if len(p.waits) > 0 {
		m.lookLaterLocked()
	}
}

// judge tells somebody if that is due.
func (m *Manager) judge(b *books) {
	p := &m.progress
	// Whatever the others give back, those who are stuck now stay so. The books are
	// not read at one instant; but who was stuck at the last look, too, has waited ever
	// since, and what it holds is what it held then.
	stuck := b.stuck(b.mostRoom)
	before := p.certain
	p.certain = seqs(stuck)
	if len(stuck) > 0 && slices.Equal(before, p.certain) {
		m.tell(b, stuck)
		return
	}
	// Or everybody waits, nothing is movable, and nothing happens.
	stuck = b.stuck(b.room)
	if len(stuck) == 0 || !b.allStuck() || !b.settled || b.anyMovable(stuck, p.movable) {
		p.still, p.since = stillness{}, time.Time{}
		return
	}
	now := time.Now()
	if still := b.stillness(stuck); p.since.IsZero() || !still.equal(p.still) {
		p.still, p.since = still, now
	}
	grace := p.grace
	if !b.holdsAny(stuck) {
		grace *= helplessGraces
	}
	if now.Sub(p.since) >= grace {
		p.since = time.Time{}
		m.tell(b, stuck)
	}
}

func seqs(waits []*waitView) []uint64 {
	out := make([]uint64, len(waits))
	for i, w := range waits {
		out[i] = w.seq
	}
	slices.Sort(out)
	return out
}
