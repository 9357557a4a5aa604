// Package topology finds out what a machine has: NUMA nodes, CPUs, memory,
// GPUs and disks, and how much of them this process may use. It knows nothing
// of tiers; what to make of a machine is decided above it.
//
//	              Discover(ctx, Options{Root, GPUs, LookupEnv})
//	                            │ reads below Root, and asks NVIDIA's library (NVML)
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
//	                ├─ Path(a, b), Matrix()   what lies between devices: NV12, PIX, PXB, PHB, NODE, SYS
//	                ├─ NICsAt(level)          those that are there, up, or have an address
//	                └─ MemoryNode(node)       where memory near to a device is taken from
//
//	DiskOf(ctx, dir, Options) ─▶ Location   the file system and the disks below dir
//
// GPUs are those that the process sees: CUDA_VISIBLE_DEVICES is honoured. Those that another driver
// has come last, as CUDA does not count them. NVML is bound at run time, on Linux on amd64 and
// arm64, with cgo or without. It is opened when it is asked, and closed again. Where there is none
// (no driver of NVIDIA's is installed, or the system is another) GPUs are known as the PCI bus
// tells, which a warning says.
//
// Everything is read from the /proc and /sys of Linux below [Options].Root, so
// that a recorded tree stands for a whole machine; elsewhere the same calls
// return what is known, which is nothing, and say so. Partial knowledge is no
// error: each thing that is missing or makes no sense is one line of Warnings,
// and its field holds the value for "not known" (0 bytes, node -1, an empty
// set). An error means an option or a CUDA_VISIBLE_DEVICES that makes no sense, or
// a context that ended.
//
// What is returned are plain values, which marshal to JSON under keys that do
// not change. They belong to the caller. Nothing is cached, opened or started
// beyond a call, the machine is not changed, and all functions may be called
// at the same time. The package takes no locks.
package topology
