package convert

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/batch"
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
	// Within is a histogram of moves of bytes: how many took less than so long, for the powers of two
	// of nanoseconds from 4 µs to 18 minutes.
	Within map[time.Duration]int64
}

// edge is what is counted of two spaces.
type edge struct {
	EdgeStats
	times  histogram.Durations
	lately struct { // as Bytes and Busy, of the last moves of bytes
		bytes int64
		busy  time.Duration
	}
}

// latest is how much time of moves tells how fast an edge is. What is older counts half.
const latest = time.Second

// note counts a move of bytes for speed.
func (e *edge) note(bytes int64, took time.Duration) {
	if e.lately.busy > latest {
		e.lately.bytes, e.lately.busy = e.lately.bytes/2, e.lately.busy/2
	}
	e.lately.bytes += bytes
	e.lately.busy += took
}

// speed returns how many bytes a second the last moves between two spaces made, each by itself; 0
// if there was none.
func (s *stats) speed(from, to tier.ID) int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.edges[[2]tier.ID{from, to}]
	if e == nil || e.lately.busy <= 0 {
		return 0
	}
	return int64(float64(e.lately.bytes) / e.lately.busy.Seconds())
}

// stats has a plain mutex: it is a leaf, held for a few additions.
type stats struct {
	mu    sync.Mutex
	edges map[[2]tier.ID]*edge
	work  works

	corrupt atomic.Int64 // batches that were found with other bytes than were written, each time
}

// add counts a move of a body, which is that of a batch in a place.
func (s *stats) add(m *Moved, body int64, took time.Duration, at batch.Place) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.work.of(at).moved(m, took)
	e := s.edgeLocked(m.From, m.To)
	e.Batches++
	e.Bytes += m.Bytes
	e.Busy += took
	e.ByReason[m.Reason] += m.Bytes
	if m.Copy {
		e.Copies++
		e.Unmoved += body
		return
	}
	e.times.Record(took)
	e.note(m.Bytes, took)
}

// unread counts the bytes of a batch that moved to a slower tier, and was dropped unused.
func (s *stats) unread(at batch.Place, bytes int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.work.of(at).Unread += bytes
}

func (s *stats) edgeLocked(from, to tier.ID) *edge {
	key := [2]tier.ID{from, to}
	e := s.edges[key]
	if e == nil {
		if s.edges == nil {
			s.edges = make(map[[2]tier.ID]*edge)
		}
		e = &edge{EdgeStats: EdgeStats{From: from, To: to, ByReason: make(map[string]int64)}}
		s.edges[key] = e
	}
	return e
}

// ahead changes the counts of bytes that were prefetched or pre-cleaned.
func (s *stats) ahead(from, to tier.ID, count func(*EdgeStats)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	count(&s.edgeLocked(from, to).EdgeStats)
}

func (s *stats) snapshot() []EdgeStats {
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
	slices.SortFunc(out, func(a, b EdgeStats) int { return cmp.Or(order(a.From, b.From), order(a.To, b.To)) })
	return out
}

// order sorts spaces, the fastest tier first.
func order(a, b tier.ID) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Ordinal, b.Ordinal))
}

// BatchChanged is for the observer of an engine's batches. It counts those that are dropped and had
// moved to a slower tier without having been used there.
func (m inside) BatchChanged(b *batch.Batch, now batch.Info) {
	if now.State != batch.Released || now.Active > 0 || now.Descriptor == nil {
		return
	}
	if _, _, unread := b.Inside().Arrival(); unread {
		m.stats.unread(now.Place, now.Descriptor.Body)
	}
}
