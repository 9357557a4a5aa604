// Package topology finds out what a machine has: NUMA nodes, CPUs, memory,
// GPUs and disks, and how much of them this process may use. It knows nothing
// of tiers; what to make of a machine is decided above it.
//
//	              Discover(ctx, Options{Root, GPUs, LookupEnv})
//	                            │ reads below Root, and calls NVIDIA's library (NVML)
//	                            ▼
//	Topology ─┬─ CPU            online, allowed, model
//	          ├─ Memory         total, free, available, swap
//	          ├─ []Node         CPUs, memory, distances
//	          ├─ []GPU ───────▶ Node, PCI address, Bus, memory, []Link, []MIGInstance
//	          ├─ []NIC ───────▶ Node, PCI address, Bus, []Port
//	          ├─ []Disk ──────▶ Node, PCI address, Bus, []Mount
//	          ├─ []Mount        that are on no disk
//	          ├─ Limits         of cgroups and cpusets: bytes, CPUs, nodes
//	          └─ Warnings       what could not be read
//	                │
//	                ├─ Matrix()               what lies between devices: NV12, PIX, PXB, PHB, NODE, SYS
//	                ├─ NICsAt(level)          those that are there, up, or have an address
//	                └─ MemoryNode(node)       where memory near to a device is taken from
//
//	DiskOf(ctx, dir, Options) ─▶ Location   the file system and the disks below dir
//
// GPUs are those that the process sees: CUDA_VISIBLE_DEVICES is honoured. Those that another driver
// has come last, as CUDA does not count them. NVML is bound at run time, on Linux on amd64 and
// arm64, with cgo or without. It is opened for a query, and closed again. Without it (no driver of
// NVIDIA's is installed, or the system is another) Discover lists the GPUs on the PCI bus, and adds a
// warning. Package gonvml reads through go-nvml instead, or through one of its mocks.
//
// Everything is read from the /proc and /sys of Linux below [Options].Root, so that a recorded tree
// represents a whole machine. Elsewhere the same calls return what is known, which is nothing, and
// report that. Partial knowledge is no error. Each thing that is missing or makes no sense is one
// line of Warnings, and its field holds the value for "not known" (0 bytes, node -1, an empty set).
// An error means an option or a CUDA_VISIBLE_DEVICES that makes no sense, or a context that ended.
//
// The results are plain values, which marshal to JSON under keys that do
// not change. They belong to the caller. Nothing is cached, opened or started
// beyond a call, the machine is not changed, and all functions may be called
// at the same time. The package takes no locks.
package topology

import (
	"context"
	"fmt"
	"net/netip"
	"path"
	"slices"

	"github.com/spillway-db/spillway/diag"
)

// Unknown is the number of a NUMA node that is not known: the firmware did not report where a
// device is, or it is on none.
const Unknown = -1

// Options says where to look. The zero value means this machine.
type Options struct {
	// Root is the directory to read as "/". Empty means "/". Links below it that lead outside of it
	// are not followed.
	Root string

	// GPUs returns the GPUs that a driver knows, in its order; package gonvml makes such a function
	// of go-nvml. Node, Driver, CPUs and the PCIe fields that are zero are filled in from the PCI
	// bus. An error that is returned with some GPUs describes what is not known of them, with
	// errors.Join for more than one thing. An error alone means that the driver cannot be queried.
	// If GPUs is nil, Discover binds NVIDIA's library (NVML) at run time if Root is "/", and
	// otherwise lists the GPUs on the PCI bus, with the properties that the bus has.
	GPUs func(context.Context) ([]GPU, error)

	// LookupEnv returns environment variables: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. Nil
	// means os.LookupEnv if Root is "/", and an empty environment otherwise.
	LookupEnv func(name string) (value string, ok bool)

	// Addresses returns the IP addresses of a network interface. Nil means those of the system if
	// Root is "/", and those in /proc/net below Root otherwise.
	Addresses func(iface string) ([]netip.Addr, error)
}

// Topology is what a machine has. The slices are never nil, so that they are
// marshalled as lists.
type Topology struct {
	CPU    CPU    `json:"cpu"`
	Memory Memory `json:"memory"`
	Nodes  []Node `json:"nodes"` // by ID; at least one
	GPUs   []GPU  `json:"gpus"`  // that this process sees, in CUDA's order: see Limits.VisibleDevices
	NICs   []NIC  `json:"nics"`  // by name
	Disks  []Disk `json:"disks"` // by name
	// OtherMounts are directories that hold files and are on none of Disks: in memory (tmpfs), over
	// a network, overlays. They are in the kernel's order.
	OtherMounts []Mount `json:"other_mounts"`
	Limits      Limits  `json:"limits"`
	// Warnings has each once: at most maxWarnings, and a last one that counts the rest. What begins
	// with the file that it is about.
	Warnings []diag.Warning `json:"warnings"`
}

// CPU is what is known of the processors.
type CPU struct {
	Model   string `json:"model"`   // of the first; empty: not known
	Online  Set    `json:"online"`  // those that run
	Allowed Set    `json:"allowed"` // those of Online that this process may run on, by affinity and cpuset
}

// Memory is what the kernel says of the machine's memory, in bytes; 0 is "not
// known", except for swap.
type Memory struct {
	TotalBytes     int64 `json:"total_bytes"`
	FreeBytes      int64 `json:"free_bytes"`      // unused
	AvailableBytes int64 `json:"available_bytes"` // unused, or taken back without swapping
	SwapBytes      int64 `json:"swap_bytes"`      // total
}

// Node is a NUMA node. One without CPUs is memory alone; one without memory
// has CPUs alone.
type Node struct {
	ID          int   `json:"id"`
	CPUs        Set   `json:"cpus"`
	MemoryBytes int64 `json:"memory_bytes"` // total; 0: none, or not known
	FreeBytes   int64 `json:"free_bytes"`   // unused
	// Distances has one entry for each of Topology.Nodes, in that order: the
	// relative cost of reaching its memory, 10 being the node itself. Empty
	// means not known.
	Distances []int `json:"distances"`
}

// GPU is a graphics processor.
type GPU struct {
	Index      int    `json:"index"`
	Name       string `json:"name"`        // empty: not known
	UUID       string `json:"uuid"`        // empty: not known
	PCIAddress string `json:"pci_address"` // as 0000:3b:00.0
	// Bus is the way from the host bridge (pci0000:3a) over the bridges to the device; empty: not known.
	Bus            []string `json:"bus"`
	DeviceID       string   `json:"device_id"`       // vendor and device, as 10de:2330
	Driver         string   `json:"driver"`          // the kernel's, such as nvidia or vfio-pci; empty: none
	Node           int      `json:"node"`            // or Unknown
	CPUs           Set      `json:"cpus"`            // the nearest; empty: not known
	MemoryBytes    int64    `json:"memory_bytes"`    // total; 0: not known
	FreeBytes      int64    `json:"free_bytes"`      // 0: none, or not known
	PCIeGeneration int      `json:"pcie_generation"` // that it can do; 0: not known
	PCIeWidth      int      `json:"pcie_width"`      // lanes in use; 0: not known
	Links          []Link   `json:"links"`           // NVLinks in use, by remote end
	// OwnNodes are the nodes whose memory is the GPU's own (Grace Hopper); empty: none.
	OwnNodes Set `json:"own_nodes"`
	// MemoryNode is the node whose memory is nearest of those that this process may
	// take: what a host buffer for the GPU should be bound to. Unknown: none in particular.
	MemoryNode int `json:"memory_node"`
	// NodeAffinity and CPUAffinity are the nodes and CPUs that the driver says are the
	// nearest, nil where it does not. They count where the kernel does not know the node.
	NodeAffinity Set           `json:"-"`
	CPUAffinity  Set           `json:"-"`
	MIGEnabled   bool          `json:"mig_enabled"` // kernels run on MIG instances only
	MIG          []MIGInstance `json:"mig"`         // those that this process sees
}

// MIGInstance is a part of a GPU that works as one of its own.
type MIGInstance struct {
	UUID            string `json:"uuid"`
	Name            string `json:"name"` // empty: not known
	GPUInstance     int    `json:"gpu_instance"`
	ComputeInstance int    `json:"compute_instance"`
	MemoryBytes     int64  `json:"memory_bytes"` // total; 0: not known
	FreeBytes       int64  `json:"free_bytes"`   // 0: none, or not known
}

// Link is one or more NVLinks that end at the same device.
type Link struct {
	Remote string `json:"remote"` // PCI address of the other end; empty: not known
	Switch bool   `json:"switch"` // an NVSwitch, else a GPU
	Count  int    `json:"count"`
}

// NIC is a network card that does RDMA: InfiniBand, or Ethernet with RoCE.
type NIC struct {
	Name       string   `json:"name"`        // the RDMA device's, as mlx5_0
	PCIAddress string   `json:"pci_address"` // empty: none known
	Bus        []string `json:"bus"`         // from the host bridge to the card; empty: not known
	Node       int      `json:"node"`        // or Unknown
	// Device is what programs use the card by, as /dev/infiniband/uverbs0; empty: there is
	// none that this process may open, and the card does not count.
	Device string `json:"device"`
	Ports  []Port `json:"ports"` // by number
}

// Port is one port of a NIC.
type Port struct {
	Number     int      `json:"number"`
	State      string   `json:"state"`      // the kernel's word: ACTIVE, DOWN, INIT, ARMED; empty: not known
	LinkLayer  string   `json:"link_layer"` // InfiniBand or Ethernet; empty: not known
	Rate       string   `json:"rate"`       // the kernel's words: 200 Gb/sec (4X HDR)
	Interfaces []string `json:"interfaces"` // its network interfaces, as ib0, and bonds and VLANs on them
	Addresses  []string `json:"addresses"`  // their IP addresses, except for those of the link alone
}

// NICLevel is how much of a NIC must work for the NIC to be listed. A looser level lists all
// NICs of a stricter one.
type NICLevel int

// The levels, each stricter than the one before. A NIC that this process may not use
// meets none of them.
const (
	nicUnusable  NICLevel = iota - 1
	NICPresent            // it is there, and this process may use it
	NICActive             // one of its ports is up
	NICAddressed          // one of its ports is up and has an IP address
)

// level returns the strictest level that n meets; below NICPresent for one that this
// process may not use.
func (n NIC) level() NICLevel {
	if n.Device == "" {
		return nicUnusable
	}
	level := NICPresent
	for _, p := range n.Ports {
		switch {
		case p.State != "ACTIVE":
		case len(p.Addresses) > 0:
			return NICAddressed
		default:
			level = NICActive
		}
	}
	return level
}

// DiskKind says how a disk works, as far as that matters for its speed.
type DiskKind string

// The kinds of disk.
const (
	NVMe        DiskKind = "nvme"    // flash behind NVMe
	SSD         DiskKind = "ssd"     // other flash: SATA, SAS, eMMC
	HDD         DiskKind = "hdd"     // rotating
	VirtualDisk DiskKind = "virtual" // made by a hypervisor or over a network: its speed says nothing of its kind
	UnknownDisk DiskKind = "unknown" // the kernel does not say whether it rotates
)

// Disk is a whole disk. Partitions, and what is stacked on disks (LVM, LUKS,
// RAID), are not disks of their own.
type Disk struct {
	Name       string   `json:"name"` // the kernel's, as nvme0n1
	Kind       DiskKind `json:"kind"`
	Model      string   `json:"model"`       // empty: not known
	SizeBytes  int64    `json:"size_bytes"`  // 0: not known
	Rotational bool     `json:"rotational"`  // as the kernel says, which of virtual disks is a guess
	Node       int      `json:"node"`        // or Unknown
	PCIAddress string   `json:"pci_address"` // of the controller; empty: none known
	Bus        []string `json:"bus"`         // from the host bridge to the controller; empty: not known
	Device     string   `json:"device"`      // major:minor
	Mounts     []Mount  `json:"mounts"`      // what is mounted of it, in the kernel's order
}

// Mount is a directory at which a file system of a disk is to be found.
type Mount struct {
	Point      string `json:"point"`
	FileSystem string `json:"file_system"` // its type, as ext4
	Source     string `json:"source"`      // what was mounted, as /dev/nvme0n1p2
	ReadOnly   bool   `json:"read_only"`
}

// Limits is what this process may use of the machine.
type Limits struct {
	// MemoryBytes is the smallest of three: the machine's memory, that of the nodes allowed, and
	// the limits of the process's cgroup and all above it. A limit is hard, or the point where the
	// kernel throttles. 0: not known.
	MemoryBytes  int64  `json:"memory_bytes"`
	MemorySource string `json:"memory_source"` // the file that said so

	// CPUs is how many CPUs' time there is: those allowed, or the cgroup's
	// quota rounded up if that is less. 0: not known.
	CPUs      int    `json:"cpus"`
	CPUSource string `json:"cpu_source"` // the file that said so

	CPUQuota    float64 `json:"cpu_quota"`    // CPUs by cgroup quota, not rounded; 0: none
	MemoryNodes Set     `json:"memory_nodes"` // nodes whose memory may be taken, except for GPUs' own; empty: not known

	// VisibleDevices is CUDA_VISIBLE_DEVICES: Topology.GPUs has what it names, in its order, and
	// HiddenGPUs is how many others there are. Where it is not set, GPUs are in the driver's
	// order, or by PCI address.
	VisibleDevices string `json:"visible_devices"`
	HiddenGPUs     int    `json:"hidden_gpus"`

	CgroupVersion int    `json:"cgroup_version"` // that controls memory: 1, 2, or 0 for none found
	Cgroup        string `json:"cgroup"`         // the directory that does
}

// Discover returns what the machine below o.Root has. The error is for an
// option that makes no sense (a Root that is no directory), for a
// CUDA_VISIBLE_DEVICES that makes none (ErrVisibleDevices), and for a context
// that ended; whatever else goes wrong is a line in Warnings.
func Discover(ctx context.Context, o Options) (*Topology, error) {
	t, err := openTree(ctx, o.Root)
	if err != nil {
		return nil, err
	}
	defer t.root.Close() // which was only ever read from

	top := t.top
	cpus, nodes := t.affinity()
	t.cgroups()
	top.Memory = t.meminfo(systemMemory)
	top.CPU = t.cpu(cpus)
	top.Nodes = t.readNodes(top.CPU, top.Memory)
	top.GPUs = t.gpus(o.GPUs)
	top.NICs = t.nics(o.Addresses)
	top.Disks, top.OtherMounts = t.disks()
	t.limit(nodes)
	if err := t.visible(o.LookupEnv); err != nil {
		return nil, err
	}
	top.Warnings = t.warnings()

	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("topology: %w", err)
	}
	return top, nil
}

// Node returns the node with the given ID.
func (t *Topology) Node(id int) (Node, bool) {
	i := slices.IndexFunc(t.Nodes, func(n Node) bool { return n.ID == id })
	if i < 0 {
		return Node{}, false
	}
	return t.Nodes[i], true
}

// Distance returns the relative cost of reaching the memory of node b from
// node a: 10 for the same node, more for others. Where the machine does not
// say, it is 20 between two nodes, which is what the kernel assumes too; a node
// that is Unknown is as far from all.
func (t *Topology) Distance(a, b int) int {
	const local, remote = 10, 20 // LOCAL_DISTANCE and REMOTE_DISTANCE of the kernel
	from, ok := t.Node(a)
	at := slices.IndexFunc(t.Nodes, func(n Node) bool { return n.ID == b })
	switch {
	case ok && at >= 0 && at < len(from.Distances):
		return from.Distances[at]
	case a == b && a != Unknown:
		return local
	}
	return remote
}

// MemoryNode returns the node whose memory is nearest to the given node, of those
// that have memory and that this process may take it from. It is Unknown if there are
// several and the given node is not known.
func (t *Topology) MemoryNode(node int) int {
	best, candidates := Unknown, 0
	for _, n := range t.Nodes {
		if n.MemoryBytes <= 0 || len(t.Limits.MemoryNodes) > 0 && !t.Limits.MemoryNodes.Contains(n.ID) {
			continue
		}
		candidates++
		if best == Unknown || t.Distance(node, n.ID) < t.Distance(node, best) {
			best = n.ID
		}
	}
	if _, known := t.Node(node); !known && candidates > 1 {
		return Unknown
	}
	return best
}

// NodeOfDir returns the NUMA node of the disks that a directory is on, as far as the mounts show.
// It is Unknown if they are on several nodes, or the directory is on none of Disks (see
// OtherMounts). It must be absolute; links in it are not followed: DiskOf does.
func (t *Topology) NodeOfDir(dir string) int {
	dir = path.Clean(dir)
	var on []Disk
	deepest := 0 // length of the mount that dir is on
	for _, d := range t.Disks {
		for _, m := range d.Mounts {
			if _, ok := cutDir(dir, m.Point); !ok || len(m.Point) < deepest {
				continue
			}
			if len(m.Point) > deepest {
				deepest, on = len(m.Point), nil
			}
			on = append(on, d)
		}
	}
	for _, m := range t.OtherMounts {
		if _, ok := cutDir(dir, m.Point); ok && len(m.Point) >= deepest {
			return Unknown // it hides the disks that are mounted above it
		}
	}
	return commonNode(on)
}

// NICsAt returns the NICs that meet a level, by name, as a new list.
func (t *Topology) NICsAt(level NICLevel) []NIC {
	return slices.DeleteFunc(append([]NIC{}, t.NICs...), func(n NIC) bool { return n.level() < level })
}
