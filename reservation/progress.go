package reservation

import (
	"cmp"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/deadlock"
	"github.com/spillway-db/spillway/internal/gate"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// defaultGrace is how long nothing may change before waiters are taken for
// deadlocked that others could have helped.
const defaultGrace = 100 * time.Millisecond

// looksPerGrace is how often the books are looked at within a grace.
const looksPerGrace = 4

// StuckAfter is the default of Config.StuckAfter. Work may be in progress on what is waited for,
// which takes longer than moves do. The waiters would fail for nothing.
const StuckAfter = 30 * time.Second

// lookShare bounds what looks cost: at most one part in lookShare of a processor.
const lookShare = 20

// progress is how a manager notices that no waiter can go on. While an owner waits it reads the
// books from time to time, on the goroutine of a timer. Otherwise there is neither. If nothing has
// changed since the last look, the books are not read again.
type progress struct {
	owners  owners
	changes atomic.Uint64 // of what owners hold and wait for

	// Guarded by Manager.mu.
	waits int           // that are judged
	owned int           // of waits: those that have an owner
	next  gate.Alarm    // for look
	took  time.Duration // by the last look

	// The look's own; there is never more than one.
	judge deadlock.Judge  // what it is configured with is immutable
	books *deadlock.Books // of the last look
	mark  []int64         // what there was when they were read
	reads int             // how often the books were read
	steps int             // what that has cost
}

// mark returns what is the same for as long as nothing has changed that the books depend on. It
// must be taken before these are read, so that a change meanwhile shows.
func (m *Manager) mark() []int64 {
	k := []int64{int64(m.progress.changes.Load())}
	for _, l := range m.lines {
		k = append(k, l.space.Used(), l.space.Available(), l.space.Room(), int64(l.waits.Door()), int64(l.space.Inside().Holds().Changes()))
	}
	return k
}

// configure is part of NewManager.
func (p *progress) configure(m *Manager, cfg Config) {
	p.owners.open = make(map[*Owner]struct{})
	p.judge.Grace = cmp.Or(cfg.Grace, defaultGrace)
	p.judge.Strangers = cmp.Or(cfg.StuckAfter, StuckAfter)
	if cfg.Movable != nil {
		p.judge.Movable = func(line int) (movable bool) {
			movable = true // if it panics
			m.panics.Do("Config.Movable", func() { movable = cfg.Movable(m.lines[line].space.ID()) })
			return movable
		}
	}
}

// judges reports whether w may be found stuck.
func (p *progress) judges(w *waiter) bool { return w.owner != nil || p.judge.Strangers >= 0 }

// waitBegunLocked notes that w has joined its lines.
func (m *Manager) waitBegunLocked(w *waiter) {
	p := &m.progress
	if !p.judges(w) {
		return
	}
	p.changes.Add(1)
	p.waits++
	if w.owner != nil {
		p.owned++
		if p.owned == 1 { // the next look is far off
			p.next.Stop()
		}
	}
	if !p.next.IsSet() {
		m.lookLaterLocked()
	}
}

// waitEndedLocked notes that w has left its lines.
func (m *Manager) waitEndedLocked(w *waiter) {
	p := &m.progress
	if !p.judges(w) {
		return
	}
	p.changes.Add(1)
	p.waits--
	if w.owner != nil {
		p.owned--
	}
	if p.waits == 0 {
		p.next.Stop() // a look that is under way sees it
	}
}

// lookLaterLocked arranges the next look.
func (m *Manager) lookLaterLocked() {
	p := &m.progress
	grace := p.judge.Grace
	if p.owned == 0 {
		grace = p.judge.Strangers
	}
	p.next.Start(max(1, grace/looksPerGrace, (lookShare-1)*p.took), m.look)
}

// look is called by the alarm.
func (m *Manager) look() {
	p := &m.progress
	lockrank.AssertNone("waiters are looked at")
	began := time.Now()
	b := m.read()
	if stuck, still := p.judge.Owners(b, time.Now()); len(stuck) > 0 {
		p.owners.Lock()
		v, again := b.Victim(stuck, func(o *deadlock.Owner) bool { return o.Of.(*Owner).told.is })
		p.owners.Unlock()
		m.tell(b, v, stuck, again, still)
	}
	lasted := func(v *deadlock.Wait) time.Duration { return time.Since(m.made) - v.Of.(*waiter).begun }
	if stuck, still := p.judge.Plain(b, time.Now(), lasted); len(stuck) > 0 {
		m.tell(b, stuck[len(stuck)-1], stuck, false, still)
	}
	took := time.Since(began)
	m.mu.Lock()
	defer m.mu.Unlock()
	p.next.Done()
	p.took = took
	if p.waits > 0 {
		m.lookLaterLocked()
	} else {
		p.books = nil // it refers to all former waiters
		p.judge.Forget()
	}
}

// read returns the books as they are, with the stuck waits. They are read only if something has
// changed since the last time.
func (m *Manager) read() *deadlock.Books {
	p := &m.progress
	now := m.mark()
	if p.books != nil && p.books.Settled && slices.Equal(now, p.mark) {
		return p.books
	}
	b := m.observe()
	p.books, p.mark = b, now
	p.reads++
	p.steps += b.Steps
	return b
}
