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

// Generated begins the name of a generated input, whose size follows the sizes of the memories.
const Generated = "a generated table"

// writeHTML writes a page about a document.
func writeHTML(w io.Writer, d Document) error {
	names, documents := parts(d)
	r := &page.Report{Title: "spillbench " + d.header().Command}
	if len(documents) == 2 {
		r.Title += ": two compared"
	}
	for i, one := range documents {
		run := PageOf(one)
		run.Name = names[i]
		r.Runs = append(r.Runs, run)
	}
	return page.Write(w, r)
}

// PageOf returns the content of a page about a Run, a Bandwidth or a Compare.
func PageOf(d Document) page.Run {
	run, h := d.(measured).page(), d.header()
	run.Began, run.Warnings = h.Time, h.Warnings
	run.Command = strings.TrimSpace("spillbench " + strings.Join(h.Args, " "))
	e := h.Env
	run.Machine = page.Pairs(
		"processor", e.CPU, "cores", e.Cores, "memory", size.Approx(e.Memory), "kernel", e.Kernel,
		"GPU", e.GPU, "driver", e.Driver, "PCIe link", e.PCIeLink,
		"file system", e.FileSystem, "direct I/O", yes(e.DirectIO),
		"spillbench", h.Version, "commit", e.Commit, "Go", h.GoVersion)
	return run
}

func yes(is bool) string {
	if is {
		return "yes"
	}
	return "no"
}

// settings lists the settings of all configurations as "key|name|flag|field|sentence": the JSON key, the
// name on a page, the flag and the field of spillway.Config that change it, and the beginning of a
// sentence that ends with the value. A key ends in "?" if 0 means that an older program wrote the
// document.
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
	"stuck_after_seconds?|stuck after seconds|--stall-timeout|StallTimeout",
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
		column := strings.Split(text+"||", "|")
		key, optional := strings.CutSuffix(column[0], "?")
		value := fieldOf(reflect.ValueOf(config), key)
		if value == nil || optional && reflect.ValueOf(value).IsZero() {
			continue
		}
		s := page.Setting{Name: column[1], Flag: column[2], Field: column[3], Says: column[4]}
		s.Value = strings.Trim((&printer{}).cell(key, value), "[]")
		switch v := value.(type) {
		case float64:
			s.Value = fmt.Sprintf("%.3g", v)
		case int64:
			if v == 0 {
				s.Value = page.Off
			} else if s.Says != "" {
				s.Value += "/s"
			}
		}
		s.Same = found.ReplaceAllString(s.Value, "")
		all = append(all, s)
	}
	return all
}

// found matches the parts of a setting's value that were measured and not set. Comparisons ignore them.
var found = regexp.MustCompile(` \((hits: \d+|[^()]* free)\)`)

// String returns the fault and how many operations it hit.
func (f Fault) String() string { return fmt.Sprintf("%s (hits: %d)", f.Spec, f.Hits) }

// String returns the directory and its capacity.
func (d Disk) String() string {
	free := " free"
	if d.CapacityGiven {
		free = ""
	}
	return fmt.Sprintf("%s (%s%s)", d.Dir, size.Approx(d.CapacityBytes), free)
}

func (r *Run) page() page.Run {
	p := page.Run{
		Seconds: r.WallSeconds, Level: page.Good, Failed: r.Error != "", Held: r.Held,
		Follows: strings.HasPrefix(r.Input.Names(), Generated), Input: r.Input, Verify: r.Verify,
		Timeline: r.Timeline, Spaces: r.Spaces, Edges: slices.Clone(r.Edges), Work: r.Work, Tasks: r.Tasks,
		Waits: r.Waits, Phases: slices.Clone(r.Phases), Settings: settingsOf(r.Config),
	}
	if r.Timeline != nil && r.Timeline.Seconds > 0 {
		p.Seconds = r.Timeline.Seconds // without opening, closing and measuring limits
	}
	for i, e := range p.Edges {
		for _, l := range r.Limits {
			if l.From == e.From && l.To == e.To {
				p.Edges[i].Limit, p.Edges[i].LimitOf = l.GiBPerS, l.LimitOf
			}
		}
	}
	for i, ph := range p.Phases {
		// How much of the input the last phase of a failed run has read is not known.
		if ph.Name != drain && (!p.Failed || i == 0 || i < len(p.Phases)-1) {
			p.Phases[i].Bytes = r.Input.Bytes
		}
	}
	down, up, _ := p.Moved()
	var leaks []string
	for _, s := range r.Spaces {
		if s.EndBytes != 0 && r.Verify.Checked {
			leaks = append(leaks, s.ID)
		}
	}

	data := fmt.Sprintf("%s of %s went through %s of GPU memory, %s of host memory and disk in %s",
		size.Approx(r.Input.Bytes), r.Input.Names(), size.Approx(r.Config.GPUMemoryBytes),
		size.Approx(r.Config.HostMemoryBytes), duration(p.Seconds))
	verified := fmt.Sprintf("%d batches", r.Verify.Batches)
	switch wrong := r.Verify.Mismatches; {
	case p.Failed:
		p.Level, p.Headline = page.Bad, "The run failed: "+r.Error
	case wrong > 0:
		p.Level, p.Headline = page.Bad, fmt.Sprintf("Wrong: %s. %s.", r.Verify.Wrong(), data)
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
	p.Facts = page.Pairs(facts...)
	return p
}

func (b *Bandwidth) page() page.Run {
	p := page.Run{Seconds: b.WallSeconds, Level: page.Good}
	p.Settings = slices.DeleteFunc(settingsOf(b.Config), func(s page.Setting) bool {
		return s.Flag == "--rows-per-batch" // bandwidth does not have it
	})
	near, unclear, failed := 0, 0, 0
	for _, r := range b.Rows {
		if r.Error != "" {
			failed++
			p.Level = page.Warn
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
		p.Figures = append(p.Figures, page.Figure{
			Title: r.From + " → " + r.To, Name: name,
			Text:  fmt.Sprintf("%s, which varies by %.0f %%", share, 100*r.Noise),
			Value: r.GiBPerS, Unit: "GiB/s", Noise: max(r.Noise, r.CV),
			Share: r.Efficiency, ShareNoise: r.Noise, ShareOf: "of the limit",
			Limit: r.LimitGiBPerS, LimitOf: fmt.Sprintf("The speed of %s from %s to %s", r.LimitOf, r.From, r.To),
			Bars: []page.Bar{
				{Name: "Spillway", Value: r.GiBPerS}, {Name: r.LimitOf, Value: r.LimitGiBPerS, Other: true},
			},
		})
	}
	p.Headline = fmt.Sprintf("Of %d rows %d reach 90 %% of the machine's own limit or more, "+
		"and %d cannot be told from it. %d were not measured.", len(b.Rows), near, unclear, failed)
	p.Facts = page.Pairs("rows", len(b.Rows), "pairs a row", b.Config.Pairs,
		"moved", size.Approx(b.Config.PlannedBytes), "time", duration(b.WallSeconds))
	return p
}

func (c *Compare) page() page.Run {
	p := page.Run{
		Seconds: c.WallSeconds, Level: page.Good, Settings: settingsOf(c.Config), Input: c.Input, Verify: c.Verify,
	}
	facts := []any{"data", size.Approx(c.Input.Bytes), "rounds", c.Config.Rounds, "time", duration(c.WallSeconds)}
	peer := c.Peer.Name
	var verdicts []any
	for i, r := range c.Ratio.rows() {
		f := page.Figure{
			Title: []string{"Writing", "Reading"}[i], Text: "medians", Unit: "GiB/s",
			Share: r.Ratio, ShareNoise: max(0, r.Max-r.Min) / 2 / r.Ratio, ShareOf: "of the speed of " + peer,
			LimitOf: "The " + r.Of + " speed of " + peer,
		}
		for _, s := range sides(peer, c.Ours, c.Peer.Rates, c.Peer.Warm) {
			if rate, ok := []any{s.Write, s.Read}[i].(float64); ok {
				f.Bars = append(f.Bars, page.Bar{Name: s.Side, Value: rate, Other: strings.HasPrefix(s.Side, peer)})
			}
		}
		f.Value, f.Limit = f.Bars[0].Value, f.Bars[len(f.Bars)-2].Value
		p.Figures = append(p.Figures, f)
		facts = append(facts, r.Of+" ratio", fmt.Sprintf("%.2f (%.2f–\u2060%.2f)", r.Ratio, r.Min, r.Max))
		verdict := fmt.Sprintf("%.1f times as fast as %s", r.Ratio, peer)
		if r.Min <= 1 && r.Max >= 1 && len(c.Samples) > 1 {
			verdict = fmt.Sprintf("about as fast as %s (%.2f to %.2f times)", peer, r.Min, r.Max)
		} else if r.Ratio < 1 {
			p.Level = page.Warn
			verdict = fmt.Sprintf("%.1f times slower than %s", 1/r.Ratio, peer)
		}
		verdicts = append(verdicts, verdict)
	}
	p.Facts = page.Pairs(facts...)
	p.Headline = fmt.Sprintf("With the same %s of memory Spillway wrote %s, and read %s.",
		size.Approx(c.Config.HostMemoryBytes), verdicts[0], verdicts[1])
	return p
}
