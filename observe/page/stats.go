package page

import (
	"strings"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
)

// Fill adds the spaces, edges, operators, tasks and waits of an engine to a Run without any.
func (r *Run) Fill(stats spillway.Stats) {
	for _, s := range stats.Spaces {
		space := Space{
			ID: s.ID.String(), Backend: s.Backend, CapacityBytes: s.Capacity, PeakBytes: s.Peak, EndBytes: s.Used(),
		}
		if s.Disk != nil {
			space.WrittenBytes, space.ReadBytes = s.Disk.Written, s.Disk.Read
		}
		r.Spaces = append(r.Spaces, space)
	}
	r.Edges = EdgesOf(stats.Edges)
	for _, w := range stats.Work {
		r.Work = append(r.Work, Work{
			Plan: w.Plan, Operator: w.Operator, Port: w.Port,
			DownBytes: w.Down.Bytes, UpBytes: w.Up.Bytes, Unread: w.Unread,
		})
	}
	for _, b := range stats.Blocked {
		r.Tasks = append(r.Tasks, Task{
			Name: b.Owner, Waits: b.Waits, Total: b.Total.Seconds(), Longest: b.Longest.Seconds(),
			Waiting: b.Waiting, SoFar: b.SoFar.Seconds(),
		})
	}
	w := stats.Waits
	r.Waits = Waits{
		Count: w.Count, P50: w.P50.Seconds(), P99: w.P99.Seconds(), P999: w.P999.Seconds(), Max: w.Max.Seconds(),
		Waiting: w.Waiting, Oldest: w.Oldest.Seconds(),
	}
}

// EdgesOf describes the moves between spaces.
func EdgesOf(stats []convert.EdgeStats) []Edge {
	all := []Edge{} // [] in JSON, not null
	for _, e := range stats {
		all = append(all, Edge{
			From: e.From.String(), To: e.To.String(),
			Batches: e.Batches, Bytes: e.Bytes, Copies: e.Copies, Unmoved: e.Unmoved,
			Ahead: e.Ahead, AheadUsed: e.AheadUsed, AheadInVain: e.AheadInVain,
			Seconds: e.Busy.Seconds(), GiBPerS: rate(e.Bytes, e.Busy.Seconds()), ByReason: e.ByReason,
			P50: e.P50.Seconds(), P99: e.P99.Seconds(), Longest: e.Longest.Seconds(),
		})
	}
	return all
}

// Moved returns the bytes that were moved to slower tiers, to faster tiers, and within a tier, such as
// from one GPU to another.
func (r *Run) Moved() (down, up, within int64) {
	rank := func(space string) int {
		kind, _, _ := strings.Cut(space, ":")
		return strings.Index("gpu host disk", kind)
	}
	for _, e := range r.Edges {
		switch from, to := rank(e.From), rank(e.To); {
		case from < to:
			down += e.Bytes
		case from > to:
			up += e.Bytes
		default:
			within += e.Bytes
		}
	}
	return down, up, within
}

// total returns the sum of the bytes of all edges.
func (r *Run) total() int64 {
	down, up, within := r.Moved()
	return down + up + within
}
