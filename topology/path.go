package topology

import (
	"cmp"
	"strconv"
	"strings"

	"github.com/spillway-db/spillway/internal/tabular"
)

// Path is what lies between two devices, in the words of nvidia-smi topo -m. A copy between two
// devices is the slower the farther apart they are; beyond PXB it passes through the processor's
// host bridge.
type Path string

// The paths, the nearest first, as nvidia-smi(1) defines them. NVLink makes the paths between GPUs
// that are linked without PCI: NV1, NV12.
const (
	Self        Path = "X"    // the device itself
	PIX         Path = "PIX"  // at most one bridge on either side below the nearest one in common: one switch
	PXB         Path = "PXB"  // several bridges, but no host bridge
	PHB         Path = "PHB"  // a host bridge
	NODE        Path = "NODE" // two host bridges of one NUMA node
	SYS         Path = "SYS"  // two NUMA nodes, or nodes that are not known: no better can be promised
	UnknownPath Path = ""     // a device is on no PCI bus that is known
)

// legend explains the paths, in the order of nvidia-smi's legend, which is also the order from near
// to far. NV stands for NV1, NV12 and so on.
var legend = []struct {
	path Path
	text string
}{
	{"NV", "NV#: that many NVLinks"},
	{PIX, "PIX: one PCI switch"},
	{PXB, "PXB: several PCI switches"},
	{PHB, "PHB: one host bridge"},
	{NODE, "NODE: host bridges of one NUMA node"},
	{SYS, "SYS: two NUMA nodes, or not known"},
	{UnknownPath, "?: a device on no PCI bus that is known"},
}

// Matrix holds the paths between some devices. It is symmetric.
type Matrix struct {
	// Devices are the names of the rows and columns: GPU<index>, and the kernel's names of NICs and
	// disks.
	Devices []string `json:"devices"`
	Paths   [][]Path `json:"paths"` // Paths[i][j] is that from Devices[i] to Devices[j]
}

// device is an end of a path: what GPUs, NICs and disks have in common.
type device struct {
	name    string
	address string
	bus     []string
	node    int
	links   []Link
}

// Matrix returns the paths between all GPUs, NICs and disks, in this order. It reads nothing.
func (t *Topology) Matrix() Matrix {
	var all []device
	for _, g := range t.GPUs {
		all = append(all, device{"GPU" + strconv.Itoa(g.Index), g.PCIAddress, g.Bus, g.Node, g.Links})
	}
	for _, n := range t.NICs {
		all = append(all, device{n.Name, n.PCIAddress, n.Bus, n.Node, nil})
	}
	for _, d := range t.Disks {
		all = append(all, device{d.Name, d.PCIAddress, d.Bus, d.Node, nil})
	}
	m := Matrix{Devices: make([]string, len(all)), Paths: make([][]Path, len(all))}
	for i, a := range all {
		m.Devices[i] = a.name
		m.Paths[i] = make([]Path, len(all))
		for j, b := range all {
			switch links := linksBetween(a, b); {
			case a.name == b.name:
				m.Paths[i][j] = Self
			case links > 0: // NVLink and PCI are both there; copies use NVLink
				m.Paths[i][j] = Path("NV" + strconv.Itoa(links))
			default:
				m.Paths[i][j] = overPCI(a, b)
			}
		}
	}
	return m
}

// overPCI returns the path between two devices over PCI, by comparing their ways from the host
// bridge:
//
//	Bus of a   pci0000:3a  0000:3a:00.0  0000:3b:08.0  0000:3c:00.0
//	Bus of b   pci0000:3a  0000:3a:00.0  0000:3b:10.0  0000:3d:00.0
//	           host bridge root port     ports of one  the devices
//	           └──── in common ────┘     switch
//
// Each entry but the last is a bridge: a PCI switch has one for its own port upwards, and one for
// each port downwards. If nothing is in common, the devices are below different host bridges, and
// the data crosses the interconnect of the processor.
func overPCI(a, b device) Path {
	if len(a.bus) == 0 || len(b.bus) == 0 {
		return UnknownPath
	}
	// The number of bridges in common, from the host bridge down.
	common := shared(a.bus, b.bus)
	switch {
	case common == 0 && a.node == b.node && a.node != Unknown:
		// Different host bridges of one node are still near to the same memory.
		return NODE
	case common == 0:
		return SYS
	case common == len(a.bus) || common == len(b.bus):
		return PIX // both hang on one controller, or one on the other
	case isHostBridge(a.bus[common-1]):
		// Only the host bridge is in common: different root ports, so the data passes through the
		// processor.
		return PHB
	}
	// Below the port that both are behind, each has one bridge, the port of the switch that it is
	// plugged into. More of them are more switches.
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

// linksBetween counts the NVLinks between a and b: the direct ones, and those of both devices to
// the same switches. Both ends list a direct link, unless a query of one failed, so the longer list
// counts. Of the links to a switch, as many are of use as the device with fewer has.
func linksBetween(a, b device) int {
	var toA, toB, switched int
	for _, l := range a.links {
		// A remote end that is not known could be any device, so it is none.
		if !l.Switch && l.Remote != "" && l.Remote == b.address {
			toB += l.Count
		}
		// Two GPUs reach each other only through switches that both are linked to.
		for _, other := range b.links {
			if l.Switch && other.Switch && other.Remote == l.Remote {
				switched += min(l.Count, other.Count)
			}
		}
	}
	for _, l := range b.links {
		if !l.Switch && l.Remote != "" && l.Remote == a.address {
			toA += l.Count
		}
	}
	return max(toA, toB) + switched
}

// busPath returns the way from the host bridge to the device in dir, a resolved path in
// /sys/devices such as /sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0. It is empty if the device
// is below no host bridge.
func busPath(dir string) []string {
	bus := []string{}
	for name := range strings.SplitSeq(dir, "/") {
		if isHostBridge(name) || isBusAddress(name) && len(bus) > 0 {
			bus = append(bus, name)
		}
	}
	return bus
}

// isHostBridge reports whether name is that of a host bridge's directory, as pci0000:3a. There is
// also one below a PCI device if that device's driver makes a PCI domain of its own (Intel VMD).
func isHostBridge(name string) bool {
	id, ok := strings.CutPrefix(name, "pci")
	return ok && isBusAddress(id+":00.0")
}

// String prints the matrix as nvidia-smi topo -m does: a row and a column for each device, and a
// legend of the words in it.
func (m Matrix) String() string {
	lines := tabular.Rows{append([]string{""}, m.Devices...)}
	found := map[Path]bool{}
	for i, name := range m.Devices {
		cells := []string{name}
		for _, p := range m.Paths[i] {
			cells = append(cells, cmp.Or(string(p), "?"))
			if strings.HasPrefix(string(p), "NV") {
				p = "NV"
			}
			found[p] = true
		}
		lines = append(lines, cells)
	}
	var words []string
	for _, l := range legend {
		if found[l.path] {
			words = append(words, l.text)
		}
	}
	var b strings.Builder
	section(&b, "Paths", lines)
	if len(words) > 0 {
		b.WriteString("  (" + strings.Join(words, ", ") + ")\n")
	}
	return b.String()
}
