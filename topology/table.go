package topology

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/tabular"
)

// String returns the topology as a table for people, of all that was found and with the warnings
// last. The table may change from version to version: for programs there is JSON.
func (t *Topology) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %d CPUs online\n", cmp.Or(printable(t.CPU.Model), "CPU of an unknown model"),
		len(t.CPU.Online))
	fmt.Fprintf(&b, "%s of memory, %s available, %s of swap\n",
		bytesOf(t.Memory.TotalBytes), bytesOf(t.Memory.AvailableBytes), size.Approx(t.Memory.SwapBytes))

	// The first row of the tables of devices has the headings.
	nodes := tabular.Rows{{"node", "cpus", "memory", "free", "distances"}}
	for _, n := range t.Nodes {
		nodes.Add(n.ID, n.CPUs, bytesOf(n.MemoryBytes), bytesOf(n.FreeBytes),
			strings.Trim(fmt.Sprint(n.Distances), "[]"))
	}
	section(&b, "NUMA nodes", nodes)

	gpus := tabular.Rows{{"gpu", "name", "pci address", "node", "cpus", "memory", "free", "link", "driver"}}
	for _, g := range t.GPUs {
		link := ""
		// One of the two alone says nothing about the speed.
		if g.PCIeGeneration > 0 && g.PCIeWidth > 0 {
			link = fmt.Sprintf("PCIe %d x%d", g.PCIeGeneration, g.PCIeWidth)
		}
		gpus.Add(g.Index, cmp.Or(shorten(g.Name), g.DeviceID), g.PCIAddress, nodeName(g.Node), g.CPUs,
			bytesOf(g.MemoryBytes), bytesOf(g.FreeBytes), link, g.Driver)
		for _, m := range g.MIG {
			// MIG instances are in rows of their own below their GPU.
			gpus.Add("", shorten(m.Name), m.UUID, "", "", bytesOf(m.MemoryBytes), bytesOf(m.FreeBytes), "", "")
		}
	}
	section(&b, "GPUs", gpus)
	// A user who misses a GPU should see why.
	if t.Limits.HiddenGPUs > 0 {
		fmt.Fprintf(&b, "  %d hidden by CUDA_VISIBLE_DEVICES=%q\n", t.Limits.HiddenGPUs,
			printable(t.Limits.VisibleDevices))
	}

	nics := tabular.Rows{{"nic", "port", "state", "link", "rate", "node", "pci address", "interfaces", "addresses"}}
	for _, n := range t.NICs {
		// A card whose ports are not known still has a row.
		if len(n.Ports) == 0 {
			nics.Add(n.Name, "", "", "", "", nodeName(n.Node), n.PCIAddress, "", "")
		}
		for _, p := range n.Ports {
			nics.Add(n.Name, p.Number, p.State, p.LinkLayer, p.Rate, nodeName(n.Node), n.PCIAddress,
				strings.Join(p.Interfaces, ", "), strings.Join(p.Addresses, ", "))
		}
	}
	if len(t.NICs) > 0 { // most machines have none that does RDMA
		section(&b, "NICs", nics)
	}

	disks := tabular.Rows{{"disk", "kind", "size", "node", "pci address", "model", "mounted at"}}
	for _, d := range t.Disks {
		var points []string
		for _, m := range d.Mounts {
			points = append(points, m.Point+" ("+m.FileSystem+")")
		}
		disks.Add(d.Name, d.Kind, bytesOf(d.SizeBytes), nodeName(d.Node), d.PCIAddress, shorten(d.Model),
			strings.Join(points, ", "))
	}
	section(&b, "Disks", disks)
	if len(t.GPUs)+len(t.NICs) > 0 { // else there are only disks
		b.WriteString(t.Matrix().String())
	}

	var limits tabular.Rows
	limits.Add("memory", bytesOf(t.Limits.MemoryBytes), t.Limits.MemorySource)
	limits.Add("memory nodes", t.Limits.MemoryNodes, "")
	cpus := ""
	if t.Limits.CPUs > 0 {
		cpus = strconv.Itoa(t.Limits.CPUs)
	}
	limits.Add("cpus", cpus, t.Limits.CPUSource)
	limits.Add("allowed cpus", t.CPU.Allowed, "")
	if q := t.Limits.CPUQuota; q > 0 {
		limits.Add("cpu quota", strconv.FormatFloat(q, 'g', 4, 64), "")
	}
	if v := t.Limits.CgroupVersion; v > 0 {
		limits.Add("cgroup", fmt.Sprintf("version %d", v), t.Limits.Cgroup)
	}
	section(&b, "Limits of this process", limits)

	if len(t.Warnings) > 0 {
		b.WriteString("\nWarnings\n")
	}
	for _, w := range t.Warnings {
		fmt.Fprintf(&b, "  %s\n", printable(w.What))
	}
	return b.String()
}

// section prints rows below a title, or "none" if there is only the row of headings. Texts are made
// printable here once more, because a Topology may come from JSON.
func section(b *strings.Builder, title string, rows tabular.Rows) {
	fmt.Fprintf(b, "\n%s\n", title)
	if len(rows) == 1 {
		b.WriteString("  none\n")
		return
	}
	// An empty cell would look like a missing column; the last one may be empty, because nothing
	// follows.
	for _, cells := range rows {
		for i := range cells {
			if cells[i] = printable(cells[i]); cells[i] == "" && i < len(cells)-1 {
				cells[i] = "-"
			}
		}
	}
	rows.Write(b, "  ")
}

// shorten cuts a name after 40 characters, so that one long name does not push a table's other
// columns away.
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

// nodeName prints the number of a node; the empty text, which section prints as "-", is for
// Unknown.
func nodeName(n int) string {
	if n == Unknown {
		return ""
	}
	return strconv.Itoa(n)
}
