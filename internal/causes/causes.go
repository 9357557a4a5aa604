// Package causes is the table of what the machine may refuse, and of the remedies. All packages
// make their warnings here. docs/machine.md is the same table for people. The package takes no
// locks.
package causes

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spillway-db/spillway/diag"
)

// The causes.
const (
	LockLimit        diag.Cause = "lock-limit"         // locked memory is limited
	HugePagesOff     diag.Cause = "huge-pages-off"     // huge pages are switched off
	HugePagesMissing diag.Cause = "huge-pages-missing" // the kernel has no huge pages
	MemoryPolicy     diag.Cause = "memory-policy"      // the process may not bind memory to a NUMA node
	MemoryNode       diag.Cause = "memory-node"        // a NUMA node's memory cannot be had
	Touch            diag.Cause = "touch"              // pages could not be made present ahead of use
	GiveBack         diag.Cause = "give-back"          // free memory could not be given back
	ExcludedNode     diag.Cause = "excluded-node"      // the process may not take the memory of some nodes
	MemoryLimit      diag.Cause = "memory-limit"       // a container's memory is nearly all taken
	MemoryFileSystem diag.Cause = "memory-file-system" // a spill directory is in memory
	Overlay          diag.Cause = "overlay"            // a spill directory is a container's own layer
	DirectIO         diag.Cause = "direct-io"          // a file system without direct I/O
	NamedFiles       diag.Cause = "named-files"        // a file system without anonymous files
	Sparse           diag.Cause = "sparse"             // a file system that reserves no room
	Abandoned        diag.Cause = "abandoned"          // killed processes had left files, which are removed
	NotRemoved       diag.Cause = "not-removed"        // and could not be
	KeptLeft         diag.Cause = "kept-left"          // what was kept is not taken over
	KeptDamaged      diag.Cause = "kept-damaged"       // what was kept is lost
	Manifest         diag.Cause = "manifest"           // what does not persist any more stays on the disk
	DiskFails        diag.Cause = "disk-fails"         // the disk refuses
	UnknownLimits    diag.Cause = "unknown-limits"     // the limits of the process's cgroup are not known
	HiddenProc       diag.Cause = "hidden-proc"        // /proc is hidden or incomplete
	HiddenSys        diag.Cause = "hidden-sys"         // /sys is hidden or incomplete
	UnknownPlace     diag.Cause = "unknown-place"      // it is not known where a device is
	Driver           diag.Cause = "driver"             // the GPUs' driver does not answer
	VisibleDevices   diag.Cause = "visible-devices"    // CUDA_VISIBLE_DEVICES names what is not there
	Simulated        diag.Cause = "simulated"          // a GPU is simulated
	NotPinned        diag.Cause = "not-pinned"         // the GPUs' driver does not pin host memory
	GPUSize          diag.Cause = "gpu-size"           // a GPU space is smaller than it was to be
	GPULost          diag.Cause = "gpu-lost"           // a GPU has failed for good
	Ledger           diag.Cause = "ledger"             // files of a node's ledger are removed while they are used
	PeerAccess       diag.Cause = "peer-access"        // GPUs do not copy to each other as their driver promises
	System           diag.Cause = "system"             // the operating system has no such thing
)

// remedies has every cause, and what to do about it; empty where nothing need be done.
var remedies = map[diag.Cause]string{
	LockLimit: "raise the limit of locked memory: ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock= in " +
		"containers; or grant CAP_IPC_LOCK",
	HugePagesOff: "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root; for a container, on " +
		"its host",
	HugePagesMissing: "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
	MemoryPolicy: "allow mbind: --cap-add SYS_NICE, or a seccomp profile that has it; or start the program " +
		"under numactl --membind",
	MemoryNode: "give the process that node (cpuset.mems, --cpuset-mems in containers), or name another for " +
		"the host space",
	Touch: "make the host memory smaller, or give the process more",
	GiveBack: "raise vm.max_map_count if the process has very many mappings; otherwise the memory is free " +
		"again when the engine is closed",
	ExcludedNode: "give the process all nodes (cpuset.mems, --cpuset-mems in containers) if the engine is to " +
		"have their memory",
	MemoryLimit: "set GOMEMLIMIT to what Go's heap can have; raise the limit (memory.max, MemoryMax= in " +
		"systemd, --memory or resources.limits.memory in containers), or give the engine less host " +
		"memory, and spill directories that are on a disk",
	MemoryFileSystem: "name a directory on a disk",
	Overlay:          "mount a volume, and name a directory in it",
	DirectIO:         "name a directory on another file system, such as ext4 or xfs",
	NamedFiles: "name a directory on another file system, such as ext4 or xfs, if a killed process must " +
		"leave nothing",
	Sparse: "name a directory on another file system, such as ext4 or xfs, or keep other programs from " +
		"filling this one",
	Abandoned:  "",
	NotRemoved: "see to it that this process may change the directory, or remove what is left by hand",
	KeptLeft: "open it with the key that it was kept with, as its owner; what another process kept that " +
		"has ended, with another engine or as another disk; or remove it if it is not needed any more",
	KeptDamaged: "make what is lost anew, and have the disk checked",
	Manifest: "see to it that this process may change the directory: the next engine may find batches that " +
		"were dropped",
	DiskFails: "see the kernel's log for what the disk says, or name another directory",
	UnknownLimits: "mount the cgroup file system into the container, or give the sizes of the host memory and " +
		"of simulated GPUs in bytes",
	HiddenProc:     "mount /proc, or give all sizes in bytes",
	HiddenSys:      "mount /sys (read-only will do), or set the nodes of the spaces in the configuration",
	UnknownPlace:   "set the nodes of the GPUs and disks in the configuration if the machine has several",
	Driver:         "install NVIDIA's driver if there is such a GPU; start containers with --gpus",
	VisibleDevices: "correct CUDA_VISIBLE_DEVICES, or unset it",
	Simulated: "install NVIDIA's driver and start containers with --gpus; or ask for the simulated GPU, if " +
		"that is what is wanted",
	NotPinned: "make the host space smaller, or give the process, its container or its virtual machine more " +
		"memory that may be pinned",
	GPUSize: "ask for less (GPUConfig.Memory, --gpu-memory), or raise the budget or the quota " +
		"(SPILLWAY_GPU_MEMORY_LIMIT)",
	GPULost: "make what was there anew, and restart the process to use the GPU again; see the kernel's " +
		"log (NVRM: Xid) for why it failed",
	Ledger: "keep whatever removes old files, such as systemd-tmpfiles, away from the directory " +
		"(SPILLWAY_GPU_QUOTA_DIR), or name another one, such as one in /run",
	PeerAccess: "switch off IOMMU and PCIe ACS between the GPUs if the machine is not virtual, or update the " +
		"driver; see nvidia-smi topo -p2p r",
	System: "",
}

// information lists the causes whose warnings are information by default.
var information = []diag.Cause{
	ExcludedNode, Overlay, NamedFiles, Sparse, Abandoned, HiddenProc, HiddenSys, UnknownPlace,
	Driver, Simulated, System,
}

// All lists the causes, by name.
func All() []diag.Cause { return slices.Sorted(maps.Keys(remedies)) }

// Remedy returns what to do about a cause; empty where nothing need be done.
func Remedy(c diag.Cause) string { return remedies[c] }

// Warn makes a warning of the cause, with its remedy. The text must say what was wanted, what came
// of it, and what that costs. Warn panics if c is not in the table.
func Warn(c diag.Cause, format string, args ...any) diag.Warning {
	remedy, ok := remedies[c]
	if !ok {
		panic(fmt.Sprintf("causes: %q is not a cause", c))
	}
	info := slices.Contains(information, c)
	return diag.Warning{Cause: c, What: fmt.Sprintf(format, args...), Remedy: remedy, Info: info}
}
