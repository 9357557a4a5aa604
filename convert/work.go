package convert

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/tally"
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

// OthersPlan is the plan of WorkStats that stand for several. At most tally.Most operators are counted
// apart.
const OthersPlan = "(others)"

// workKey is what WorkStats are counted by. Plans of one name, one after the other, count together: else
// what is shown of them would fall when one is counted with others.
type workKey struct {
	plan     string
	operator string
	port     int
}

// othersKey is what those are counted by that are not kept apart.
var othersKey = workKey{plan: OthersPlan}

type work struct{ WorkStats }

// works is guarded by its owner.
type works struct{ tally.Table[workKey, *work] }

// of returns what is counted for batches of a place.
func (w *works) of(at batch.Place) *work {
	return w.Of(workKey{at.Name, at.Operator, at.Port}, othersKey, func(key workKey) *work {
		return &work{WorkStats{Plan: key.plan, Operator: key.operator, Port: key.port, ByReason: make(map[string]int64)}}
	})
}

// Add counts with of what another has counted.
func (of *work) Add(o *work) {
	of.Down.plus(o.Down)
	of.Up.plus(o.Up)
	of.Unread += o.Unread
	for reason, bytes := range o.ByReason {
		of.ByReason[reason] += bytes
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

// Work returns what was moved so far for each operator, ordered by plan, operator and port. At most
// some thousand are kept apart: see OthersPlan. Moves within a tier are in ByReason alone.
func (m *Mover) Work() []WorkStats {
	s := &m.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]WorkStats, 0, s.work.Len())
	for _, of := range s.work.All() {
		c := of.WorkStats
		c.ByReason = maps.Clone(of.ByReason)
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b WorkStats) int {
		return cmp.Or(cmp.Compare(a.Plan, b.Plan), cmp.Compare(a.Operator, b.Operator), cmp.Compare(a.Port, b.Port))
	})
	return out
}
