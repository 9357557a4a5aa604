package metrics

import (
	"strconv"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// table is all metrics; it is never changed.
var table = []grouped{
	spaces, hosts, disks, edges, work, waits, blocked, corrupt, moves, admissions, permits, budgets, quotas,
}

func gauge[T any](name string, unit Unit, help string, value func(*T, emit), labels ...string) row[T] {
	return row[T]{Measure{Name: name, Unit: unit, Kind: Gauge, Help: help, Labels: labels}, value}
}

func counter[T any](name string, unit Unit, help string, value func(*T, emit), labels ...string) row[T] {
	return row[T]{Measure{Name: name, Unit: unit, Kind: Counter, Help: help, Labels: labels}, value}
}

func histogram[T any](name, help string, of func(*T) Sample) row[T] {
	return row[T]{Measure{Name: name, Unit: Seconds, Kind: Histogram, Help: help}, func(t *T, to emit) { to(of(t)) }}
}

// durations makes the sample of a histogram.
func durations(count int64, sum, half, most time.Duration, within map[time.Duration]int64) Sample {
	s := Sample{Count: uint64(count), Value: sum.Seconds(), P50: half.Seconds(), P99: most.Seconds(), Within: make(map[float64]uint64, len(within))}
	for bound, n := range within {
		s.Within[bound.Seconds()] = uint64(n)
	}
	return s
}

type space = spillway.SpaceStats

var spaces = labelled(Main, "space", []string{"space", "tier"},
	func(s *spillway.Stats, to func(*space, ...string)) {
		for i := range s.Spaces {
			id := s.Spaces[i].ID
			to(&s.Spaces[i], id.String(), id.Kind.String())
		}
	},
	gauge("info", "1", "Is 1, and names the backend of a space.", func(s *space, to emit) { to(Sample{Value: 1}, s.Backend) }, "backend"),
	gauge("capacity", Bytes, "Size of a space, in bytes.", one(func(s *space) int64 { return s.Capacity })),
	gauge("limit", Bytes, "What reservations may take of a space, in bytes.", one(func(s *space) int64 { return s.Limit })),
	gauge("trigger", Bytes, "Pressure at which the monitor begins to move batches down, in bytes.", one(func(s *space) int64 { return s.Trigger })),
	gauge("stop", Bytes, "Pressure at which the monitor ends, in bytes.", one(func(s *space) int64 { return s.Stop })),
	gauge("pressure", Bytes, "What trigger and stop are compared with: bytes that are live, retired, reserved or foreign.",
		one(func(s *space) int64 { return s.Used() + s.Foreign })),
	gauge("held", Bytes, "Bytes of a space by kind: live (in use), retired (freed, the device may still use them), reserved (promised), cached (copies that give way).",
		func(s *space, to emit) {
			to(Sample{Value: float64(s.Live)}, "live")
			to(Sample{Value: float64(s.Retired)}, "retired")
			to(Sample{Value: float64(s.Reserved)}, "reserved")
			to(Sample{Value: float64(s.Cached)}, "cached")
		}, "kind"),
	gauge("foreign", Bytes, "Bytes that others hold on the space's device, sampled each second.", one(func(s *space) int64 { return s.Foreign })),
	gauge("peak", Bytes, "Largest sum of live, retired and reserved bytes so far.", one(func(s *space) int64 { return s.Peak })),
	gauge("lost", "1", "Whether the space's device is lost: 1, or 0.", whether(func(s *space) bool { return s.Lost })),
	gauge("warnings", "{warning}", "Warnings about a space that cost something: see Engine.Warnings.", one(func(s *space) int {
		n := 0
		if s.Host != nil {
			for _, w := range s.Host.Warnings {
				n += int(truth(!w.Info))
			}
		}
		if s.Disk != nil {
			for _, w := range s.Disk.Warnings {
				n += int(truth(!w.Info))
			}
		}
		return n
	})),
)

var hosts = labelled(Main, "host", []string{"space"},
	func(s *spillway.Stats, to func(*tier.HostStats, ...string)) {
		for i := range s.Spaces {
			if h := s.Spaces[i].Host; h != nil {
				to(h, s.Spaces[i].ID.String())
			}
		}
	},
	gauge("used", Bytes, "Bytes of a host arena that are handed out.", one(func(h *tier.HostStats) int64 { return h.Used })),
	gauge("slabs", Bytes, "Bytes of the slabs that small memory of a host arena lies in.", one(func(h *tier.HostStats) int64 { return h.Slabs })),
	gauge("slack", Bytes, "Bytes of a host arena's pages in use that are not handed out.", one(func(h *tier.HostStats) int64 { return h.Slack })),
	gauge("committed", Bytes, "Bytes of a host arena that may be present, at most.", one(func(h *tier.HostStats) int64 { return h.Committed })),
	gauge("touched", Bytes, "Bytes of a host arena that were touched ahead of use.", one(func(h *tier.HostStats) int64 { return h.Touched })),
	gauge("locked", Bytes, "Bytes of a host arena that cannot be swapped out.", one(func(h *tier.HostStats) int64 { return h.Locked })),
	gauge("largest_free", Bytes, "The longest free range of a host arena, in bytes.", one(func(h *tier.HostStats) int64 { return h.LargestFree })),
)

var disks = labelled(Main, "disk", []string{"space"},
	func(s *spillway.Stats, to func(*disk.Stats, ...string)) {
		for i := range s.Spaces {
			if d := s.Spaces[i].Disk; d != nil {
				to(d, s.Spaces[i].ID.String())
			}
		}
	},
	gauge("info", "1", "Is 1, and says where a spill volume is, and how it is used.", func(d *disk.Stats, to emit) {
		to(Sample{Value: 1}, d.Dir, d.FileSystem, strconv.FormatBool(d.Direct), strconv.FormatBool(d.Anonymous), strconv.FormatBool(d.Encrypted))
	}, "dir", "file_system", "direct", "anonymous", "encrypted"),
	gauge("request", Bytes, "Size of a large request to a volume, in bytes.", one(func(d *disk.Stats) int64 { return d.Request })),
	gauge("depth", "{request}", "How many requests to a volume a transfer has under way at most.", one(func(d *disk.Stats) int { return d.Depth })),
	gauge("used", Bytes, "Bytes of a volume that are handed out.", one(func(d *disk.Stats) int64 { return d.Used })),
	gauge("backed", Bytes, "Bytes that a volume has taken from its file system.", one(func(d *disk.Stats) int64 { return d.Backed })),
	gauge("files", "{file}", "Open files of a volume.", one(func(d *disk.Stats) int { return d.Segments })),
	counter("written", Bytes, "Bytes that were written to a volume.", one(func(d *disk.Stats) int64 { return d.Written })),
	counter("read", Bytes, "Bytes that were read from a volume.", one(func(d *disk.Stats) int64 { return d.Read })),
	counter("fresh", Bytes, "Bytes of room that a volume took from its file system.", one(func(d *disk.Stats) int64 { return d.Fresh })),
	counter("given_back", Bytes, "Bytes of room that a volume gave back to its file system.", one(func(d *disk.Stats) int64 { return d.Given })),
	gauge("write_bandwidth", BytesPerSecond, "How many bytes a second a volume wrote of late, while it wrote.", one(func(d *disk.Stats) int64 { return d.Bandwidth })),
	gauge("backlog", Bytes, "Bytes of a volume that are handed out, and not written since.", one(func(d *disk.Stats) int64 { return d.Backlog })),
	counter("writing", Seconds, "Seconds in which at least one write to a volume was under way.", one(func(d *disk.Stats) float64 { return d.Writing.Seconds() })),
	gauge("ailing", "1", "Whether a volume failed, or had no room, a moment ago, so that others come first: 1, or 0.", whether(func(d *disk.Stats) bool { return d.Ailing })),
)

type edge = convert.EdgeStats

var edges = labelled(Main, "edge", []string{"from", "to"},
	func(s *spillway.Stats, to func(*edge, ...string)) {
		for i := range s.Edges {
			to(&s.Edges[i], s.Edges[i].From.String(), s.Edges[i].To.String())
		}
	},
	counter("moved_batches", "{batch}", "Batches that were moved from one space to another, also onto copies.", one(func(e *edge) int64 { return e.Batches })),
	counter("moved", Bytes, "Bytes that were moved from one space to another, by reason: trigger, demand, work, ahead.",
		by(func(e *edge) map[string]int64 { return e.ByReason }), "reason"),
	counter("copies", "{batch}", "Batches that found a copy, so that no bytes were moved.", one(func(e *edge) int64 { return e.Copies })),
	counter("unmoved", Bytes, "Bytes that were not moved, because a copy lay there.", one(func(e *edge) int64 { return e.Unmoved })),
	counter("ahead", Bytes, "Bytes that were moved or copied before they were needed.", one(func(e *edge) int64 { return e.Ahead })),
	counter("ahead_used", Bytes, "Bytes of those ahead that were used then.", one(func(e *edge) int64 { return e.AheadUsed })),
	counter("ahead_wasted", Bytes, "Bytes of those ahead that left again unused.", one(func(e *edge) int64 { return e.AheadInVain })),
	counter("busy", Seconds, "Seconds that moves took, added up; they may overlap.", one(func(e *edge) float64 { return e.Busy.Seconds() })),
	histogram("move_duration", "How many seconds moves of bytes took, without those onto copies.", func(e *edge) Sample {
		return durations(e.Batches-e.Copies, e.Moving, e.P50, e.P99, e.Within)
	}),
	gauge("longest_move", Seconds, "The longest move of bytes so far, in seconds.", one(func(e *edge) float64 { return e.Longest.Seconds() })),
)

type worked = convert.WorkStats

// directions emits what was moved to slower and to faster tiers.
func directions[N int64 | float64](of func(convert.MoveStats) N) func(*worked, emit) {
	return func(w *worked, to emit) {
		to(Sample{Value: float64(of(w.Down))}, "down")
		to(Sample{Value: float64(of(w.Up))}, "up")
	}
}

var work = labelled(Work, "work", []string{"plan", "operator", "port"},
	func(s *spillway.Stats, to func(*worked, ...string)) {
		for i := range s.Work {
			w := &s.Work[i]
			to(w, w.Plan, w.Operator, strconv.Itoa(w.Port))
		}
	},
	counter("moved_batches", "{batch}", "Batches of an operator that were moved to slower tiers (down) or faster ones (up).",
		directions(func(m convert.MoveStats) int64 { return m.Batches }), "direction"),
	counter("moved", Bytes, "Bytes of an operator's batches that were moved to slower tiers (down) or faster ones (up).",
		directions(func(m convert.MoveStats) int64 { return m.Bytes }), "direction"),
	counter("busy", Seconds, "Seconds that moves of an operator's batches took, added up; they may overlap.",
		directions(func(m convert.MoveStats) float64 { return m.Busy.Seconds() }), "direction"),
	counter("reason", Bytes, "Bytes of an operator's batches that were moved, by reason: trigger, demand, work, ahead.",
		by(func(w *worked) map[string]int64 { return w.ByReason }), "reason"),
	counter("unread", Bytes, "Bytes of an operator's batches that had moved down, and were dropped unused.", one(func(w *worked) int64 { return w.Unread })),
)

var waits = labelled(Main, "wait", nil,
	func(s *spillway.Stats, to func(*reservation.WaitStats, ...string)) { to(&s.Waits) },
	histogram("duration", "How many seconds requests waited for room that had to wait, however it ended.",
		func(w *reservation.WaitStats) Sample { return durations(w.Count, w.Total, w.P50, w.P99, w.Within) }),
	gauge("longest", Seconds, "The longest wait for room so far, in seconds.", one(func(w *reservation.WaitStats) float64 { return w.Max.Seconds() })),
	gauge("waiting", "{request}", "Requests that wait for room now.", one(func(w *reservation.WaitStats) int64 { return w.Waiting })),
	gauge("oldest", Seconds, "How many seconds the oldest request that waits now has waited so far; 0 if none waits.",
		one(func(w *reservation.WaitStats) float64 { return w.Oldest.Seconds() })),
)

var blocked = labelled(Blocked, "blocked", []string{"task"},
	func(s *spillway.Stats, to func(*reservation.Blocked, ...string)) {
		for i := range s.Blocked {
			to(&s.Blocked[i], s.Blocked[i].Owner)
		}
	},
	counter("waits", "{wait}", "Waits for room that have ended, of tasks of one name.", one(func(b *reservation.Blocked) int64 { return b.Waits })),
	counter("", Seconds, "Seconds that tasks of one name waited for room, added up; waits may overlap.", one(func(b *reservation.Blocked) float64 { return b.Total.Seconds() })),
	gauge("longest", Seconds, "The longest wait for room of tasks of one name, in seconds.", one(func(b *reservation.Blocked) float64 { return b.Longest.Seconds() })),
	gauge("waiting", "{request}", "Requests of tasks of one name that wait for room now.", one(func(b *reservation.Blocked) int64 { return b.Waiting })),
	gauge("so_far", Seconds, "Seconds that these have waited so far, added up.", one(func(b *reservation.Blocked) float64 { return b.SoFar.Seconds() })),
)

var corrupt = labelled(Main, "batch", nil,
	func(s *spillway.Stats, to func(*spillway.Stats, ...string)) { to(s) },
	counter("corruptions", "{batch}", "How often a batch was found with other bytes than were written.", one(func(s *spillway.Stats) int64 { return s.Corrupt })),
)

var moves = labelled(Main, "monitor", nil,
	func(s *spillway.Stats, to func(*monitor.Stats, ...string)) { to(&s.Monitor) },
	counter("looks", "{look}", "How often the monitor looked at the spaces.", one(func(m *monitor.Stats) int64 { return m.Looks })),
	counter("steps", "{look}", "Looks of the monitor that found something to do.", one(func(m *monitor.Stats) int64 { return m.Steps })),
	counter("moves", "{move}", "Moves of the monitor by outcome: moved, no_room, busy (the batch was in use), unmovable, failed.", func(m *monitor.Stats, to emit) {
		to(Sample{Value: float64(m.Moves)}, "moved")
		to(Sample{Value: float64(m.NoRoom)}, "no_room")
		to(Sample{Value: float64(m.Busy)}, "busy")
		to(Sample{Value: float64(m.Unmovable)}, "unmovable")
		to(Sample{Value: float64(m.Failed)}, "failed")
	}, "outcome"),
	counter("freed", Bytes, "Bytes that the monitor's moves freed.", one(func(m *monitor.Stats) int64 { return m.Bytes })),
	counter("refused", "{waiter}", "Waiters that were sent away, because all was full for good.", one(func(m *monitor.Stats) int64 { return m.Refused })),
)

var admissions = labelled(Main, "admission", nil,
	func(s *spillway.Stats, to func(*admission.Stats, ...string)) { to(&s.Admission) },
	gauge("tasks", "{task}", "Tasks by state: running, or waiting to be admitted.", func(a *admission.Stats, to emit) {
		to(Sample{Value: float64(a.Running)}, "running")
		to(Sample{Value: float64(a.Waiting)}, "waiting")
	}, "state"),
	counter("admitted", "{task}", "Tasks that were admitted.", one(func(a *admission.Stats) int64 { return a.Admitted })),
	counter("alone", "{task}", "Tasks that were admitted only because no other ran.", one(func(a *admission.Stats) int64 { return a.Alone })),
	counter("passed", "{task}", "Tasks that were admitted before an older one.", one(func(a *admission.Stats) int64 { return a.Passed })),
	counter("retried", "{attempt}", "Attempts of tasks that ran out of memory and were followed by another.", one(func(a *admission.Stats) int64 { return a.Retried })),
)

// limited emits a number of slots, unless they are not limited.
func limited(of func(*permit.Stats) int) func(*permit.Stats, emit) {
	return func(p *permit.Stats, to emit) {
		if p.Slots != permit.Unlimited {
			to(Sample{Value: float64(of(p))})
		}
	}
}

var permits = labelled(Main, "permit", nil,
	func(s *spillway.Stats, to func(*permit.Stats, ...string)) { to(&s.Permits) },
	gauge("waiting", "{request}", "Requests that wait for a permit.", one(func(p *permit.Stats) int { return p.Waiting })),
	gauge("slots", "{slot}", "Spill slots; without a value if there is no limit.", limited(func(p *permit.Stats) int { return p.Slots })),
	gauge("held_slots", "{slot}", "Spill slots that are held.", one(func(p *permit.Stats) int { return p.HeldSlots })),
	gauge("free_slots", "{slot}", "Spill slots that are free; without a value if there is no limit.", limited(func(p *permit.Stats) int { return p.FreeSlots })),
)

var budgets = labelled(Main, "permit", []string{"budget"},
	func(s *spillway.Stats, to func(*permit.BudgetStats, ...string)) {
		for i := range s.Permits.Budgets {
			to(&s.Permits.Budgets[i], s.Permits.Budgets[i].Name)
		}
	},
	gauge("budget", Bytes, "Size of a budget of transfers under way, in bytes.", one(func(b *permit.BudgetStats) int64 { return b.Total })),
	gauge("held", Bytes, "Bytes of a budget that permits hold.", one(func(b *permit.BudgetStats) int64 { return b.Held })),
)

var quotas = labelled(Main, "quota", []string{"quota"},
	func(s *spillway.Stats, to func(*quota.Stats, ...string)) {
		if s.Quota != nil {
			to(s.Quota, s.Quota.Name)
		}
	},
	gauge("limit", Bytes, "How many bytes may be charged to a quota.", one(func(q *quota.Stats) int64 { return q.Limit })),
	gauge("used", Bytes, "Bytes that are charged to a quota.", one(func(q *quota.Stats) int64 { return q.Used })),
	gauge("peak", Bytes, "The most bytes that were charged to a quota so far.", one(func(q *quota.Stats) int64 { return q.Peak })),
)
