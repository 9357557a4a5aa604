package reservation

import (
	"github.com/spillway-db/spillway/internal/deadlock"
	"github.com/spillway-db/spillway/internal/holds"
)

// books are a snapshot of what is held, what is waited for, and what room there is.
type books struct {
	deadlock.Books
	owners map[*Owner]*deadlock.Owner
	waits  map[*waiter]*deadlock.Wait // that are judged, and all heads
}

// observe reads the books: first what is held, then the waits, then the spaces. So what owners hold
// is not more than what is used.
func (m *Manager) observe() *books {
	open, changes := m.progress.owners.reservations()
	b := m.observeHeld(open)
	b.Changes = changes
	m.mu.Lock()
	for w := range m.progress.waits {
		var o *deadlock.Owner
		if w.owner != nil {
			o = b.owner(w.owner)
		}
		b.Judged(b.wait(w), o)
	}
	for i, l := range m.lines {
		b.Lines[i].Shut = l.waits.Door().Shut()
		if head := l.waits.Head(); head != nil {
			b.Lines[i].Head = b.wait(head.Of.w)
		}
	}
	m.mu.Unlock()
	for i, l := range m.lines {
		v := b.Lines[i]
		v.Used, v.Available, v.Ever, v.Own = l.space.Used(), l.space.Available(), l.space.Room(), l.space.Inside().Held()
	}
	t := &m.progress.owners
	t.Lock()
	b.Settled = t.changes == b.Changes
	t.Unlock()
	b.Settle()
	return b
}

// observeHeld reads what the open reservations of owners promise, and then which handles and records
// keep memory.
func (m *Manager) observeHeld(open map[*Owner][]Reservation) *books {
	b := &books{owners: make(map[*Owner]*deadlock.Owner), waits: make(map[*waiter]*deadlock.Wait)}
	for _, l := range m.lines {
		b.AddLine().Holds = l.space.Inside().Holds().Changes()
	}
	for o, all := range open {
		v := b.owner(o)
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
				owner = b.owner(o)
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

func (b *books) owner(o *Owner) *deadlock.Owner {
	v := b.owners[o]
	if v == nil {
		v = b.AddOwner(o, o.goroutines())
		b.owners[o] = v
	}
	return v
}

// wait returns the view of w, whose place in its lines must not change meanwhile:
// the manager's lock is held.
func (b *books) wait(w *waiter) *deadlock.Wait {
	v := b.waits[w]
	if v == nil {
		var slots []deadlock.Slot
		for i := range w.slots {
			if s := &w.slots[i]; s.in() {
				slots = append(slots, deadlock.Slot{Line: b.Lines[s.line.index], Need: s.wants()})
			}
		}
		v = b.AddWait(w, w.seq, slots...)
		b.waits[w] = v
	}
	return v
}

// waiterOf returns the waiter that a wait of the books is of; nil if that wait is over.
func waiterOf(v *deadlock.Wait) *waiter {
	if w := v.Of.(*waiter); w.seq == v.Seq && !w.over.Load() {
		return w
	}
	return nil
}
