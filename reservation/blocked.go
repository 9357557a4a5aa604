package reservation

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/tally"
)

// Blocked says how long the waits of the owners of one name took, in all and the longest, and which are
// not over.
type Blocked struct {
	Owner   string        // "" stands for all whose waits have no owner
	Waits   int64         // that are over
	Total   time.Duration // of them; they may overlap
	Longest time.Duration
	Waiting int64         // that are not over
	SoFar   time.Duration // how long these have taken, added up
}

// Add adds what another has counted.
func (b *Blocked) Add(o *Blocked) {
	b.Waits += o.Waits
	b.Total += o.Total
	b.Longest = max(b.Longest, o.Longest)
}

// otherOwners is what is counted under when there are too many names: a program that gives each task a
// name of its own would fill the memory.
const otherOwners = "(others)"

// blocked counts finished waits by the names of their owners.
type blocked struct {
	mu struct {
		lockrank.Mutex[lockrank.Reservation] // never held with another of this rank
		tally.Table[string, *Blocked]
	}
}

// label is the name that the owner's waits are counted by.
func (o *Owner) label() string {
	if o == nil {
		return ""
	}
	return o.name
}

func (b *blocked) add(o *Owner, took time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.mu.Of(o.label(), otherOwners, func(name string) *Blocked { return &Blocked{Owner: name} })
	of.Waits++
	of.Total += took
	of.Longest = max(of.Longest, took)
}

// Blocked returns how long owners have waited for room, and wait still, the longest first. At most some
// thousand names are kept apart: those that waited last. The rest is "(others)".
func (m *Manager) Blocked() []Blocked {
	by := make(map[string]*Blocked)
	m.blocked.mu.Lock()
	for name, b := range m.blocked.mu.All() {
		one := *b
		by[name] = &one
	}
	m.blocked.mu.Unlock()
	m.mu.Lock()
	now := time.Since(m.made)
	for w := range m.waitersLocked() {
		name := w.owner.label()
		of := by[name]
		if of == nil && len(by) >= tally.Most {
			name = otherOwners
			of = by[name]
		}
		if of == nil {
			of = &Blocked{Owner: name}
			by[name] = of
		}
		of.Waiting++
		of.SoFar += max(0, now-w.begun)
	}
	m.mu.Unlock()
	all := make([]Blocked, 0, len(by))
	for _, b := range by {
		all = append(all, *b)
	}
	slices.SortFunc(all, func(a, b Blocked) int {
		return cmp.Or(cmp.Compare(b.Total+b.SoFar, a.Total+a.SoFar), cmp.Compare(a.Owner, b.Owner))
	})
	return all
}

// say calls Config.Events for a wait, with no lock held.
func (m *Manager) say(ctx context.Context, w *waiter, kind events.Kind, took time.Duration) {
	if m.config.Events == nil {
		return
	}
	s := w.first()
	e := events.Event{
		Kind: kind, At: time.Now(), Context: ctx, Origin: events.From(ctx), To: s.line.space.ID(), Bytes: s.need, Took: took,
	}
	if w.owner != nil && w.owner.name != e.Task {
		e.Task, e.TaskID = w.owner.name, 0
	}
	if kind == events.WaitEnded {
		e.Err = w.err
	}
	m.panics.Do("Config.Events", func() { m.config.Events(e) })
}
