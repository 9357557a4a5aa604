package reservation

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/lockrank"
)

// Blocked says how long the waits of the owners of one name took, in all and the longest. Waits that
// are not over are not counted.
type Blocked struct {
	Owner   string // "" stands for all whose waits have no owner
	Waits   int64
	Total   time.Duration // they may overlap
	Longest time.Duration
}

// mostNames is how many names of owners are counted apart. A program that gives each task a name of
// its own would fill the memory.
const mostNames = 1024

// otherOwners is what is counted under when there are too many names.
const otherOwners = "(others)"

// blocked counts finished waits by the names of their owners.
type blocked struct {
	mu struct {
		lockrank.Mutex[lockrank.Reservation] // never held with another of this rank
		by                                   map[string]*Blocked
	}
}

func (b *blocked) add(o *Owner, took time.Duration) {
	name := ""
	if o != nil {
		name = o.name
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.mu.by[name]
	if of == nil && len(b.mu.by) >= mostNames {
		name = otherOwners
		of = b.mu.by[name]
	}
	if of == nil {
		if b.mu.by == nil {
			b.mu.by = make(map[string]*Blocked)
		}
		of = &Blocked{Owner: name}
		b.mu.by[name] = of
	}
	of.Waits++
	of.Total += took
	of.Longest = max(of.Longest, took)
}

// Blocked returns how long owners have waited for room, the longest total first. At most some
// thousand names are kept apart; the rest is "(others)".
func (m *Manager) Blocked() []Blocked {
	m.blocked.mu.Lock()
	all := make([]Blocked, 0, len(m.blocked.mu.by))
	for _, b := range m.blocked.mu.by {
		all = append(all, *b)
	}
	m.blocked.mu.Unlock()
	slices.SortFunc(all, func(a, b Blocked) int { return cmp.Or(cmp.Compare(b.Total, a.Total), cmp.Compare(a.Owner, b.Owner)) })
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
	m.panics.Do("Events", func() { m.config.Events(e) })
}
