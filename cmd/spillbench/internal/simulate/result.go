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
	Moves    []convert.EdgeStats // fastest tiers first
	Took     time.Duration       // from the first put or use to the last event of a batch
	Accesses int64               // uses of batches
	Found    int64               // uses that needed no move
	Stalled  time.Duration       // how long puts and uses waited for room, and uses for their batches
}

// Bytes returns the bytes of all moves.
func (r *Result) Bytes() (n int64) {
	for _, m := range r.Moves {
		n += m.Bytes
	}
	return n
}

// Fetched returns the bytes of the moves to a faster tier.
func (r *Result) Fetched() (n int64) {
	for _, m := range r.Moves {
		if m.To.Kind < m.From.Kind {
			n += m.Bytes
		}
	}
	return n
}

// add counts the move of a batch.
func (r *Result) add(from, to tier.ID, bytes int64, took time.Duration, copied bool, reason string) {
	i, found := slices.BinarySearchFunc(r.Moves, Edge{from, to}, func(m convert.EdgeStats, e Edge) int {
		return cmp.Or(compareIDs(m.From, e.From), compareIDs(m.To, e.To))
	})
	if !found {
		r.Moves = slices.Insert(r.Moves, i, convert.EdgeStats{From: from, To: to, ByReason: make(map[string]int64)})
	}
	m := &r.Moves[i]
	m.Batches++
	m.Busy += took
	if copied {
		m.Copies++
		m.Unmoved += bytes
		return
	}
	m.Bytes += bytes
	m.ByReason[reason] += bytes
}

// compareIDs orders spaces, the fastest tier first.
func compareIDs(a, b tier.ID) int {
	return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Ordinal, b.Ordinal))
}

// Measured returns the outcome of the workload as it was recorded.
func Measured(t *Trace) *Result {
	r := new(Result)
	size := make(map[uint64]int64)   // of batches
	fetched := make(map[uint64]bool) // since the last use
	first := int64(-1)
	for i := range t.Events {
		e := &t.Events[i]
		took := time.Duration(e.Took)
		switch e.Kind {
		case events.MoveEnded.String():
			if e.Error == "" {
				r.add(e.From, e.To, cmp.Or(e.Bytes, size[e.Batch]), took, e.Copy, e.Reason)
				if e.Reason == convert.ReasonWork {
					fetched[e.Batch] = true
					r.Stalled += took
				}
			}
			continue
		case events.WaitEnded.String():
			if e.Error == "" {
				r.Stalled += took
			}
			continue
		case events.BatchPut.String():
			size[e.Batch] = e.Bytes
		case events.BatchUsed.String():
			r.Accesses++
			if !fetched[e.Batch] {
				r.Found++
			}
			fetched[e.Batch] = false
		case events.BatchDropped.String():
		default:
			continue
		}
		if first < 0 {
			first = e.At
		}
		r.Took = time.Duration(e.At - first)
	}
	return r
}

// bandwidths returns how many bytes a second each edge moved while it was in use.
func bandwidths(t *Trace) map[Edge]float64 {
	bytes, took, until := make(map[Edge]int64), make(map[Edge]int64), make(map[Edge]int64)
	for _, e := range t.Events {
		if e.Kind == events.MoveEnded.String() && e.Error == "" && e.Bytes > 0 {
			edge := Edge{e.From, e.To}
			bytes[edge] += e.Bytes
			took[edge] += e.At - max(e.At-e.Took, until[edge])
			until[edge] = e.At
		}
	}
	all := make(map[Edge]float64)
	for edge, n := range bytes {
		all[edge] = float64(n) / max(1e-9, time.Duration(took[edge]).Seconds())
	}
	return all
}
