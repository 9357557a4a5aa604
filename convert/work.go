package convert

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
)

// WorkStats counts what was moved for the batches of one operator's port, or of those that are in no
// plan.
type WorkStats struct {
	Plan     string // "" for batches that are in none
	Operator string
	Port     int

	Down, Up MoveStats        // to slower tiers, and to faster ones
	Unread   int64            // bytes of batches that had moved down, and were dropped without having been used since
	ByReason map[string]int64 // bytes
}

// MoveStats counts moves of batches.
type MoveStats struct {
	Batches int64
	Bytes   int64         // that were moved: a copy that lay there moves none
	Busy    time.Duration // sum over the moves; they may overlap
}

// OthersPlan is the plan of the WorkStats that count several operators together. At most
// maxOperators are counted separately.
const OthersPlan = "(others)"

const maxOperators = 1024

// workKey identifies WorkStats. Plans with the same name, one after the other, count together.
// Otherwise the figures under a name would fall when one of these plans moves to OthersPlan.
type workKey struct {
	plan     string
	operator string
	port     int
}

var othersKey = workKey{plan: OthersPlan}

type work struct {
	WorkStats
	used uint64 // works.uses at the last use
}

// works counts by operator. Its owner guards it.
type works struct {
	by   map[workKey]*work
	uses uint64 // calls of of
}

// of returns the counts of the operator at a place. When there are too many operators, it adds the
// counts of the least recently used one to those of OthersPlan.
func (w *works) of(at batch.Place) *work {
	key := workKey{at.Name, at.Operator, at.Port}
	of := w.by[key]
	if of == nil {
		if key != othersKey && len(w.by) >= maxOperators {
			w.foldOldest()
		}
		if w.by == nil {
			w.by = make(map[workKey]*work)
		}
		of = &work{WorkStats: WorkStats{
			Plan: at.Name, Operator: at.Operator, Port: at.Port, ByReason: make(map[string]int64),
		}}
		w.by[key] = of
	}
	w.uses++
	of.used = w.uses
	return of
}

func (w *works) foldOldest() {
	var oldest workKey
	least := w.uses + 1
	for key, of := range w.by {
		if key != othersKey && of.used < least {
			oldest, least = key, of.used
		}
	}
	o := w.by[oldest]
	delete(w.by, oldest)
	others := w.of(batch.Place{Name: OthersPlan})
	others.Down.plus(o.Down)
	others.Up.plus(o.Up)
	others.Unread += o.Unread
	for reason, bytes := range o.ByReason {
		others.ByReason[reason] += bytes
	}
}

func (s *MoveStats) plus(o MoveStats) {
	s.Batches += o.Batches
	s.Bytes += o.Bytes
	s.Busy += o.Busy
}

func (of *work) moved(m *Moved, took time.Duration) {
	one := MoveStats{Batches: 1, Bytes: m.Bytes, Busy: took}
	switch {
	case m.To.Kind > m.From.Kind:
		of.Down.plus(one)
	case m.To.Kind < m.From.Kind:
		of.Up.plus(one)
	}
	of.ByReason[m.Reason] += m.Bytes
}

// Work returns what was moved so far for each operator, ordered by plan, operator and port. It
// counts the most recently used 1,024 operators separately: see OthersPlan. Moves within a tier are
// in ByReason alone.
func (m *Mover) Work() []WorkStats {
	s := &m.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]WorkStats, 0, len(s.work.by))
	for _, of := range s.work.by {
		c := of.WorkStats
		c.ByReason = maps.Clone(of.ByReason)
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b WorkStats) int {
		return cmp.Or(cmp.Compare(a.Plan, b.Plan), cmp.Compare(a.Operator, b.Operator), cmp.Compare(a.Port, b.Port))
	})
	return out
}
