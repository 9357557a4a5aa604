package reservation

import (
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

// Runnable lists the waiters that could be served as things are, and all of the manager's state
// that does not agree with the list of waiters. It checks all waiters, not the index, and is meant
// for quiet moments.
func (m *Manager) Runnable() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, l := range m.lines {
		limit, room, door := l.space.Limit(), l.space.Available(), l.waits.Door()
		head := true
		for w := range m.waitersLocked() {
			for i := range w.slots {
				s := &w.slots[i]
				if s.line != l || !s.fits(limit) {
					continue
				}
				if s.need <= room && (head || !door.Shut()) {
					out = append(out, fmt.Sprintf("%s: a waiter for %d of %d bytes (head %v, %d passes)", l.space.ID(), s.need, room, head, door.Passes()))
				}
				head = false
			}
		}
		if head != door.Open() && limit == l.limit.Load() {
			out = append(out, fmt.Sprintf("%s: the door is %x; nobody waits: %v", l.space.ID(), door, head))
		}
		if door.Passes() > l.waits.Bypass {
			out = append(out, fmt.Sprintf("%s: %d passes were left of %d", l.space.ID(), door.Passes(), l.waits.Bypass))
		}
	}
	return out
}

// TakePass takes a pass of a space's door, as a passing request does, and returns what gives it
// back unused.
func (m *Manager) TakePass(id tier.ID) (giveBack func()) {
	l := m.lines[m.spaces.index(id)]
	door := l.waits.Door()
	for !l.waits.Pass(door) {
		door = l.waits.Door()
	}
	return func() { l.unpass(door) }
}

// Looks says how often the books were read so far, and how many steps that took. The
// caller is in a synctest bubble, and has waited.
func (m *Manager) Looks() (reads, steps int) { return m.progress.reads, m.progress.steps }

// Stall keeps all waiters from being served, as a slow server does, until resume is called.
func (m *Manager) Stall() (resume func()) {
	m.serving.Add(1)
	return func() {
		m.serving.Store(0)
		m.serve()
	}
}

// What is not configured.
const (
	DefaultBypass = defaultBypass
	DefaultGrace  = defaultGrace
	LongWaitAfter = longWaitAfter
)

// Goroutines returns how many goroutines work for the owner.
func (o *Owner) Goroutines() int { return o.goroutines() }
