package report

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/page"
	"github.com/spillway-db/spillway/internal/size"
)

// ErrNotMeasured reports a document that Read does not read.
var ErrNotMeasured = errors.New("it is no result of run, bandwidth or compare")

// Read reads a document that has figures.
func Read(text []byte) (Measured, error) {
	var head struct {
		Schema  string `json:"schema"`
		Command string `json:"command"`
	}
	if err := json.Unmarshal(text, &head); err != nil {
		if wrong := mistyped(err); wrong != nil {
			return nil, fmt.Errorf("%w: %w", ErrNotMeasured, wrong)
		}
		return nil, fmt.Errorf("it is no JSON: %w", err)
	}
	if head.Schema != Schema {
		return nil, fmt.Errorf("%w: its schema is %q, and not %q", ErrNotMeasured, head.Schema, Schema)
	}
	var doc Measured
	switch head.Command {
	case "run":
		doc = new(Run)
	case "bandwidth":
		doc = new(Bandwidth)
	case "compare":
		doc = new(Compare)
	default:
		return nil, fmt.Errorf("%w: it is one of %q", ErrNotMeasured, head.Command)
	}
	if err := json.Unmarshal(text, doc); err != nil {
		return nil, fmt.Errorf("%w: %w", errInsane, cmp.Or(mistyped(err), err))
	}
	if err := sane(doc); err != nil {
		return nil, err
	}
	return doc, whole(text, doc)
}

// mistyped says in plain words which value of a document is of another type than the schema says; nil
// of other errors.
func mistyped(err error) error {
	var wrong *json.UnmarshalTypeError
	var when *time.ParseError
	switch {
	case errors.As(err, &when):
		return fmt.Errorf("%s is no time such as 2026-11-25T12:30:00Z", strings.Trim(when.Value, `"`))
	case !errors.As(err, &wrong):
		return nil
	}
	kind, value, _ := strings.Cut(wrong.Value, " ")
	is := map[string]string{"array": "a list", "object": "an object", "string": "a text", "bool": "true or false", "number": "a number"}[kind]
	if value != "" {
		is = "the number " + value
	}
	// Keys are in small letters, and the names of embedded types, which are in the path too, are not.
	path := slices.DeleteFunc(strings.Split(wrong.Field, "."), func(s string) bool { return s == "" || strings.ToLower(s) != s })
	if len(path) == 0 {
		path = []string{"it"}
	}
	return fmt.Errorf("%s is %s, and not %s", strings.Join(path, "."), is, expected(wrong.Type))
}

// expected is what a value of a type is in JSON.
func expected(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.String:
		return "a text"
	case reflect.Bool:
		return "true or false"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Int, reflect.Int64:
		return "a whole number"
	case reflect.Uint, reflect.Uint64:
		return "a whole number from 0 up"
	}
	return "an object"
}

// WriteHTML writes a page about a document, or about two of one command that are compared. names are
// those of the documents.
func WriteHTML(w io.Writer, names []string, docs ...Measured) error {
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
func PageOf(d Measured) page.Run {
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
	var dirs, faults, setDirs, setFaults []string // set: without what the machine has free, and what happened
	for _, d := range c.Disks {
		dirs = append(dirs, d.Dir+" ("+size.Approx(d.CapacityBytes)+")")
		setDirs = append(setDirs, d.Dir)
		if d.CapacityGiven {
			setDirs = append(setDirs, size.Approx(d.CapacityBytes))
		}
	}
	for _, f := range c.Faults {
		faults = append(faults, fmt.Sprintf("%s (hits: %d)", f.Spec, f.Hits))
		setFaults = append(setFaults, f.Spec)
	}
	perSecond := func(n int64) string {
		if n <= 0 {
			return page.Off
		}
		return size.Approx(n) + "/s"
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
		s("host memory", size.Approx(c.HostMemoryBytes), "--host-memory", "HostMemory"), {Name: "spill directories", Value: strings.Join(dirs, ", "), Same: strings.Join(setDirs, ", "), Flag: "--disk", Field: "Disks"},
		s("limit", strconv.FormatFloat(c.Limit, 'g', 3, 64), "--limit", "GPUMarks.Limit"),
		s("trigger", strconv.FormatFloat(c.Trigger, 'g', 3, 64), "--trigger", "GPUMarks.Trigger"),
		s("stop", strconv.FormatFloat(c.Stop, 'g', 3, 64), "--stop", "GPUMarks.Stop"),
		s("policy", c.Policy, "--policy", "Policy"), s("codec", c.Codec, "--codec", "Codec"), s("encryption", encrypt, "--encrypt", "Disks[].Encrypt"),
		s("monitor period", seconds(c.MonitorPeriodSeconds), "--monitor-period", "MonitorPeriod"),
		{Name: "written ahead", Says: "batches were written ahead at up to", Value: perSecond(c.WriteAheadBytesPerS), Flag: "--write-ahead", Field: "WriteAhead"},
		{Name: "disk slowed to", Says: "the disk was slowed to", Value: perSecond(c.DiskThrottleBytesPerS), Flag: "--disk-throttle"},
	}
	// Documents of older programs do not have these.
	if c.MovesPerEdge > 0 {
		all = append(all, s("moves an edge", strconv.Itoa(c.MovesPerEdge), "--moves-per-edge", "MovesPerEdge"))
	}
	if c.DiskSlots > 0 {
		all = append(all, s("transfers with disks", strconv.Itoa(c.DiskSlots), "--disk-slots", "Limits.Permits.Slots"))
	}
	if c.StuckAfterSeconds > 0 {
		all = append(all, s("stuck after", shortly(c.StuckAfterSeconds), "--stuck-after", "StuckAfter"))
	}
	if len(faults) == 0 {
		faults = []string{"none"}
	}
	return append(all, page.Setting{Name: "faults", Value: strings.Join(faults, ", "), Same: strings.Join(setFaults, ", "), Flag: "--fault"})
}

// seconds writes a time as flags take it.
func seconds(v float64) string { return strconv.FormatFloat(v*1e3, 'g', 4, 64) + "ms" }

func setting(name string, value any, flag string) page.Setting {
	return page.Setting{Name: name, Value: fmt.Sprint(value), Flag: flag}
}

// rowsPerBatch writes how many rows a batch has.
func (r *Run) rowsPerBatch(generated bool) string {
	switch {
	case r.Config.RowsPerBatch > 0:
		return strconv.FormatInt(r.Config.RowsPerBatch, 10)
	case generated:
		return "as suits the GPU memory"
	}
	return "as the files have them"
}

// sourced is the input of a page.
func (i Input) sourced() page.Input {
	return page.Input{Sources: shortened(i.Sources), Rows: i.Rows, Batches: i.Batches, Bytes: i.Bytes}
}

// Generated begins the name of an input that is no file, and so many times as large as the memories.
const Generated = "a generated table"

func (r *Run) run() page.Run {
	p := page.Run{
		Name: "run", Seconds: r.WallSeconds, Level: page.Good, Timeline: r.Timeline,
		Waits: page.Waits{Count: r.Waits.Count, P50: r.Waits.P50, P99: r.Waits.P99, Max: r.Waits.Max},
		Input: r.Input.sourced(), Verified: page.Verified(r.Verify),
	}
	p.Follows = len(r.Input.Sources) > 0 && strings.HasPrefix(r.Input.Sources[0], Generated)
	if r.Timeline != nil && r.Timeline.Seconds > 0 {
		p.Seconds = r.Timeline.Seconds // without opening, closing and measuring limits
	}
	data := fmt.Sprintf("%s of %s went through %s of GPU memory, %s of host memory and disk in %s",
		size.Approx(r.Input.Bytes), shortened(r.Input.Sources), size.Approx(r.Config.GPUMemoryBytes), size.Approx(r.Config.HostMemoryBytes), shortly(p.Seconds))
	var left []string
	for _, s := range r.Spaces {
		p.Spaces = append(p.Spaces, page.Space{ID: s.ID, Backend: s.Backend, Capacity: s.CapacityBytes, Peak: s.PeakBytes, End: s.EndBytes, Written: s.WrittenBytes, Read: s.ReadBytes})
		if s.EndBytes != 0 && r.Verify.Checked {
			left = append(left, s.ID)
		}
	}
	switch {
	case r.Error != "":
		p.Level, p.Failed, p.Headline = page.Bad, true, "The run failed: "+r.Error
	case r.Verify.Mismatches > 0:
		p.Level, p.Headline = page.Bad, fmt.Sprintf("Wrong: %s. %s.", page.Verified(r.Verify).Wrong(), data)
	case len(left) > 0:
		p.Level, p.Headline = page.Warn, fmt.Sprintf("%s were not empty at the end. %s.", strings.Join(left, ", "), data)
	case r.Verify.Checked:
		p.Headline = fmt.Sprintf("All is well: %s, and all %d batches that were checked came back as they were loaded.", data, r.Verify.Batches)
	default:
		p.Headline = data + "; nothing was checked."
	}
	if busy := r.Busy(); busy != "" && p.Level == page.Good {
		p.Level, p.Headline = page.Warn, p.Headline+" But "+busy+"."
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
	for _, h := range r.Held {
		p.Held = append(p.Held, page.Pair{Name: h.Space, Value: h.Text})
	}
	for i, ph := range r.Phases {
		one := page.Phase{Name: ph.Name, Seconds: ph.Seconds}
		cutShort := p.Failed && i > 0 && i == len(r.Phases)-1 // what was loaded is known, and not what was worked on
		if ph.Name != drain && !cutShort {
			one.Bytes = r.Input.Bytes
		}
		p.Phases = append(p.Phases, one)
	}
	verified := fmt.Sprintf("%d batches", r.Verify.Batches)
	if wrong := r.Verify.Mismatches; wrong > 0 {
		verified = fmt.Sprintf("%d of %d", r.Verify.Batches-wrong, r.Verify.Batches)
	}
	p.Facts = []page.Pair{
		{Name: "time", Value: shortly(p.Seconds)}, {Name: "data", Value: size.Approx(r.Input.Bytes)}, {Name: "batches", Value: strconv.FormatInt(r.Input.Batches, 10)},
		{Name: "moved down", Value: size.Approx(down)}, {Name: "moved up", Value: size.Approx(up)}, {Name: "waits for room", Value: strconv.FormatInt(r.Waits.Count, 10)},
		{Name: "verified", Value: verified},
	}
	if r.CPUSeconds > 0 {
		p.Facts = append(p.Facts, page.Pair{Name: "processor time", Value: shortly(r.CPUSeconds)})
	}
	if t := r.RunTimes; len(r.Runs) > 1 {
		p.Facts = append(p.Facts, page.Pair{Name: fmt.Sprintf("median of %d runs", len(r.Runs)),
			Value: fmt.Sprintf("%s (%.1f %% spread)", shortly(t.MedianSeconds), 100*t.Spread)})
	}
	p.Settings = append(r.Config.settings(),
		setting("rows a batch", r.rowsPerBatch(p.Follows), "--rows-per-batch"), setting("seed", r.Config.Seed, "--seed"), setting("place", r.Config.Place, "--place"),
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
		says := fmt.Sprintf("%.0f %% of the limit", 100*r.Efficiency)
		if r.Inconclusive {
			says = "cannot be told from the limit"
		}
		by[edge].Groups = append(by[edge].Groups, page.Group{Name: name, Text: fmt.Sprintf("%s, which varies by %.0f %%", says, 100*r.Noise), Bars: []page.Bar{
			{Name: "Spillway", Value: r.GiBPerS}, {Name: r.LimitOf, Value: r.LimitGiBPerS, Other: true},
		}})
		p.Figures = append(p.Figures, page.Figure{
			Name: edge + ", " + name, Value: r.GiBPerS, Unit: "GiB/s", Noise: max(r.Noise, r.CV),
			Share: r.Efficiency, ShareNoise: r.Noise, ShareOf: "of the limit", Limit: r.LimitGiBPerS, LimitOf: "The machine's own speed of " + r.limit(),
		})
	}
	for _, edge := range order {
		p.Bars = append(p.Bars, *by[edge])
	}
	p.Headline = fmt.Sprintf("Of %d rows %d reach 90 %% of the machine's own limit or more, and %d cannot be told from it.", len(b.Rows), near, unclear)
	if slowest != nil {
		p.Headline += fmt.Sprintf(" The lowest efficiency is %.2f: %s → %s with batches of %s.", slowest.Efficiency, slowest.From, slowest.To, size.Format(slowest.Bytes))
	}
	if failed > 0 {
		p.Level = page.Warn
		p.Headline += fmt.Sprintf(" %d rows were not measured.", failed)
	}
	p.Facts = []page.Pair{{Name: "rows", Value: strconv.Itoa(len(b.Rows))}, {Name: "pairs a row", Value: strconv.Itoa(b.Config.Pairs)}, {Name: "moved", Value: size.Approx(b.Config.PlannedBytes)}, {Name: "time", Value: shortly(b.WallSeconds)}}
	p.Settings = append(b.Config.settings(), setting("extent", b.Config.Extent, "--thorough"), setting("pairs", b.Config.Pairs, "--pairs"), setting("sizes", sizes(b.Config.Sizes), "--sizes"), setting("moves at once", numbersOf(b.Config.Threads), "--threads"), setting("seed", b.Config.Seed, "--seed"))
	return p
}

func sizes(all []int64) string {
	texts := make([]string, len(all))
	for i, n := range all {
		texts[i] = size.Format(n)
	}
	return strings.Join(texts, ", ")
}

func numbersOf(all []int) string {
	return strings.Trim(strings.Join(strings.Fields(fmt.Sprint(all)), ", "), "[]")
}

// limit says what the row's limit is the speed of.
func (r BandwidthRow) limit() string {
	switch {
	case r.BothWays:
		return "moving both ways between " + r.From + " and " + r.To
	case rank(r.To) == rank("disk:0"):
		return "writing to " + r.To
	case rank(r.From) == rank("disk:0"):
		return "reading from " + r.From
	case r.LimitOf == "memmove":
		return "copying memory"
	}
	return "copying from " + r.From + " to " + r.To
}

func (c *Compare) run() page.Run {
	p := page.Run{Name: "compare", Seconds: c.WallSeconds, Level: page.Good, Input: c.Input.sourced(), Verified: page.Verified(c.Verify)}
	word := func(ratio, least, most float64) string {
		switch {
		case least <= 1 && most >= 1 && len(c.Samples) > 1:
			return fmt.Sprintf("about as fast as %s (%.2f to %.2f times)", c.Peer.Name, least, most)
		case ratio >= 1:
			return fmt.Sprintf("%.1f times as fast as %s", ratio, c.Peer.Name)
		}
		p.Level = page.Warn
		return fmt.Sprintf("%.1f times slower than %s", 1/ratio, c.Peer.Name)
	}
	p.Headline = fmt.Sprintf("With the same %s of memory Spillway wrote %s, and read %s.", size.Approx(c.Config.HostMemoryBytes),
		word(c.Ratio.Write, c.Ratio.WriteMin, c.Ratio.WriteMax), word(c.Ratio.Read, c.Ratio.ReadMin, c.Ratio.ReadMax))
	for _, way := range []struct {
		name                        string
		ours, rewritten, peer, warm float64
		ratio, least, most          float64
	}{
		{"Writing", c.Ours.WriteGiBPerS, c.Ours.Rewritten.WriteGiBPerS, c.Peer.WriteGiBPerS, c.Peer.Warm.WriteGiBPerS, c.Ratio.Write, c.Ratio.WriteMin, c.Ratio.WriteMax},
		{"Reading", c.Ours.ReadGiBPerS, c.Ours.Rewritten.ReadGiBPerS, c.Peer.ReadGiBPerS, c.Peer.Warm.ReadGiBPerS, c.Ratio.Read, c.Ratio.ReadMin, c.Ratio.ReadMax},
	} {
		p.Bars = append(p.Bars, page.Bars{Title: way.name, Unit: "GiB/s", Groups: []page.Group{
			{Name: "to and from the disk", Bars: []page.Bar{{Name: "Spillway", Value: way.ours}, {Name: c.Peer.Name, Value: way.peer, Other: true}}},
			{Name: "in room used before; the peer in its page cache", Bars: []page.Bar{{Name: "Spillway", Value: way.rewritten}, {Name: c.Peer.Name + ", warm", Value: way.warm, Other: true}}},
		}})
		p.Figures = append(p.Figures, page.Figure{
			Name: way.name, Value: way.ours, Unit: "GiB/s", Share: way.ratio, ShareNoise: max(0, way.most-way.least) / 2 / way.ratio,
			ShareOf: "of the speed of " + c.Peer.Name, Limit: way.peer, LimitOf: "The speed of " + c.Peer.Name + " in " + strings.ToLower(way.name),
		})
	}
	p.Facts = []page.Pair{
		{Name: "data", Value: size.Approx(c.Input.Bytes)}, {Name: "write ratio", Value: fmt.Sprintf("%.2f (%.2f–\u2060%.2f)", c.Ratio.Write, c.Ratio.WriteMin, c.Ratio.WriteMax)},
		{Name: "read ratio", Value: fmt.Sprintf("%.2f (%.2f–\u2060%.2f)", c.Ratio.Read, c.Ratio.ReadMin, c.Ratio.ReadMax)}, {Name: "rounds", Value: strconv.Itoa(c.Config.Rounds)}, {Name: "time", Value: shortly(c.WallSeconds)},
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
func CommandOf(d Measured) string { return d.header().Command }

// FailureOf returns why what a document is of failed; empty: it did not.
func FailureOf(d Measured) string {
	if r, ok := d.(*Run); ok {
		return r.Error
	}
	return ""
}

// NotesOf returns the notes that a stored document still has: the warnings that its command noted.
func NotesOf(d Measured) (notes []string) {
	for _, w := range d.header().Warnings {
		notes = append(notes, w.String())
	}
	if r, ok := d.(*Run); ok && r.Busy() != "" {
		notes = append(notes, r.Busy())
	}
	return notes
}

// PageOfTwo shows what differs between two documents of one command, A and B, in words.
func PageOfTwo(names []string, a, b Measured) *Page {
	p := new(Page)
	p.linef("spillbench report: A is %s, B is %s, both of %s", names[0], names[1], CommandOf(a))
	p.linef("")
	s := &sheet{columns: []column{{head: "about", key: "about"}, {head: "B is", key: "b_is"}, {head: "what differs", key: "text"}}}
	was, is := PageOf(a), PageOf(b)
	for _, d := range page.Differ(&was, &is) {
		verdict := "better"
		if d.Plain {
			verdict = ""
		} else if d.Worse {
			verdict = "worse"
		}
		s.add(d.About, verdict, d.Text)
	}
	if len(s.rows) == 0 {
		p.linef("nothing differs by more than two equal runs do")
		p.parts = append(p.parts, part{sheet: s, only: programs}) // its keys
		return p
	}
	p.table(s)
	return p
}
