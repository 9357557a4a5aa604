package report

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

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

// table aligns rows of cells. The first column is to the left, as names are.
func table(w io.Writer, rows [][]string) {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		fmt.Fprintf(tw, "  %s\n", strings.Join(r, "\t"))
	}
	_ = tw.Flush() // reports what w did, which the caller's own writes will too
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

// Print writes the summary of a run for people. notes are lines of their own.
func (r *Run) Print(w io.Writer, notes []string) {
	fmt.Fprintf(w, "spillbench run: %s\n", r.Env.line())
	fmt.Fprintf(w, "%s of %s in %d batches", size.Approx(r.Input.Bytes), strings.Join(r.Input.Sources, ", "), r.Input.Batches)
	fmt.Fprintf(w, " (%d rows), %d workers, policy %s, codec %s,%s placed in the GPU: %s\n\n", r.Input.Rows, r.Config.Workers, r.Config.Policy, r.Config.Codec, onDisk(r.Config.Encrypt), placing(r.Config.Place))

	rows := [][]string{{"phase", "seconds", "GiB/s"}}
	for _, p := range r.Phases {
		rate := ""
		if p.Name != "drain" {
			rate = fmt.Sprintf("%.2f", Rate(r.Input.Bytes, p.Seconds))
		}
		rows = append(rows, []string{p.Name, fmt.Sprintf("%.3f", p.Seconds), rate})
	}
	table(w, append(rows, []string{"all", fmt.Sprintf("%.3f", r.WallSeconds), ""}))

	fmt.Fprintln(w)
	rows = [][]string{{"space", "backend", "capacity", "peak", "at the end"}}
	for _, s := range r.Spaces {
		rows = append(rows, []string{s.ID, s.Backend, size.Approx(s.CapacityBytes), size.Approx(s.PeakBytes), size.Approx(s.EndBytes)})
	}
	table(w, rows)

	if len(r.Edges) > 0 {
		fmt.Fprintln(w)
		table(w, edgeRows(r.Edges))
	}
	fmt.Fprintf(w, "\nwaits for room: %d", r.Waits.Count)
	if r.Waits.Count > 0 {
		fmt.Fprintf(w, ", half within %s, 99 %% within %s, the longest %s", duration(r.Waits.P50), duration(r.Waits.P99), duration(r.Waits.Max))
	}
	fmt.Fprintln(w)
	for _, n := range notes {
		fmt.Fprintf(w, "note: %s\n", n)
	}
	switch {
	case !r.Verify.Checked:
		fmt.Fprintln(w, "nothing was checked: there were no passes or no batches")
	case r.Verify.Mismatches == 0:
		fmt.Fprintf(w, "verified: all %d digests are those of what was loaded\n", r.Verify.Batches)
	default:
		fmt.Fprintf(w, "FAILED: %d of %d digests are not those of what was loaded\n", r.Verify.Mismatches, r.Verify.Batches)
	}
}

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

// edgeRows has a column for each reason that moved anything, one for what had copies, and three
// for what was moved or copied ahead.
func edgeRows(edges []Edge) [][]string {
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
	head := []string{"from", "to", "batches", "bytes", "seconds", "GiB/s"}
	for _, r := range reasons {
		head = append(head, "for "+r)
	}
	if copies {
		head = append(head, "on a copy")
	}
	if ahead {
		head = append(head, "ahead", "used", "in vain")
	}
	rows := [][]string{head}
	for _, e := range edges {
		row := []string{e.From, e.To, fmt.Sprint(e.Batches), size.Approx(e.Bytes), fmt.Sprintf("%.3f", e.Seconds), fmt.Sprintf("%.2f", e.GiBPerS)}
		for _, r := range reasons {
			row = append(row, nonzero(e.ByReason[r]))
		}
		if copies {
			row = append(row, nonzero(e.Unmoved))
		}
		if ahead {
			row = append(row, nonzero(e.Ahead), nonzero(e.AheadUsed), nonzero(e.AheadInVain))
		}
		rows = append(rows, row)
	}
	return rows
}

func nonzero(bytes int64) string {
	if bytes == 0 {
		return ""
	}
	return size.Approx(bytes)
}

// Print writes what verify found for people.
func (v *Verify) Print(w io.Writer, notes []string) {
	fmt.Fprintf(w, "spillbench verify: %s\n\n", v.Env.line())
	rows := [][]string{{"file", "batches", "edges", "differences", ""}}
	batches, sound := int64(0), true
	for _, f := range v.Files {
		batches += f.Batches
		sound = sound && f.Mismatches == 0 && f.Error == ""
		rows = append(rows, []string{f.Path, fmt.Sprint(f.Batches), fmt.Sprint(f.Edges), fmt.Sprint(f.Mismatches), f.Error})
	}
	table(w, rows)
	for _, n := range notes {
		fmt.Fprintf(w, "note: %s\n", n)
	}
	switch {
	case !sound:
		fmt.Fprintln(w, "FAILED: the last column says why")
	case batches == 0:
		fmt.Fprintln(w, "nothing was verified: there were no batches")
	default:
		fmt.Fprintf(w, "verified: all %d batches are the same after a move along each edge and back\n", batches)
	}
}

// Print writes the topology for people.
func (t *Topo) Print(w io.Writer) { fmt.Fprint(w, t.Topology) }

// Print writes what reserve measured for people.
func (r *Reserve) Print(w io.Writer) {
	fmt.Fprintf(w, "spillbench reserve: %s\n\n", r.Env.line())
	table(w, [][]string{
		{"one goroutine", "ns", "allocations"},
		{"manager", fmt.Sprintf("%.1f", r.UncontendedNs), fmt.Sprintf("%.2f", r.AllocsPerOp)},
		{"semaphore", fmt.Sprintf("%.1f", r.SemaphoreUncontendedNs), ""},
	})
	fmt.Fprintln(w)
	rows := [][]string{{"room for", "goroutines", "million/s", "semaphore", "ratio", "from", "to"}}
	for _, c := range r.Contended {
		rows = append(rows, []string{
			c.Scenario, fmt.Sprint(c.Goroutines), fmt.Sprintf("%.2f", c.OpsPerS/1e6), fmt.Sprintf("%.2f", c.SemaphoreOpsPerS/1e6),
			fmt.Sprintf("%.2f", c.Ratio), fmt.Sprintf("%.2f", c.RatioMin), fmt.Sprintf("%.2f", c.RatioMax),
		})
	}
	table(w, rows)
	fmt.Fprintln(w)
	rows = [][]string{{"waiters", "ns a release", "semaphore", "ns a turn", "semaphore"}}
	for _, c := range r.Waiters {
		rows = append(rows, []string{fmt.Sprint(c.Waiters), fmt.Sprintf("%.0f", c.NsPerRelease), fmt.Sprintf("%.0f", c.SemaphoreNsPerRelease),
			fmt.Sprintf("%.0f", c.NsPerTurn), fmt.Sprintf("%.0f", c.SemaphoreNsPerTurn)})
	}
	table(w, rows)
	fmt.Fprintf(w, "\n%d pairs of rounds of %s, %s a request; ratios are the manager's rate by the semaphore's\n",
		r.Config.Rounds, duration(r.Config.RoundSeconds), size.Approx(r.Config.UnitBytes))
}
