package reservation_test

import (
	"fmt"
	"math"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/reservation"
)

// crowd is workers on a field, and what is checked whenever all of them are idle
// or wait.
type crowd struct {
	f       *field
	workers []*crowdWorker
	nudge   chan struct{}

	ops   atomic.Int64
	epoch atomic.Int64 // of requests of one epoch it is not known which came first

	lines []lineWatch // by space
}

// lineWatch counts the requests served from a space, to know what passed its head.
type lineWatch struct {
	sure, maybe atomic.Int64 // took a pass if there were waiters: certainly, and at most

	// The controller's.
	limits    int64  // how often the limit had been set
	head      *asked // the request that is certainly the head, or nil
	oldest    int    // the epoch of those that may be
	sureThen  int64  // when head was known to be it
	maybeThen int64  // when it cannot have been it yet
	maybeLast int64  // at the last quiet moment
}

func (c *crowd) tell() {
	select {
	case c.nudge <- struct{}{}:
	default:
	}
}

// admitted counts requests served with bytes that waiters may have waited for.
func (c *crowd) admitted(space int) {
	c.lines[space].sure.Add(1)
	c.lines[space].maybe.Add(1)
}

// overdrawn counts an allocation that took more than was promised, unless
// something was freed meanwhile, and more than the least of ReserveUpTo.
func (c *crowd) overdrawn(space int) { c.lines[space].maybe.Add(1) }

// waiting returns what is waited for.
func (c *crowd) waiting() []*asked {
	var out []*asked
	for _, w := range c.workers {
		w.mu.Lock()
		if w.asked != nil {
			out = append(out, w.asked)
		}
		w.mu.Unlock()
	}
	return out
}

// wrong returns what is wrong when all workers are idle or wait: the books, the demand, and queued
// waiters that could be served. It changes nothing.
func (c *crowd) wrong() []string {
	bad := c.wrongBooks()
	waiting := c.waiting()
	now := int(c.epoch.Load())
	var want []reservation.Demand
	for i, s := range c.f.spaces {
		limit, room := s.State().Limit, s.State().Available
		d := reservation.Demand{Space: s.ID()}
		oldest := now // a waiter of a later epoch is not the head
		for _, a := range waiting {
			if need, ok := a.in(i, limit); ok {
				d.Waiters++
				d.Bytes += need
				if a.seen > 0 {
					oldest = min(oldest, a.seen)
				}
			}
		}
		if d.Waiters == 0 {
			continue
		}
		want = append(want, d)
		fit := true // all that may be the head
		for _, a := range waiting {
			if need, ok := a.in(i, limit); ok && a.epoch <= oldest {
				fit = fit && need <= room
			}
		}
		if fit {
			bad = append(bad, fmt.Sprintf("%s: the oldest of %d waiters fits into %d bytes and waits", s.ID(), d.Waiters, room))
		}
	}
	if got := c.f.m.Demand(nil); !slices.Equal(got, want) {
		bad = append(bad, fmt.Sprintf("demand is %+v; want %+v", got, want))
		return bad // some have not begun to wait yet, or do no more
	}
	for _, a := range waiting {
		if a.seen == 0 {
			a.seen = now
		}
		stands := false
		for i, s := range c.f.spaces {
			_, ok := a.in(i, s.State().Limit)
			stands = stands || ok
		}
		if !stands {
			bad = append(bad, fmt.Sprintf("a request that fits no limit any more waits: %+v", a.slots))
		}
	}
	return bad
}

// wrongBooks compares the spaces' ledgers with what the workers hold.
func (c *crowd) wrongBooks() (bad []string) {
	reserved := make([]int64, len(c.f.spaces))
	for _, w := range c.workers {
		w.mu.Lock()
		for _, e := range w.held {
			unused := e.unused()
			reserved[e.space] += unused
			if e.r.Bytes() != e.promised || e.r.Unused() != unused {
				bad = append(bad, fmt.Sprintf("a reservation promises %d, %d unused; want %d, %d", e.r.Bytes(), e.r.Unused(), e.promised, unused))
			}
		}
		w.mu.Unlock()
	}
	for i, s := range c.f.spaces {
		u, p := s.State().Usage, c.f.pools[i]
		if u.Live != p.live.Load() || u.Retired != p.retired.Load() || u.Reserved != reserved[i] ||
			s.State().Used() != u.Used() {
			bad = append(bad, fmt.Sprintf("%s: %+v, %d used; want live %d, retired %d, reserved %d",
				s.ID(), u, s.State().Used(), p.live.Load(), p.retired.Load(), reserved[i]))
		}
	}
	return bad
}

// watch checks the doors. All workers must be idle or wait, exactly: only a bubble can show that.
// So must they be when an epoch begins. A request is made before it is in the line. So the older of
// two that overlap may be behind the other, and is never its head. probe reports whether an open
// door may be tried, which takes a pass.
func (c *crowd) watch(probe bool) (bad []string) {
	c.f.calm.Store(true)
	defer c.f.calm.Store(false)
	waiting := c.waiting()
	for _, a := range waiting {
		if a.epoch != a.seen { // a waiter that came then may be before it
			bad = append(bad, fmt.Sprintf("the test is wrong: a request of epoch %d began to wait in %d", a.epoch, a.seen))
		}
	}
	for i := range c.lines {
		bad = append(bad, c.watchLine(i, waiting, probe)...)
	}
	return bad
}

func (c *crowd) watchLine(i int, waiting []*asked, probe bool) (bad []string) {
	l, s := &c.lines[i], c.f.spaces[i]
	limit, room := s.State().Limit, s.State().Available
	var head *asked
	var standing, fitting int
	oldest := math.MaxInt
	for _, a := range waiting {
		need, ok := a.in(i, limit)
		if !ok {
			continue
		}
		standing++
		if need <= room {
			fitting++
		}
		switch {
		case a.epoch < oldest:
			oldest, head = a.epoch, a
		case a.epoch == oldest:
			head = nil // it may be either
		}
	}
	sure, maybe, limits := l.sure.Load(), l.maybe.Load(), c.f.limits[i].Load()
	switch {
	case head == l.head:
	case head != nil && (head.epoch <= l.oldest || head.limits[i] != limits): // it may have been the head before
		l.maybeThen = head.maybe[i]
	default:
		l.maybeThen = l.maybeLast
	}
	if head != l.head || limits != l.limits { // a limit can bring another head for a while
		l.sureThen = sure
	}
	l.head, l.limits, l.oldest, l.maybeLast = head, limits, oldest, maybe
	if n := sure - l.sureThen; head != nil && n > int64(c.f.allowed()) {
		bad = append(bad, fmt.Sprintf("%s: %d passed the oldest waiter; at most %d may", s.ID(), n, c.f.allowed()))
	}
	if room < c.f.pools[i].granule || standing > 0 && fitting == 0 && !probe {
		return bad
	}
	r, err := c.f.m.TryReserve(reservation.Specific(s.ID()), 1, nil)
	if err == nil {
		if err := r.Release(); err != nil {
			bad = append(bad, err.Error())
		}
		c.admitted(i)
	}
	switch passed := maybe - l.maybeThen; {
	case err == nil && fitting > 0:
		bad = append(bad, fmt.Sprintf("%s: the door is open and %d of %d waiters fit into %d bytes", s.ID(), fitting, standing, room))
	case err != nil && standing == 0:
		bad = append(bad, fmt.Sprintf("%s: nobody waits and %d bytes are free: %v", s.ID(), room, err))
	case err != nil && head != nil && passed < int64(c.f.allowed()):
		bad = append(bad, fmt.Sprintf("%s: the door is shut after %d passed; %d may: %v", s.ID(), passed, c.f.allowed(), err))
	}
	return bad
}
