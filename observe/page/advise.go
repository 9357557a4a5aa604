package page

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
)

// Advice is something to change: what was found, with its figures, and which flag of spillbench and
// field of spillway.Config change it.
type Advice struct{ What, Change, Flag, Field string }

// What a rule takes for much. A part that is smaller is not worth a change.
const (
	slowDisk   = 0.6  // of the raw limit: less is slow
	busyDisk   = 0.6  // of the raw limit, over the whole run: more is what bounds it
	muchWaited = 0.25 // waits at once, in the mean
	muchInVain = 0.25 // of what was moved ahead
	muchUnread = 0.3  // of what was moved down
	worthwhile = 0.05 // of all bytes that were moved
)

// sorted returns the keys with the largest values first.
func sorted(by map[string]int64) []string {
	keys := slices.DeleteFunc(slices.Collect(maps.Keys(by)), func(k string) bool { return by[k] == 0 })
	slices.SortFunc(keys, func(a, b string) int { return cmp.Or(cmp.Compare(by[b], by[a]), cmp.Compare(a, b)) })
	return keys
}

func isDisk(space string) bool { return strings.HasPrefix(space, "disk:") }

// setting returns the value of a setting; empty if there is none.
func (r *Run) setting(flag string) string {
	for _, s := range r.Settings {
		if s.Flag == flag {
			return s.Value
		}
	}
	return ""
}

// moved is what was moved in all.
func (r *Run) moved() (bytes int64) {
	for _, e := range r.Edges {
		bytes += e.Bytes
	}
	return bytes
}

// peakOf is the highest rate of an edge over time, in GiB/s.
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

// waiting is how many waited at once, in the mean.
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

// advise returns what to change, the most important first.
func advise(r *Run) (all []Advice) {
	moved := r.moved()
	if moved == 0 {
		return nil
	}
	rules := []func(*Run, int64) (Advice, bool){failing, throttled, boundByDisk, slowOfDisk, hostTooSmall, aheadInVain, neverRead, waits}
	if r.Failed { // how fast it was says nothing; its error says what to do
		rules = rules[:1]
	}
	for _, rule := range rules {
		if a, found := rule(r, moved); found {
			all = append(all, a)
		}
	}
	return all
}

// failing: a disk that fails or is full comes before all else.
func failing(r *Run, _ int64) (Advice, bool) {
	if r.Timeline == nil {
		return Advice{}, false
	}
	for _, n := range r.Timeline.Notes {
		what := fmt.Sprintf("%s: %s at %s", n.Space, n.Kind, took(n.At))
		switch kind := n.Kind; {
		case kind == "disk failing" && isFull(n.Text):
			return Advice{fmt.Sprintf("%s was full at %s", n.Space, took(n.At)), moreRoom, "--disk DIR=SIZE", "Disks[].Capacity"}, true
		case kind == "disk failing" || kind == "corruption found" || kind == "space lost":
			if v := r.setting("--fault"); v != "" && v != Off {
				return Advice{what, "leave the flag out: the fault was made on purpose", "--fault", "Disks[].FS"}, true
			}
			return Advice{what, "replace the device, or leave it out", "--disk DIR", "Disks"}, true
		case kind == "disk nearly full":
			return Advice{fmt.Sprintf("%s is nearly full", n.Space), moreRoom, "--disk DIR=SIZE", "Disks[].Capacity"}, true
		case kind == "waiters refused":
			return Advice{fmt.Sprintf("the disk was full at %s, and so was all memory above it", took(n.At)), moreRoom, "--disk DIR=SIZE", "Disks[].Capacity"}, true
		}
	}
	return Advice{}, false
}

const moreRoom = "give it more room: make some there, name another directory, or set its size"

// isFull reports whether the text of an error says that a disk, or a quota of it, is full: that is no
// matter of the device.
func isFull(text string) bool {
	return strings.Contains(text, "no space left on device") || strings.Contains(text, "quota exceeded")
}

func throttled(r *Run, _ int64) (Advice, bool) {
	v := r.setting("--disk-throttle")
	return Advice{"each spill directory was slowed to " + v + " on purpose", "leave the flag out to see the disk's own speed", "--disk-throttle", "Disks[].FS"}, v != "" && v != Off
}

// traffic is what was written to a disk and read from it, as its file system saw it, and which part
// that is of what the engine moved: compression makes it less.
type traffic struct {
	written               int64
	writtenPart, readPart float64
	known                 bool
}

func (r *Run) onDisk(disk string) traffic {
	var there, back int64
	for _, e := range r.Edges {
		if e.To == disk {
			there += e.Bytes
		}
		if e.From == disk {
			back += e.Bytes
		}
	}
	for _, s := range r.Spaces {
		if s.ID == disk && s.Written+s.Read > 0 {
			part := func(of, whole int64) float64 { return min(1, float64(of)/float64(max(1, whole))) }
			return traffic{s.Written, part(s.Written, there), part(s.Read, back), true}
		}
	}
	codec := r.setting("--codec")
	return traffic{there, 1, 1, codec == "" || codec == "none"}
}

// boundByDisk: what was written took most of what the disk can do.
func boundByDisk(r *Run, _ int64) (Advice, bool) {
	moved, limit := make(map[string]int64), make(map[string]float64)
	for _, e := range r.Edges {
		if isDisk(e.To) && e.Limit > 0 {
			moved[e.To] += e.Bytes
			limit[e.To] = e.Limit
		}
	}
	for _, disk := range first(sorted(moved)) {
		disks := r.onDisk(disk)
		mean := rate(disks.written, r.Seconds)
		if !disks.known || mean < busyDisk*limit[disk] {
			continue
		}
		is, most := speeds(mean, limit[disk])
		a := Advice{
			What:   fmt.Sprintf("writing to %s bounds the run: %s on average%s, of the %s that the disk can do", disk, is, compressed(disks.writtenPart), most),
			Change: "add a second spill directory on another disk", Flag: "--disk DIR", Field: "Disks",
		}
		if r.setting("--codec") == "none" {
			a.Change, a.Flag, a.Field = "compress what goes to disk", "--codec auto", "Codec"
		}
		return a, true
	}
	return Advice{}, false
}

// compressed says that a rate is that of compressed bytes, where that makes it another one.
func compressed(part float64) string {
	if part > 0.95 {
		return ""
	}
	return " after compression"
}

// slowOfDisk: an edge with a disk never came near to what the disk can do. Where the engine compresses as
// it finds best, processors may be what bounds it, and more moves at once would take them too.
func slowOfDisk(r *Run, moved int64) (Advice, bool) {
	for _, e := range first(r.Edges) {
		if !isDisk(e.From) && !isDisk(e.To) || e.Limit <= 0 || float64(e.Bytes) < worthwhile*float64(moved) {
			continue
		}
		of := r.onDisk(e.To)
		part := of.writtenPart
		if !isDisk(e.To) {
			of = r.onDisk(e.From)
			part = of.readPart
		}
		peak := r.peakOf(e.From, e.To) * part
		if !of.known || peak <= 0 || peak >= slowDisk*e.Limit {
			continue
		}
		is, most := speeds(peak, e.Limit)
		a := Advice{
			What:   fmt.Sprintf("%s → %s reached %s at most%s, of the %s that the disk can do (%s)", e.From, e.To, is, compressed(part), most, percent(peak/e.Limit)),
			Change: "do more at once", Flag: "--moves-per-edge", Field: "MovesPerEdge",
		}
		if codec := r.setting("--codec"); codec == "zstd" || codec == "s2" || codec == "bitpack" {
			a.Change, a.Flag, a.Field = "leave the choice of the codec to the engine, which measures", "--codec auto", "Codec"
		} else if compressed(part) != "" {
			continue
		}
		return a, true
	}
	return Advice{}, false
}

// usualTrigger is what Config has without being told.
const usualTrigger = 0.85

// hostTrigger is how full, as a part, host memory gets before batches go to disk.
func (r *Run) hostTrigger() float64 {
	if r.Timeline != nil {
		for _, s := range r.Timeline.Spaces {
			if strings.HasPrefix(s.ID, "host:") && s.Trigger > 0 && s.Trigger <= s.Capacity {
				return float64(s.Trigger) / float64(s.Capacity)
			}
		}
	}
	if v, err := strconv.ParseFloat(r.setting("--trigger"), 64); err == nil && v > 0 && v <= 1 {
		return v
	}
	return usualTrigger
}

// hostTooSmall: what came back from the disk would have fitted into host memory beside the machine's
// own. Of input that is as large as the memories make it that is never so.
func hostTooSmall(r *Run, moved int64) (Advice, bool) {
	if r.Follows {
		return Advice{}, false
	}
	var back, host, disk int64
	for _, e := range r.Edges {
		if isDisk(e.From) {
			back += e.Bytes
		}
	}
	for _, s := range r.Spaces {
		switch {
		case isDisk(s.ID):
			disk += s.Peak
		case strings.HasPrefix(s.ID, "host:"):
			host += s.Capacity
		}
	}
	return Advice{
		What:   fmt.Sprintf("%s came back from disk, %s of all that was moved; the disk held %s at most", size.Approx(back), share(back, moved), size.Approx(disk)),
		Change: fmt.Sprintf("with %s of host memory instead of %s nothing would have to go to disk", size.Approx(int64(float64(host+disk)/r.hostTrigger())), size.Approx(host)),
		Flag:   "--host-memory", Field: "HostMemory",
	}, host > 0 && float64(back) >= 0.2*float64(moved)
}

func aheadInVain(r *Run, moved int64) (Advice, bool) {
	var ahead, vain int64
	for _, e := range r.Edges {
		ahead, vain = ahead+e.Ahead, vain+e.AheadInVain
	}
	return Advice{
		What:   fmt.Sprintf("of %s that was moved or copied before it was needed, %s (%s) was never used", size.Approx(ahead), size.Approx(vain), share(vain, ahead)),
		Change: "copy less ahead", Flag: "--write-ahead", Field: "WriteAhead",
	}, float64(vain) >= muchInVain*float64(ahead) && float64(vain) >= worthwhile*float64(moved)
}

func neverRead(r *Run, _ int64) (Advice, bool) {
	var down, unread int64
	worst := Work{}
	for _, w := range r.Work {
		down, unread = down+w.Down, unread+w.Unread
		if w.Unread >= worst.Unread {
			worst = w
		}
	}
	what := fmt.Sprintf("%s (%s of what was moved down) was dropped without having been used again", size.Approx(unread), share(unread, down))
	if worst.Operator != "" {
		what += ", most of it of operator " + operator(worst)
	}
	return Advice{
		What: what, Change: "drop batches sooner, or give the memory above more room", Flag: "--host-memory", Field: "HostMemory",
	}, down > 0 && float64(unread) >= muchUnread*float64(down)
}

func waits(r *Run, _ int64) (Advice, bool) {
	n := r.waiting()
	return Advice{
		What:   fmt.Sprintf("%.1f requests waited for room at once, on average; %s waits, the longest %s", n, count(r.Waits.Count), took(r.Waits.Max)),
		Change: "start to move batches down sooner, so that there is room when it is asked for", Flag: "--trigger, --stop", Field: "GPUMarks",
	}, n >= muchWaited
}
