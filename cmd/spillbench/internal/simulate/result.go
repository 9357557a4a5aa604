package simulate

import (
	"cmp"
	"slices"
	"time"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// Edge is a way from one space to another.
type Edge struct{ From, To tier.ID }

func (e Edge) compare(other Edge) int {
	return cmp.Or(
		cmp.Compare(e.From.Kind, other.From.Kind), cmp.Compare(e.From.Ordinal, other.From.Ordinal),
		cmp.Compare(e.To.Kind, other.To.Kind), cmp.Compare(e.To.Ordinal, other.To.Ordinal),
	)
}

// Result is the outcome of a workload.
type Result struct {
	Moves    []convert.EdgeStats // fastest tiers first
	Took     time.Duration       // from the first put or use to the last event of a batch
	Accesses int64               // uses of batches
	Found    int64               // of them, those that needed no move
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
func (r *Result) add(k Edge, bytes int64, took time.Duration, copied bool, reason string) {
	i, found := slices.BinarySearchFunc(r.Moves, k, func(m convert.EdgeStats, k Edge) int {
		return Edge{m.From, m.To}.compare(k)
	})
	if !found {
		r.Moves = slices.Insert(r.Moves, i, convert.EdgeStats{From: k.From, To: k.To, ByReason: make(map[string]int64)})
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

// Measured returns the outcome of the workload as it was recorded.
func Measured(t *Trace) *Result {
	r := new(Result)
	size := make(map[uint64]int64)   // of batches
	fetched := make(map[uint64]bool) // since the last use
	first := int64(-1)
	for i := range t.Events {
		e := &t.Events[i]
		took := time.Duration(e.Took)
		switch {
		case e.is(events.MoveEnded) && e.Error == "":
			r.add(Edge{e.From, e.To}, cmp.Or(e.Bytes, size[e.Batch]), took, e.Copy, e.Reason)
			if e.Reason == convert.ReasonWork {
				fetched[e.Batch] = true
				r.Stalled += took
			}
			continue
		case e.is(events.WaitEnded) && e.Error == "":
			r.Stalled += took
			continue
		case e.is(events.BatchPut):
			size[e.Batch] = e.Bytes
		case e.is(events.BatchUsed):
			r.Accesses++
			if !fetched[e.Batch] {
				r.Found++
			}
			fetched[e.Batch] = false
		case !e.is(events.BatchDropped):
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
	type used struct {
		bytes       int64
		took, until int64
	}
	edges := make(map[Edge]used)
	for i := range t.Events {
		if e := &t.Events[i]; e.is(events.MoveEnded) && e.Error == "" && e.Bytes > 0 {
			u := edges[Edge{e.From, e.To}]
			u.bytes += e.Bytes
			u.took += e.At - max(e.At-e.Took, u.until)
			u.until = e.At
			edges[Edge{e.From, e.To}] = u
		}
	}
	all := make(map[Edge]float64)
	for k, u := range edges {
		all[k] = float64(u.bytes) / max(1e-9, time.Duration(u.took).Seconds())
	}
	return all
}
