package admission

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// state is what the requests of tasks in a space depend on beside the room that is free.
type state struct {
	mark    int64 // how many bytes may be used for a task to be admitted by the rule
	top     int64 // how many bytes may be used at all
	idle    bool  // no task runs in the space
	allIdle bool  // no task runs at all
}

// stateLocked returns the state of a space.
//
// The mark is a whole number of the space's charge units below the top, which puts it up to a unit
// below the threshold. The head reserves this difference beside its need. If only that sum were
// rounded up, the head would wait where a new task is admitted.
func (a *Admitter) stateLocked(s *tier.Space) state {
	top := add(s.Room(), s.Held())
	mark := s.Capacity()
	if a.threshold < 1 {
		mark = int64(float64(mark) * a.threshold)
	}
	mark -= s.Foreign() // which is part of the pressure that the threshold is for
	if mark < top {
		mark = max(0, top-charge(s, top-mark))
	}
	return state{min(mark, top), top, a.running[s] == 0, a.stats.Running == 0}
}

// holdLocked reports whether a task may start, and the plans' states are the present ones.
func (a *Admitter) holdLocked(ps plans) bool {
	changed := func(p plan) bool { return p.state != a.stateLocked(p.Space) }
	return !a.closed && a.stats.Running < a.threads && !slices.ContainsFunc(ps, changed)
}

// plan is what a task would take in one space. A new plan is to reserve the need by the rule.
type plan struct {
	*tier.Space
	state
	there   int64 // bytes of the inputs that are in the space
	missing int64 // and that have to be brought
	need    int64 // missing and work, as charged
	reserve int64 // what to ask for
	keep    int64 // and how much of that to keep
	alone   bool  // the space is idle, and so the rule need not hold
}

// plans are where a task may run. They are the strategy of a request for any of them.
type plans []plan

// Candidates implements reservation.Strategy.
func (ps plans) Candidates(_ *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	for i := range ps {
		dst = append(dst, ps[i].Space)
	}
	return dst
}

// String implements reservation.Strategy.
func (ps plans) String() string { return "a space where the task may run" }

// BytesIn implements reservation.Sized.
func (ps plans) BytesIn(s *tier.Space, _ int64) int64 { return ps[ps.index(s)].reserve }

func (ps plans) index(s *tier.Space) int {
	return slices.IndexFunc(ps, func(p plan) bool { return p.Space == s })
}

// plan lists where the task could run, and what it needs there. The least need comes first, and of
// equal needs the most room, less what others hold on the device. Lost spaces are skipped.
func (a *Admitter) plan(w *waiter) (ps plans, err error) {
	w.work = w.outputAndOverhead(a.rules.Estimator)
	err = fmt.Errorf("admission: %s: %w", a.rules.Strategy, reservation.ErrNoCandidate)
	for _, s := range a.rules.Strategy.Candidates(a.reservations.Spaces(), nil) {
		if s == nil {
			continue
		}
		if lost := s.Lost(); lost != nil {
			err = lost
			continue
		}
		there, missing := w.in(s)
		if w.stale >= maxStale {
			there, missing = 0, add(there, missing)
		}
		need := charge(s, add(missing, w.work))
		ps = append(ps, plan{Space: s, there: there, missing: missing, need: need, reserve: need, keep: need})
	}
	if len(ps) == 0 {
		return nil, err
	}
	slices.SortStableFunc(ps, func(p, q plan) int {
		room := cmp.Compare(q.Available()-q.Foreign(), p.Available()-p.Foreign())
		return cmp.Or(cmp.Compare(p.need, q.need), room)
	})
	a.mu.Lock()
	defer a.mu.Unlock()
	for i := range ps {
		ps[i].state = a.stateLocked(ps[i].Space)
	}
	return ps, nil
}

// asHead returns the plans that the head may wait for now, with what it asks for. In an idle space
// that is the need or, if no task runs at all, what can be had beside the inputs that are there.
// Elsewhere it is the need and what lies between the mark and the top: so the manager waits, and
// the monitor makes room, until the need fits under the mark.
func (ps plans) asHead() (asks plans) {
	for _, p := range ps {
		room := p.Room()
		p.reserve = add(p.need, p.top-p.mark)
		possible := charge(p.Space, p.reserve) <= room
		if p.alone = p.idle; p.alone {
			p.keep = min(p.need, most(p.Space, room-p.there))
			p.reserve = p.keep
			possible = p.keep == p.need || p.allIdle && room > 0
		}
		if possible {
			asks = append(asks, p)
		}
	}
	return asks
}
