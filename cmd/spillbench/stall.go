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

// stallAfter is how long nothing moves before a note says so: the end of --stuck-after is far away.
const stallAfter = 2 * time.Second

// stall finds out that requests wait, and that nothing moves that could free room for them. It says so
// once. A nil one does nothing. Its mutex is a leaf.
type stall struct {
	after time.Duration
	tell  func(why string)

	mu struct {
		sync.Mutex
		moving map[uint64]bool   // batches
		needs  map[tier.ID]int64 // bytes that are asked for where nothing can be moved
		last   time.Time         // when something moved
	}
	stop chan struct{} // nil: not watching
	done sync.WaitGroup
}

func newStall(after time.Duration, tell func(why string)) *stall {
	s := &stall{after: after, tell: tell}
	s.mu.moving, s.mu.needs = make(map[uint64]bool), make(map[tier.ID]int64)
	return s
}

// events is event, or nil if nobody wants to know.
func (s *stall) events() func(spillway.Event) {
	if s == nil {
		return nil
	}
	return s.event
}

// event is for Config.Events.
func (s *stall) event(e spillway.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch e.Kind {
	case events.Stuck:
		s.mu.needs[e.To] = e.Bytes
		return
	case events.MoveBegun:
		s.mu.moving[e.Batch] = true
		return
	case events.MoveEnded:
		delete(s.mu.moving, e.Batch)
	case events.WaitEnded, events.CopyMade, events.TaskEnded:
	default:
		return
	}
	if e.Err == nil {
		clear(s.mu.needs)
		s.mu.last = e.At
	}
}

// watch begins to look, until end is called.
func (s *stall) watch(spaces []*tier.Space) {
	if s == nil {
		return
	}
	s.mu.Lock()
	s.mu.last = time.Now()
	s.mu.Unlock()
	s.stop = make(chan struct{})
	s.done.Go(func() {
		tick := time.NewTicker(max(s.after/8, time.Millisecond))
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				return
			case now := <-tick.C:
				if needs := s.needs(now); needs != nil {
					s.tell(shortOf(spaces, needs))
					return
				}
			}
		}
	})
}

// needs returns what is asked for in vain, if that is so for long enough; else nil.
func (s *stall) needs(now time.Time) map[tier.ID]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.mu.needs) == 0 || len(s.mu.moving) > 0 || now.Sub(s.mu.last) < s.after {
		return nil
	}
	needs := make(map[tier.ID]int64, len(s.mu.needs))
	for id, n := range s.mu.needs {
		needs[id] = n
	}
	return needs
}

// end ends watch. It may be called again.
func (s *stall) end() {
	if s == nil || s.stop == nil {
		return
	}
	close(s.stop)
	s.done.Wait()
	s.stop = nil
}

// shortOf says which spaces lack room: those of the slowest tier, if they lack it for what is needed,
// and else where it is needed.
func shortOf(spaces []*tier.Space, needs map[tier.ID]int64) string {
	most, lowest := int64(0), tier.GPU
	for _, n := range needs {
		most = max(most, n)
	}
	for _, s := range spaces {
		lowest = max(lowest, s.Kind())
	}
	var short, where []string
	room := false
	for _, s := range spaces {
		if s.Kind() == lowest {
			room = room || s.Available() >= most
			short = append(short, filled(s))
		}
		if _, needed := needs[s.ID()]; needed {
			where = append(where, filled(s))
		}
	}
	if room && len(where) > 0 {
		short = where
	}
	slices.Sort(short)
	return strings.Join(short, ", ")
}

// filled says how full a space is.
func filled(s *tier.Space) string {
	if left := s.Available(); left >= s.Limit()/100 {
		return fmt.Sprintf("%s has only %s left", s.ID(), size.Approx(left))
	}
	return s.ID().String() + " is full"
}
