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

// mostWorks is how many operators are counted apart. When there are more, what was moved for the
// longest ago is counted with others, under OthersPlan.
const mostWorks = 1024

// OthersPlan is the plan of WorkStats that stand for several.
const OthersPlan = "(others)"

// workKey is what WorkStats are counted by. Plans of one name, one after the other, count together: else
// what is shown of them would fall when one is counted with others.
type workKey struct {
	plan     string
	operator string
	port     int
}

type work struct {
	WorkStats
	key  workKey
	last uint64 // when something was counted last, in counts
}

// works is guarded by its owner.
type works struct {
	by     map[workKey]*work
	counts uint64
}

// of returns what is counted for batches of a place.
func (w *works) of(at batch.Place) *work {
	key := workKey{at.Name, at.Operator, at.Port}
	w.counts++
	of := w.by[key]
	if of == nil {
		if w.by == nil {
			w.by = make(map[workKey]*work)
		}
		if len(w.by) >= mostWorks {
			w.fold()
		}
		of = &work{WorkStats: WorkStats{Plan: at.Name, Operator: at.Operator, Port: at.Port, ByReason: make(map[string]int64)}, key: key}
		w.by[key] = of
	}
	of.last = w.counts
	return of
}

// othersKey is what those are counted by that are not kept apart.
var othersKey = workKey{plan: OthersPlan}

// fold counts what was not counted for the longest time with others.
func (w *works) fold() {
	var oldest *work
	for _, of := range w.by {
		if of.key != othersKey && (oldest == nil || of.last < oldest.last) {
			oldest = of
		}
	}
	delete(w.by, oldest.key)
	others := w.by[othersKey]
	if others == nil {
		others = &work{WorkStats: WorkStats{Plan: OthersPlan, ByReason: make(map[string]int64)}, key: othersKey}
		w.by[othersKey] = others
	}
	others.Down.plus(oldest.Down)
	others.Up.plus(oldest.Up)
	others.Unread += oldest.Unread
	for reason, bytes := range oldest.ByReason {
		others.ByReason[reason] += bytes
	}
}

func (s *MoveStats) plus(o MoveStats) {
	s.Batches += o.Batches
	s.Bytes += o.Bytes
	s.Busy += o.Busy
}

func (of *work) add(m *Moved, took time.Duration) {
	one := MoveStats{Batches: 1, Bytes: m.Bytes, Busy: took}
	switch {
	case m.To.Kind > m.From.Kind:
		of.Down.plus(one)
	case m.To.Kind < m.From.Kind:
		of.Up.plus(one)
	}
	of.ByReason[m.Reason] += m.Bytes
}

// Work returns what was moved so far for each operator, ordered by plan, operator and port. At most
// some thousand are kept apart: see OthersPlan. Moves within a tier are in ByReason alone.
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
