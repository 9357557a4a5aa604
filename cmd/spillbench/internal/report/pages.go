package report

import (
	"fmt"
	"io"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/observe/page"
)

// Generated begins the name of an input that is no file. Its size follows that of the memories.
const Generated = "a generated table"

// WriteHTML writes a page about a document, or about two of one command that are compared. names are
// those of the documents.
func WriteHTML(w io.Writer, names []string, docs ...Measured) error {
	r := &page.Report{Title: "spillbench " + CommandOf(docs[0])}
	for i, d := range docs {
		run := PageOf(d)
		if i < len(names) {
			run.Name = names[i]
		}
		r.Runs = append(r.Runs, run)
	}
	if len(docs) == 2 {
		r.Title += ": two compared"
	}
	return page.Write(w, r)
}

// PageOf returns what a page shows of a document.
func PageOf(d Measured) page.Run {
	run, h := d.page(), d.header()
	run.Name = h.Command
	run.Began = h.Time
	run.Command = strings.TrimSpace("spillbench " + strings.Join(h.Args, " "))
	for _, w := range h.Warnings {
		what := strings.TrimPrefix(w.Space+": "+w.What, ": ")
		run.Warnings = append(run.Warnings, page.Warning{What: what, Remedy: w.Remedy, Info: w.Info})
	}
	e := h.Env
	run.Machine = pairs(
		"processor", e.CPU, "cores", e.Cores, "memory", size.Approx(e.Memory), "kernel", e.Kernel,
		"GPU", e.GPU, "driver", e.Driver, "PCIe link", e.PCIeLink,
		"file system", e.FileSystem, "direct I/O", yes(e.DirectIO),
		"spillbench", h.Version, "commit", e.Commit, "Go", h.GoVersion)
	return run
}

// pairs makes pairs of names and values.
func pairs(namesAndValues ...any) (all []page.Pair) {
	for p := range slices.Chunk(namesAndValues, 2) {
		all = append(all, page.Pair{Name: fmt.Sprint(p[0]), Value: fmt.Sprint(p[1])})
	}
	return all
}

func yes(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

// few joins the first few of many names.
func few(names []string) string {
	if more := len(names) - 3; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), more)
	}
	return strings.Join(names, ", ")
}

// settings are those of all configurations, as "key|name|flag|field|sentence": the JSON key, which ends
// in "?" if a 0 means that the document is of an older program, the name on a page, the flag and the
// field of spillway.Config that change it, and the beginning of a sentence that the value ends.
var settings = []string{
	"gpu|GPU|--gpu|GPUs[].Backend",
	"gpu_memory_bytes|GPU memory|--gpu-memory|GPUMemory",
	"host_memory_bytes|host memory|--host-memory|HostMemory",
	"disks|spill directories|--disk|Disks",
	"limit|limit|--limit|GPUMarks.Limit",
	"trigger|trigger|--trigger|GPUMarks.Trigger",
	"stop|stop|--stop|GPUMarks.Stop",
	"policy|policy|--policy|Policy",
	"codec|codec|--codec|Codec",
	"encrypt|encryption|--encrypt|Disks[].Encrypt",
	"monitor_period_seconds|monitor period in seconds|--monitor-period|MonitorPeriod",
	"write_ahead_bytes_per_s|written ahead|--write-ahead|WriteAhead|batches were written ahead at up to",
	"disk_throttle_bytes_per_s|disk slowed to|--disk-throttle||the disk was slowed to",
	"moves_per_edge?|moves an edge|--moves-per-edge|MovesPerEdge",
	"disk_slots?|transfers with disks|--disk-slots|Limits.Permits.Slots",
	"stuck_after_seconds?|stuck after seconds|--stuck-after|StuckAfter",
	"faults|faults|--fault",
	"extent|extent|--thorough",
	"pairs|pairs|--pairs",
	"sizes_bytes|sizes|--sizes",
	"threads|moves at once|--threads",
	"peer|peer|--peer",
	"rounds|rounds|--rounds",
	"rows_per_batch|rows a batch|--rows-per-batch",
	"seed|seed|--seed",
	"place|place|--place",
	"repeat|repeat|--repeat",
	"partitions|partitions|--partitions",
	"passes|passes|--passes",
	"workers|workers|--workers",
	"runs?|runs|--runs",
}

// settingsOf returns the settings that a configuration has.
func settingsOf(config any) (all []page.Setting) {
	for _, text := range settings {
		parts := append(strings.Split(text, "|"), "", "")
		key, optional := strings.CutSuffix(parts[0], "?")
		value := fieldOf(reflect.ValueOf(config), key)
		if value == nil || optional && reflect.ValueOf(value).IsZero() {
			continue
		}
		s := page.Setting{Name: parts[1], Flag: parts[2], Field: parts[3], Says: parts[4]}
		s.Value = strings.Trim((&printer{}).cell(key, value), "[]")
		if v, ok := value.(float64); ok {
			s.Value = fmt.Sprintf("%.3g", v)
		}
		if s.Says != "" {
			s.Value += "/s"
		}
		if value == int64(0) {
			s.Value = page.Off
		}
		s.Same = found.ReplaceAllString(s.Value, "")
		all = append(all, s)
	}
	return all
}

// found is what is in a setting and was not set. Two runs are not compared by it.
var found = regexp.MustCompile(` \((hits: \d+|[^()]* free)\)`)

// String is the fault with what it hit.
func (f Fault) String() string { return fmt.Sprintf("%s (hits: %d)", f.Spec, f.Hits) }

// String is the directory with its capacity.
func (d Disk) String() string {
	free := " free"
	if d.CapacityGiven {
		free = ""
	}
	return fmt.Sprintf("%s (%s%s)", d.Dir, size.Approx(d.CapacityBytes), free)
}

func (i Input) page() page.Input {
	return page.Input{Sources: few(i.Sources), Rows: i.Rows, Batches: i.Batches, Bytes: i.Bytes}
}

// rank returns the position of a space's tier, the fastest first.
func rank(space string) int {
	kind, _, _ := strings.Cut(space, ":")
	return slices.Index([]string{"gpu", "host", "disk"}, kind)
}

func (r *Run) page() page.Run {
	p := page.Run{
		Seconds: r.WallSeconds, Level: page.Good, Timeline: r.Timeline, Settings: settingsOf(r.Config),
		Input: r.Input.page(), Verified: page.Verified(r.Verify),
		Waits:   page.Waits{Count: r.Waits.Count, P50: r.Waits.P50, P99: r.Waits.P99, Max: r.Waits.Max},
		Failed:  r.Error != "",
		Follows: strings.HasPrefix(few(r.Input.Sources), Generated),
	}
	if r.Timeline != nil && r.Timeline.Seconds > 0 {
		p.Seconds = r.Timeline.Seconds // without opening, closing and measuring limits
	}
	var leaks []string
	for _, s := range r.Spaces {
		p.Spaces = append(p.Spaces, page.Space{
			ID: s.ID, Backend: s.Backend, Capacity: s.CapacityBytes, Peak: s.PeakBytes, End: s.EndBytes,
			Written: s.WrittenBytes, Read: s.ReadBytes,
		})
		if s.EndBytes != 0 && r.Verify.Checked {
			leaks = append(leaks, s.ID)
		}
	}
	var down, up int64
	for _, e := range r.Edges {
		edge := page.Edge{
			From: e.From, To: e.To, Batches: e.Batches, Bytes: e.Bytes, Copies: e.Copies, Unmoved: e.Unmoved,
			Ahead: e.Ahead, AheadUsed: e.AheadUsed, AheadInVain: e.AheadInVain,
			Seconds: e.Seconds, P50: e.P50, P99: e.P99, Longest: e.Longest, ByReason: e.ByReason,
		}
		for _, l := range r.Limits {
			if l.From == e.From && l.To == e.To {
				edge.Limit, edge.LimitOf = l.GiBPerS, l.LimitOf
			}
		}
		p.Edges = append(p.Edges, edge)
		if from, to := rank(e.From), rank(e.To); from < to {
			down += e.Bytes
		} else if from > to { // and not from one GPU to another
			up += e.Bytes
		}
	}
	for _, w := range r.Work {
		p.Work = append(p.Work, page.Work{
			Plan: w.Plan, Operator: w.Operator, Port: w.Port, Down: w.DownBytes, Up: w.UpBytes, Unread: w.Unread,
		})
	}
	for _, t := range r.Tasks {
		p.Tasks = append(p.Tasks, page.Task{Name: t.Name, Waits: t.Waits, Total: t.Total, Longest: t.Longest})
	}
	for _, h := range r.Held {
		p.Held = append(p.Held, page.Pair{Name: h.Space, Value: h.Text})
	}
	for i, ph := range r.Phases {
		one := page.Phase{Name: ph.Name, Seconds: ph.Seconds, Bytes: r.Input.Bytes}
		if cutShort := p.Failed && i > 0 && i == len(r.Phases)-1; cutShort || ph.Name == drain {
			one.Bytes = 0 // how much of the input it worked on is unknown
		}
		p.Phases = append(p.Phases, one)
	}

	data := fmt.Sprintf("%s of %s went through %s of GPU memory, %s of host memory and disk in %s",
		size.Approx(r.Input.Bytes), p.Input.Sources, size.Approx(r.Config.GPUMemoryBytes),
		size.Approx(r.Config.HostMemoryBytes), duration(p.Seconds))
	verified := fmt.Sprintf("%d batches", r.Verify.Batches)
	switch wrong := r.Verify.Mismatches; {
	case p.Failed:
		p.Level, p.Headline = page.Bad, "The run failed: "+r.Error
	case wrong > 0:
		p.Level, p.Headline = page.Bad, fmt.Sprintf("Wrong: %s. %s.", p.Verified.Wrong(), data)
		verified = fmt.Sprintf("%d of %d", r.Verify.Batches-wrong, r.Verify.Batches)
	case len(leaks) > 0:
		p.Level = page.Warn
		p.Headline = fmt.Sprintf("%s were not empty at the end. %s.", strings.Join(leaks, ", "), data)
	case r.Verify.Checked:
		p.Headline = fmt.Sprintf("All is well: %s, and all %d batches that were checked came back as they were loaded.",
			data, r.Verify.Batches)
	default:
		p.Headline = data + "; nothing was checked."
	}
	if busy := r.Busy(); busy != "" && p.Level == page.Good {
		p.Level = page.Warn
		p.Headline = "The machine was busy: " + busy + ". " + strings.TrimPrefix(p.Headline, "All is well: ")
	}
	facts := []any{
		"time", duration(p.Seconds), "moved down", size.Approx(down), "moved up", size.Approx(up),
		"waits for room", r.Waits.Count,
	}
	if r.Input.Batches > 0 { // it is 0 while the run lasts
		facts = append(facts, "data", size.Approx(r.Input.Bytes), "batches", r.Input.Batches, "verified", verified)
	}
	if r.CPUSeconds > 0 {
		facts = append(facts, "processor time", duration(r.CPUSeconds))
	}
	if t := r.RunTimes; len(r.Runs) > 1 {
		facts = append(facts, fmt.Sprintf("median of %d runs", len(r.Runs)),
			fmt.Sprintf("%s (%.1f %% spread)", duration(t.MedianSeconds), 100*t.Spread))
	}
	p.Facts = pairs(facts...)
	return p
}

func (b *Bandwidth) page() page.Run {
	p := page.Run{Seconds: b.WallSeconds, Level: page.Good}
	near, unclear, failed := 0, 0, 0
	for _, r := range b.Rows {
		if r.Error != "" {
			failed++
			continue
		}
		share := fmt.Sprintf("%.0f %% of the limit", 100*r.Efficiency)
		if r.Inconclusive {
			unclear++
			share = "cannot be told from the limit"
		} else if r.Efficiency >= 0.9 {
			near++
		}
		name := size.Format(r.Bytes)
		if r.Threads > 1 {
			name += fmt.Sprintf(", %d moves", r.Threads)
		}
		if r.BothWays {
			name += ", both ways"
		} else if r.State != "" {
			name += ", " + r.State
		}
		edge := r.From + " → " + r.To
		at := slices.IndexFunc(p.Bars, func(b page.Bars) bool { return b.Title == edge })
		if at < 0 {
			at, p.Bars = len(p.Bars), append(p.Bars, page.Bars{Title: edge, Unit: "GiB/s"})
		}
		p.Bars[at].Groups = append(p.Bars[at].Groups, page.Group{
			Name: name, Text: fmt.Sprintf("%s, which varies by %.0f %%", share, 100*r.Noise),
			Bars: []page.Bar{
				{Name: "Spillway", Value: r.GiBPerS}, {Name: r.LimitOf, Value: r.LimitGiBPerS, Other: true},
			},
		})
		p.Figures = append(p.Figures, page.Figure{
			Name: edge + ", " + name, Value: r.GiBPerS, Unit: "GiB/s", Noise: max(r.Noise, r.CV),
			Share: r.Efficiency, ShareNoise: r.Noise, ShareOf: "of the limit",
			Limit: r.LimitGiBPerS, LimitOf: fmt.Sprintf("The speed of %s from %s to %s", r.LimitOf, r.From, r.To),
		})
	}
	p.Headline = fmt.Sprintf("Of %d rows %d reach 90 %% of the machine's own limit or more, "+
		"and %d cannot be told from it. %d were not measured.", len(b.Rows), near, unclear, failed)
	if failed > 0 {
		p.Level = page.Warn
	}
	p.Facts = pairs("rows", len(b.Rows), "pairs a row", b.Config.Pairs,
		"moved", size.Approx(b.Config.PlannedBytes), "time", duration(b.WallSeconds))
	p.Settings = settingsOf(b.Config)
	return p
}

func (c *Compare) page() page.Run {
	p := page.Run{
		Seconds: c.WallSeconds, Level: page.Good, Settings: settingsOf(c.Config),
		Input: c.Input.page(), Verified: page.Verified(c.Verify),
	}
	facts := []any{"data", size.Approx(c.Input.Bytes), "rounds", c.Config.Rounds, "time", duration(c.WallSeconds)}
	name := c.Peer.Name
	var verdicts []string
	for _, r := range c.Ratio.rows() {
		title := map[string]string{"write": "Writing", "read": "Reading"}[r.Of]
		var bars []page.Bar
		for _, s := range sides(name, c.Ours, c.Peer.Rates, c.Peer.Warm) {
			rate, known := s.Write, true
			if r.Of == "read" {
				rate, known = s.Read.(float64)
			}
			if known {
				bars = append(bars, page.Bar{Name: s.Side, Value: rate, Other: strings.HasPrefix(s.Side, name)})
			}
		}
		p.Bars = append(p.Bars, page.Bars{
			Title: title, Unit: "GiB/s", Groups: []page.Group{{Name: "medians", Bars: bars}},
		})
		p.Figures = append(p.Figures, page.Figure{
			Name: title, Value: bars[0].Value, Unit: "GiB/s",
			Share: r.Ratio, ShareNoise: max(0, r.Max-r.Min) / 2 / r.Ratio, ShareOf: "of the speed of " + name,
			Limit: bars[len(bars)-2].Value, LimitOf: "The " + r.Of + " speed of " + name,
		})
		facts = append(facts, r.Of+" ratio", fmt.Sprintf("%.2f (%.2f–\u2060%.2f)", r.Ratio, r.Min, r.Max))
		verdict := fmt.Sprintf("%.1f times as fast as %s", r.Ratio, name)
		if r.Min <= 1 && r.Max >= 1 && len(c.Samples) > 1 {
			verdict = fmt.Sprintf("about as fast as %s (%.2f to %.2f times)", name, r.Min, r.Max)
		} else if r.Ratio < 1 {
			p.Level = page.Warn
			verdict = fmt.Sprintf("%.1f times slower than %s", 1/r.Ratio, name)
		}
		verdicts = append(verdicts, verdict)
	}
	p.Facts = pairs(facts...)
	p.Headline = fmt.Sprintf("With the same %s of memory Spillway wrote %s, and read %s.",
		size.Approx(c.Config.HostMemoryBytes), verdicts[0], verdicts[1])
	return p
}
