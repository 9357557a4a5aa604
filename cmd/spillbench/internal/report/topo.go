package report

import (
	"strings"

	"github.com/spillway-db/spillway/topology"
)

// Topo is the document of topo.
type Topo struct {
	Header
	Topology *topology.Topology `json:"topology"`
	Paths    topology.Matrix    `json:"paths"` // between GPUs, NICs and disks
}

// Page shows the topology: for people as it prints itself, for others what it has of each kind. notes
// are lines of their own.
func (t *Topo) Page(notes []string) *Page {
	p := new(Page)
	p.parts = append(p.parts, part{line: strings.TrimSuffix(t.Topology.String(), "\n"), only: readers})
	for _, s := range []*sheet{t.nodes(), t.gpus(), t.nics(), t.disks(), t.paths()} {
		if len(s.rows) > 0 {
			p.parts = append(p.parts, part{sheet: s, only: notReaders})
		}
	}
	p.notes(notes)
	return p
}

func (t *Topo) nodes() *sheet {
	s := &sheet{columns: []column{{head: "node", key: "node"}, {head: "cpus", key: "cpus"}, {head: "memory", key: "memory_bytes"}, {head: "free", key: "free_bytes"}}}
	for _, n := range t.Topology.Nodes {
		s.add(n.ID, n.CPUs.String(), approx(n.MemoryBytes), approx(n.FreeBytes))
	}
	return s
}

func (t *Topo) gpus() *sheet {
	s := &sheet{columns: []column{{head: "GPU", key: "gpu"}, {head: "name", key: "name"}, {head: "UUID", key: "uuid"}, {head: "PCI address", key: "pci_address"}, {head: "node", key: "node"}, {head: "memory", key: "memory_bytes"}, {head: "free", key: "free_bytes"}, {head: "link", key: "pcie_link"}, {head: "driver", key: "driver"}}}
	for _, g := range t.Topology.GPUs {
		s.add(g.Index, g.Name, g.UUID, g.PCIAddress, node(g.Node), approx(g.MemoryBytes), approx(g.FreeBytes), link(g), g.Driver)
	}
	return s
}

func (t *Topo) nics() *sheet {
	s := &sheet{columns: []column{{head: "NIC", key: "nic"}, {head: "PCI address", key: "pci_address"}, {head: "node", key: "node"}, {head: "device", key: "device"}}}
	for _, n := range t.Topology.NICs {
		s.add(n.Name, n.PCIAddress, node(n.Node), n.Device)
	}
	return s
}

func (t *Topo) disks() *sheet {
	s := &sheet{columns: []column{{head: "disk", key: "disk"}, {head: "kind", key: "kind"}, {head: "model", key: "model"}, {head: "size", key: "size_bytes"}, {head: "node", key: "node"}, {head: "mounted at", key: "mounts"}}}
	for _, d := range t.Topology.Disks {
		var points []string
		for _, m := range d.Mounts {
			points = append(points, m.Point)
		}
		s.add(d.Name, string(d.Kind), d.Model, approx(d.SizeBytes), node(d.Node), strings.Join(points, " "))
	}
	return s
}

// paths has each pair of devices once.
func (t *Topo) paths() *sheet {
	s := &sheet{columns: []column{{head: "from", key: "from"}, {head: "to", key: "to"}, {head: "path", key: "path"}}}
	for i, from := range t.Paths.Devices {
		for j, to := range t.Paths.Devices[:i] {
			s.add(to, from, string(t.Paths.Paths[i][j]))
		}
	}
	return s
}

// node is a NUMA node's number, or nothing.
func node(n int) any {
	if n == topology.Unknown {
		return nil
	}
	return n
}
