package topology

import (
	"cmp"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Path says what lies between two devices, in the words of nvidia-smi topo -m.
type Path string

// The paths, the nearest first. NVLink makes those between GPUs that are linked
// without PCI: NV1, NV12.
const (
	Self        Path = "X"    // the device itself
	PIX         Path = "PIX"  // at most one bridge on either side below the nearest one in common: one switch
	PXB         Path = "PXB"  // several bridges, but no host bridge
	PHB         Path = "PHB"  // a host bridge
	NODE        Path = "NODE" // two host bridges of one NUMA node
	SYS         Path = "SYS"  // two NUMA nodes, or nodes that are not known: no better can be promised
	UnknownPath Path = ""     // a device is on no PCI bus that is known
)

// nvLink returns the path over a number of NVLinks.
func nvLink(links int) Path { return Path("NV" + strconv.Itoa(links)) }

// NVLinks returns how many NVLinks p is over; 0 if it is over none.
func (p Path) NVLinks() int {
	number, ok := strings.CutPrefix(string(p), "NV")
	if n, err := strconv.Atoi(number); ok && err == nil && n > 0 {
		return n
	}
	return 0
}

// Compare is negative if p is nearer than q, positive if it is farther: the
// device itself, NVLinks (more of them first), PIX, PXB, PHB, NODE, SYS, and what
// is not known.
func (p Path) Compare(q Path) int {
	return cmp.Or(p.rank()-q.rank(), q.NVLinks()-p.NVLinks())
}

func (p Path) rank() int {
	switch {
	case p == Self:
		return 0
	case p.NVLinks() > 0:
		return 1
	}
	overPCI := []Path{PIX, PXB, PHB, NODE, SYS}
	if i := slices.Index(overPCI, p); i >= 0 {
		return 2 + i
	}
	return 2 + len(overPCI)
}

// Matrix holds the paths between some devices.
type Matrix struct {
	Devices []string `json:"devices"`
	Paths   [][]Path `json:"paths"` // Paths[i][j] is that from Devices[i] to Devices[j]
}

// device is what a path is worked out from.
type device struct {
	name    string
	address string
	bus     []string
	node    int
	cpus    Set
	links   []Link
}

// devices returns the GPUs, named GPU0 by Index, the NICs and the disks, which
// have names of their own.
func (t *Topology) devices() []device {
	all := make([]device, 0, len(t.GPUs)+len(t.NICs)+len(t.Disks))
	for _, g := range t.GPUs {
		all = append(all, device{"GPU" + strconv.Itoa(g.Index), g.PCIAddress, g.Bus, g.Node, g.CPUs, g.Links})
	}
	for _, n := range t.NICs {
		all = append(all, device{n.Name, n.PCIAddress, n.Bus, n.Node, nil, nil})
	}
	for _, d := range t.Disks {
		all = append(all, device{d.Name, d.PCIAddress, d.Bus, d.Node, nil, nil})
	}
	return all
}

// Path returns the path between two devices: GPUs are named GPU0 by their Index,
// NICs and disks by their names. ok reports whether there are such devices.
func (t *Topology) Path(a, b string) (p Path, ok bool) {
	all := t.devices()
	i := slices.IndexFunc(all, func(d device) bool { return d.name == a })
	j := slices.IndexFunc(all, func(d device) bool { return d.name == b })
	if i < 0 || j < 0 {
		return UnknownPath, false
	}
	return between(all[i], all[j]), true
}

// Matrix returns the paths between all GPUs, NICs and disks, in this order.
func (t *Topology) Matrix() Matrix {
	all := t.devices()
	m := Matrix{Devices: make([]string, len(all)), Paths: make([][]Path, len(all))}
	for i, a := range all {
		m.Devices[i] = a.name
		m.Paths[i] = make([]Path, len(all))
		for j, b := range all {
			m.Paths[i][j] = between(a, b)
		}
	}
	return m
}

func between(a, b device) Path {
	if a.name == b.name {
		return Self
	}
	// NVLink and PCI are both there; what copies go over is the former.
	if n := linksBetween(a, b); n > 0 {
		return nvLink(n)
	}
	return overPCI(a, b)
}

// overPCI compares the ways from the host bridge to both devices. Each entry of
// a Bus but the last is a bridge, and the first is a host bridge.
func overPCI(a, b device) Path {
	if len(a.bus) == 0 || len(b.bus) == 0 {
		return UnknownPath
	}
	common := shared(a.bus, b.bus)
	switch {
	case common == 0 && a.node == b.node && a.node != Unknown:
		return NODE
	case common == 0:
		return SYS
	case common == len(a.bus) || common == len(b.bus):
		return PIX // both hang on one controller, or one on the other
	case isHostBridge(a.bus[common-1]):
		return PHB
	}
	// Below the port of a switch that both are behind, each has one bridge, the
	// port that it is plugged into. More of them are more switches.
	if max(len(a.bus), len(b.bus))-common-1 <= 1 {
		return PIX
	}
	return PXB
}

// shared counts the words that two lists have in common at their beginning.
func shared(a, b []string) int {
	n := 0
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// linksBetween counts the NVLinks between a and b: those that end at the other, as the end says
// that knows of more, and those of both to the same switches.
func linksBetween(a, b device) int {
	switched := 0
	for _, l := range a.links {
		for _, other := range b.links {
			if l.Switch && other.Switch && other.Remote == l.Remote {
				switched += min(l.Count, other.Count)
			}
		}
	}
	return max(linksTo(a, b), linksTo(b, a)) + switched
}

// linksTo counts the NVLinks that a says end at b.
func linksTo(a, b device) int {
	n := 0
	for _, l := range a.links {
		if !l.Switch && l.Remote != "" && l.Remote == b.address {
			n += l.Count
		}
	}
	return n
}

// busPath returns the way from the host bridge to the device whose directory is
// dir, which has no links in it; empty if it is below no host bridge.
func busPath(dir string) []string {
	bus := []string{}
	for name := range strings.SplitSeq(dir, "/") {
		if isHostBridge(name) || isBusAddress(name) && len(bus) > 0 {
			bus = append(bus, name)
		}
	}
	return bus
}

// isHostBridge reports whether name is that of a host bridge's directory, as
// pci0000:3a. There is one below a PCI device where a controller makes a domain of its
// own (Intel VMD).
func isHostBridge(name string) bool {
	id, ok := strings.CutPrefix(name, "pci")
	return ok && isBusAddress(id+":00.0")
}

// busOfAddress returns the way to the PCI device with the given address.
func (t *tree) busOfAddress(address string) []string {
	file := path.Join(pciDevices, address)
	dir, err := t.resolve(file)
	if err != nil {
		return []string{}
	}
	bus := busPath(dir)
	if len(bus) == 0 {
		t.warnf(file, "the device is below no host bridge: its paths to others are not known")
	}
	return bus
}

// legend is what the paths mean, in the order of nvidia-smi's.
var legend = []struct {
	is   func(Path) bool
	text string
}{
	{func(p Path) bool { return p.NVLinks() > 0 }, "NV#: that many NVLinks"},
	{func(p Path) bool { return p == PIX }, "PIX: one PCI switch"},
	{func(p Path) bool { return p == PXB }, "PXB: several PCI switches"},
	{func(p Path) bool { return p == PHB }, "PHB: one host bridge"},
	{func(p Path) bool { return p == NODE }, "NODE: host bridges of one NUMA node"},
	{func(p Path) bool { return p == SYS }, "SYS: two NUMA nodes, or not known"},
	{func(p Path) bool { return p == UnknownPath }, "?: a device on no PCI bus that is known"},
}

// String prints the matrix as nvidia-smi topo -m does: a row and a column for
// each device, and what the words in it mean.
func (m Matrix) String() string {
	var b strings.Builder
	table(&b, "Paths", func(row func(...string)) {
		row(append([]string{""}, m.Devices...)...)
		for i, name := range m.Devices {
			cells := []string{name}
			for _, p := range m.Paths[i] {
				cells = append(cells, cmp.Or(string(p), "?"))
			}
			row(cells...)
		}
	})
	var words []string
	for _, l := range legend {
		if slices.ContainsFunc(slices.Concat(m.Paths...), l.is) {
			words = append(words, l.text)
		}
	}
	if len(words) > 0 {
		b.WriteString("  (" + strings.Join(words, ", ") + ")\n")
	}
	return b.String()
}
