package convert

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/internal/histogram"
	"github.com/spillway-db/spillway/tier"
)

// EdgeStats counts what was moved from one space to another.
type EdgeStats struct {
	From, To tier.ID
	Batches  int64
	Bytes    int64
	Copies   int64 // of the batches, those that found a copy, so that no bytes were moved
	Unmoved  int64 // the bytes of these copies
	// Ahead counts bytes that were moved before they were needed, or, on the way to a disk, copied
	// there while their batch stayed. AheadUsed are those that were used then. AheadInVain are
	// those that left again, were freed or were dropped before that. The rest is there still.
	Ahead, AheadUsed, AheadInVain int64
	Busy                          time.Duration    // sum over the moves; they may overlap
	Moving                        time.Duration    // of Busy, that of moves of bytes: those that found no copy
	P50, P99, Longest             time.Duration    // of moves of bytes; percentiles are at most 1/16 too high
	ByReason                      map[string]int64 // bytes
	// Within is a histogram of moves of bytes: how many took less than so long, for the powers of
	// two of nanoseconds from 4 µs to 18 minutes.
	Within map[time.Duration]int64
}

// WorkStats counts what was moved for the batches of one operator's port, or of those that are in
// no plan.
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
	Bytes   int64         // moved; a move onto a clean image moves none
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

// stats counts moves by edge, and by operator. It has a plain mutex: a leaf, held for a few
// additions.
type stats struct {
	mu    sync.Mutex
	edges map[[2]tier.ID]*edge
	work  map[workKey]*work
	uses  uint64 // calls of workLocked
	// evictedAt is when a batch was last evicted from a space, by the monitor or for a waiter.
	evictedAt map[tier.ID]time.Time

	corrupt atomic.Int64 // batches that were found with other bytes than were written, each time
}

func (s *stats) init() {
	s.edges, s.work = make(map[[2]tier.ID]*edge), make(map[workKey]*work)
	s.evictedAt = make(map[tier.ID]time.Time)
}

// edge is what is counted of two spaces.
type edge struct {
	EdgeStats
	times  histogram.Durations
	lately MoveStats // the last moves of bytes
}

// work is what is counted of an operator.
type work struct {
	WorkStats
	used uint64 // stats.uses at the last use
}

// latest is how much time of moves an edge's speed is computed of. Older moves count half.
const latest = time.Second

// add counts a move of a body, which is that of a batch in a place.
func (s *stats) add(m *events.Event, body int64, at batch.Place) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := s.workLocked(at)
	w.ByReason[m.Reason] += m.Bytes
	e := s.edgeLocked(m.From, m.To)
	way := &MoveStats{} // moves within a tier are not counted
	if m.To.Kind > m.From.Kind {
		way = &w.Down
	} else if m.To.Kind < m.From.Kind {
		way = &w.Up
	}
	way.Batches++
	way.Bytes += m.Bytes
	way.Busy += m.Took
	e.Batches++
	e.Bytes += m.Bytes
	e.Busy += m.Took
	e.ByReason[m.Reason] += m.Bytes
	if m.Reason == ReasonTrigger || m.Reason == ReasonDemand {
		s.evictedAt[m.From] = time.Now()
	}
	if m.Copy {
		e.Copies++
		e.Unmoved += body
		return
	}
	e.times.Record(m.Took)
	if e.lately.Busy > latest {
		e.lately.Bytes, e.lately.Busy = e.lately.Bytes/2, e.lately.Busy/2
	}
	e.lately.Bytes += m.Bytes
	e.lately.Busy += m.Took
}

func (s MoveStats) plus(o MoveStats) MoveStats {
	return MoveStats{s.Batches + o.Batches, s.Bytes + o.Bytes, s.Busy + o.Busy}
}

func (s *stats) edgeLocked(from, to tier.ID) *edge {
	key := [2]tier.ID{from, to}
	e := s.edges[key]
	if e == nil {
		e = &edge{EdgeStats: EdgeStats{From: from, To: to, ByReason: make(map[string]int64)}}
		s.edges[key] = e
	}
	return e
}

// ahead adds to the counts of bytes that were prefetched or pre-cleaned.
func (s *stats) ahead(from, to tier.ID, made, used, inVain int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.edgeLocked(from, to)
	e.Ahead, e.AheadUsed, e.AheadInVain = e.Ahead+made, e.AheadUsed+used, e.AheadInVain+inVain
}

// workLocked returns the counts of the operator at a place. When there are too many operators, it
// adds the counts of the least recently used one to those of OthersPlan.
func (s *stats) workLocked(at batch.Place) *work {
	key := workKey{at.Name, at.Operator, at.Port}
	w := s.work[key]
	if w == nil {
		if others := (workKey{plan: OthersPlan}); len(s.work) >= maxOperators && key != others {
			var oldest *work
			for k, o := range s.work {
				if k != others && (oldest == nil || o.used < oldest.used) {
					oldest = o
				}
			}
			delete(s.work, workKey{oldest.Plan, oldest.Operator, oldest.Port})
			sum := s.workLocked(batch.Place{Name: OthersPlan})
			sum.Down, sum.Up, sum.Unread = sum.Down.plus(oldest.Down), sum.Up.plus(oldest.Up), sum.Unread+oldest.Unread
			for reason, bytes := range oldest.ByReason {
				sum.ByReason[reason] += bytes
			}
		}
		w = &work{WorkStats: WorkStats{
			Plan: at.Name, Operator: at.Operator, Port: at.Port, ByReason: make(map[string]int64),
		}}
		s.work[key] = w
	}
	s.uses++
	w.used = s.uses
	return w
}

// Stats returns what was moved so far, one entry for each pair of spaces,
// ordered by them.
func (m *Mover) Stats() []EdgeStats {
	s := &m.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]EdgeStats, 0, len(s.edges))
	for _, e := range s.edges {
		c, times := e.EdgeStats, e.times.Summary()
		c.Moving, c.P50, c.P99, c.Longest = times.Total, times.P50, times.P99, times.Max
		c.Within = times.Within
		c.ByReason = maps.Clone(e.ByReason)
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b EdgeStats) int {
		return cmp.Or(
			cmp.Compare(a.From.Kind, b.From.Kind), cmp.Compare(a.From.Ordinal, b.From.Ordinal),
			cmp.Compare(a.To.Kind, b.To.Kind), cmp.Compare(a.To.Ordinal, b.To.Ordinal),
		)
	})
	return out
}

// Work returns what was moved so far for each operator, ordered by plan, operator and port. It
// counts the most recently used 1,024 operators separately: see OthersPlan. Moves within a tier are
// in ByReason alone.
func (m *Mover) Work() []WorkStats {
	s := &m.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]WorkStats, 0, len(s.work))
	for _, of := range s.work {
		c := of.WorkStats
		c.ByReason = maps.Clone(of.ByReason)
		out = append(out, c)
	}
	slices.SortFunc(out, func(a, b WorkStats) int {
		return cmp.Or(cmp.Compare(a.Plan, b.Plan), cmp.Compare(a.Operator, b.Operator), cmp.Compare(a.Port, b.Port))
	})
	return out
}

// Speed returns how many bytes a second the last moves between two spaces made, each by itself; 0
// if there was none.
func (m *Mover) Speed(from, to tier.ID) int64 {
	s := &m.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.edges[[2]tier.ID{from, to}]
	if e == nil || e.lately.Busy <= 0 {
		return 0
	}
	return int64(float64(e.lately.Bytes) / e.lately.Busy.Seconds())
}

// BatchChanged is for the observer of an engine's batches. It counts those that are dropped and had
// moved to a slower tier without having been used there.
func (m *Mover) BatchChanged(_ *batch.Batch, now batch.Info) {
	if now.State == batch.Released && now.Active == 0 && now.Descriptor != nil && now.Unread {
		m.stats.mu.Lock()
		defer m.stats.mu.Unlock()
		m.stats.workLocked(now.Place).Unread += now.Descriptor.Body
	}
}
