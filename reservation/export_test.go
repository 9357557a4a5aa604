package reservation

import "fmt"

// Runnable lists the waiters that could be served as things are. It is meant for quiet moments.
func (m *Manager) Runnable() (out []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, l := range m.lines {
		if e := l.nextLocked(); e != nil {
			out = append(
				out,
				fmt.Sprintf(
					"%s: a waiter for %d of %d bytes (head %t, %d candidates, limit %d)",
					l.space.ID(),
					e.Value.need,
					l.space.Available(),
					l.queue.Head() == e,
					len(e.Value.request.candidates),
					l.space.Limit(),
				),
			)
		}
		waiting, upward := 0, 0
		for e := range m.mu.waiters.All() {
			if c := e.Value.in(l); c != nil && c.entry.Waits() {
				waiting++
				if c.upward {
					upward++
				}
			}
		}
		if upward != l.upward {
			out = append(out, fmt.Sprintf("%s: %d may use headroom, %d are counted", l.space.ID(), upward, l.upward))
		}
		if waiting != l.queue.Len() {
			out = append(out, fmt.Sprintf("%s: %d wait, %d in line", l.space.ID(), waiting, l.queue.Len()))
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
