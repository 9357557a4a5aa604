package tier

import "fmt"

// Warning is something that the machine refused or did not tell, and without which all
// works: slower, or less safely. It is a plain value.
type Warning struct {
	Cause  Cause
	Space  ID     // that it is about; the zero ID: the machine as a whole
	What   string // what was wanted, what came of it, and what that costs; one line
	Remedy string // what to do; empty: nothing can be done, or need be
	Info   bool   // it costs nothing, or is meant to be so
}

// String returns all of it in one line.
func (w Warning) String() string {
	s := w.What
	if w.Space.Valid() {
		s = w.Space.String() + ": " + s
	}
	if w.Remedy != "" {
		s += " (" + w.Remedy + ")"
	}
	return s
}

// Cause is the kind of a Warning. docs/machine.md has a table of them. The zero value is
// invalid.
type Cause uint8

// The causes.
const (
	CauseLockLimit        Cause = iota + 1 // locked memory is limited
	CauseHugePagesOff                      // huge pages are switched off
	CauseHugePagesMissing                  // the kernel has no huge pages
	CauseMemoryPolicy                      // the process may not bind memory to a NUMA node
	CauseMemoryNode                        // a NUMA node's memory cannot be had
	CauseTouch                             // pages could not be made present ahead of use
	CauseGiveBack                          // free memory could not be given back
	CauseExcludedNode                      // the process may not take the memory of some nodes
	CauseMemoryLimit                       // a container's memory is nearly all taken
	CauseMemoryFileSystem                  // a spill directory is in memory
	CauseOverlay                           // a spill directory is a container's own layer
	CauseDirectIO                          // a file system without direct I/O
	CauseNamedFiles                        // a file system without anonymous files
	CauseSparse                            // a file system that sets no room aside
	CauseFileLimit                         // open files are limited
	CauseAbandoned                         // killed processes had left files, which are removed
	CauseNotRemoved                        // and could not be
	CauseKeptLeft                          // what was kept is not taken over
	CauseKeptDamaged                       // what was kept is lost
	CauseManifest                          // what is to be kept cannot be recorded
	CauseDiskFails                         // the disk refuses
	CauseUnknownLimits                     // the limits of the process's cgroup are not known
	CauseHiddenProc                        // /proc does not tell
	CauseHiddenSys                         // /sys does not tell
	CauseUnknownPlace                      // it is not known where a device is
	CauseDriver                            // the GPUs' driver does not tell
	CauseVisibleDevices                    // CUDA_VISIBLE_DEVICES names what is not there
	CauseSimulated                         // a GPU is simulated
	CauseNotPinned                         // the GPUs' driver does not pin host memory
	CauseGPUSize                           // a GPU space is smaller than it was to be
	CauseGPULost                           // a GPU has failed for good
	CauseLedger                            // files of a node's ledger are removed while they are used
	CausePeerAccess                        // GPUs do not copy to each other as their driver promises
	CauseSystem                            // the operating system has no such thing
	causes                                 // how many there are, and one
)

// cause is what is the same for all warnings of a cause.
type cause struct {
	name   string // stable
	info   bool
	remedy string
}

var causeTable = [causes]cause{
	CauseLockLimit: {"lock-limit", false,
		"raise the limit of locked memory: ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock= in containers; or grant CAP_IPC_LOCK"},
	CauseHugePagesOff: {"huge-pages-off", false,
		"echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root; for a container, on its host"},
	CauseHugePagesMissing: {"huge-pages-missing", false,
		"use a kernel with CONFIG_TRANSPARENT_HUGEPAGE"},
	CauseMemoryPolicy: {"memory-policy", false,
		"allow mbind: --cap-add SYS_NICE, or a seccomp profile that has it; or start the program under numactl --membind"},
	CauseMemoryNode: {"memory-node", false,
		"give the process that node (cpuset.mems, --cpuset-mems in containers), or name another for the host space"},
	CauseTouch: {"touch", false,
		"make the host memory smaller, or give the process more"},
	CauseGiveBack: {"give-back", false,
		"raise vm.max_map_count if the process has very many mappings; otherwise the memory is free again when the engine is closed"},
	CauseExcludedNode: {"excluded-node", true,
		"give the process all nodes (cpuset.mems, --cpuset-mems in containers) if the engine is to have their memory"},
	CauseMemoryLimit: {"memory-limit", false,
		"set GOMEMLIMIT to what Go's heap can have; raise the limit (memory.max, MemoryMax= in systemd, --memory or resources.limits.memory in containers), or give the engine less host memory, and spill directories that are on a disk"},
	CauseMemoryFileSystem: {"memory-file-system", false,
		"name a directory on a disk"},
	CauseOverlay: {"overlay", true,
		"mount a volume, and name a directory in it"},
	CauseDirectIO: {"direct-io", false,
		"name a directory on another file system, such as ext4 or xfs"},
	CauseNamedFiles: {"named-files", true,
		"name a directory on another file system, such as ext4 or xfs, if a killed process must leave nothing"},
	CauseSparse: {"sparse", true,
		"name a directory on another file system, such as ext4 or xfs, or see to it that nobody else fills this one"},
	CauseFileLimit: {"file-limit", false,
		"raise the limit of open files: ulimit -n, LimitNOFILE= in systemd, --ulimit nofile= in containers; or give the volume less"},
	CauseAbandoned: {"abandoned", true, ""},
	CauseNotRemoved: {"not-removed", false,
		"see to it that this process may change the directory, or remove what is left by hand"},
	CauseKeptLeft: {"kept-left", false,
		"open it with the key that it was kept with, as the user whose it is; or remove it if nobody wants it any more"},
	CauseKeptDamaged: {"kept-damaged", false,
		"make what is lost anew, and have the disk checked"},
	CauseManifest: {"manifest", false,
		"make room there, or name another directory: what is put from now on may not be found by the next engine"},
	CauseDiskFails: {"disk-fails", false,
		"see the kernel's log for what the disk says, or name another directory"},
	CauseUnknownLimits: {"unknown-limits", false,
		"mount the cgroup file system into the container, or give the sizes of the host memory and of simulated GPUs in bytes"},
	CauseHiddenProc: {"hidden-proc", true,
		"mount /proc, or give all sizes in bytes"},
	CauseHiddenSys: {"hidden-sys", true,
		"mount /sys (read-only will do), or set the nodes of the spaces in the configuration"},
	CauseUnknownPlace: {"unknown-place", true,
		"set the nodes of the GPUs and disks in the configuration if the machine has several"},
	CauseDriver: {"driver", true,
		"install NVIDIA's driver if there is such a GPU; start containers with --gpus"},
	CauseVisibleDevices: {"visible-devices", false,
		"correct CUDA_VISIBLE_DEVICES, or unset it"},
	CauseSimulated: {"simulated", true,
		"install NVIDIA's driver and start containers with --gpus; or ask for the simulated GPU, if that is what is wanted"},
	CauseNotPinned: {"not-pinned", false,
		"make the host space smaller, or give the process, its container or its virtual machine more memory that may be pinned"},
	CauseGPUSize: {"gpu-size", false,
		"ask for less (GPU.Memory, --gpu-memory), or raise the budget or the quota (SPILLWAY_GPU_MEMORY_LIMIT)"},
	CauseGPULost: {"gpu-lost", false,
		"make what was there anew, and restart the process to use the GPU again; see the kernel's log (NVRM: Xid) for why it failed"},
	CauseLedger: {"ledger", false,
		"keep whatever removes old files, such as systemd-tmpfiles, away from the directory (SPILLWAY_GPU_QUOTA_DIR), or name another one, such as one in /run"},
	CausePeerAccess: {"peer-access", false,
		"switch off IOMMU and PCIe ACS between the GPUs if the machine is not virtual, or update the driver; see nvidia-smi topo -p2p r"},
	CauseSystem: {"system", true, ""},
}

// Causes lists all causes.
func Causes() []Cause {
	all := make([]Cause, 0, causes-1)
	for c := Cause(1); c < causes; c++ {
		all = append(all, c)
	}
	return all
}

// Valid says whether c is one of the causes.
func (c Cause) Valid() bool { return c > 0 && c < causes }

// String returns the name, such as "lock-limit", which does not change.
func (c Cause) String() string {
	if !c.Valid() {
		return "invalid"
	}
	return causeTable[c].name
}

// Remedy returns what to do about it; empty for one of which nothing need be done.
func (c Cause) Remedy() string {
	if !c.Valid() {
		return ""
	}
	return causeTable[c].remedy
}

// Info says whether warnings of the cause are information, unless they say otherwise.
func (c Cause) Info() bool { return c.Valid() && causeTable[c].info }

// Warning makes a warning with the remedy of the cause. The text is to say what was
// wanted, what came of it, and what that costs.
func (c Cause) Warning(format string, args ...any) Warning {
	return Warning{Cause: c, What: fmt.Sprintf(format, args...), Remedy: c.Remedy(), Info: c.Info()}
}
