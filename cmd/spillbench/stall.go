package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// stallAfter is how long nothing moves before a note reports it: long before the end of --stuck-after.
const stallAfter = 2 * time.Second

// stall finds out from the engine's events that requests wait and that nothing moves that could free
// room for them. Its mutex is a leaf.
type stall struct {
	mu     sync.Mutex
	moving map[uint64]bool // batches
	stuck  bool            // a request waits, and the monitor found no batch that it could move
	last   time.Time       // when something moved
}

// event is for Config.Events.
func (s *stall) event(e spillway.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e.Kind {
	case events.Stuck:
		s.stuck = true
		return
	case events.MoveBegun:
		s.moving[e.Batch] = true
		return
	case events.MoveEnded:
		delete(s.moving, e.Batch)
	case events.WaitEnded, events.CopyMade, events.TaskEnded:
	default:
		return
	}
	if e.Err == nil {
		s.stuck, s.last = false, e.At
	}
}

// watch calls tell once, with the room that is left in each space, if requests wait and nothing moves
// for the time after. The function that it returns ends that.
func (s *stall) watch(after time.Duration, spaces []*tier.Space, tell func(room string)) (stop func()) {
	told := false
	return every(max(after/8, time.Millisecond), func(now time.Time) {
		s.mu.Lock()
		stalled := s.stuck && len(s.moving) == 0 && now.Sub(s.last) >= after
		s.mu.Unlock()
		if !stalled || told {
			return
		}
		told = true
		var room []string
		for _, space := range spaces {
			room = append(room, fmt.Sprintf("%s has %s left", space.ID(), size.Approx(space.Available())))
		}
		slices.Sort(room)
		tell(strings.Join(room, ", "))
	})
}

// every calls f once a period, in a goroutine of its own. The function that it returns ends that, and
// waits for a call that is in progress; it may be called several times.
func every(period time.Duration, f func(now time.Time)) (stop func()) {
	stopped := make(chan struct{})
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(period)
		defer tick.Stop()
		for {
			select {
			case <-stopped:
				return
			case now := <-tick.C:
				f(now)
			}
		}
	})
	return sync.OnceFunc(func() {
		close(stopped)
		done.Wait()
	})
}
