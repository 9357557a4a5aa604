// Package loss notifies subscribers that a device has failed for good. Devices implement
// tier.Losable with it.
//
// Its lock is lockrank.Device. Nothing is called under it.
package loss

import (
	"slices"
	"sync"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// A Signal is the loss of one device. The zero value is ready, and must not be copied. It is safe
// for concurrent use.
type Signal struct {
	panics guard.Log
	once   sync.Once // so that every call of Lose returns after all subscribers were called

	mu struct {
		lockrank.Mutex[lockrank.Device]
		why         error
		over        bool // all subscribers were called
		subscribers []*func(why error)
	}
}

// Err returns why the device is lost, once all subscribers were called; nil before.
func (l *Signal) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mu.over {
		return nil
	}
	return l.mu.why
}

// Lose marks the device as lost, for the first reason given. It calls all subscribers and returns
// when they have returned. It must be called with no lock held.
func (l *Signal) Lose(why error) {
	lockrank.AssertNone("a device is lost")
	l.once.Do(func() {
		l.mu.Lock()
		l.mu.why = why
		subscribers := slices.Clone(l.mu.subscribers)
		l.mu.Unlock()
		for _, f := range subscribers {
			l.panics.Do("a listener of a device's loss", func() { (*f)(why) })
		}
		l.mu.Lock()
		l.mu.over = true
		l.mu.Unlock()
	})
}

// OnLost implements tier.Losable.
func (l *Signal) OnLost(f func(why error)) (cancel func()) {
	l.mu.Lock()
	l.mu.subscribers = append(l.mu.subscribers, &f)
	why := l.mu.why
	l.mu.Unlock()
	if why != nil {
		f(why)
	}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.mu.subscribers = slices.DeleteFunc(l.mu.subscribers, func(o *func(error)) bool { return o == &f })
	}
}
