package topology

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spillway-db/spillway/internal/procfs"
	"github.com/spillway-db/spillway/internal/size"
)

// String returns the topology as a table for people. The table may change
// from version to version: for programs there is JSON.
func (t *Topology) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d CPUs online\n", cmp.Or(procfs.Printable(t.CPU.Model), "CPU of an unknown model"),
		len(t.CPU.Online))
	fmt.Fprintf(&b, "%s of memory, %s available, %s of swap\n",
		bytesOf(t.Memory.TotalBytes), bytesOf(t.Memory.AvailableBytes), size.Approx(t.Memory.SwapBytes))

	rows := [][]string{{"node", "cpus", "memory", "free", "distances"}}
	for _, n := range t.Nodes {
		rows = append(rows, []string{strconv.Itoa(n.ID), n.CPUs.String(), bytesOf(n.MemoryBytes), bytesOf(n.FreeBytes),
			strings.Trim(fmt.Sprint(n.Distances), "[]")})
	}
	table(&b, "NUMA nodes", rows)

	rows = [][]string{{"gpu", "name", "pci address", "node", "cpus", "memory", "free", "link", "driver"}}
	for _, g := range t.GPUs {
		link := ""
		if g.PCIeGeneration > 0 && g.PCIeWidth > 0 {
			link = fmt.Sprintf("PCIe %d x%d", g.PCIeGeneration, g.PCIeWidth)
		}
		rows = append(rows, []string{strconv.Itoa(g.Index), cmp.Or(shorten(g.Name), g.DeviceID), g.PCIAddress,
			nodeName(g.Node),
			g.CPUs.String(), bytesOf(g.MemoryBytes), bytesOf(g.FreeBytes), link, g.Driver})
		for _, m := range g.MIG {
			rows = append(rows, []string{"", shorten(m.Name), m.UUID, "", "", bytesOf(m.MemoryBytes),
				bytesOf(m.FreeBytes), "", ""})
		}
	}
	table(&b, "GPUs", rows)
	if t.Limits.HiddenGPUs > 0 {
		fmt.Fprintf(&b, "  %d hidden by CUDA_VISIBLE_DEVICES=%s\n", t.Limits.HiddenGPUs,
			strconv.Quote(procfs.Printable(t.Limits.VisibleDevices)))
	}

	rows = [][]string{{"nic", "port", "state", "link", "rate", "node", "pci address", "interfaces", "addresses"}}
	for _, n := range t.NICs {
		if len(n.Ports) == 0 {
			rows = append(rows, []string{n.Name, "", "", "", "", nodeName(n.Node), n.PCIAddress, "", ""})
		}
		for _, p := range n.Ports {
			rows = append(rows, []string{n.Name, strconv.Itoa(p.Number), p.State, p.LinkLayer, p.Rate, nodeName(n.Node),
				n.PCIAddress,
				strings.Join(p.Interfaces, ", "), strings.Join(p.Addresses, ", ")})
		}
	}
	if len(t.NICs) > 0 { // most machines have none that does RDMA
		table(&b, "NICs", rows)
	}

	rows = [][]string{{"disk", "kind", "size", "node", "pci address", "model", "mounted at"}}
	for _, d := range t.Disks {
		var points []string
		for _, m := range d.Mounts {
			points = append(points, m.Point+" ("+m.FileSystem+")")
		}
		rows = append(rows, []string{d.Name, string(d.Kind), bytesOf(d.SizeBytes), nodeName(d.Node), d.PCIAddress,
			shorten(d.Model),
			strings.Join(points, ", ")})
	}
	table(&b, "Disks", rows)
	if len(t.GPUs)+len(t.NICs) > 0 { // else there are only disks
		b.WriteString(t.Matrix().String())
	}

	cpus := ""
	if t.Limits.CPUs > 0 {
		cpus = strconv.Itoa(t.Limits.CPUs)
	}
	rows = [][]string{
		{"memory", bytesOf(t.Limits.MemoryBytes), t.Limits.MemorySource},
		{"memory nodes", t.Limits.MemoryNodes.String(), ""},
		{"cpus", cpus, t.Limits.CPUSource},
		{"allowed cpus", t.CPU.Allowed.String(), ""},
	}
	if q := t.Limits.CPUQuota; q > 0 {
		rows = append(rows, []string{"cpu quota", strconv.FormatFloat(q, 'g', 4, 64), ""})
	}
	if v := t.Limits.CgroupVersion; v > 0 {
		rows = append(rows, []string{"cgroup", fmt.Sprintf("version %d", v), t.Limits.Cgroup})
	}
	table(&b, "Limits of this process", rows)

	if len(t.Warnings) > 0 {
		b.WriteString("\nWarnings\n")
	}
	for _, w := range t.Warnings {
		fmt.Fprintf(&b, "  %s\n", procfs.Printable(w.What))
	}
	return b.String()
}

// table prints rows below a title with their columns aligned, or that there are none: a single row
// has the names of columns.
func table(b *strings.Builder, title string, rows [][]string) {
	fmt.Fprintf(b, "\n%s\n", title)
	if len(rows) == 1 {
		b.WriteString("  none\n")
		return
	}
	var aligned strings.Builder
	w := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', 0)
	for _, cells := range rows {
		for i := range cells {
			if cells[i] = procfs.Printable(cells[i]); cells[i] == "" && i < len(cells)-1 {
				cells[i] = "-"
			}
		}
		fmt.Fprintf(w, "  %s\n", strings.Join(cells, "\t"))
	}
	_ = w.Flush() // into memory
	for line := range strings.Lines(aligned.String()) {
		b.WriteString(strings.TrimRight(line, " \n") + "\n")
	}
}

// shorten keeps one long name from pushing a table's other columns away.
func shorten(s string) string {
	const maxRunes = 40
	if r := []rune(s); len(r) > maxRunes {
		return string(r[:maxRunes-1]) + "…"
	}
	return s
}

// String returns the location as text for people, in a few lines.
func (l Location) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", procfs.Printable(l.Dir), cmp.Or(procfs.Printable(l.FileSystem),
		"a file system that is not known"))
	if l.FreeBytes >= 0 {
		fmt.Fprintf(&b, ", %s of %s free", size.Approx(l.FreeBytes), size.Approx(l.TotalBytes))
	}
	if l.ReadOnly {
		b.WriteString(", read-only")
	}
	b.WriteString("\n")
	for _, d := range l.Disks {
		fmt.Fprintf(&b, "  %s, %s, node %s, %s\n", d.Name, d.Kind, cmp.Or(nodeName(d.Node), "unknown"),
			cmp.Or(shorten(d.Model), "model unknown"))
	}
	for _, w := range l.Warnings {
		fmt.Fprintf(&b, "  warning: %s\n", procfs.Printable(w.What))
	}
	return b.String()
}

// bytesOf prints a number of bytes, of which 0 is "not known".
func bytesOf(n int64) string {
	if n == 0 {
		return "?"
	}
	return size.Approx(n)
}

func nodeName(n int) string {
	if n == Unknown {
		return ""
	}
	return strconv.Itoa(n)
}
