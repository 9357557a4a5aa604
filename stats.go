package spillway

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/tabular"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/arrowmem"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Stats is what the engine has done and holds. Sizes are in bytes. Each part is consistent in
// itself; the parts are read one after the other.
type Stats struct {
	Spaces    []SpaceStats
	Edges     []convert.EdgeStats   // what was moved, a pair of spaces each
	Work      []convert.WorkStats   // the same by plan and operator, and what was evicted and never used again
	Corrupt   int64                 // how often a batch was found with other bytes than were written
	Waits     reservation.WaitStats // for room
	Blocked   []reservation.Blocked // the same by task, the longest first
	Monitor   monitor.Stats
	Admission admission.Stats
	Permits   permit.Stats // also of a pool that engines share
	Quota     *quota.Stats // nil without a limit of GPU memory
	// HeapOverflow counts what allocators of Works took from the Go heap, beyond what was reserved.
	HeapOverflow arrowmem.HeapStats
}

// SpaceStats describes one space.
type SpaceStats struct {
	ID       tier.ID
	Backend  string
	Capacity int64
	// Limit, Trigger and Stop are the marks, in bytes; see tier.Marks.
	Limit, Trigger, Stop int64
	External             int64 // what others hold on the device, sampled each second; part of the pressure
	Lost                 bool  // its device is lost, with what is in use here; see tier.Space.Lost
	tier.Usage
	Host *tier.HostStats // of host memory; else nil
	Disk *disk.Stats     // of a spill volume; else nil
}

// Stats returns the present numbers. It may be called at any time, also after Close.
func (e *Engine) Stats() Stats {
	s := Stats{
		Edges:        e.mover.Stats(),
		Work:         e.mover.Work(),
		Corrupt:      e.mover.Corrupt(),
		Waits:        e.reservations.Waits(),
		Blocked:      e.reservations.Blocked(),
		Monitor:      e.monitor.Stats(),
		Admission:    e.admitter.Stats(),
		Permits:      e.permits.Stats(),
		HeapOverflow: e.overflow.Stats(),
	}
	if e.limits.quota != nil {
		q := e.limits.quota.Stats()
		s.Quota = &q
	}
	for _, space := range e.spaces {
		now := space.State()
		one := SpaceStats{
			ID: space.ID(), Backend: space.Backend, Capacity: space.Capacity,
			Limit: now.Limit, Trigger: now.Trigger, Stop: now.Stop,
			External: now.External, Lost: space.Lost() != nil, Usage: now.Usage,
		}
		switch pool := space.Pool.(type) {
		case *host.Arena:
			arena := pool.Stats()
			one.Host = &arena
		case *volumes.Volume:
			volume := pool.Stats()
			one.Disk = &volume
		}
		s.Spaces = append(s.Spaces, one)
	}
	return s
}

// Spaces returns the engine's spaces, ordered by tier and number.
func (e *Engine) Spaces() []*tier.Space { return e.reservations.Spaces().All() }

// String returns the figures as tables, for people. Sizes are rounded.
func (s Stats) String() string {
	var b strings.Builder
	table := func(rows tabular.Rows) {
		if len(rows) > 1 {
			rows.Write(&b, "")
			b.WriteByte('\n')
		}
	}
	spaces := tabular.Rows{{"space", "backend", ">capacity", ">used", ">reserved", ">copies", ">peak", ">external"}}
	for _, p := range s.Spaces {
		spaces.Add(p.ID, p.Backend, size.Approx(p.Capacity), size.Approx(p.Used()), size.Approx(p.Reserved),
			size.Approx(p.Cached), size.Approx(p.Peak), size.Approx(p.External))
	}
	table(spaces)
	edges := tabular.Rows{
		{"from", "to", ">batches", ">bytes", ">GiB/s", ">half within", ">99 % within", ">longest", "reasons"},
	}
	for _, e := range s.Edges {
		rate := "-"
		if e.Busy > 0 {
			rate = fmt.Sprintf("%.2f", float64(e.Bytes)/(1<<30)/e.Busy.Seconds())
		}
		edges.Add(e.From, e.To, e.Batches, size.Approx(e.Bytes), rate,
			rounded(e.P50), rounded(e.P99), rounded(e.Longest), reasons(e.ByReason))
	}
	table(edges)
	operators := tabular.Rows{{"plan", "operator", ">moved down", ">moved up", ">down and never used", "reasons"}}
	for _, w := range s.Work {
		operator := "-"
		if w.Operator != "" {
			operator = fmt.Sprintf("%s:%d", named.Plain(w.Operator), w.Port)
		}
		operators.Add(cmp.Or(named.Plain(w.Plan), "-"), operator, size.Approx(w.Down.Bytes), size.Approx(w.Up.Bytes),
			size.Approx(w.Unread), reasons(w.ByReason))
	}
	table(operators)
	tasks := tabular.Rows{{"task", ">waits", ">waited", ">longest", ">waiting now", ">so far"}}
	for _, o := range s.Blocked {
		tasks.Add(cmp.Or(named.Plain(o.Owner), "-"), o.Waits, rounded(o.Total), rounded(o.Longest), o.Waiting,
			rounded(o.SoFar))
	}
	table(tasks)
	fmt.Fprintf(&b, "waits for room: %d, half within %s, 99 %% within %s, 99.9 %% within %s, the longest %s\n",
		s.Waits.Count, rounded(s.Waits.P50), rounded(s.Waits.P99), rounded(s.Waits.P999), rounded(s.Waits.Max))
	if w := s.Waits; w.Waiting > 0 {
		fmt.Fprintf(&b, "waiting for room now: %d, the oldest for %s\n", w.Waiting, rounded(w.Oldest))
	}
	fmt.Fprintf(&b, "tasks: %d running, %d waiting, %d admitted, %d tried again\n",
		s.Admission.Running, s.Admission.Waiting, s.Admission.Admitted, s.Admission.Retried)
	fmt.Fprintf(&b, "monitor: %d moves of %s, %d found no room, %d failed, %d waiters refused\n",
		s.Monitor.Moves, size.Approx(s.Monitor.Bytes), s.Monitor.NoRoom, s.Monitor.Failed, s.Monitor.Refused)
	if o := s.HeapOverflow; o.Peak > 0 {
		fmt.Fprintf(&b, "operators: %s on the Go heap beyond their Works, %s at the peak\n", size.Approx(o.Bytes),
			size.Approx(o.Peak))
	}
	if q := s.Quota; q != nil {
		fmt.Fprintf(&b, "quota %s: %s of %s used, %s at the peak\n",
			named.Plain(q.Name), size.Approx(q.Used), size.Approx(q.Limit), size.Approx(q.Peak))
	}
	return b.String()
}

// reasons returns the bytes by reason, the most first.
func reasons(by map[string]int64) string {
	most := func(a, b string) int { return cmp.Or(cmp.Compare(by[b], by[a]), cmp.Compare(a, b)) }
	var parts []string
	for _, n := range slices.SortedFunc(maps.Keys(by), most) {
		if by[n] > 0 {
			parts = append(parts, n+" "+size.Approx(by[n]))
		}
	}
	return strings.Join(parts, ", ")
}

// rounded returns a duration with three digits or so.
func rounded(d time.Duration) time.Duration {
	switch {
	case d >= time.Second:
		return d.Round(time.Millisecond)
	case d >= time.Millisecond:
		return d.Round(time.Microsecond)
	}
	return d
}
