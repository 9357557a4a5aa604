// Package topology finds out what a machine has: NUMA nodes, CPUs, memory, GPUs, network cards and
// disks, where they are, and how much of them this process may use. The engine places its spaces
// with it: pinned memory near each GPU, spill volumes on local disks, and limits below those of the
// container. The package decides none of that. It knows nothing of tiers, and changes nothing on
// the machine.
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
// The order of steps in Discover matters: devices look up their nodes in the nodes read before,
// disks look up their mounts, and the limits come last, because they are bounded by what the
// machine has.
//
//	tree.go                 reads files below Root, resolves links, and collects warnings
//	node.go, cgroup.go      CPUs, memory and nodes; what of them this process may use
//	gpu.go, nvml.go         GPUs: what the driver reports, completed from the PCI bus
//	visible.go              which of them this process sees
//	nic.go                  network cards that do RDMA, their ports and addresses
//	disk.go, mount.go       whole disks, and what is mounted of them
//	diskof.go               the disks below one directory
//	path.go, table.go       what lies between devices; tables for people
//	text.go, set.go         parsers of the kernel's formats
//
// GPUs are those that the process sees: CUDA_VISIBLE_DEVICES is honoured. GPUs that a driver other
// than NVIDIA's has come last, because CUDA does not count them. NVML is bound at run time, on
// Linux on amd64 and arm64, with cgo or without. It is opened for a query, and closed again.
// Without it (no driver of NVIDIA's is installed, or the system is another) Discover lists the GPUs
// on the PCI bus, and adds a warning. Package gonvml reads through go-nvml instead, or through one
// of its mocks.
//
// Everything is read from the /proc and /sys of Linux below [Options].Root, so that a recorded tree
// represents a whole machine. The formats are specified in proc(5), sysfs(5), cgroups(7),
// cpuset(7), and in Documentation/ABI of the kernel. Elsewhere the same calls return what is known,
// which is nothing, and report that. Partial knowledge is no error. Each thing that is missing or
// makes no sense is one line of Warnings, and its field holds the value for "not known" (0 bytes,
// node -1, an empty set). An error means an option or a CUDA_VISIBLE_DEVICES that makes no sense,
// or a context that ended.
//
// Containers are the usual case, and explain most special cases in the code. They see all devices
// of the host in /sys, but may use only some; their cgroup may not be mounted where the kernel's
// files say; and their files are on overlays, whose directories they do not see.
//
// The input is not trusted: names come from devices and from users that mount things, and a
// recorded tree from anywhere. Sizes and loops are bounded, and texts are made printable.
//
// The results are plain values, which marshal to JSON under keys that do not change. They belong to
// the caller. Nothing is cached, opened or started beyond a call, the machine is not changed, and
// all functions may be called at the same time. The package takes no locks.
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
// device is, or the device is on no node. The kernel uses the same number (NUMA_NO_NODE).
const Unknown = -1

// Options says where to look. The zero value means this machine.
type Options struct {
	// Root is the directory to read as "/". Empty means "/". Links below it are followed within it,
	// as if it were the root; those that lead outside of it are not. A recorded machine is a copy
	// of its /proc, /sys and, for links of devices, /dev.
	Root string

	// GPUs returns the GPUs that a driver knows, in its order; package gonvml makes such a function
	// of go-nvml. Discover fills in Node, and Driver, CPUs and the PCIe fields if they are zero,
	// from the PCI bus. An error that is returned with some GPUs describes what is not known of
	// them, with errors.Join for more than one thing. An error alone means that the driver cannot
	// be queried, and has Discover list the GPUs on the PCI bus. A panic of the function counts as
	// such an error.
	//
	// If GPUs is nil, Discover binds NVIDIA's library (NVML) at run time if Root is "/", and
	// otherwise lists the GPUs on the PCI bus, with the properties that the bus has.
	GPUs func(context.Context) ([]GPU, error)

	// LookupEnv returns environment variables: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER. Nil
	// means os.LookupEnv if Root is "/", and an empty environment otherwise, because this process's
	// variables mean nothing on another machine.
	LookupEnv func(name string) (value string, ok bool)

	// Addresses returns the IP addresses of a network interface, by its name. Nil means those of
	// the system if Root is "/", and those in /proc/net below Root otherwise.
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
	// a network, overlays. They are in the kernel's order. They matter because they hide disks that
	// are mounted above them.
	OtherMounts []Mount `json:"other_mounts"`
	Limits      Limits  `json:"limits"`
	// Warnings has one line for each thing that is not known or makes no sense, beginning with the
	// file that it is about. Each is there once. There are at most maxWarnings, and a last one that
	// counts the rest.
	Warnings []diag.Warning `json:"warnings"`
}

// CPU is what is known of the processors. The numbers are the kernel's, of hardware threads.
type CPU struct {
	// Model is the first processor's name; empty means not known. All are taken to be alike.
	Model  string `json:"model"`
	Online Set    `json:"online"` // those that run
	// Allowed are those of Online that this process may run on, by its affinity
	// (sched_setaffinity(2)) and its cpuset.
	Allowed Set `json:"allowed"`
}

// Memory is what the kernel reports of the machine's memory, or a node's, in bytes, as of the call;
// see meminfo in proc(5). 0 means "not known", except for swap. Free memory leaves out the page
// cache, so AvailableBytes is what a program can expect to get.
type Memory struct {
	TotalBytes int64 `json:"total_bytes"`
	FreeBytes  int64 `json:"free_bytes"` // unused
	// AvailableBytes is the kernel's estimate of what can be had without swapping: free memory and
	// most of the page cache.
	AvailableBytes int64 `json:"available_bytes"`
	SwapBytes      int64 `json:"swap_bytes"` // total
}

// Node is a NUMA node: CPUs and memory that are near to each other. It may have only memory, as the
// memory of a GPU or of CXL devices, or only CPUs. A machine without NUMA has one node.
type Node struct {
	ID          int   `json:"id"`
	CPUs        Set   `json:"cpus"`
	MemoryBytes int64 `json:"memory_bytes"` // total; 0: none, or not known
	FreeBytes   int64 `json:"free_bytes"`   // unused
	// Distances has one entry for each of Topology.Nodes, in that order: the relative cost of
	// reaching that node's memory from here, 10 being the node's own. They are the firmware's (SLIT
	// of ACPI), not measured. Empty means not known.
	Distances []int `json:"distances"`
}

// GPU is a graphics processor, or with CUDA_VISIBLE_DEVICES a part of one: then MIG has one
// instance, and the memory is the instance's. The PCI bus fills in what the driver does not report,
// and the driver what the bus does not; see complete.
type GPU struct {
	// Index is the number by which CUDA counts the GPU if CUDA_DEVICE_ORDER is PCI_BUS_ID and
	// CUDA_VISIBLE_DEVICES is not set.
	Index int `json:"index"`
	// Name is the product, such as "NVIDIA H100 80GB HBM3"; only the driver reports it.
	Name string `json:"name"` // empty: not known
	// UUID is the driver's, GPU-…, the same at each start of the machine.
	UUID string `json:"uuid"` // empty: not known
	// PCIAddress is domain:bus:device.function, as the kernel writes it.
	PCIAddress string `json:"pci_address"` // as 0000:3b:00.0
	// Bus is the way from the host bridge (pci0000:3a) over the bridges to the device; empty: not known.
	Bus      []string `json:"bus"`
	DeviceID string   `json:"device_id"` // vendor and device, as 10de:2330
	// Driver is the kernel module that is bound to the device, such as nvidia or vfio-pci; empty
	// means none that is visible.
	Driver string `json:"driver"`
	// Node is the NUMA node that the GPU is attached to, or Unknown. Copies between the GPU and
	// memory of this node do not cross the interconnect of the processors.
	Node int `json:"node"`
	// CPUs are those nearest to the GPU, for threads that feed it; empty means not known.
	CPUs Set `json:"cpus"`
	// MemoryBytes and FreeBytes are the device memory, total and free at the time of the call. A
	// program's own CUDA context takes some of the free memory.
	MemoryBytes int64 `json:"memory_bytes"` // total; 0: not known
	FreeBytes   int64 `json:"free_bytes"`   // 0: none, or not known
	// PCIeGeneration is the highest that the device and its slot can do, and PCIeWidth the number
	// of lanes in use; 0 means not known. Together they bound the speed of copies: a lane of
	// generation 5 transfers about 4 GB/s in each direction, and one of the generation before about
	// half.
	PCIeGeneration int    `json:"pcie_generation"`
	PCIeWidth      int    `json:"pcie_width"`
	Links          []Link `json:"links"` // NVLinks in use, by remote end
	// OwnNodes are the NUMA nodes whose memory is the GPU's own, as on Grace Hopper, where the
	// kernel manages it. Memory of these nodes is no host memory: see Limits.MemoryNodes. Empty
	// means none.
	OwnNodes Set `json:"own_nodes"`
	// MemoryNode is the node whose memory is nearest to the GPU, of those that this process may
	// take memory from: what a host buffer for the GPU should be bound to. Unknown means none in
	// particular. It differs from Node if that has no memory, or if the process's cpuset excludes
	// it.
	MemoryNode int `json:"memory_node"`
	// NodeAffinity and CPUAffinity are the nodes and CPUs that the driver reports as the nearest;
	// nil if it reports none. They count only where the kernel reports no node.
	NodeAffinity Set `json:"-"`
	CPUAffinity  Set `json:"-"`
	// MIGEnabled means that kernels run on MIG instances only; MIG has those that this process
	// sees. An enabled GPU without instances can run nothing.
	MIGEnabled bool          `json:"mig_enabled"`
	MIG        []MIGInstance `json:"mig"`
}

// MIGInstance is a part of a GPU that works as one of its own (Multi-Instance GPU): a compute
// instance in a GPU instance, which has its own memory. A CUDA program can use one at a time. See
// NVIDIA's MIG User Guide.
type MIGInstance struct {
	UUID string `json:"uuid"`
	Name string `json:"name"` // empty: not known
	// GPUInstance and ComputeInstance are the numbers by which nvidia-smi shows the instance.
	// Compute instances of one GPU instance share its memory.
	GPUInstance     int   `json:"gpu_instance"`
	ComputeInstance int   `json:"compute_instance"`
	MemoryBytes     int64 `json:"memory_bytes"` // total; 0: not known
	FreeBytes       int64 `json:"free_bytes"`   // 0: none, or not known
}

// Link is all NVLinks of a GPU that end at the same device. A virtual machine does not see the
// switches: there, an unknown remote device counts as a switch, and all such links as ending at
// one.
type Link struct {
	// Remote is the PCI address of the other end; empty means not known, as for a switch in a
	// virtual machine.
	Remote string `json:"remote"`
	// Switch is true for an NVSwitch, through which the GPU reaches all others on it, and false for
	// a GPU.
	Switch bool `json:"switch"`
	Count  int  `json:"count"`
}

// NIC is a network card that does RDMA: InfiniBand, or Ethernet with RoCE. Other network cards are
// not listed. The engine does not use NICs; they are for programs that transfer batches between
// machines, and which choose one near to a GPU.
type NIC struct {
	// Name is that of the RDMA device, as mlx5_0, by which libraries such as UCX and NCCL select
	// cards.
	Name       string   `json:"name"`
	PCIAddress string   `json:"pci_address"` // empty: none known
	Bus        []string `json:"bus"`         // from the host bridge to the card; empty: not known
	Node       int      `json:"node"`        // or Unknown
	// Device is what programs use the card by, as /dev/infiniband/uverbs0; empty: there is
	// none that this process may open, and the card does not count.
	Device string `json:"device"`
	Ports  []Port `json:"ports"` // by number
}

// Port is one port of a NIC. A port that is up may still have no IP address, which InfiniBand does
// not need and RoCE does.
type Port struct {
	Number int `json:"number"`
	// State is the kernel's word for the port's state: ACTIVE means that it is up; others are DOWN,
	// INIT and ARMED. Empty means not known.
	State     string `json:"state"`
	LinkLayer string `json:"link_layer"` // InfiniBand or Ethernet; empty: not known
	Rate      string `json:"rate"`       // the kernel's words: 200 Gb/sec (4X HDR)
	// Interfaces are the port's network interfaces, such as ib0, and the bonds and VLANs made of
	// them. Addresses are the IP addresses of all these, without link-local ones.
	Interfaces []string `json:"interfaces"`
	Addresses  []string `json:"addresses"`
}

// NICLevel is how much of a NIC must work for NICsAt to list it. A looser level lists all NICs of a
// stricter one. A level is met by the best port.
type NICLevel int

// The levels, each stricter than the one before. A NIC that this process may not use meets none of
// them. RDMA over InfiniBand needs NICActive; RoCE, and libraries that connect over IP, need
// NICAddressed.
const (
	nicUnusable  NICLevel = iota - 1
	NICPresent            // it is there, and this process may use it
	NICActive             // one of its ports is up
	NICAddressed          // one of its ports is up and has an IP address
)

// level returns the strictest level that n meets, which its best port decides. It is below
// NICPresent for a card that this process may not use.
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

// DiskKind is how a disk works, as far as that matters for its speed: how many requests at a time
// it needs, and what random reads cost.
type DiskKind string

// The kinds of disk.
const (
	NVMe        DiskKind = "nvme"    // flash behind NVMe
	SSD         DiskKind = "ssd"     // other flash: SATA, SAS, eMMC
	HDD         DiskKind = "hdd"     // rotating
	VirtualDisk DiskKind = "virtual" // made by a hypervisor or over a network: its speed says nothing of its kind
	UnknownDisk DiskKind = "unknown" // the kernel does not say whether it rotates
)

// Disk is a whole disk. Partitions, and what is stacked on disks (LVM, LUKS, RAID), are not disks
// of their own: what is mounted of them is in Mounts of all disks below. The same mount may
// therefore be in several disks.
type Disk struct {
	Name      string   `json:"name"` // the kernel's, as nvme0n1
	Kind      DiskKind `json:"kind"`
	Model     string   `json:"model"`      // empty: not known
	SizeBytes int64    `json:"size_bytes"` // 0: not known
	// Rotational is what the kernel reports (queue/rotational). For virtual disks it is a guess of
	// the hypervisor.
	Rotational bool `json:"rotational"`
	Node       int  `json:"node"` // or Unknown
	// PCIAddress and Bus are those of the disk's controller; of several paths to a disk, those of
	// the first. They are empty if there is none on the PCI bus, as for disks of some hypervisors.
	PCIAddress string   `json:"pci_address"`
	Bus        []string `json:"bus"`
	// Device is major:minor, by which mountinfo names the disk.
	Device string  `json:"device"`
	Mounts []Mount `json:"mounts"` // what is mounted of it, in the kernel's order
}

// Mount is a directory at which a file system of a disk is mounted, as this process sees it
// (/proc/self/mountinfo). A file system may be mounted at several.
type Mount struct {
	Point      string `json:"point"`
	FileSystem string `json:"file_system"` // its type, as ext4
	// Source is what was mounted, as /dev/nvme0n1p2 or host:/export. It is a name in the mount
	// namespace of the program that mounted it.
	Source   string `json:"source"`
	ReadOnly bool   `json:"read_only"`
}

// Limits is what this process may use of the machine. Each is the smallest of several bounds, with
// the file that has it, so that a message can name what to change.
type Limits struct {
	// MemoryBytes is the smallest of three: the machine's memory, that of the nodes allowed, and
	// the limits of the process's cgroup and all above it. A limit is the hard one, at which the
	// kernel kills, or the one at which it throttles (memory.high of cgroups). 0 means not known.
	MemoryBytes  int64  `json:"memory_bytes"`
	MemorySource string `json:"memory_source"` // the file that said so

	// CPUs is the number of CPUs whose time the process may use: the number allowed, or the
	// cgroup's quota rounded up if that is less. 0 means not known.
	CPUs      int    `json:"cpus"`
	CPUSource string `json:"cpu_source"` // the file that said so

	// CPUQuota is how many CPUs' time the cgroups allow, which need not be whole; 0 means no quota.
	// MemoryNodes are the nodes whose memory may be taken: the cpuset's, without GPUs' own.
	CPUQuota    float64 `json:"cpu_quota"`
	MemoryNodes Set     `json:"memory_nodes"`

	// VisibleDevices is CUDA_VISIBLE_DEVICES: Topology.GPUs has what it names, in its order, and
	// HiddenGPUs is how many others there are. If the variable is not set, GPUs are in the driver's
	// order, or by PCI address.
	VisibleDevices string `json:"visible_devices"`
	HiddenGPUs     int    `json:"hidden_gpus"`

	// Cgroup is the directory of the process's cgroup, in the hierarchy that controls memory, and
	// CgroupVersion that hierarchy's version: 1, 2, or 0 if none was found.
	CgroupVersion int    `json:"cgroup_version"`
	Cgroup        string `json:"cgroup"`
}

// Discover returns what the machine below o.Root has. It blocks while it reads files and calls the
// driver, which may take seconds to initialize if no other program uses the GPUs (see "persistence
// mode" in nvidia-smi(1)). It returns an error for an option that makes no sense (a Root that is no
// directory), for a CUDA_VISIBLE_DEVICES that makes none (ErrVisibleDevices), and for a context
// that ended. Anything else that goes wrong is a line in Warnings.
func Discover(ctx context.Context, o Options) (*Topology, error) {
	t, err := openTree(ctx, o.Root)
	if err != nil {
		return nil, err
	}
	defer t.root.Close() // which was only ever read from

	top := t.top
	// Nodes come before devices, which look theirs up. Mounts are read with the cgroups, and disks
	// use them. limit needs all of them. visible comes last, because the memory of hidden GPUs is
	// no host memory either, and because a GPU's MemoryNode depends on the limits.
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

// Distance returns the relative cost of reaching the memory of node b from node a: 10 for the same
// node, more for others. If the machine does not report it, the distance between two nodes is 20,
// as the kernel assumes too. A node that is Unknown is at that distance from all, itself included.
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

// MemoryNode returns the node whose memory is nearest to the given node, of the nodes that have
// memory and that this process may take it from. Of several at the same distance it is the first.
// If the given node is not known, MemoryNode returns the only candidate, or Unknown if there are
// several or none.
func (t *Topology) MemoryNode(node int) int {
	best, candidates := Unknown, 0
	for _, n := range t.Nodes {
		// A node of CPUs alone has no memory to take. Without a list of nodes, all are allowed.
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

// NodeOfDir returns the NUMA node of the disks that a directory is on, as far as the mounts in t
// show. It reads nothing. It returns Unknown if the disks are on several nodes, or the directory is
// on none of Disks (see OtherMounts). dir must be absolute; links in it are not followed, which
// DiskOf does.
func (t *Topology) NodeOfDir(dir string) int {
	dir = path.Clean(dir)
	var on []Disk
	deepest := 0 // length of the mount that dir is on
	// The deepest mount that has dir is the one its files are on. Several disks may have it (RAID).
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

// NICsAt returns the NICs that meet a level, by name, as a new list, which is never nil. NICs that
// this process may not use are in none of the lists, but in Topology.NICs.
func (t *Topology) NICsAt(level NICLevel) []NIC {
	return slices.DeleteFunc(append([]NIC{}, t.NICs...), func(n NIC) bool { return n.level() < level })
}
