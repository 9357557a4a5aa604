package reservation

import (
	"fmt"
	"slices"
)

// Runnable lists the waiters that could be served as things are. It is meant for quiet moments.
func (m *Manager) Runnable() (out []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		if c := l.nextLocked(); c != nil {
			out = append(out, fmt.Sprintf("%s: a waiter for %d of %d bytes (head %t, %d candidates, limit %d)",
				l.space.ID(), c.need, l.space.State().Available, l.queue.Head() == c, len(c.request.candidates),
				l.space.State().Limit))
		}
		waiting := 0
		for _, w := range m.mu.waiters.Waiters {
			if slices.ContainsFunc(w.candidates, func(c candidate) bool { return c.line == l && c.inLine }) {
				waiting++
			}
		}
		if waiting != len(l.queue.Waiters) {
			out = append(out, fmt.Sprintf("%s: %d wait, %d in line", l.space.ID(), waiting, len(l.queue.Waiters)))
		}
	}
	return out
}

// What is not configured.
const (
	DefaultBypass = defaultBypass
	DefaultGrace  = grace
	LongWaitAfter = longWaitAfter
)
