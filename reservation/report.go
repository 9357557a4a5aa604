package reservation

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// longWaitAfter is how long a wait takes before it is reported. The moves that make room
// are over by then: 64 MiB at 20 MB/s, a slow disk, take 3 s. It is reported again after
// twice that time, then four times, and so on.
const longWaitAfter = 5 * time.Second

// holdersAfter is after how long the error of a wait names the holders of what was waited for.
const holdersAfter = time.Second

// LongWait describes a wait that takes long. Sizes are bytes.
type LongWait struct {
	Space     tier.ID
	Requested int64         // by the oldest waiter, as the space charges it
	Waited    time.Duration // by it
	Owner     string        // of it; "" if it has none
	Waiters   int           // all that wait for the space
	Waiting   int64         // the sum of what they need, and the headroom that they leave free
	Holdings  tier.Holdings // of the space
}

// reportLong calls Config.LongWait for w, if it heads a line and its report is due.
func (m *Manager) reportLong(w *request) {
	waited := time.Since(w.begun)
	if m.config.LongWait == nil || waited < w.due {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	i := 0
	for i < len(w.candidates) && w.candidates[i].line.queue.Head() != &w.candidates[i] {
		i++
	}
	if i == len(w.candidates) || m.reporting.Swap(true) {
		return
	}
	w.due = 2 * waited
	c := &w.candidates[i]
	d := c.line.demandLocked(false)
	one := LongWait{
		Space: d.Space, Requested: c.need, Waited: waited, Owner: w.owner.Name(), Waiters: d.Waiters, Waiting: d.Bytes,
	}
	m.calls.Go(func() { // holders may take long to look up
		labels.Alarm.Set()
		defer m.reporting.Store(false)
		one.Holdings = m.holders(one.Space)
		m.panics.Do("Config.LongWait", func() { m.config.LongWait(one) })
	})
}

// holders asks Config.Holders.
func (m *Manager) holders(id tier.ID) (h tier.Holdings) {
	ok := false
	if m.config.Holders != nil {
		m.panics.Do("Config.Holders", func() { h, ok = m.config.Holders(id) })
	}
	if sp, known := m.spaces.ByID(id); !ok && known {
		h = sp.Holdings(nil)
	}
	return h
}

// giveUp ends a wait that its context has ended. After a second its error names the holders of what
// was waited for; of many waits that end at once one looks them up.
func (m *Manager) giveUp(ctx context.Context, w *request) error {
	err := ended(ctx, w.String())
	m.mu.Lock()
	m.failLocked(w, err)
	failed, passed := w.err, w.passedLocked()
	m.mu.Unlock()
	if failed != err || time.Since(w.begun) < holdersAfter || m.looking.Swap(true) {
		return failed
	}
	defer m.looking.Store(false)
	space := w.candidates[0].line.space
	h := m.holders(space.ID())
	return fmt.Errorf("%w; in %s %s (%s)%s", err, h.Space, &h, lever(h, space.Hint), notGiven(passed))
}

// WaitStats has the times of finished waits, however they ended, and the number of those that are
// not over. Requests that did not have to wait are not counted.
type WaitStats struct {
	Count int64
	Total time.Duration // of all together; they may overlap
	// P50, P99 and P999 are percentiles, P999 that of 99.9 %. They are at most 1/16 too high.
	P50, P99, P999, Max time.Duration
	// Within is a histogram: how many took less than so long, for the powers of two of nanoseconds
	// from 4 µs to 18 minutes.
	Within  map[time.Duration]int64
	Waiting int64         // that are not over
	Oldest  time.Duration // how long the oldest of them has taken so far
	Refused int64         // that ended because batches at rest filled the spaces, and none could leave
}

// Waits returns how long finished waits took, and how many are not over.
func (m *Manager) Waits() WaitStats {
	sum := m.waits.Summary()
	s := WaitStats{
		Count:  sum.Count,
		Total:  sum.Total,
		P50:    sum.P50,
		P99:    sum.P99,
		P999:   sum.P999,
		Max:    sum.Max,
		Within: sum.Within, Refused: m.refused.Load(),
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if first := m.mu.waiters.Head(); first != nil {
		s.Waiting, s.Oldest = int64(len(m.mu.waiters.Waiters)), time.Since(first.begun)
	}
	return s
}

// Blocked has the number and the times of the waits of all owners with one name.
type Blocked struct {
	Owner   string        // "" stands for all whose waits have no owner
	Waits   int64         // that are over
	Total   time.Duration // of them; they may overlap
	Longest time.Duration
	Waiting int64         // that are not over
	SoFar   time.Duration // how long these have taken, added up
}

const (
	// maxBlocked is how many names are counted separately: a program that gives each task a name of
	// its own would fill the memory. When there are more, all of them become part of otherOwners.
	maxBlocked  = 1024
	otherOwners = "(others)"
)

// countBlockedLocked counts a finished wait by the name of its owner.
func (m *Manager) countBlockedLocked(o *Owner, took time.Duration) {
	all, name := m.mu.blocked, o.Name()
	if _, known := all[name]; !known && len(all) >= maxBlocked {
		others := Blocked{Owner: otherOwners}
		for _, b := range all {
			others.Waits += b.Waits
			others.Total += b.Total
			others.Longest = max(others.Longest, b.Longest)
		}
		clear(all)
		all[otherOwners] = others
	}
	b := all[name]
	all[name] = Blocked{Owner: name, Waits: b.Waits + 1, Total: b.Total + took, Longest: max(b.Longest, took)}
}

// Blocked returns how long owners have waited for room, and wait still, the longest first. If
// there are more than a thousand names, some are summed as "(others)".
func (m *Manager) Blocked() []Blocked {
	m.mu.Lock()
	all := maps.Clone(m.mu.blocked)
	for _, w := range m.mu.waiters.Waiters {
		name := w.owner.Name()
		if _, known := all[name]; !known && len(all) >= maxBlocked {
			name = otherOwners
		}
		b := all[name]
		b.Owner = name
		b.Waiting++
		b.SoFar += time.Since(w.begun)
		all[name] = b
	}
	m.mu.Unlock()
	return slices.SortedFunc(maps.Values(all), func(a, b Blocked) int {
		return cmp.Or(cmp.Compare(b.Total+b.SoFar, a.Total+a.SoFar), cmp.Compare(a.Owner, b.Owner))
	})
}
