package devpool

import (
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/guard"
)

// Loss notifies subscribers that a device has failed for good. Devices implement tier.Losable with
// it. The zero value is ready, and must not be copied. It is safe for concurrent use.
type Loss struct {
	subscribers guard.List[error]
	once        sync.Once // so that every call of Lose returns after all subscribers were called
	why, over   atomic.Pointer[error]
}

// Err returns why the device is lost, once all subscribers were called; nil before.
func (l *Loss) Err() error {
	if why := l.over.Load(); why != nil {
		return *why
	}
	return nil
}

// Lose marks the device as lost, for the first reason given. It calls all subscribers and returns
// when they have returned. It must be called with no lock held.
func (l *Loss) Lose(why error) {
	l.once.Do(func() {
		l.why.Store(&why)
		l.subscribers.Call("a listener of a device's loss", why)
		l.over.Store(&why)
	})
}

// OnLost implements tier.Losable. A subscriber that is added while the device is lost may be called
// twice.
func (l *Loss) OnLost(f func(why error)) (cancel func()) {
	cancel = l.subscribers.Add(f) // first, so that Lose or the next lines find the other
	if why := l.why.Load(); why != nil {
		f(*why)
	}
	return cancel
}
