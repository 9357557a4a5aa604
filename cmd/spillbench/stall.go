package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/progress"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// stallAfter is how long nothing moves before a note reports it: long before the end of
// --stall-timeout.
const stallAfter = 2 * time.Second

// stall detects, from the engine's events, that requests wait for room and that no move in progress
// could free any. Its mutex is a leaf.
type stall struct {
	mu     sync.Mutex
	moving map[uint64]bool // batches
	stuck  bool            // a request waits, and the monitor found no batch that it could move
	last   time.Time       // of the latest move, or other progress
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

// watch starts a goroutine that calls report once, with the room that is left in each space, when
// requests have waited without progress for the time after. stop ends the goroutine.
func (s *stall) watch(after time.Duration, spaces []*tier.Space, report func(room string)) (stop func()) {
	reported := false
	return progress.Every(max(after/8, time.Millisecond), func(now time.Time) {
		s.mu.Lock()
		stalled := s.stuck && len(s.moving) == 0 && now.Sub(s.last) >= after
		s.mu.Unlock()
		if !stalled || reported {
			return
		}
		reported = true
		var room []string
		for _, space := range spaces {
			room = append(room, fmt.Sprintf("%s has %s left", space.ID(), size.Approx(space.State().Available)))
		}
		slices.Sort(room)
		report(strings.Join(room, ", "))
	})
}
