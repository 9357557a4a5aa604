package report

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/page"
	"github.com/spillway-db/spillway/internal/size"
)

const gib = 1 << 30

// Rate returns GiB/s, 0 where no time passed.
func Rate(bytes int64, seconds float64) float64 {
	if seconds <= 0 {
		return 0
	}
	return float64(bytes) / gib / seconds
}

// line describes the machine and what is spilled to.
func (e Env) line() string {
	io := "buffered I/O"
	if e.DirectIO {
		io = "direct I/O"
	}
	return fmt.Sprintf("%s; %s, %s; %s", e.processors(), orUnknown(e.FileSystem, "unknown file system"), io, e.Kernel)
}

// lineWithoutDisk describes the machine for commands that spill nothing.
func (e Env) lineWithoutDisk() string { return e.processors() + "; " + e.Kernel }

// processors describes CPU, memory and GPU.
func (e Env) processors() string {
	gpu := e.GPU
	switch gpu {
	case "":
		gpu = "no GPU"
	case simulated:
		gpu = "simulated GPU (sim: no figure here is a real GPU's)"
	}
	return fmt.Sprintf("%s, %d cores, %s; %s", orUnknown(e.CPU, "unknown CPU"), e.Cores, size.Approx(e.Memory), gpu)
}

func orUnknown(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// Page shows a run. notes are lines of their own.
func (r *Run) Page(notes []string) *Page {
	p := new(Page)
	p.linef("spillbench run: %s", r.Env.line())
	p.linef("%s of %s in %d batches (%d rows), %d workers, policy %s, codec %s,%s placed in the GPU: %s", size.Approx(r.Input.Bytes), strings.Join(r.Input.Sources, ", "), r.Input.Batches,
		r.Input.Rows, r.Config.Workers, r.Config.Policy, r.Config.Codec, onDisk(r.Config.Encrypt), placing(r.Config.Place))
	p.linef("")
	phases := &sheet{columns: []column{{head: "phase", key: "name"}, {head: "seconds", key: "seconds"}, {head: "GiB/s", key: "gib_per_s"}}}
	for _, f := range r.Phases {
		if f.Name == drain {
			phases.add(f.Name, three(f.Seconds))
		} else {
			phases.add(f.Name, three(f.Seconds), two(Rate(r.Input.Bytes, f.Seconds)))
		}
	}
	phases.add("all", three(r.WallSeconds))
	p.table(phases)
	r.showRuns(p)

	p.linef("")
	spaces := &sheet{columns: []column{{head: "space", key: "id"}, {head: "backend", key: "backend"}, {head: "capacity", key: "capacity_bytes"}, {head: "peak", key: "peak_bytes"}, {head: "at the end", key: "end_bytes"}}}
	for _, s := range r.Spaces {
		spaces.add(s.ID, s.Backend, approx(s.CapacityBytes), approx(s.PeakBytes), approx(s.EndBytes))
	}
	p.table(spaces)

	if len(r.Edges) > 0 {
		p.linef("")
		p.table(edgeSheet(r.Edges))
	} else if r.Input.Batches > 0 {
		p.linef("nothing was moved: the input fits where it was loaded (--gpu-memory makes that smaller)")
	}
	p.linef("")
	waits := ""
	if r.Waits.Count > 0 {
		waits = fmt.Sprintf(", half within %s, 99 %% within %s", duration(r.Waits.P50), duration(r.Waits.P99))
		if r.Waits.P999 > 0 { // documents of older programs do not have it
			waits += ", 99.9 % within " + duration(r.Waits.P999).String()
		}
		waits += ", the longest " + duration(r.Waits.Max).String()
	}
	p.linef("waits for room: %d%s", r.Waits.Count, waits)
	if r.Admission != nil {
		p.linef("%s", r.Admission.line())
	}
	if r.CPUSeconds > 0 {
		p.linef("processor time: %.3f s in %.3f s", r.CPUSeconds, r.WallSeconds)
	}
	p.notes(notes)
	switch {
	case r.Error != "":
		for _, h := range r.Held {
			p.linef("in %s %s", h.Space, h.Text)
		}
		p.linef("FAILED: %s", r.Error)
	case !r.Verify.Checked:
		p.linef("nothing was checked: there were no passes or no batches")
	case r.Verify.Mismatches == 0:
		p.linef("verified: all %d digests are those of what was loaded", r.Verify.Batches)
	default:
		p.linef("FAILED: %s", page.Verified(r.Verify).Wrong())
	}
	return p
}

// drain is the phase of a run that drops the batches. It has no rate.
const drain = "drain"

func onDisk(encrypt bool) string {
	if encrypt {
		return " encrypted on disk,"
	}
	return ""
}

func placing(place string) string {
	if place == "fits" {
		return "while it has room"
	}
	return "always"
}

func duration(seconds float64) time.Duration {
	d := time.Duration(seconds * float64(time.Second))
	if d >= time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Microsecond)
}

// edgeSheet has a column for each reason that moved anything, one for what had copies, and three
// for what was moved or copied ahead.
func edgeSheet(edges []Edge) *sheet {
	var reasons []string
	copies, ahead := false, false
	for _, e := range edges {
		copies, ahead = copies || e.Copies > 0, ahead || e.Ahead > 0
		for r := range e.ByReason {
			if !slices.Contains(reasons, r) {
				reasons = append(reasons, r)
			}
		}
	}
	slices.Sort(reasons)
	s := &sheet{columns: []column{{head: "from", key: "from"}, {head: "to", key: "to"}, {head: "batches", key: "batches"}, {head: "bytes", key: "bytes"}, {head: "seconds", key: "seconds"}, {head: "GiB/s", key: "gib_per_s"}}}
	for _, r := range reasons {
		s.columns = append(s.columns, column{head: "for " + r, key: "by_reason_" + r})
	}
	if copies {
		s.columns = append(s.columns, column{head: "on a copy", key: "unmoved_bytes"})
	}
	if ahead {
		s.columns = append(s.columns, column{head: "ahead", key: "ahead_bytes"}, column{head: "used", key: "ahead_used_bytes"}, column{head: "in vain", key: "ahead_in_vain_bytes"})
	}
	for _, e := range edges {
		row := []any{e.From, e.To, e.Batches, approx(e.Bytes), three(e.Seconds), two(e.GiBPerS)}
		for _, r := range reasons {
			row = append(row, some(e.ByReason[r]))
		}
		if copies {
			row = append(row, some(e.Unmoved))
		}
		if ahead {
			row = append(row, some(e.Ahead), some(e.AheadUsed), some(e.AheadInVain))
		}
		s.add(row...)
	}
	return s
}

// some is a number of bytes that people do not see if it is 0.
type some int64

func (n some) String() string {
	if n == 0 {
		return ""
	}
	return size.Approx(int64(n))
}

// Page shows what verify found. notes are lines of their own.
func (v *Verify) Page(notes []string) *Page {
	p := new(Page)
	p.linef("spillbench verify: %s", v.Env.line())
	p.linef("")
	files := &sheet{columns: []column{{head: "file", key: "path"}, {head: "batches", key: "batches"}, {head: "edges", key: "edges"}, {head: "differences", key: "mismatches"}, {key: "error"}}}
	batches, sound := int64(0), true
	for _, f := range v.Files {
		batches += f.Batches
		sound = sound && f.Mismatches == 0 && f.Error == ""
		files.add(f.Path, f.Batches, f.Edges, f.Mismatches, f.Error)
	}
	p.table(files)
	p.notes(notes)
	switch {
	case !sound:
		p.linef("FAILED: the last column says why")
	case batches == 0:
		p.linef("nothing was verified: there were no batches")
	default:
		p.linef("verified: all %d batches are the same after a move along each edge and back", batches)
	}
	return p
}
