// Package loss notifies subscribers that a device has failed for good. Devices implement
// tier.Losable with it.
package loss

import (
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/guard"
)

// A Signal is the loss of one device. The zero value is ready, and must not be copied. It is safe
// for concurrent use.
type Signal struct {
	subscribers guard.List[error]
	once        sync.Once // so that every call of Lose returns after all subscribers were called
	why         atomic.Pointer[error]
	over        atomic.Bool // all subscribers were called
}

// Err returns why the device is lost, once all subscribers were called; nil before.
func (l *Signal) Err() error {
	if !l.over.Load() {
		return nil
	}
	return *l.why.Load()
}

// Lose marks the device as lost, for the first reason given. It calls all subscribers and returns
// when they have returned. It must be called with no lock held.
func (l *Signal) Lose(why error) {
	l.once.Do(func() {
		l.why.Store(&why)
		l.subscribers.Call("a listener of a device's loss", why)
		l.over.Store(true)
	})
}

// OnLost implements tier.Losable.
func (l *Signal) OnLost(f func(why error)) (cancel func()) {
	cancel = l.subscribers.Add(f)
	if why := l.why.Load(); why != nil { // Lose may call f too
		f(*why)
	}
	return cancel
}
