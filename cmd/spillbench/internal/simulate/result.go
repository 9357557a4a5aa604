package simulate

import (
	"cmp"
	"slices"
	"time"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// Edge is an ordered pair of spaces.
type Edge struct{ From, To tier.ID }

// Result is the outcome of a workload.
type Result struct {
	Moves          []convert.EdgeStats // fastest tiers first
	Bytes, Fetched int64               // of all moves, and of those to a faster tier
	Took           time.Duration       // from the first put or use to the last event of a batch
	Accesses       int64               // uses of batches
	Found          int64               // uses that needed no move
	Stalled        time.Duration       // how long puts and uses waited for room, and uses for their batches
}

// Measured returns the outcome of the workload as its events describe it. In Moves, Moving is the
// time in which an edge had at least one move of bytes: overlapping moves count once.
func Measured(t *Trace) *Result {
	r := new(Result)
	size := make(map[uint64]int64)   // of batches
	fetched := make(map[uint64]bool) // since the last use
	until := make(map[Edge]int64)    // when the last move of bytes ended
	first := int64(-1)
	for _, e := range t.Events {
		if e.Error != "" {
			continue
		}
		took := time.Duration(e.Took)
		switch e.Kind {
		case events.MoveEnded.String():
			edge := Edge{e.From, e.To}
			i := slices.IndexFunc(r.Moves, func(m convert.EdgeStats) bool { return Edge{m.From, m.To} == edge })
			if i < 0 {
				i = len(r.Moves)
				r.Moves = append(r.Moves,
					convert.EdgeStats{From: e.From, To: e.To, ByReason: make(map[string]int64)})
			}
			m := &r.Moves[i]
			m.Batches++
			m.Busy += took
			if e.Copy {
				m.Copies++
				m.Unmoved += size[e.Batch]
			} else {
				m.Bytes += e.Bytes
				m.ByReason[e.Reason] += e.Bytes
				m.Moving += time.Duration(e.At - max(e.At-e.Took, until[edge]))
				until[edge] = e.At
				r.Bytes += e.Bytes
				if e.To.Kind < e.From.Kind {
					r.Fetched += e.Bytes
				}
			}
			if e.Reason == convert.ReasonWork {
				fetched[e.Batch] = true
				r.Stalled += took
			}
			continue
		case events.WaitEnded.String():
			r.Stalled += took
			continue
		case events.BatchPut.String():
			size[e.Batch] = e.Bytes
		case events.BatchUsed.String():
			r.Accesses++
			if !fetched[e.Batch] {
				r.Found++
			}
			delete(fetched, e.Batch)
		case events.BatchDropped.String():
		default:
			continue
		}
		if first < 0 {
			first = e.At
		}
		r.Took = time.Duration(e.At - first)
	}
	slices.SortStableFunc(r.Moves, func(a, b convert.EdgeStats) int {
		return cmp.Or(cmp.Compare(a.From.Kind, b.From.Kind), cmp.Compare(a.To.Kind, b.To.Kind))
	})
	return r
}
