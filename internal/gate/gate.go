// Package gate counts what is under way inside of something, so that closing it can
// refuse what comes later and wait for the rest.
//
//	Gate   for calls from outside
//	Alarm  for a call of its own, after some time
package gate

import (
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/labels"
)

// Gate is open until it is shut, once and for all. The zero value is open. It is safe for
// concurrent use.
type Gate struct {
	mu     sync.Mutex // a leaf: nothing is called under it
	inside int
	empty  chan struct{} // nil while the gate is open; closed when it is shut and empty
}

// Enter lets the caller in and returns true, or false once the gate is shut. After true, the caller
// must Leave once.
func (g *Gate) Enter() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.empty != nil {
		return false
	}
	g.inside++
	return true
}

// Leave ends what Enter began.
func (g *Gate) Leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.inside == 0 {
		panic("gate: left more often than entered")
	}
	g.inside--
	if g.inside == 0 && g.empty != nil {
		close(g.empty)
	}
}

// Shut closes the gate to new callers. It does not wait. It returns whether it was the first.
func (g *Gate) Shut() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.empty != nil {
		return false
	}
	g.empty = make(chan struct{})
	if g.inside == 0 {
		close(g.empty)
	}
	return true
}

// Wait returns when all callers have left. The gate must have been shut.
func (g *Gate) Wait() { <-g.Empty() }

// Empty returns what is closed when all callers have left. The gate must have been shut.
func (g *Gate) Empty() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.empty
}

// Alarm calls a function after some time, on a goroutine of its own. The zero value is not set. A
// lock of its owner guards it, except for Wait.
type Alarm struct {
	timer *time.Timer
	set   bool
	calls sync.WaitGroup // one while it is set, and until the function has returned
}

// IsSet reports whether the call is due or under way.
func (a *Alarm) IsSet() bool { return a.set }

// Start sets the alarm, which is not set: it has f called, the same each time. f must call Done.
func (a *Alarm) Start(after time.Duration, f func()) {
	a.set = true
	a.calls.Add(1)
	if a.timer == nil {
		a.timer = time.AfterFunc(after, func() {
			labels.Alarm.Set()
			defer a.calls.Done()
			f()
		})
		return
	}
	a.timer.Reset(after)
}

// Done ends the call. The function calls it once, and may Start the alarm anew then.
func (a *Alarm) Done() { a.set = false }

// Stop ends an alarm that is due. It does nothing if the call is under way, or the alarm not set.
func (a *Alarm) Stop() {
	if a.set && a.timer.Stop() {
		a.set = false
		a.calls.Done()
	}
}

// Wait returns when the alarm is not set and its last call has returned. The caller does not hold
// the lock, and nobody starts the alarm meanwhile but the function.
func (a *Alarm) Wait() { a.calls.Wait() }
