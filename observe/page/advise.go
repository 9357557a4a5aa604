package page

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
)

// Advice recommends a change: the finding with its figures, and the flag of spillbench and the field of
// spillway.Config to change.
type Advice struct{ What, Change, Flag, Field string }

// Thresholds of the rules. A smaller part is not worth a change.
const (
	slowDisk   = 0.6  // of the raw limit: less is slow
	busyDisk   = 0.6  // of the raw limit, over the whole run: more bounds the run
	muchWaited = 0.25 // waits at once, in the mean
	muchInVain = 0.25 // of the bytes that were moved ahead
	muchUnread = 0.3  // of the bytes that were moved down
	worthwhile = 0.05 // of all bytes that were moved
)

func isDisk(space string) bool { return strings.HasPrefix(space, "disk:") }
func isHost(space string) bool { return strings.HasPrefix(space, "host:") }

// setting returns the value of a setting, or "" if there is none.
func (r *Run) setting(flag string) string {
	for _, s := range r.Settings {
		if s.Flag == flag {
			return s.Value
		}
	}
	return ""
}

// peakOf returns the highest rate of an edge over time, in GiB/s.
func (r *Run) peakOf(from, to string) float64 {
	if r.Timeline == nil {
		return 0
	}
	for _, e := range r.Timeline.Edges {
		if e.From == from && e.To == to && len(e.Bytes) > 0 {
			return rate(slices.Max(e.Bytes), r.Timeline.IntervalSeconds)
		}
	}
	return 0
}

// waiting returns the mean number of concurrent waits.
func (r *Run) waiting() float64 {
	if r.Timeline == nil || r.Timeline.Seconds <= 0 {
		return 0
	}
	total := 0.0
	for _, v := range r.Timeline.Waits.Total {
		total += v
	}
	return total / r.Timeline.Seconds
}

// advise returns the recommendations, the most important first.
func advise(r *Run) (all []Advice) {
	if r.total() == 0 {
		return nil
	}
	rules := []func(*Run) Advice{
		failing, throttled, boundByDisk, slowOfDisk, hostTooSmall, aheadInVain, neverRead, waits,
	}
	if r.Failed { // its speed means nothing, and its error has the advice
		rules = rules[:1]
	}
	for _, rule := range rules {
		if a := rule(r); a.What != "" {
			all = append(all, a)
		}
	}
	return all
}

const moreRoom = "give it more room: make some there, name another directory, or set its size"

// failing applies if a disk fails or is full, which matters more than anything else.
func failing(r *Run) Advice {
	if r.Timeline == nil {
		return Advice{}
	}
	for _, n := range r.Timeline.Notes {
		at, full := took(n.At), ""
		switch n.Kind {
		case "disk nearly full":
			full = n.Space + " is nearly full"
		case "waiters refused":
			full = fmt.Sprintf("the disk was full at %s, and so was all memory above it", at)
		case "disk failing", "corruption found", "space lost":
			// If the error means that the disk, or a quota of it, is full, the device is fine.
			noRoom := strings.Contains(n.Text, "no space left on device") || strings.Contains(n.Text, "quota exceeded")
			if n.Kind == "disk failing" && noRoom {
				full = fmt.Sprintf("%s was full at %s", n.Space, at)
				break
			}
			what := fmt.Sprintf("%s: %s at %s", n.Space, n.Kind, at)
			if v := r.setting("--fault"); v != "" && v != Off {
				return Advice{what, "leave the flag out: the fault was made on purpose", "--fault", "Disks[].FS"}
			}
			return Advice{what, "replace the device, or leave it out", "--disk DIR", "Disks"}
		default:
			continue
		}
		return Advice{full, moreRoom, "--disk DIR=SIZE", "Disks[].Capacity"}
	}
	return Advice{}
}

func throttled(r *Run) Advice {
	v := r.setting("--disk-throttle")
	if v == "" || v == Off {
		return Advice{}
	}
	return Advice{
		"each spill directory was slowed to " + v + " on purpose",
		"leave the flag out to see the disk's own speed", "--disk-throttle", "Disks[].FS",
	}
}

// traffic is the bytes that a disk's file system wrote. The parts are the bytes that it wrote and read by
// those that the engine moved: less than 1 if they are compressed.
type traffic struct {
	written               int64
	writtenPart, readPart float64
	known                 bool
}

func (r *Run) onDisk(disk string) traffic {
	var to, from int64
	for _, e := range r.Edges {
		if e.To == disk {
			to += e.Bytes
		}
		if e.From == disk {
			from += e.Bytes
		}
	}
	for _, s := range r.Spaces {
		if s.ID == disk && s.WrittenBytes+s.ReadBytes > 0 {
			part := func(of, whole int64) float64 { return min(1, float64(of)/float64(max(1, whole))) }
			return traffic{s.WrittenBytes, part(s.WrittenBytes, to), part(s.ReadBytes, from), true}
		}
	}
	codec := r.setting("--codec")
	return traffic{to, 1, 1, codec == "" || codec == "none"}
}

// boundByDisk applies if a disk was busy with writes during most of the run.
func boundByDisk(r *Run) Advice {
	for _, e := range first(r.Edges) {
		disk := r.onDisk(e.To)
		mean := rate(disk.written, r.Seconds)
		if !isDisk(e.To) || e.Limit <= 0 || !disk.known || mean < busyDisk*e.Limit {
			continue
		}
		is, limit := alike(inRates, mean, e.Limit)
		what := fmt.Sprintf("writing to %s bounds the run: %s on average%s, of the %s that the disk can do",
			e.To, is, compressed(disk.writtenPart), limit)
		if r.setting("--codec") == "none" {
			return Advice{what, "compress what goes to disk", "--codec auto", "Codec"}
		}
		return Advice{what, "add a second spill directory on another disk", "--disk DIR", "Disks"}
	}
	return Advice{}
}

// compressed completes a rate of compressed bytes.
func compressed(part float64) string {
	if part > 0.95 {
		return ""
	}
	return " after compression"
}

// slowOfDisk applies if an edge with a disk never came near the speed of the disk. If the engine chooses
// the codec, processors may be the bottleneck, and more concurrent moves would need more of them.
func slowOfDisk(r *Run) Advice {
	for _, e := range first(r.Edges) {
		if !isDisk(e.From) && !isDisk(e.To) || e.Limit <= 0 || float64(e.Bytes) < worthwhile*float64(r.total()) {
			continue
		}
		disk := r.onDisk(e.To)
		part := disk.writtenPart
		if !isDisk(e.To) {
			disk = r.onDisk(e.From)
			part = disk.readPart
		}
		peak := r.peakOf(e.From, e.To) * part
		if !disk.known || peak <= 0 || peak >= slowDisk*e.Limit {
			continue
		}
		is, limit := alike(inRates, peak, e.Limit)
		what := fmt.Sprintf("%s → %s reached %s at most%s, of the %s that the disk can do (%s)",
			e.From, e.To, is, compressed(part), limit, percent(peak/e.Limit))
		if codec := r.setting("--codec"); codec == "zstd" || codec == "s2" || codec == "bitpack" {
			return Advice{what, "leave the choice of the codec to the engine, which measures", "--codec auto", "Codec"}
		}
		if compressed(part) == "" {
			return Advice{what, "do more at once", "--moves-per-edge", "MovesPerEdge"}
		}
	}
	return Advice{}
}

// hostTrigger returns the part of host memory that batches can fill before they go to disk.
func (r *Run) hostTrigger() float64 {
	if r.Timeline != nil {
		for _, s := range r.Timeline.Spaces {
			if isHost(s.ID) && s.Trigger > 0 && s.Trigger <= s.Capacity {
				return float64(s.Trigger) / float64(s.Capacity)
			}
		}
	}
	if v, err := strconv.ParseFloat(r.setting("--trigger"), 64); err == nil && v > 0 && v <= 1 {
		return v
	}
	return 0.85 // the default of Config
}

// hostTooSmall applies if a larger host memory could have held the bytes that came back from disk. It
// never applies to input whose size follows from the memories.
func hostTooSmall(r *Run) Advice {
	var back, host, disk int64
	moved := r.total()
	for _, e := range r.Edges {
		if isDisk(e.From) {
			back += e.Bytes
		}
	}
	for _, s := range r.Spaces {
		switch {
		case isDisk(s.ID):
			disk += s.PeakBytes
		case isHost(s.ID):
			host += s.CapacityBytes
		}
	}
	if r.Follows || host == 0 || float64(back) < 0.2*float64(moved) {
		return Advice{}
	}
	enough := int64(float64(host+disk) / r.hostTrigger())
	return Advice{
		fmt.Sprintf("%s came back from disk, %s of all that was moved; the disk held %s at most",
			size.Approx(back), share(back, moved), size.Approx(disk)),
		fmt.Sprintf("with %s of host memory instead of %s nothing would have to go to disk",
			size.Approx(enough), size.Approx(host)),
		"--host-memory", "HostMemory",
	}
}

func aheadInVain(r *Run) Advice {
	var ahead, unused int64
	for _, e := range r.Edges {
		ahead, unused = ahead+e.Ahead, unused+e.AheadInVain
	}
	if float64(unused) < max(muchInVain*float64(ahead), worthwhile*float64(r.total())) {
		return Advice{}
	}
	return Advice{
		fmt.Sprintf("of %s that was moved or copied before it was needed, %s (%s) was never used",
			size.Approx(ahead), size.Approx(unused), share(unused, ahead)),
		"copy less ahead", "--write-ahead", "WriteAhead",
	}
}

func neverRead(r *Run) Advice {
	var down, unread int64
	worst := Work{}
	for _, w := range r.Work {
		down, unread = down+w.DownBytes, unread+w.Unread
		if w.Unread >= worst.Unread {
			worst = w
		}
	}
	if down == 0 || float64(unread) < muchUnread*float64(down) {
		return Advice{}
	}
	what := fmt.Sprintf("%s (%s of what was moved down) was dropped without having been used again",
		size.Approx(unread), share(unread, down))
	if worst.Operator != "" {
		what += ", most of it of operator " + operator(worst)
	}
	return Advice{what, "drop batches sooner, or give the memory above more room", "--host-memory", "HostMemory"}
}

func waits(r *Run) Advice {
	n := r.waiting()
	if n < muchWaited {
		return Advice{}
	}
	return Advice{
		fmt.Sprintf("%.1f requests waited for room at once, on average; %s waits, the longest %s",
			n, count(r.Waits.Count), took(r.Waits.Max)),
		"start to move batches down sooner, so that there is room when it is asked for",
		"--trigger, --stop", "GPUMarks",
	}
}
