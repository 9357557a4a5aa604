package reservation

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/deadlock"
	"github.com/spillway-db/spillway/tier"
)

func (m *Manager) errorOf(b *deadlock.Books, v *deadlock.Wait, waiters int, split bool, still time.Duration) *DeadlockError {
	s := v.MostKept()
	l := m.lines[s.Line.Index]
	e := &DeadlockError{
		Space: l.space.ID(), Requested: slotIn(v.Of.(*waiter).slots, l).need, Available: s.Line.Available,
		Waiters: waiters, Split: split, Hint: l.hint, Still: still, Holders: holdersIn(b, l.space, still > 0),
	}
	if v.Owner != nil {
		e.Owner, e.Held = v.Owner.Of.(*Owner).name, v.Owner.Total
	}
	if among := e.Holders; len(among) > maxHolders {
		e.Holders, e.MoreHolders = among[:maxHolders], len(among)-maxHolders
	}
	return e
}

// maxHolders is how many holders an error or an event names.
const maxHolders = 8

// holdersIn lists what handles and records of waiting owners keep in a space, and of unknown owners
// where these are in the way. The largest is first.
func holdersIn(b *deadlock.Books, space *tier.Space, unknown bool) []tier.Holding {
	var out []tier.Holding
	for _, v := range space.Inside().Holds().Append(nil) {
		if known := b.Owner(v.Owner); known == nil && unknown || known != nil && len(known.Waits) > 0 {
			out = append(out, space.Inside().Describe(&v))
		}
	}
	slices.SortFunc(out, func(a, b tier.Holding) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Batch, b.Batch), cmp.Compare(a.Kind, b.Kind))
	})
	return out
}

// tell ends v's wait, unless there is room for it by now. It records before that the owner gets
// the error, so that what the owner does then counts.
func (m *Manager) tell(b *deadlock.Books, v *deadlock.Wait, stuck []*deadlock.Wait, split bool, still time.Duration) {
	err := m.errorOf(b, v, len(stuck), split, still)
	takeBack := func() {}
	if v.Owner != nil {
		takeBack = v.Owner.Of.(*Owner).tell(m, err)
	}
	m.end(func(done *over) {
		if w := waiterOf(v); w != nil && !w.fitsLocked() {
			err.others = othersLocked(stuck, v)
			m.failLocked(w, err, done)
			takeBack = func() {}
		}
	})
	takeBack()
}

// tell records that o gets err.
func (o *Owner) tell(m *Manager, err *DeadlockError) (takeBack func()) {
	t := &m.progress.owners
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

// fitsLocked reports whether w is about to be served.
func (w *waiter) fitsLocked() bool {
	for s := range w.placesLocked() {
		if s.line.space.Available() >= s.wants() && (!s.line.waits.Door().Shut() || s.line.waits.Head() == &s.place) {
			return true
		}
	}
	return false
}

// othersLocked returns what is closed when a wait of an owner other than told's is over; nil if
// there is none.
func othersLocked(stuck []*deadlock.Wait, told *deadlock.Wait) <-chan struct{} {
	stuck = slices.DeleteFunc(slices.Clone(stuck), func(v *deadlock.Wait) bool {
		return v == told || v.Owner != nil && v.Owner == told.Owner
	})
	if len(stuck) == 0 {
		return nil
	}
	others := make(chan struct{})
	end := sync.OnceFunc(func() { close(others) })
	for _, v := range stuck {
		if w := waiterOf(v); w != nil {
			w.tells = append(w.tells, end)
		} else { // it ended just now
			end()
		}
	}
	return others
}
