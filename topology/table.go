package topology

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/procfs"
	"github.com/spillway-db/spillway/internal/size"
)

// String returns the topology as a table for people. What it prints may change
// from version to version: for programs there is JSON.
func (t *Topology) String() string {
	var b strings.Builder
	t.writeMachine(&b)
	t.writeNodes(&b)
	t.writeGPUs(&b)
	t.writeHidden(&b)
	t.writeNICs(&b)
	t.writeDisks(&b)
	if len(t.GPUs)+len(t.NICs) > 0 { // else there are but disks
		b.WriteString(t.Matrix().String())
	}
	t.writeLimits(&b)
	writeWarnings(&b, t.Warnings)
	return b.String()
}

// table aligns the columns of what write prints into it.
func table(w io.Writer, title string, write func(row func(cells ...string))) {
	fmt.Fprintf(w, "\n%s\n", title)
	var b strings.Builder
	tw := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	write(func(cells ...string) {
		for i := range cells {
			if cells[i] = procfs.Printable(cells[i]); cells[i] == "" && i < len(cells)-1 {
				cells[i] = "-"
			}
		}
		fmt.Fprintf(tw, "  %s\n", strings.Join(cells, "\t"))
	})
	_ = tw.Flush() // into memory
	for line := range strings.Lines(b.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
}

// shorten keeps one long name from pushing a table's other columns away.
func shorten(s string) string {
	const most = 40
	if r := []rune(s); len(r) > most {
		return string(r[:most-1]) + "…"
	}
	return s
}

func (t *Topology) writeMachine(w io.Writer) {
	fmt.Fprintf(w, "%s, %d CPUs online\n", cmp.Or(procfs.Printable(t.CPU.Model), "CPU of an unknown model"), len(t.CPU.Online))
	fmt.Fprintf(w, "%s of memory, %s available, %s of swap\n",
		bytesOf(t.Memory.TotalBytes), bytesOf(t.Memory.AvailableBytes), size.Approx(t.Memory.SwapBytes))
}

func (t *Topology) writeNodes(w io.Writer) {
	table(w, "NUMA nodes", func(row func(...string)) {
		row("node", "cpus", "memory", "free", "distances")
		for _, n := range t.Nodes {
			row(strconv.Itoa(n.ID), n.CPUs.String(), bytesOf(n.MemoryBytes), bytesOf(n.FreeBytes),
				strings.Trim(fmt.Sprint(n.Distances), "[]"))
		}
	})
}

func (t *Topology) writeGPUs(w io.Writer) {
	if len(t.GPUs) == 0 {
		fmt.Fprintf(w, "\nGPUs\n  none\n")
		return
	}
	table(w, "GPUs", func(row func(...string)) {
		row("gpu", "name", "pci address", "node", "cpus", "memory", "free", "link", "driver")
		for _, g := range t.GPUs {
			row(strconv.Itoa(g.Index), cmp.Or(shorten(g.Name), g.DeviceID), g.PCIAddress, nodeName(g.Node), g.CPUs.String(),
				bytesOf(g.MemoryBytes), bytesOf(g.FreeBytes), linkOf(g), g.Driver)
			for _, m := range g.MIG {
				row("", shorten(m.Name), m.UUID, "", "", bytesOf(m.MemoryBytes), bytesOf(m.FreeBytes), "", "")
			}
		}
	})
}

func (t *Topology) writeHidden(w io.Writer) {
	if t.Limits.HiddenGPUs > 0 {
		fmt.Fprintf(w, "  %d hidden by CUDA_VISIBLE_DEVICES=%s\n", t.Limits.HiddenGPUs, strconv.Quote(procfs.Printable(t.Limits.VisibleDevices)))
	}
}

func (t *Topology) writeNICs(w io.Writer) {
	if len(t.NICs) == 0 {
		return // most machines have none that does RDMA
	}
	table(w, "NICs", func(row func(...string)) {
		row("nic", "port", "state", "link", "rate", "node", "pci address", "interfaces", "addresses")
		for _, n := range t.NICs {
			if len(n.Ports) == 0 {
				row(n.Name, "", "", "", "", nodeName(n.Node), n.PCIAddress, "", "")
			}
			for _, p := range n.Ports {
				row(n.Name, strconv.Itoa(p.Number), p.State, p.LinkLayer, p.Rate, nodeName(n.Node), n.PCIAddress,
					strings.Join(p.Interfaces, ", "), strings.Join(p.Addresses, ", "))
			}
		}
	})
}

func (t *Topology) writeDisks(w io.Writer) {
	if len(t.Disks) == 0 {
		fmt.Fprintf(w, "\nDisks\n  none\n")
		return
	}
	table(w, "Disks", func(row func(...string)) {
		row("disk", "kind", "size", "node", "pci address", "model", "mounted at")
		for _, d := range t.Disks {
			var points []string
			for _, m := range d.Mounts {
				points = append(points, m.Point+" ("+m.FileSystem+")")
			}
			row(d.Name, string(d.Kind), bytesOf(d.SizeBytes), nodeName(d.Node), d.PCIAddress, shorten(d.Model), strings.Join(points, ", "))
		}
	})
}

func (t *Topology) writeLimits(w io.Writer) {
	table(w, "Limits of this process", func(row func(...string)) {
		row("memory", bytesOf(t.Limits.MemoryBytes), t.Limits.MemorySource)
		row("memory nodes", t.Limits.MemoryNodes.String(), "")
		cpus := strconv.Itoa(t.Limits.CPUs)
		if t.Limits.CPUs == 0 {
			cpus = ""
		}
		row("cpus", cpus, t.Limits.CPUSource)
		row("allowed cpus", t.CPU.Allowed.String(), "")
		if q := t.Limits.CPUQuota; q > 0 {
			row("cpu quota", strconv.FormatFloat(q, 'g', 4, 64), "")
		}
		if t.Limits.CgroupVersion > 0 {
			row("cgroup", fmt.Sprintf("version %d", t.Limits.CgroupVersion), t.Limits.Cgroup)
		}
	})
}

func writeWarnings(w io.Writer, warnings []diag.Warning) {
	if len(warnings) == 0 {
		return
	}
	fmt.Fprintf(w, "\nWarnings\n")
	for _, one := range warnings {
		fmt.Fprintf(w, "  %s\n", procfs.Printable(one.What))
	}
}

// String returns the location as text for people, in a few lines.
func (l Location) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", procfs.Printable(l.Dir), cmp.Or(procfs.Printable(l.FileSystem), "a file system that is not known"))
	if l.FreeBytes >= 0 {
		fmt.Fprintf(&b, ", %s of %s free", size.Approx(l.FreeBytes), size.Approx(l.TotalBytes))
	}
	if l.ReadOnly {
		b.WriteString(", read-only")
	}
	b.WriteString("\n")
	for _, d := range l.Disks {
		fmt.Fprintf(&b, "  %s, %s, node %s, %s\n", d.Name, d.Kind, cmp.Or(nodeName(d.Node), "unknown"), cmp.Or(shorten(d.Model), "model unknown"))
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

func linkOf(g GPU) string {
	if g.PCIeGeneration == 0 || g.PCIeWidth == 0 {
		return ""
	}
	return fmt.Sprintf("PCIe %d x%d", g.PCIeGeneration, g.PCIeWidth)
}
