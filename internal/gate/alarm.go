package gate

import (
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/labels"
)

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
