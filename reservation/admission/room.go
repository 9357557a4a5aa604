package admission

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// plan is what a task would take in one space.
type plan struct {
	space   *tier.Space
	there   int64 // bytes of the inputs that are in the space
	missing int64 // and that have to be brought
	need    int64 // missing and work, as charged
}

// in is the strategy of one space. reservation.Specific would look it up, and find another where a
// user's strategy names one that the manager does not have.
type in struct{ space *tier.Space }

func (i in) Candidates(_ *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	return append(dst, i.space)
}

func (i in) String() string { return i.space.ID().String() }

// plans lists where the task could run, and what it needs there. The least need comes first, and of
// equal needs the most room, less what others hold on the device. Lost spaces are skipped. all
// counts all inputs as missing. work is what is needed beside them.
func (a *Admitter) plans(e *Estimate, all bool) (plans []plan, work int64, err error) {
	work = e.work(a.rules.Estimator, e.input())
	err = fmt.Errorf("admission: %s: %w", a.rules.Strategy, reservation.ErrNoCandidate)
	for _, s := range a.rules.Strategy.Candidates(a.reservations.Spaces(), nil) {
		if s != nil && s.Lost() != nil {
			err = s.Lost()
			continue
		}
		if s == nil || slices.ContainsFunc(plans, func(p plan) bool { return p.space == s }) {
			continue
		}
		p := plan{space: s}
		p.there, p.missing = e.in(s)
		if all {
			p.there, p.missing = 0, add(p.there, p.missing)
		}
		p.need = charge(s, add(p.missing, work))
		plans = append(plans, p)
	}
	if len(plans) == 0 {
		return nil, 0, err
	}
	slices.SortStableFunc(plans, func(p, q plan) int {
		return cmp.Or(cmp.Compare(p.need, q.need), cmp.Compare(q.space.Available()-q.space.Foreign(), p.space.Available()-p.space.Foreign()))
	})
	return plans, work, nil
}

// marks returns how many bytes may be used in a space for a task to be admitted, beside what others
// hold on the device. The second result is how many in all. The difference is a whole number of the
// space's charge units, which puts the mark up to a unit below the threshold. A waiting task
// reserves the difference beside its need. If only that sum were rounded up, it would wait where a
// new task is admitted.
func marks(s *tier.Space, threshold float64) (mark, top int64) {
	top = add(s.Room(), s.Inside().Held())
	mark = s.Capacity()
	if threshold < 1 {
		mark = int64(float64(mark) * threshold)
	}
	mark -= s.Foreign() // which is part of the pressure that the threshold is for
	if mark >= top {
		return top, top
	}
	return max(0, top-charge(s, top-mark)), top
}

// fits reports whether the task could be admitted now.
func (p *plan) fits(threshold float64) bool {
	mark, _ := marks(p.space, threshold)
	return p.need <= mark-p.space.Used() && p.need <= p.space.Available()
}

// ask is what is reserved in a space, and how much of it is kept. Reserving what
// lies between the threshold and the limit beside the need makes the manager wait,
// and the monitor make room, until the need fits under the threshold.
type ask struct {
	plan
	reserve, keep int64
}

// hasRoom reports whether what is asked for is free.
func (k ask) hasRoom() bool { return charge(k.space, k.reserve) <= k.space.Available() }

// strict is what to ask for so that the rule holds; false if that can never be had.
func (p *plan) strict(threshold float64) (ask, bool) {
	mark, top := marks(p.space, threshold)
	k := ask{plan: *p, reserve: add(p.need, top-mark), keep: p.need}
	return k, charge(p.space, k.reserve) <= p.space.Room()
}

// alone is what to ask for when no task runs there: the need or, if that is less, all
// that can be had beside the inputs that are there.
func (p *plan) alone() ask {
	n := min(p.need, most(p.space, p.space.Room()-p.there))
	return ask{plan: *p, reserve: n, keep: n}
}

// asks lists what the head asks for; nothing if it has to wait until no task runs. alone is whether
// none does; idle lists the spaces in which none does.
func asks(plans []plan, threshold float64, alone bool, idle []*tier.Space) (out anyOf) {
	for i := range plans {
		p := &plans[i]
		if alone || slices.Contains(idle, p.space) {
			if k := p.alone(); k.keep == p.need || alone && p.space.Room() > 0 {
				out = append(out, k)
			}
		} else if k, ok := p.strict(threshold); ok {
			out = append(out, k)
		}
	}
	return out
}

// got is a promise in one of the spaces.
type got struct {
	ask
	r reservation.Reservation
}

// try reserves in the first space in which the rule holds now, without waiting; the
// zero value if there is none.
func (a *Admitter) try(plans []plan, threshold float64) (got, error) {
	for i := range plans {
		p := &plans[i]
		if !p.fits(threshold) {
			continue
		}
		r, err := a.reservations.TryReserve(in{p.space}, p.need, reservation.WithPolicy(a.rules.Policy), reservation.Consuming())
		switch {
		case passedBy(err):
			continue // another was faster, or it is kept for another
		case err != nil:
			return got{}, err
		}
		if mark, _ := marks(p.space, threshold); p.space.Used() <= mark {
			return got{ask{plan: *p, reserve: p.need, keep: p.need}, r}, nil
		}
		if err := r.Release(); err != nil { // others have taken so much since
			return got{}, err
		}
	}
	return got{}, nil
}

// passedBy reports whether a space that refused with err is no reason not to ask others.
func passedBy(err error) bool {
	return errors.Is(err, tier.ErrNoSpace) || errors.Is(err, reservation.ErrExceeded) || errors.Is(err, tier.ErrLost)
}

// anyOf is the strategy of asks.
type anyOf []ask

func (a anyOf) Candidates(_ *reservation.Spaces, dst []*tier.Space) []*tier.Space {
	for i := range a {
		dst = append(dst, a[i].space)
	}
	return dst
}

func (a anyOf) String() string {
	names := make([]string, len(a))
	for i := range a {
		names[i] = a[i].space.ID().String()
	}
	return "any of " + strings.Join(names, ", ")
}

// BytesIn implements reservation.Sized.
func (a anyOf) BytesIn(s *tier.Space, _ int64) int64 { return a.in(s).reserve }

func (a anyOf) in(s *tier.Space) ask {
	return a[slices.IndexFunc(a, func(k ask) bool { return k.space == s })]
}

// await reserves one of asks: the first for which there is room, or else, with waiting, in the
// space that has room first. That is one request, so that the monitor makes room in one space for
// it.
func (a *Admitter) await(ctx context.Context, asks anyOf) (got, error) {
	r, err := a.tryInOrder(asks)
	if err == nil && r.IsZero() {
		r, err = a.reservations.Reserve(ctx, asks, 0, reservation.WithPolicy(a.rules.Policy), reservation.Consuming())
	}
	if err != nil {
		return got{}, err
	}
	g := got{asks.in(r.Space()), r}
	if n := r.Bytes() - g.keep; n > 0 {
		if err := r.Shrink(n); err != nil {
			return got{}, errors.Join(err, r.Release())
		}
	}
	return g, nil
}

// tryInOrder is the zero value if none of asks has room now.
func (a *Admitter) tryInOrder(asks anyOf) (reservation.Reservation, error) {
	for _, k := range asks {
		r, err := a.reservations.TryReserve(in{k.space}, k.reserve, reservation.WithPolicy(a.rules.Policy), reservation.Consuming())
		if !passedBy(err) { // also where there is none
			return r, err
		}
	}
	return reservation.Reservation{}, nil
}
