package convert

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/spillway-db/spillway/tier"
)

// EdgeStats counts what was moved from one space to another.
type EdgeStats struct {
	From, To tier.ID
	Batches  int64
	Bytes    int64
	Copies   int64            // of the batches, those that found a copy, so that no bytes were moved
	Unmoved  int64            // the bytes of these copies
	Busy     time.Duration    // sum over the moves; they may overlap
	ByReason map[string]int64 // bytes
}

// stats has a plain mutex: it is a leaf, held for a few additions.
type stats struct {
	mu    sync.Mutex
	edges map[[2]tier.ID]*EdgeStats
}

// add counts a move of a body.
func (s *stats) add(m *Moved, body int64, took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := [2]tier.ID{m.From, m.To}
	e := s.edges[key]
	if e == nil {
		if s.edges == nil {
			s.edges = make(map[[2]tier.ID]*EdgeStats)
		}
		e = &EdgeStats{From: m.From, To: m.To, ByReason: make(map[string]int64)}
		s.edges[key] = e
	}
	e.Batches++
	e.Bytes += m.Bytes
	e.Busy += took
	e.ByReason[m.Reason] += m.Bytes
	if m.Copy {
		e.Copies++
		e.Unmoved += body
	}
}

func (s *stats) snapshot() []EdgeStats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]EdgeStats, 0, len(s.edges))
	for _, e := range s.edges {
		c := *e
		c.ByReason = maps.Clone(e.ByReason)
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b EdgeStats) int {
		return cmp.Or(cmp.Compare(a.From.Kind, b.From.Kind), cmp.Compare(a.From.Ordinal, b.From.Ordinal),
			cmp.Compare(a.To.Kind, b.To.Kind), cmp.Compare(a.To.Ordinal, b.To.Ordinal))
	})
	return out
}
