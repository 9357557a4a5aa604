package tier

import (
	"maps"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// Loss is what devices implement Losable with. The zero value is ready, and not to be copied. It is safe for concurrent use.
type Loss struct {
	panics guard.Log
	once   sync.Once // nobody goes on with an error of the loss before all were told

	mu struct {
		lockrank.Mutex[lockrank.Device]
		why  error
		over bool // all were told
		next int
		told map[int]func(error)
	}
}

// Err says why the device is lost, when all who wanted to know were told; nil before.
func (l *Loss) Err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.mu.over {
		return nil
	}
	return l.mu.why
}

// Lose notes that the device is lost, for the first reason that it is given, tells, and returns when all were told. It must be called with no
// lock held.
func (l *Loss) Lose(why error) {
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

func (l *Loss) begin(why error) []func(error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.why = why
	return slices.Collect(maps.Values(l.mu.told))
}

// OnLost is Losable's.
func (l *Loss) OnLost(f func(why error)) (cancel func()) {
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

func (l *Loss) add(f func(error)) (id int, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.told == nil {
		l.mu.told = make(map[int]func(error))
	}
	l.mu.next++
	l.mu.told[l.mu.next] = f
	return l.mu.next, l.mu.why
}

// Lost returns nil, or the *LostError that says why nothing can be done in the space any more: its device is lost. Then reservations
// pass the space by, its Limit is 0, and buffers there can only be released. It does not come back.
func (s *Space) Lost() error {
	if lost := s.lost.Load(); lost != nil {
		return lost
	}
	return nil
}

// lose is told by the pool. The listeners hear of a limit that has become 0: so those who wait for room here are
// told, or go on waiting for others.
func (s *Space) lose(why error) {
	if !s.loseOnce(&LostError{Space: s.cfg.ID, Bytes: s.Used(), Cause: why}) {
		return
	}
	s.ledger.limitsChanged()
	s.notify(Released)
}

func (s *Space) loseOnce(lost *LostError) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost.Load() != nil {
		return false
	}
	s.lost.Store(lost) // first, so that whoever is refused for the limit finds the reason
	s.limit.Store(0)
	return true
}

// refusal is the error of n bytes that cannot be promised.
func (s *Space) refusal(n int64, cause error) error {
	if err := s.Lost(); err != nil {
		return err
	}
	return &NoSpaceError{Space: s.cfg.ID, Requested: n, Available: s.Available(), Hint: s.cfg.Hint, Cause: cause}
}
