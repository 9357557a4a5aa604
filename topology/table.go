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

	nodes := rows{{"node", "cpus", "memory", "free", "distances"}}
	for _, n := range t.Nodes {
		nodes.add(n.ID, n.CPUs, bytesOf(n.MemoryBytes), bytesOf(n.FreeBytes), strings.Trim(fmt.Sprint(n.Distances), "[]"))
	}
	nodes.write(&b, "NUMA nodes")

	gpus := rows{{"gpu", "name", "pci address", "node", "cpus", "memory", "free", "link", "driver"}}
	for _, g := range t.GPUs {
		link := ""
		if g.PCIeGeneration > 0 && g.PCIeWidth > 0 {
			link = fmt.Sprintf("PCIe %d x%d", g.PCIeGeneration, g.PCIeWidth)
		}
		gpus.add(g.Index, cmp.Or(shorten(g.Name), g.DeviceID), g.PCIAddress, nodeName(g.Node), g.CPUs,
			bytesOf(g.MemoryBytes), bytesOf(g.FreeBytes), link, g.Driver)
		for _, m := range g.MIG {
			gpus.add("", shorten(m.Name), m.UUID, "", "", bytesOf(m.MemoryBytes), bytesOf(m.FreeBytes), "", "")
		}
	}
	gpus.write(&b, "GPUs")
	if t.Limits.HiddenGPUs > 0 {
		fmt.Fprintf(&b, "  %d hidden by CUDA_VISIBLE_DEVICES=%q\n", t.Limits.HiddenGPUs,
			procfs.Printable(t.Limits.VisibleDevices))
	}

	nics := rows{{"nic", "port", "state", "link", "rate", "node", "pci address", "interfaces", "addresses"}}
	for _, n := range t.NICs {
		if len(n.Ports) == 0 {
			nics.add(n.Name, "", "", "", "", nodeName(n.Node), n.PCIAddress, "", "")
		}
		for _, p := range n.Ports {
			nics.add(n.Name, p.Number, p.State, p.LinkLayer, p.Rate, nodeName(n.Node), n.PCIAddress,
				strings.Join(p.Interfaces, ", "), strings.Join(p.Addresses, ", "))
		}
	}
	if len(t.NICs) > 0 { // most machines have none that does RDMA
		nics.write(&b, "NICs")
	}

	disks := rows{{"disk", "kind", "size", "node", "pci address", "model", "mounted at"}}
	for _, d := range t.Disks {
		var points []string
		for _, m := range d.Mounts {
			points = append(points, m.Point+" ("+m.FileSystem+")")
		}
		disks.add(d.Name, d.Kind, bytesOf(d.SizeBytes), nodeName(d.Node), d.PCIAddress, shorten(d.Model),
			strings.Join(points, ", "))
	}
	disks.write(&b, "Disks")
	if len(t.GPUs)+len(t.NICs) > 0 { // else there are only disks
		b.WriteString(t.Matrix().String())
	}

	var limits rows
	limits.add("memory", bytesOf(t.Limits.MemoryBytes), t.Limits.MemorySource)
	limits.add("memory nodes", t.Limits.MemoryNodes, "")
	cpus := ""
	if t.Limits.CPUs > 0 {
		cpus = strconv.Itoa(t.Limits.CPUs)
	}
	limits.add("cpus", cpus, t.Limits.CPUSource)
	limits.add("allowed cpus", t.CPU.Allowed, "")
	if q := t.Limits.CPUQuota; q > 0 {
		limits.add("cpu quota", strconv.FormatFloat(q, 'g', 4, 64), "")
	}
	if v := t.Limits.CgroupVersion; v > 0 {
		limits.add("cgroup", fmt.Sprintf("version %d", v), t.Limits.Cgroup)
	}
	limits.write(&b, "Limits of this process")

	if len(t.Warnings) > 0 {
		b.WriteString("\nWarnings\n")
	}
	for _, w := range t.Warnings {
		fmt.Fprintf(&b, "  %s\n", procfs.Printable(w.What))
	}
	return b.String()
}

// rows are the lines of a table, in cells. The first line has the names of the columns.
type rows [][]string

func (r *rows) add(cells ...any) {
	line := make([]string, len(cells))
	for i, c := range cells {
		line[i] = fmt.Sprint(c)
	}
	*r = append(*r, line)
}

// write prints the rows below a title with their columns aligned, or that there are none.
func (r rows) write(b *strings.Builder, title string) {
	fmt.Fprintf(b, "\n%s\n", title)
	if len(r) == 1 {
		b.WriteString("  none\n")
		return
	}
	var aligned strings.Builder
	w := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', 0)
	for _, cells := range r {
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
