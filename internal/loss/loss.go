// Package loss notifies subscribers that a device has failed for good. Devices implement
// tier.Losable with it.
//
// Its lock is lockrank.Device. Nothing is called under it.
package loss

import (
	"maps"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// A Signal is the loss of one device. The zero value is ready, and must not be copied. It is safe
// for concurrent use.
type Signal struct {
	panics guard.Log
	once   sync.Once // no caller goes on with an error of the loss before all subscribers were called

	mu struct {
		lockrank.Mutex[lockrank.Device]
		why  error
		over bool // all subscribers were called
		next int
		told map[int]func(error)
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
// when they have. It must be called with no lock held.
func (l *Signal) Lose(why error) {
	lockrank.AssertNone("a device is lost")
	l.once.Do(func() {
		for _, f := range l.begin(why) {
			l.panics.Do("a listener of a device's loss", func() { f(why) })
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.mu.over = true
	})
}

func (l *Signal) begin(why error) []func(error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.why = why
	return slices.Collect(maps.Values(l.mu.told))
}

// OnLost is tier.Losable's.
func (l *Signal) OnLost(f func(why error)) (cancel func()) {
	id, why := l.add(f)
	if why != nil {
		f(why)
	}
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.mu.told, id)
	}
}

func (l *Signal) add(f func(error)) (id int, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.told == nil {
		l.mu.told = make(map[int]func(error))
	}
	l.mu.next++
	l.mu.told[l.mu.next] = f
	return l.mu.next, l.mu.why
}
