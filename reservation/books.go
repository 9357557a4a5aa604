package reservation

import (
	"github.com/spillway-db/spillway/internal/deadlock"
	"github.com/spillway-db/spillway/internal/holds"
)

// observe reads the books: first what is held, then the waits that are judged and all heads, then
// the spaces. So what owners hold is not more than what is used.
func (m *Manager) observe() *deadlock.Books {
	open, changes := m.progress.owners.reservations()
	b := m.observeHeld(open)
	b.Changes = changes
	m.mu.Lock()
	for w := range m.waitersLocked() {
		if w.owner != nil {
			b.Judged(viewLocked(b, w), b.AddOwner(w.owner, w.owner.goroutines()))
		} else if m.progress.judges(w) {
			b.Judged(viewLocked(b, w), nil)
		}
	}
	for i, l := range m.lines {
		b.Lines[i].Shut = l.waits.Door().Shut()
		if head := l.waits.Head(); head != nil {
			b.Lines[i].Head = viewLocked(b, head.Of.w)
		}
	}
	m.mu.Unlock()
	for i, l := range m.lines {
		v := b.Lines[i]
		v.Used, v.Available, v.Ever = l.space.Used(), l.space.Available(), l.space.Room()
	}
	b.Settled = m.progress.owners.changes.Load() == b.Changes
	b.Settle()
	return b
}

// observeHeld reads what the open reservations of owners promise, and then which handles and
// records keep memory.
func (m *Manager) observeHeld(open map[*Owner][]Reservation) *deadlock.Books {
	b := new(deadlock.Books)
	for _, l := range m.lines {
		b.AddLine().Holds = l.space.Inside().Holds().Changes()
	}
	for o, all := range open {
		v := b.AddOwner(o, o.goroutines())
		for _, r := range all {
			promised, unused := r.amounts()
			b.Promise(v, b.Lines[r.rec.line.index], promised)
			b.Drawn(v, b.Lines[r.rec.line.index], promised-unused)
		}
	}
	var views []holds.View
	for i, l := range m.lines {
		views = l.space.Inside().Holds().Append(views[:0])
		for k := range views {
			var owner *deadlock.Owner
			if o, ok := views[k].Owner.(*Owner); ok && o.maybeOf(m) {
				owner = b.AddOwner(o, o.goroutines())
			}
			l.space.Inside().EachKept(&views[k], func(memory any, bytes int64) { b.Keep(owner, b.Lines[i], memory, bytes) })
		}
	}
	return b
}

// maybeOf reports whether o is m's, or has not asked any manager yet.
func (o *Owner) maybeOf(m *Manager) bool {
	is := o.manager.Load()
	return is == nil || is == m
}

// viewLocked returns w as the books have it.
func viewLocked(b *deadlock.Books, w *waiter) *deadlock.Wait {
	if v := b.Wait(w); v != nil {
		return v
	}
	var slots []deadlock.Slot
	for s := range w.placesLocked() {
		slots = append(slots, deadlock.Slot{Line: b.Lines[s.line.index], Need: s.wants()})
	}
	return b.AddWait(w, w.seq, slots...)
}

// waiterOf returns the waiter that a wait of the books is of; nil if that wait is over.
func waiterOf(v *deadlock.Wait) *waiter {
	if w := v.Of.(*waiter); w.seq == v.Seq && !w.over.Load() {
		return w
	}
	return nil
}
