package metrics

import (
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/permit"
)

// table has all metrics, and nothing changes it.
var table = []group{
	newGroup("space", "Spaces", "space tier", "ID ID.Kind",
		gauge("info", "1", "Is 1, and names the backend of a space.", info("backend", "Backend")),
		gauge("capacity", Bytes, "Size of a space, in bytes.", field("Capacity")),
		gauge("limit", Bytes, "Maximum that reservations may take of a space, in bytes.", field("Limit")),
		gauge("trigger", Bytes, "Pressure at which the monitor starts to evict batches, in bytes.", field("Trigger")),
		gauge("stop", Bytes, "Pressure at which the monitor stops, in bytes.", field("Stop")),
		gauge("pressure", Bytes,
			"Live, retired, reserved and external bytes, which the monitor compares with trigger and stop.",
			computed(func(s spillway.SpaceStats) Sample { return Sample{Value: float64(s.Used() + s.External)} })),
		gauge("held", Bytes,
			"Bytes of a space by kind: live, retired (freed, but a device uses them), reserved, "+
				"cached (freed on demand).",
			split("kind", "live retired reserved cached", "Live Retired Reserved Cached")),
		gauge("foreign", Bytes, "Bytes that others hold on the space's device, sampled each second.",
			field("External")),
		gauge("peak", Bytes, "Largest sum of live, retired and reserved bytes so far.", field("Peak")),
		gauge("lost", "1", "Whether the space's device is lost: 1, or 0.", field("Lost")),
		gauge("warnings", "{warning}", "Warnings about a space that affect its use: see Engine.Warnings.",
			computed(warnings))),

	newGroup("host", "Spaces", "space", "ID",
		gauge("used", Bytes, "Allocated bytes of a host arena.", field("Host.Used")),
		gauge("slabs", Bytes, "Bytes of the slabs for small allocations of a host arena.", field("Host.Slabs")),
		gauge("slack", Bytes, "Unallocated bytes in the used pages of a host arena.", field("Host.Slack")),
		gauge("committed", Bytes, "Maximum of bytes of a host arena that may be resident.", field("Host.Committed")),
		gauge("touched", Bytes, "Bytes of a host arena that were touched ahead of use.", field("Host.Touched")),
		gauge("locked", Bytes, "Bytes of a host arena that cannot be swapped out.", field("Host.Locked")),
		gauge("largest_free", Bytes, "The longest free range of a host arena, in bytes.", field("Host.LargestFree"))),

	newGroup("disk", "Spaces", "space", "ID",
		gauge("info", "1", "Is 1, and names the directory and the modes of a spill volume.",
			info("dir file_system direct anonymous encrypted",
				"Disk.Dir Disk.FileSystem Disk.Direct Disk.Anonymous Disk.Encrypted")),
		gauge("request", Bytes, "Size of a large request to a volume, in bytes.", field("Disk.Request")),
		gauge("depth", "{request}", "Maximum of concurrent requests of one transfer to a volume.", field("Disk.Depth")),
		gauge("used", Bytes, "Allocated bytes of a volume.", field("Disk.Used")),
		gauge("backed", Bytes, "Bytes that a volume has taken from its file system.", field("Disk.Backed")),
		gauge("files", "{file}", "Open files of a volume.", field("Disk.Segments")),
		counter("written", Bytes, "Bytes written to a volume.", field("Disk.Written")),
		counter("read", Bytes, "Bytes read from a volume.", field("Disk.Read")),
		counter("fresh", Bytes, "Bytes of space that a volume took from its file system.", field("Disk.Fresh")),
		counter("given_back", Bytes, "Bytes of space that a volume returned to its file system.", field("Disk.Given")),
		gauge("write_bandwidth", BytesPerSecond,
			"Recent write speed of a volume while it was writing, in bytes per second.", field("Disk.Bandwidth")),
		gauge("backlog", Bytes, "Allocated bytes of a volume that are not yet written.", field("Disk.Backlog")),
		counter("writing", Seconds, "Seconds with at least one write to a volume in progress.", field("Disk.Writing")),
		gauge("ailing", "1",
			"Whether a volume recently failed or ran out of space, so that others are preferred: 1, or 0.",
			field("Disk.Ailing"))),

	newGroup("edge", "Edges", "from to", "From To",
		counter("moved_batches", "{batch}",
			"Batches moved from one space to another, including those that found a copy.", field("Batches")),
		counter("moved", Bytes, "Bytes moved from one space to another, by reason: trigger, demand, work, ahead.",
			field("ByReason", "reason")),
		counter("copies", "{batch}", "Batches that found a copy, so that no bytes were moved.", field("Copies")),
		counter("unmoved", Bytes, "Bytes not moved because the target still held a copy.", field("Unmoved")),
		counter("ahead", Bytes, "Bytes that were moved or copied ahead of need.", field("Ahead")),
		counter("ahead_used", Bytes, "Bytes moved or copied ahead of need and then used.", field("AheadUsed")),
		counter("ahead_wasted", Bytes, "Bytes moved or copied ahead of need that left unused.", field("AheadInVain")),
		counter("busy", Seconds, "Sum of the seconds that moves took; they may overlap.", field("Busy")),
		histogram("move_duration", "Seconds that moves of bytes took, without those that found a copy.",
			func(e convert.EdgeStats) Sample {
				return durations(e.Batches-e.Copies, e.Moving, e.P50, e.P99, e.Within)
			}),
		gauge("longest_move", Seconds, "The longest move of bytes so far, in seconds.", field("Longest"))),

	newGroup("work", "Work", "plan operator port", "Plan Operator Port",
		counter("moved_batches", "{batch}", "Batches of an operator moved to slower tiers (down) or faster ones (up).",
			split("direction", "down up", "Down.Batches Up.Batches")),
		counter("moved", Bytes, "Bytes of an operator's batches moved to slower tiers (down) or faster ones (up).",
			split("direction", "down up", "Down.Bytes Up.Bytes")),
		counter("busy", Seconds, "Sum of the seconds that moves of an operator's batches took; they may overlap.",
			split("direction", "down up", "Down.Busy Up.Busy")),
		counter("reason", Bytes, "Bytes of an operator's batches moved, by reason: trigger, demand, work, ahead.",
			field("ByReason", "reason")),
		counter("unread", Bytes, "Bytes of an operator's batches that were moved to slower tiers and dropped unused.",
			field("Unread"))),

	newGroup("wait", "Waits", "", "",
		histogram("duration", "Seconds that requests waited for room, of those that had to wait, whatever the outcome.",
			func(w reservation.WaitStats) Sample { return durations(w.Count, w.Total, w.P50, w.P99, w.Within) }),
		gauge("longest", Seconds, "The longest wait for room so far, in seconds.", field("Max")),
		gauge("waiting", "{request}", "Requests that wait for room now.", field("Waiting")),
		gauge("oldest", Seconds, "Seconds that the oldest waiting request has waited so far; 0 if none waits.",
			field("Oldest"))),

	newGroup("blocked", "Blocked", "task", "Owner",
		counter("waits", "{wait}", "Finished waits for room of the tasks of one name.", field("Waits")),
		counter("", Seconds, "Sum of the seconds that the tasks of one name waited for room; waits may overlap.",
			field("Total")),
		gauge("longest", Seconds, "The longest wait for room of the tasks of one name, in seconds.", field("Longest")),
		gauge("waiting", "{request}", "Requests of the tasks of one name that wait for room now.", field("Waiting")),
		gauge("so_far", Seconds, "Sum of the seconds that these requests have waited so far.", field("SoFar"))),

	newGroup("batch", "", "", "",
		counter("corruptions", "{batch}", "Reads of a batch that found other bytes than were written.",
			field("Corrupt"))),

	newGroup("monitor", "Monitor", "", "",
		counter("looks", "{look}", "How often the monitor checked the spaces.", field("Looks")),
		counter("steps", "{look}", "Checks of the monitor that found something to do.", field("Steps")),
		counter("moves", "{move}",
			"Moves of the monitor by outcome: moved, no_room, busy (the batch was in use), unmovable, failed.",
			split("outcome", "moved no_room busy unmovable failed", "Moves NoRoom Busy Unmovable Failed")),
		counter("freed", Bytes, "Bytes that the monitor's moves freed.", field("Bytes")),
		counter("refused", "{waiter}", "Waiters that were refused because all tiers were full for too long.",
			field("Refused"))),

	newGroup("admission", "Admission", "", "",
		gauge("tasks", "{task}", "Tasks by state: running, or waiting for admission.",
			split("state", "running waiting", "Running Waiting")),
		counter("admitted", "{task}", "Admitted tasks.", field("Admitted")),
		counter("alone", "{task}", "Tasks admitted only because no other ran.", field("Alone")),
		counter("passed", "{task}", "Tasks admitted before an older one.", field("Passed")),
		counter("retried", "{attempt}",
			"Attempts of tasks that ran out of memory and were followed by another attempt.", field("Retried"))),

	newGroup("permit", "Permits", "", "",
		gauge("waiting", "{request}", "Requests that wait for a permit.", field("Waiting")),
		gauge("slots", "{slot}", "Spill slots; without a value if there is no limit.",
			limited("Slots")),
		gauge("held_slots", "{slot}", "Held spill slots.", field("HeldSlots")),
		gauge("free_slots", "{slot}", "Free spill slots; without a value if there is no limit.",
			limited("FreeSlots"))),

	newGroup("permit", "Permits.Budgets", "budget", "Name",
		gauge("budget", Bytes, "Size of a budget of transfers in progress, in bytes.", field("Total")),
		gauge("held", Bytes, "Bytes of a budget that permits hold.", field("Held"))),

	newGroup("heap", "HeapOverflow", "", "",
		gauge("overflow", Bytes, "Bytes on the Go heap that operators allocated beyond their reserved memory.",
			field("Bytes")),
		gauge("overflow_peak", Bytes, "Largest number of such bytes so far.", field("Peak"))),

	newGroup("quota", "Quota", "quota", "Name",
		gauge("limit", Bytes, "Maximum of bytes that a quota allows.", field("Limit")),
		gauge("used", Bytes, "Bytes charged to a quota.", field("Used")),
		gauge("peak", Bytes, "Largest number of bytes charged to a quota so far.", field("Peak"))),
}

func newGroup(name, of, labels, fields string, rows ...row) group {
	g := group{name, of, strings.Fields(labels), strings.Fields(fields), rows}
	for i := range rows {
		rows[i].Group, rows[i].Labels = name, slices.Concat(g.labels, rows[i].value.labels)
	}
	return g
}

func gauge(name string, unit Unit, help string, v value) row {
	return row{Measure{Name: name, Kind: Gauge, Unit: unit, Help: help}, v}
}

func counter(name string, unit Unit, help string, v value) row {
	return row{Measure{Name: name, Kind: Counter, Unit: unit, Help: help}, v}
}

func histogram[T any](name, help string, of func(T) Sample) row {
	return row{Measure{Name: name, Kind: Histogram, Unit: Seconds, Help: help}, computed(of)}
}

// durations returns the sample of a histogram.
func durations(count int64, sum, p50, p99 time.Duration, within map[time.Duration]int64) Sample {
	s := Sample{
		Count: uint64(count), Value: sum.Seconds(), P50: p50.Seconds(), P99: p99.Seconds(),
		Within: make(map[float64]uint64, len(within)),
	}
	for bound, n := range within {
		s.Within[bound.Seconds()] = uint64(n)
	}
	return s
}

// limited takes a field of permit.Stats, unless the number of slots has no limit.
func limited(path string) value {
	v := field(path)
	return value{nil, func(part reflect.Value) []Sample {
		if part.Interface().(permit.Stats).Slots == permit.Unlimited {
			return nil
		}
		return v.samples(part)
	}}
}

// warnings counts the warnings of a space that are not for information only.
func warnings(s spillway.SpaceStats) Sample {
	var all []diag.Warning
	if s.Host != nil {
		all = append(all, s.Host.Warnings...)
	}
	if s.Disk != nil {
		all = append(all, s.Disk.Warnings...)
	}
	all = slices.DeleteFunc(all, func(w diag.Warning) bool { return w.Info })
	return Sample{Value: float64(len(all))}
}
