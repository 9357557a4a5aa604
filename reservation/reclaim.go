package reservation

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/labels"
)

// A Reclaimer is memory that is not in batches, and that its holder gives back when it is asked:
// the state of an operator at rest. Reclaim is called on a goroutine of its own, one call at a
// time, when a request waits for room in the reservation's space, or in a faster tier, and no batch
// can be evicted for it. want is how many bytes the request lacks. Reclaim gives memory back by
// Reservation.Shrink. ctx ends after a second, after which the request asks another Reclaimer.
type Reclaimer struct {
	Reservation *Reservation
	Name        string // for errors
	Reclaim     func(ctx context.Context, want int64)
}

// reclaimer is a registered Reclaimer.
type reclaimer struct {
	Reclaimer
	busy  chan struct{} // holds one value while Reclaim runs
	began time.Time     // when it was called last; guarded by Manager.mu
}

// passedLocked names the memory that gave w too little in time, as far as there is some left.
func (w *request) passedLocked() (names []string) {
	for _, r := range w.passed {
		if n := r.Reservation.Bytes(); n > 0 {
			names = append(names, fmt.Sprintf("%s, which has %d bytes", r.Name, n))
		}
	}
	return names
}

// reclaimTime is how long a request waits for one Reclaimer.
const reclaimTime = time.Second

// OnReclaim registers memory that can be reclaimed. The returned function unregisters it and waits
// until Reclaim has returned; a second call does nothing. A nil Reservation has nothing to reclaim
// and is not registered.
func (m *Manager) OnReclaim(r Reclaimer) (cancel func()) {
	if r.Reservation == nil {
		return func() {}
	}
	one := &reclaimer{Reclaimer: r, busy: make(chan struct{}, 1)}
	m.mu.Lock()
	m.mu.reclaim = append(m.mu.reclaim, one)
	m.mu.Unlock()
	return func() {
		m.mu.Lock()
		m.mu.reclaim = slices.DeleteFunc(m.mu.reclaim, func(o *reclaimer) bool { return o == one })
		m.mu.Unlock()
		one.busy <- struct{}{} // none begins any more
		<-one.busy
	}
}

// nextReclaimerLocked returns the largest reservation that w can ask for memory in a space; nil if
// there is none. If batches are at rest there, which can leave when there is room for them, and the
// space has no such reservation, it is one in a slower space. A Grow does not ask its own.
func (m *Manager) nextReclaimerLocked(w *request, l *line, atRest bool) (next *reclaimer) {
	var largest int64
	near := false // next is in l's space
	for _, r := range m.mu.reclaim {
		own, n := r.Reservation, r.Reservation.Bytes()
		here, below := own.line == l, atRest && own.line.space.Kind() > l.space.Kind()
		if own == w.grows || n == 0 || !here && !below || slices.Contains(w.passed, r) {
			continue
		}
		if next == nil || here && !near || here == near && n > largest {
			next, near, largest = r, here, n
		}
	}
	return next
}

// reclaimFor asks the largest holder of memory that is not in batches to give some back for w, which
// heads lines, and for which no batch can be evicted. If that one is at work already, for w or for
// another request, w waits a second for it, and then asks the next. reclaimFor does not wait: what is
// given back wakes w.
func (m *Manager) reclaimFor(ctx context.Context, w *request) {
	m.mu.Lock()
	none := len(m.mu.reclaim) == 0
	m.mu.Unlock()
	for i := 0; i < len(w.candidates) && !none; {
		c := &w.candidates[i]
		atRest := c.line.atRest() > 0
		m.mu.Lock()
		r := m.nextReclaimerLocked(w, c.line, atRest)
		switch {
		case r == nil || c.line.queue.Head() != c: // the wait may have failed meanwhile, as by Close
			i++
		case len(r.busy) == 0:
			r.busy <- struct{}{}
			r.began = time.Now()
			now := c.line.space.State()
			lack := c.need + c.leavesFree(&now) - now.Available
			m.calls.Go(func() {
				labels.Reclaim.Set()
				m.reclaim(context.WithoutCancel(ctx), w, r, lack)
			})
			fallthrough
		case time.Since(r.began) < reclaimTime:
			m.mu.Unlock()
			return
		default: // it has freed too little
			w.passed = append(w.passed, r)
		}
		m.mu.Unlock()
	}
}

// reclaim asks r for memory for w. When r has returned, the heads of all lines look again: w asks
// another if that was too little, and the others may ask r for what they lack themselves.
func (m *Manager) reclaim(ctx context.Context, w *request, r *reclaimer, lack int64) {
	ctx, cancel := context.WithTimeout(ctx, reclaimTime)
	defer cancel()
	defer func() { // also after runtime.Goexit
		m.mu.Lock()
		defer m.mu.Unlock()
		<-r.busy
		if !slices.Contains(w.passed, r) {
			w.passed = append(w.passed, r)
		}
		for _, l := range m.lines {
			l.wakeLocked(true)
		}
	}()
	m.panics.Do("a function that reclaims memory", func() { r.Reclaim(ctx, lack) })
}
