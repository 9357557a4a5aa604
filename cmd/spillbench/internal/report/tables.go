package report

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/topology"
)

// drain is the phase of a run that drops the batches. It has no rate.
const drain = "drain"

// Rate returns GiB/s, or 0 if no time passed.
func Rate(bytes int64, seconds float64) float64 {
	if seconds <= 0 {
		return 0
	}
	return float64(bytes) / (1 << 30) / seconds
}

// duration rounds seconds for people.
func duration(seconds float64) time.Duration {
	return time.Duration(seconds * float64(time.Second)).Round(time.Microsecond)
}

// String describes the machine, and its spill directories if there are some.
func (e Env) String() string {
	gpu := cmp.Or(e.GPU, "no GPU")
	if e.GPU == simulated {
		gpu = "simulated GPU (sim: no figure here is a real GPU's)"
	}
	disks := ""
	if e.FileSystem != "" {
		disks = fmt.Sprintf(" %s, direct I/O: %s;", e.FileSystem, yes(e.DirectIO))
	}
	return fmt.Sprintf("%s, %d cores, %s; %s;%s %s",
		cmp.Or(e.CPU, "unknown CPU"), e.Cores, size.Approx(e.Memory), gpu, disks, e.Kernel)
}

// phaseRow is a phase and its rate, which is nil for phases without one.
type phaseRow struct {
	Phase
	GiBPerS any `json:"gib_per_s"`
}

// runRow is one of several runs, with its number.
type runRow struct {
	Run int `json:"run"`
	Repetition
}

func (r *Run) print(p *printer) string {
	p.line("%s of %s in %d batches (%d rows), %d workers, policy %s, codec %s, encrypted on disk: %s, place %s",
		size.Approx(r.Input.Bytes), strings.Join(r.Input.Sources, ", "), r.Input.Batches, r.Input.Rows,
		r.Config.Workers, r.Config.Policy, r.Config.Codec, yes(r.Config.Encrypt), r.Config.Place)
	var phases []phaseRow
	for _, ph := range r.Phases {
		row := phaseRow{Phase: ph}
		if ph.Name != drain {
			row.GiBPerS = Rate(r.Input.Bytes, ph.Seconds)
		}
		phases = append(phases, row)
	}
	phases = append(phases, phaseRow{Phase: Phase{Name: "all", Seconds: r.WallSeconds}})
	p.table(phases, "phase=name", "seconds", "GiB/s=gib_per_s")
	if t := r.RunTimes; len(r.Runs) > 1 {
		var rows []runRow
		for i, one := range r.Runs {
			rows = append(rows, runRow{i + 1, one})
		}
		p.table(rows, "run", "seconds", "GiB/s=gib_per_s", "CPU seconds=cpu_seconds")
		p.line("%d runs after a warm-up: median %.3f s (%.3f GiB/s), %.3f s to %.3f s, a spread of %.1f %%",
			len(r.Runs), t.MedianSeconds, t.MedianGiBPerS, t.MinSeconds, t.MaxSeconds, 100*t.Spread)
		p.line("the phases are those of the median run; all else is of all runs, with the warm-up")
	}
	p.table(r.Spaces, "space=id", "backend", "capacity=capacity_bytes", "peak=peak_bytes", "at the end=end_bytes")
	p.edges(r.Edges)
	if len(r.Edges) == 0 && r.Input.Batches > 0 {
		p.line("nothing was moved: the input fits where it was loaded (--gpu-memory makes that smaller)")
	}
	rare := ""
	if w := r.Waits; w.P999 > 0 { // not in documents of older programs
		rare = fmt.Sprintf(" 99.9 %% within %s,", duration(w.P999))
	}
	p.line("waits for room: %d, half within %s, 99 %% within %s,%s the longest %s",
		r.Waits.Count, duration(r.Waits.P50), duration(r.Waits.P99), rare, duration(r.Waits.Max))
	if r.Admission != nil {
		p.line("%s", r.Admission)
	}
	if r.CPUSeconds > 0 {
		p.line("processor time: %.3f s in %.3f s", r.CPUSeconds, r.WallSeconds)
	}
	for _, h := range r.Held {
		p.line("in %s %s", h.Space, h.Text)
	}
	switch {
	case r.Error != "":
		return "FAILED: " + r.Error
	case !r.Verify.Checked:
		return "nothing was checked: there were no passes or no batches"
	case r.Verify.Mismatches > 0:
		return "FAILED: " + r.Verify.Wrong()
	}
	return fmt.Sprintf("verified: all %d digests are those of what was loaded", r.Verify.Batches)
}

// edges adds a table of edges, with a column for each reason that moved anything.
func (p *printer) edges(edges []Edge) {
	reasons := make(map[string]int64)
	for _, e := range edges {
		maps.Copy(reasons, e.ByReason)
	}
	columns := []string{"from", "to", "batches", "bytes", "seconds", "GiB/s=gib_per_s"}
	for _, r := range slices.Sorted(maps.Keys(reasons)) {
		columns = append(columns, "for "+r+"=by_reason_"+r)
	}
	p.table(edges, append(columns,
		"on a copy=unmoved_bytes", "ahead=ahead_bytes", "used=ahead_used_bytes", "in vain=ahead_in_vain_bytes")...)
}

func (v *Verify) print(p *printer) string {
	p.table(v.Files, "file=path", "batches", "edges", "differences=mismatches", "error")
	batches, sound := int64(0), true
	for _, f := range v.Files {
		batches += f.Batches
		sound = sound && f.Mismatches == 0 && f.Error == ""
	}
	switch {
	case !sound:
		return "FAILED: the last column names the reasons"
	case batches == 0:
		return "nothing was verified: there were no batches"
	}
	return fmt.Sprintf("verified: all %d batches are the same after a move along each edge and back", batches)
}

func (b *Bandwidth) print(p *printer) string {
	p.table(b.Rows, "from", "to", "batch=bytes", "moves=threads", "state", "GiB/s=gib_per_s",
		"limit=limit_gib_per_s", "efficiency", "noise", "cv", "limit of=limit_of", "inconclusive",
		"both ways=both_ways", "gain", "limit gain=limit_gain", "error")
	p.line("%d pairs a row, in %s; limits have a thread for each move; disk I/O is %s, on a file in the same state;",
		b.Config.Pairs, duration(b.WallSeconds), map[bool]string{true: "direct", false: "buffered"}[b.Env.DirectIO])
	p.line("efficiency is the median of Spillway's rate by the limit, pair by pair; " +
		"noise is how far the limit is from itself in the same rounds;")
	p.line("gain is how many times as fast both ways at once are as one after the other")
	unclear := 0
	for _, r := range b.Rows {
		if r.Inconclusive {
			unclear++
		}
	}
	if unclear > 0 {
		p.line("%d of %d rows are inconclusive: Spillway is no further from the limit than the limit from itself "+
			"(more --pairs, larger --sizes or an idle machine help)", unclear, len(b.Rows))
	}
	hint := ""
	if b.Config.Extent == "quick" {
		hint = "; --thorough measures larger batches, several moves at a time, and all spaces"
	}
	return fmt.Sprintf("%s: %s were moved%s", b.Config.Extent, size.Approx(b.Config.PlannedBytes), hint)
}

// sideRow is one side of a comparison. Read is nil if nothing was read.
type sideRow struct {
	Side  string  `json:"side"`
	Write float64 `json:"write_gib_per_s"`
	Read  any     `json:"read_gib_per_s"`
}

// sides returns the sides of Spillway, followed by the two of the peer.
func sides(peer string, ours OurRates, cold, warm Rates) []sideRow {
	return []sideRow{
		{"spillway", ours.WriteGiBPerS, ours.ReadGiBPerS},
		{"spillway, laid out", ours.PutWriteGiBPerS, nil},
		{"spillway, rewritten", ours.Rewritten.WriteGiBPerS, ours.Rewritten.ReadGiBPerS},
		{peer, cold.WriteGiBPerS, cold.ReadGiBPerS},
		{peer + ", warm", warm.WriteGiBPerS, warm.ReadGiBPerS},
	}
}

// ratioRow is how much faster Spillway was than the peer in writing or in reading.
type ratioRow struct {
	Of    string  `json:"of"`
	Ratio float64 `json:"ratio"`
	Min   float64 `json:"ratio_min"`
	Max   float64 `json:"ratio_max"`
}

func (r Ratios) rows() []ratioRow {
	return []ratioRow{{"write", r.Write, r.WriteMin, r.WriteMax}, {"read", r.Read, r.ReadMin, r.ReadMax}}
}

func (c *Compare) print(p *printer) string {
	p.line("%s of %s in %d batches (%d rows), through %s of memory; ours with codec %s, encrypted on disk: %s",
		size.Approx(c.Input.Bytes), strings.Join(c.Input.Sources, ", "), c.Input.Batches, c.Input.Rows,
		size.Approx(c.Config.HostMemoryBytes), c.Config.Codec, yes(c.Config.Encrypt))
	p.table(sides(c.Peer.Name, c.Ours, c.Peer.Rates, c.Peer.Warm),
		"side", "write GiB/s=write_gib_per_s", "read GiB/s=read_gib_per_s")
	p.table(c.Ratio.rows(), "spillway by the peer=of", "ratio", "from=ratio_min", "to=ratio_max")
	p.line("%d rounds; the peer's file is synced, and dropped from the page cache before it is read; warm: neither;",
		c.Config.Rounds)
	p.line("laid out: with laying the batches out in memory; rewritten: in room that was used before")
	return fmt.Sprintf("verified: %d batches of both sides are those of the input", c.Verify.Batches)
}

func (t *Trace) print(p *printer) string {
	for _, r := range t.Traces {
		p.line("%s: %d events%s", r.File, r.Events, map[bool]string{true: "; the end is missing"}[r.CutOff])
		rows := []outcomeRow{{r.Recorded, r.File, "recorded"}}
		for _, o := range r.Replays {
			rows = append(rows, outcomeRow{o, r.File, "replayed"})
		}
		p.table(rows, "=file", "outcome", "policy", "moved=bytes", "fetched=fetched_bytes", "seconds",
			"stalled=stalled_seconds", "accesses", "found", "error")
		if len(r.Replays) == 1 && r.Replays[0].Error == "" {
			p.edges(r.Replays[0].Edges)
			p.line("recorded:")
			p.edges(r.Recorded.Edges)
		}
	}
	return ""
}

type outcomeRow struct {
	Outcome
	File string `json:"file"`
	Name string `json:"outcome"`
}

func (q *Quota) print(p *printer) string {
	p.table([]Quota{*q}, "limit of GPU memory (a share is of all GPUs)=limit", "=limit_bytes", "set by=source",
		"oversubscription ratio=ratio", "each GPU counts as=physical_bytes", "ledger", "group")
	if q.Limit == "" {
		p.line("limit of GPU memory: none (SPILLWAY_GPU_MEMORY_LIMIT is not set)")
	}
	if q.Ledger == "" {
		return "ledger: none (SPILLWAY_GPU_QUOTA_DIR is not set): other processes are not asked"
	}
	p.table(q.Holders, "GPU=device", "group", "process=pid", "since=started", "quota", "holds=live", "peak",
		"files removed from the ledger=lost")
	if len(q.Holders) == 0 {
		return "no process has a lease"
	}
	return ""
}

type gpuRow struct {
	topology.GPU
	Link string `json:"pcie_link"`
}

type pathRow struct {
	From string        `json:"from"`
	To   string        `json:"to"`
	Path topology.Path `json:"path"`
}

// print shows the topology as it prints itself, or as tables.
func (t *Topo) print(p *printer) string {
	if p.format == Table {
		p.text.WriteString(t.Topology.String())
		return ""
	}
	var gpus []gpuRow
	for _, g := range t.Topology.GPUs {
		gpus = append(gpus, gpuRow{g, link(g)})
	}
	var paths []pathRow // each pair of devices once
	for i, from := range t.Paths.Devices {
		for j, to := range t.Paths.Devices[:i] {
			paths = append(paths, pathRow{to, from, t.Paths.Paths[i][j]})
		}
	}
	p.table(t.Topology.Nodes, "node=node=id", "cpus", "memory=memory_bytes", "free=free_bytes")
	p.table(gpus, "GPU=gpu=index", "name", "UUID=uuid", "PCI address=pci_address", "node",
		"memory=memory_bytes", "free=free_bytes", "link=pcie_link", "driver")
	p.table(t.Topology.NICs, "NIC=nic=name", "PCI address=pci_address", "node", "device")
	p.table(t.Topology.Disks, "disk=disk=name", "kind", "model", "size=size_bytes", "node", "mounted at=mounts")
	p.table(paths, "from", "to", "path")
	return ""
}

// Damage returns how many batches and other records are damaged.
func (d *Inspect) Damage() (n int) {
	for _, dir := range d.Directories {
		n += len(dir.Damaged)
		for _, b := range dir.Batches {
			if b.Error != "" {
				n++
			}
		}
	}
	return n
}

// persistedRow is a batch of inspect, with its operator and port as one text and the number of its columns.
type persistedRow struct {
	PersistedBatch
	Operator string `json:"operator"`
	Columns  int    `json:"columns"`
}

func (d *Inspect) print(p *printer) string {
	p.line("directory %s", d.Path)
	batches := 0
	for _, dir := range d.Directories {
		state := map[bool]string{false: "not in use", true: "in use by an engine: its batches may change"}
		p.line("%s, %s", dir.Path, state[dir.InUse])
		switch {
		case dir.Error != "":
			p.line("cannot be read: %s", dir.Error)
			continue
		case dir.Encrypted:
			p.line("encrypted: %d records of %s; their content can be read only with the key",
				dir.Records, size.Approx(dir.Bytes))
		default:
			p.line("%d batches and %d shared dictionaries of %s, in %s of files",
				len(dir.Batches), dir.Dictionaries, size.Approx(dir.Bytes), size.Approx(dir.FileBytes))
		}
		var rows []persistedRow
		for _, b := range dir.Batches {
			row := persistedRow{b, b.Operator, len(b.Columns)}
			if row.Operator != "" {
				row.Operator = fmt.Sprintf("%s:%d", b.Operator, b.Port)
			}
			rows = append(rows, row)
		}
		batches += len(rows)
		p.table(rows, "batch=id", "plan", "operator", "partition", "rows", "columns", "on disk=bytes",
			"image=image_bytes", "codec", "dictionaries", "error")
		for _, what := range dir.Damaged {
			p.line("damaged: %s", what)
		}
		if len(dir.Unlisted) > 0 {
			p.line("files that hold nothing that persists: %s", strings.Join(dir.Unlisted, ", "))
		}
	}
	switch n := d.Damage(); {
	case n > 0:
		return fmt.Sprintf("FAILED: %d entries are damaged", n)
	case d.Checksums:
		return fmt.Sprintf("%d batches, none damaged: all bytes are those that were written", batches)
	}
	return fmt.Sprintf("%d batches, no record damaged (--checksums compares the bytes, too)", batches)
}
