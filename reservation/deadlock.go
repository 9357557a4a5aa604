package reservation

import (
	"cmp"
	"slices"
	"sync"

	"github.com/spillway-db/spillway/tier"
)

// tell ends one of the waits, which are stuck: the youngest of an owner whose giving up
// would help and that has not been told yet to roll back; if all have, the youngest, and
// then rolling back again would only turn in a circle.
func (m *Manager) tell(b *books, stuck []*waitView) {
	among := b.holders(stuck)
	if len(among) == 0 {
		among = stuck
	}
	v, advice := among[len(among)-1], Split
	t := &m.progress.owners
	t.Lock()
	for _, c := range slices.Backward(among) {
		if !c.owner.owner.told.is {
			v, advice = c, RollBack
			break
		}
	}
	t.Unlock()
	m.tellOne(v, stuck, b.errorOf(v, len(stuck), advice))
}

func (b *books) errorOf(v *waitView, waiters int, advice Advice) *DeadlockError {
	s := v.slot()
	e := &DeadlockError{
		Space: s.line.space.ID(), Requested: s.need, Available: s.line.available,
		Waiters: waiters, Advice: advice, Hint: s.line.hint, Still: b.quiet, Holders: b.holdersIn(s.line),
	}
	if v.owner != nil {
		e.Owner, e.Held = v.owner.owner.name, v.owner.total
	}
	if among := e.Holders; len(among) > maxHolders {
		e.Holders, e.MoreHolders = among[:maxHolders], len(among)-maxHolders
	}
	return e
}

// maxHolders is how many holders an error or an event names.
const maxHolders = 8

// holdersIn describes what is kept in a line by handles and records of owners who wait,
// and of unknown ones where these are in the way. The largest is first.
func (b *books) holdersIn(l *lineView) []tier.Holding {
	var out []tier.Holding
	for _, v := range l.space.Holds(nil) {
		o, _ := v.Owner.(*Owner)
		if known := b.owners[o]; known == nil && b.quiet > 0 || known != nil && len(known.waits) > 0 {
			out = append(out, v.Describe(l.space.ID()))
		}
	}
	slices.SortFunc(out, func(a, b tier.Holding) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Batch, b.Batch), cmp.Compare(a.Kind, b.Kind))
	})
	return out
}

// tellOne ends v's wait, unless there is room for it by now. That the owner was told
// is noted before, so that what it does then counts.
func (m *Manager) tellOne(v *waitView, stuck []*waitView, err *DeadlockError) {
	takeBack := v.owner.tell(m, err)
	var done over
	m.mu.Lock()
	w := v.w
	ended := !v.over() && !w.fitsLocked()
	if ended {
		err.others = signalOfLocked(stuck, v)
		m.failLocked(w, err, &done)
	}
	m.mu.Unlock()
	if !ended {
		takeBack()
		return
	}
	done.wake()
	m.serve()
}

// tell notes that the owner, if there is one, is told err.
func (v *ownerView) tell(m *Manager, err *DeadlockError) (takeBack func()) {
	if v == nil {
		return func() {}
	}
	o, t := v.owner, &m.progress.owners
	t.Lock()
	defer t.Unlock()
	before := o.told
	o.told = told{is: true, past: err.Held + err.Requested, rolledBack: len(o.open) == 0}
	return func() {
		t.Lock()
		defer t.Unlock()
		o.told = before
	}
}

// fitsLocked says whether w is about to be served.
func (w *waiter) fitsLocked() bool {
	for i := range w.slots {
		s := &w.slots[i]
		if s.in() && s.line.space.Available() >= s.need && (!s.line.shut() || s.line.waits.Head() == &s.place) {
			return true
		}
	}
	return false
}

// shut says whether only the head may be served.
func (l *line) shut() bool { return l.waits.Door().Shut() }

// signal is set once.
type signal struct {
	once sync.Once
	c    chan struct{}
}

func (s *signal) set() { s.once.Do(func() { close(s.c) }) }

// signalOfLocked returns what is set when another wait is over that is not of told's owner;
// nil if there is none.
func signalOfLocked(stuck []*waitView, told *waitView) *signal {
	var s *signal
	for _, v := range stuck {
		if v == told || v.owner != nil && v.owner == told.owner {
			continue
		}
		if s == nil {
			s = &signal{c: make(chan struct{})}
		}
		if v.over() { // just now
			s.set()
			continue
		}
		v.w.tells = append(v.w.tells, s)
	}
	return s
}

// tellThose lets those know who gave way to w that its wait is over.
func (w *waiter) tellThose() {
	for _, s := range w.tells {
		s.set()
	}
}
