package report

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/page"
	"github.com/spillway-db/spillway/internal/size"
)

// Pictured is a Document that a page of its own shows: Run, Bandwidth and Compare.
type Pictured interface {
	Document
	header() *Header
	run() page.Run
}

func (h *Header) header() *Header { return h }

// ErrNotPictured reports a document that is none of those.
var ErrNotPictured = errors.New("it is no result of run, bandwidth or compare")

// Read reads a document that a page can show.
func Read(text []byte) (Pictured, error) {
	var head struct{ Schema, Command string }
	if err := json.Unmarshal(text, &head); err != nil {
		return nil, fmt.Errorf("it is no JSON: %w", err)
	}
	if head.Schema != Schema {
		return nil, fmt.Errorf("%w: its schema is %q, and not %q", ErrNotPictured, head.Schema, Schema)
	}
	var doc Pictured
	switch head.Command {
	case "run":
		doc = new(Run)
	case "bandwidth":
		doc = new(Bandwidth)
	case "compare":
		doc = new(Compare)
	default:
		return nil, fmt.Errorf("%w: it is one of %q", ErrNotPictured, head.Command)
	}
	if err := json.Unmarshal(text, doc); err != nil {
		return nil, fmt.Errorf("%w: %w", errInsane, err)
	}
	return doc, sane(doc)
}

// WriteHTML writes a page about a document, or about two of one command that are compared. names are
// those of the documents.
func WriteHTML(w io.Writer, names []string, docs ...Pictured) error {
	r := &page.Report{Title: "spillbench " + docs[0].header().Command}
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
func PageOf(d Pictured) page.Run {
	run, h := d.run(), d.header()
	run.Began = h.Time
	run.Command = strings.TrimSpace("spillbench " + strings.Join(h.Args, " "))
	for _, w := range h.Warnings {
		run.Warnings = append(run.Warnings, page.Warning{What: strings.TrimPrefix(w.Space+": "+w.What, ": "), Remedy: w.Remedy, Info: w.Info})
	}
	run.Machine = machineOf(h)
	return run
}

func machineOf(h *Header) []page.Pair {
	e := h.Env
	direct := "no"
	if e.DirectIO {
		direct = "yes"
	}
	return []page.Pair{
		{Name: "processor", Value: e.CPU}, {Name: "cores", Value: strconv.Itoa(e.Cores)}, {Name: "memory", Value: size.Approx(e.Memory)},
		{Name: "kernel", Value: e.Kernel}, {Name: "GPU", Value: e.GPU}, {Name: "driver", Value: e.Driver}, {Name: "PCIe link", Value: e.PCIeLink},
		{Name: "file system", Value: e.FileSystem}, {Name: "direct I/O", Value: direct},
		{Name: "spillbench", Value: h.Version}, {Name: "commit", Value: e.Commit}, {Name: "Go", Value: h.GoVersion},
	}
}

// settings are those of all commands.
func (c Config) settings() []page.Setting {
	var dirs, faults []string
	for _, d := range c.Disks {
		dirs = append(dirs, d.Dir+" ("+size.Approx(d.CapacityBytes)+")")
	}
	for _, f := range c.Faults {
		faults = append(faults, fmt.Sprintf("%s (%d hits)", f.Spec, f.Hits))
	}
	perSecond := func(n int64) string {
		if n <= 0 {
			return "off"
		}
		return size.Approx(n)
	}
	encrypt := "no"
	if c.Encrypt {
		encrypt = "yes"
	}
	s := func(name, value, flag, field string) page.Setting {
		return page.Setting{Name: name, Value: value, Flag: flag, Field: field}
	}
	all := []page.Setting{
		s("GPU", c.GPU, "--gpu", "GPUs[].Backend"), s("GPU memory", size.Approx(c.GPUMemoryBytes), "--gpu-memory", "GPUMemory"),
		s("host memory", size.Approx(c.HostMemoryBytes), "--host-memory", "HostMemory"), s("spill directories", strings.Join(dirs, ", "), "--disk", "Disks"),
		s("limit", strconv.FormatFloat(c.Limit, 'g', 3, 64), "--limit", "GPUMarks.Limit"),
		s("trigger", strconv.FormatFloat(c.Trigger, 'g', 3, 64), "--trigger", "GPUMarks.Trigger"),
		s("stop", strconv.FormatFloat(c.Stop, 'g', 3, 64), "--stop", "GPUMarks.Stop"),
		s("policy", c.Policy, "--policy", "Policy"), s("codec", c.Codec, "--codec", "Codec"), s("encryption", encrypt, "--encrypt", "Disks[].Encrypt"),
		s("monitor period", seconds(c.MonitorPeriodSeconds), "--monitor-period", "MonitorPeriod"),
		s("written ahead, a second", perSecond(c.WriteAheadBytesPerS), "--write-ahead", "WriteAhead"),
		s("disk slowed down to, a second", perSecond(c.DiskThrottleBytesPerS), "--disk-throttle", ""),
	}
	if len(faults) == 0 {
		faults = []string{"none"}
	}
	return append(all, s("faults", strings.Join(faults, ", "), "--fault", ""))
}

// seconds writes a time as flags take it.
func seconds(v float64) string { return strconv.FormatFloat(v*1e3, 'g', 4, 64) + "ms" }

func setting(name string, value any, flag string) page.Setting {
	return page.Setting{Name: name, Value: fmt.Sprint(value), Flag: flag}
}

// Generated begins the name of an input that is no file, and so many times as large as the memories.
const Generated = "a generated table"

func (r *Run) run() page.Run {
	p := page.Run{
		Name: "run", Seconds: r.WallSeconds, Level: page.Good, Timeline: r.Timeline,
		Waits: page.Waits{Count: r.Waits.Count, P50: r.Waits.P50, P99: r.Waits.P99, Max: r.Waits.Max},
	}
	p.Follows = len(r.Input.Sources) > 0 && strings.HasPrefix(r.Input.Sources[0], Generated)
	if r.Timeline != nil && r.Timeline.Seconds > 0 {
		p.Seconds = r.Timeline.Seconds // without opening, closing and measuring limits
	}
	data := fmt.Sprintf("%s of %s went through %s of GPU memory, %s of host memory and disk in %s",
		size.Approx(r.Input.Bytes), shortened(r.Input.Sources), size.Approx(r.Config.GPUMemoryBytes), size.Approx(r.Config.HostMemoryBytes), shortly(p.Seconds))
	var left []string
	for _, s := range r.Spaces {
		p.Spaces = append(p.Spaces, page.Space{ID: s.ID, Backend: s.Backend, Capacity: s.CapacityBytes, Peak: s.PeakBytes, End: s.EndBytes})
		if s.EndBytes != 0 && r.Verify.Checked {
			left = append(left, s.ID)
		}
	}
	switch {
	case r.Verify.Mismatches > 0:
		p.Level, p.Headline = page.Bad, fmt.Sprintf("Wrong: %d of %d batches came back with other bytes than were loaded. %s.", r.Verify.Mismatches, r.Verify.Batches, data)
	case len(left) > 0:
		p.Level, p.Headline = page.Warn, fmt.Sprintf("%s were not empty at the end. %s.", strings.Join(left, ", "), data)
	case r.Verify.Checked:
		p.Headline = fmt.Sprintf("All is well: %s, and all %d batches that were checked came back as they were loaded.", data, r.Verify.Batches)
	default:
		p.Headline = data + "; nothing was checked."
	}
	limits := make(map[[2]string]Limit)
	for _, l := range r.Limits {
		limits[[2]string{l.From, l.To}] = l
	}
	var down, up int64
	for _, e := range r.Edges {
		l := limits[[2]string{e.From, e.To}]
		p.Edges = append(p.Edges, page.Edge{
			From: e.From, To: e.To, Batches: e.Batches, Bytes: e.Bytes, Copies: e.Copies, Unmoved: e.Unmoved, Ahead: e.Ahead, AheadUsed: e.AheadUsed,
			AheadInVain: e.AheadInVain, Seconds: e.Seconds, P50: e.P50, P99: e.P99, Longest: e.Longest, ByReason: e.ByReason, Limit: l.GiBPerS, LimitOf: l.LimitOf,
		})
		switch from, to := rank(e.From), rank(e.To); { // neither is from one GPU to another
		case from < to:
			down += e.Bytes
		case from > to:
			up += e.Bytes
		}
	}
	for _, w := range r.Work {
		p.Work = append(p.Work, page.Work{Plan: w.Plan, Operator: w.Operator, Port: w.Port, Down: w.DownBytes, Up: w.UpBytes, Unread: w.Unread})
	}
	for _, t := range r.Tasks {
		p.Tasks = append(p.Tasks, page.Task{Name: t.Name, Waits: t.Waits, Total: t.Total, Longest: t.Longest})
	}
	for _, ph := range r.Phases {
		one := page.Phase{Name: ph.Name, Seconds: ph.Seconds}
		if ph.Name != drain {
			one.Bytes = r.Input.Bytes
		}
		p.Phases = append(p.Phases, one)
	}
	p.Facts = []page.Pair{
		{Name: "time", Value: shortly(p.Seconds)}, {Name: "data", Value: size.Approx(r.Input.Bytes)}, {Name: "batches", Value: strconv.FormatInt(r.Input.Batches, 10)},
		{Name: "moved down", Value: size.Approx(down)}, {Name: "moved up", Value: size.Approx(up)}, {Name: "waits for room", Value: strconv.FormatInt(r.Waits.Count, 10)},
		{Name: "verified", Value: fmt.Sprintf("%d batches", r.Verify.Batches)},
	}
	p.Settings = append(r.Config.settings(),
		setting("rows a batch", r.Config.RowsPerBatch, "--rows-per-batch"), setting("seed", r.Config.Seed, "--seed"), setting("place", r.Config.Place, "--place"),
		setting("repeat", r.Config.Repeat, "--repeat"), setting("partitions", r.Config.Partitions, "--partitions"), setting("passes", r.Config.Passes, "--passes"),
		setting("workers", r.Config.Workers, "--workers"))
	return p
}

// rank is the order of a space's tier.
func rank(space string) int {
	kind, _, _ := strings.Cut(space, ":")
	return slices.Index([]string{"gpu", "host", "disk"}, kind)
}

// shortened lists names, the first few.
func shortened(names []string) string {
	const most = 3
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}

func (b *Bandwidth) run() page.Run {
	p := page.Run{Name: "bandwidth", Seconds: b.WallSeconds, Level: page.Good}
	near, unclear, failed := 0, 0, 0
	by := make(map[string]*page.Bars)
	var order []string
	var slowest *BandwidthRow
	for i, r := range b.Rows {
		edge := r.From + " → " + r.To
		if r.Error != "" {
			failed++
			continue
		}
		if r.Inconclusive {
			unclear++
		} else if r.Efficiency >= 0.9 {
			near++
		}
		if slowest == nil || r.Efficiency < slowest.Efficiency {
			slowest = &b.Rows[i]
		}
		name := size.Format(r.Bytes)
		if r.Threads > 1 {
			name += fmt.Sprintf(", %d moves", r.Threads)
		}
		if state := cmp.Or(map[bool]string{true: "both ways"}[r.BothWays], r.State); state != "" {
			name += ", " + state
		}
		if by[edge] == nil {
			by[edge] = &page.Bars{Title: edge, Unit: "GiB/s"}
			order = append(order, edge)
		}
		by[edge].Groups = append(by[edge].Groups, page.Group{Name: name, Bars: []page.Bar{
			{Name: "Spillway", Value: r.GiBPerS}, {Name: r.LimitOf, Value: r.LimitGiBPerS, Other: true},
		}})
		p.Figures = append(p.Figures, page.Figure{Name: edge + ", " + name, Value: r.GiBPerS, Unit: "GiB/s", Noise: max(r.Noise, r.CV)})
	}
	for _, edge := range order {
		p.Bars = append(p.Bars, *by[edge])
	}
	p.Headline = fmt.Sprintf("%d of %d rows reach 90 %% of the machine's own limit or more; of %d ours cannot be told from the limit.", near, len(b.Rows), unclear)
	if slowest != nil {
		p.Headline += fmt.Sprintf(" The lowest efficiency is %.2f: %s → %s with batches of %s.", slowest.Efficiency, slowest.From, slowest.To, size.Format(slowest.Bytes))
	}
	if failed > 0 {
		p.Level = page.Warn
		p.Headline += fmt.Sprintf(" %d rows were not measured.", failed)
	}
	p.Facts = []page.Pair{{Name: "rows", Value: strconv.Itoa(len(b.Rows))}, {Name: "pairs a row", Value: strconv.Itoa(b.Config.Pairs)}, {Name: "moved", Value: size.Approx(b.Config.PlannedBytes)}, {Name: "time", Value: shortly(b.WallSeconds)}}
	p.Settings = append(b.Config.settings(), setting("extent", b.Config.Extent, "--thorough"), setting("pairs", b.Config.Pairs, "--pairs"), setting("seed", b.Config.Seed, "--seed"))
	return p
}

func (c *Compare) run() page.Run {
	p := page.Run{Name: "compare", Seconds: c.WallSeconds, Level: page.Good}
	word := func(ratio float64) string {
		if ratio >= 1 {
			return fmt.Sprintf("%.1f times as fast as %s", ratio, c.Peer.Name)
		}
		return fmt.Sprintf("%.1f times slower than %s", 1/ratio, c.Peer.Name)
	}
	p.Headline = fmt.Sprintf("With the same %s of memory Spillway wrote %s, and read %s.", size.Approx(c.Config.HostMemoryBytes), word(c.Ratio.Write), word(c.Ratio.Read))
	if c.Ratio.Write < 1 || c.Ratio.Read < 1 {
		p.Level = page.Warn
	}
	for _, way := range []struct {
		name                        string
		ours, rewritten, peer, warm float64
	}{
		{"Writing", c.Ours.WriteGiBPerS, c.Ours.Rewritten.WriteGiBPerS, c.Peer.WriteGiBPerS, c.Peer.Warm.WriteGiBPerS},
		{"Reading", c.Ours.ReadGiBPerS, c.Ours.Rewritten.ReadGiBPerS, c.Peer.ReadGiBPerS, c.Peer.Warm.ReadGiBPerS},
	} {
		p.Bars = append(p.Bars, page.Bars{Title: way.name, Unit: "GiB/s", Groups: []page.Group{
			{Name: "to and from the disk", Bars: []page.Bar{{Name: "Spillway", Value: way.ours}, {Name: c.Peer.Name, Value: way.peer, Other: true}}},
			{Name: "in room used before; the peer in its page cache", Bars: []page.Bar{{Name: "Spillway", Value: way.rewritten}, {Name: c.Peer.Name + ", warm", Value: way.warm, Other: true}}},
		}})
		p.Figures = append(p.Figures,
			page.Figure{Name: way.name + ", Spillway", Value: way.ours, Unit: "GiB/s"}, page.Figure{Name: way.name + ", " + c.Peer.Name, Value: way.peer, Unit: "GiB/s"})
	}
	p.Facts = []page.Pair{
		{Name: "data", Value: size.Approx(c.Input.Bytes)}, {Name: "write ratio", Value: fmt.Sprintf("%.2f (%.2f–%.2f)", c.Ratio.Write, c.Ratio.WriteMin, c.Ratio.WriteMax)},
		{Name: "read ratio", Value: fmt.Sprintf("%.2f (%.2f–%.2f)", c.Ratio.Read, c.Ratio.ReadMin, c.Ratio.ReadMax)}, {Name: "rounds", Value: strconv.Itoa(c.Config.Rounds)}, {Name: "time", Value: shortly(c.WallSeconds)},
	}
	p.Settings = append(c.Config.settings(), setting("peer", c.Config.Peer, "--peer"), setting("repeat", c.Config.Repeat, "--repeat"), setting("rounds", c.Config.Rounds, "--rounds"), setting("workers", c.Config.Workers, "--workers"), setting("seed", c.Config.Seed, "--seed"))
	return p
}

// shortly writes seconds with three digits.
func shortly(seconds float64) string {
	switch {
	case seconds < 1:
		return strconv.FormatFloat(seconds*1e3, 'g', 3, 64) + " ms"
	case seconds < 100:
		return strconv.FormatFloat(seconds, 'g', 3, 64) + " s"
	}
	return duration(seconds).Round(time.Second).String()
}

// CommandOf returns the command that a document is of.
func CommandOf(d Pictured) string { return d.header().Command }
