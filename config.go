package spillway

import (
	"context"
	"log/slog"
	"time"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/topology"
)

// Backend says what serves a GPU space.
type Backend string

// The backends.
const (
	Auto Backend = ""     // the machine's GPU where there is a backend for it, else Sim
	Sim  Backend = "sim"  // the simulated GPU, in host memory
	CUDA Backend = "cuda" // NVIDIA's driver; opening fails where it cannot be had
)

// Config configures an Engine. The zero value takes everything from the machine: its GPUs or a
// simulated one, a pinned host space on each NUMA node, and the temporary directory's disk. Open
// makes the lists that are nil as Configure does.
type Config struct {
	// GPUs are the GPU spaces, gpu:0 onwards. Nil means one on each GPU that CUDA shows to the
	// process, or a simulated one if there is none. An empty list, which is not nil, means none.
	GPUs []GPUConfig
	// Hosts are the pinned host spaces, host:0 onwards. Nil means those that HostPerGPU describes.
	Hosts []HostConfig
	// Disks are the spill volumes, disk:0 onwards. What goes to any disk is spread over
	// them in proportion to how fast each is written. Nil means one with defaults;
	// an empty list, which is not nil, means none.
	Disks []DiskConfig

	// GPUMemory is the size of each space where GPUs is nil, and must not be set elsewhere. A share
	// is one of the GPU's memory, or, where the GPU is simulated, of the memory that the process
	// may use. The default is that of GPUConfig.Memory.
	GPUMemory Amount
	// MaxGPUs is how many GPUs are used at most where GPUs is nil; it must not be set elsewhere.
	// Those are chosen of which the fewest bytes are in use. 0 means all.
	MaxGPUs int
	// HostMemory is how much all host spaces take together where Hosts is nil, and must not be set
	// elsewhere. A share is one of the memory that the process may use. The default is a quarter of
	// that, and no more than half of any node's memory.
	HostMemory Amount
	// HostPerGPU divides HostMemory into one space for each GPU, on the node nearest to it, where
	// Hosts is nil, and must not be set elsewhere. Otherwise there is one space on each NUMA node
	// whose memory the process may use.
	HostPerGPU bool

	// The marks of each tier; zero fields mean the defaults (tier.Marks.In). A space may have
	// its own, and they can be changed while the engine runs (tier.Space.SetMarks).
	GPUMarks, HostMarks, DiskMarks tier.Marks

	// Policy chooses what the monitor moves down; nil means monitor.CostAware.
	Policy monitor.Policy
	// MonitorPeriod is how often the monitor looks without being woken while anything is needed, at
	// least every monitor.MinPeriod; 0 means 50 ms.
	MonitorPeriod time.Duration
	// MovesPerEdge is how many moves the monitor has under way at once from one space to one other;
	// 0 means 2, so that one reads while the other writes. At most monitor.MaxMovesPerEdge.
	MovesPerEdge int

	// WriteAhead is how many bytes a second are copied to disks at most, while nothing else uses
	// these, of the batches that would be the first to leave a space that is above its stop mark.
	// Such a batch stays where it is, and leaves without a transfer later. 0 means 64 MiB, and nothing
	// to disks with Persist: a copy there persists, too. Below 0 there is none.
	WriteAhead int64

	// StallTimeout is how long nothing may change before a stuck wait for room, as of Put, Acquire or
	// a Reader, ends with an error. If all memories are full of batches at rest, it is a
	// tier.NoSpaceError: nobody has used or dropped any for so long. If open handles or records
	// keep so much that the wait could not be served whatever else became free, it is a
	// reservation.DeadlockError. Make it longer than the longest work on open batches, or pause of
	// the consumers. 0 means 30 s; below 0 such waits end with their contexts.
	// Owners (reservation.Owner, RunTask) need not wait for it: what they hold is known.
	StallTimeout time.Duration

	// Codec is how what goes to disk is compressed. The zero value, convert.CodecAuto,
	// compresses where that is faster than writing what is there, as measured.
	Codec convert.Codec
	// Limits bound what the engine takes, beside the sizes of its spaces.
	Limits Limits

	// CUDALibrary is the path of NVIDIA's driver library; empty means libcuda.so.1, as the dynamic
	// linker finds it.
	CUDALibrary string

	// Topology is what the machine has; nil means that Open discovers it.
	Topology *topology.Topology
	// Logger gets warnings; nil means slog.Default. A line is lost when its handler panics.
	Logger *slog.Logger
	// Events is called as the engine works: for moves, waits, copies, disks, tasks and all else that
	// package events lists, on the goroutine that does it. It must be quick, and must not wait for
	// what the engine does. A panic is logged. Nil costs nothing. Tee joins several.
	Events func(Event)
}

// GPUConfig configures one GPU space.
//
// A GPU may be lost while the engine is open: an error of the driver ends its context, or it falls
// off the bus. Then Put and moves go to other GPUs, or to slower tiers where their strategy names
// these. A call that asks for that GPU alone, or waits for it, gets a *tier.LostError at once. So
// does one that opens a batch which is only there; such a batch can be dropped. Warnings and Stats
// show the loss. Batches elsewhere are not affected. A Device of the program's own, or what Open
// returns, is treated so if it is a tier.Losable.
type GPUConfig struct {
	Backend Backend
	// ID says which of the machine's GPUs it is: by its UUID or PCI address in any of the usual
	// spellings (0000:17:00.0, 00000000:17:00.0, 17:00.0), or by the beginning of one GPU's UUID,
	// as GPU-8932f937. If it is that of several, Open returns an AmbiguousGPUError. Empty means any
	// GPU that no other space has: the one of which the fewest bytes are in use, by the topology or
	// in the node's ledger, then that with the fewest holders there, then by UUID.
	ID string
	// Memory is the size of the space, of a page or more, and at most the device's memory. A share
	// is one of the card's memory, so it is for spaces that a backend's GPU serves. For a simulated
	// GPU it is refused with ErrShareOfSimulated. The default is what is free on the device. A
	// simulated GPU takes host memory, so its default is the least of 256 MiB, an eighth of the
	// memory that the process may use, and an equal part for each GPU space of what the host spaces
	// leave of that. This is also the most for a simulated GPU that replaces one with an ID.
	Memory Amount
	// Marks are this space's; zero fields mean those of Config.GPUMarks.
	Marks tier.Marks
	// Node, if set, is the NUMA node that the space counts as nearest to, or -1 for none. Nil
	// means what the device says; a simulated one is given a node of its own.
	Node *int
	// Device, if set, is used instead of a backend's own: pooled, decorated, or
	// one that the program already has. The engine closes it only if Own is set.
	Device tier.Device
	Own    bool
	// Open, if set, makes the device instead of a backend: plain, pooled or
	// stream-ordered. The engine closes it. memory is Memory in bytes, so 0 leaves the size
	// to Open.
	Open func(ctx context.Context, memory int64) (tier.Device, error)
	// Wrap, if set, is given the device, wherever it comes from, and returns what the engine is to
	// use in its place: decorators in any order. Limits.Budgets and the quota go around what it
	// returns. Where the engine closes the device it closes what Wrap returned.
	//
	// The limit of a tier.Limited among them is charged for everything that is promised in the
	// space.
	Wrap func(tier.Device) (tier.Device, error)
}

// HostConfig configures one pinned host space.
type HostConfig struct {
	// Memory is its size, which must be set. A share is one of the memory that the process may use.
	Memory Amount
	// Marks are this space's; zero fields mean those of Config.HostMarks.
	Marks tier.Marks
	// Node is the NUMA node that the memory is bound to; -1 means any.
	Node int
	// GPUs are the numbers of the GPU spaces that it is set apart for: what moves down from
	// these goes here rather than to another space that is equally near. Others may use it, too.
	GPUs []int
}

// DiskConfig configures one spill volume.
type DiskConfig struct {
	// Dir is the directory; empty means os.TempDir. Nothing but the engine's own
	// files in it is touched, and none stays, but with Persist.
	Dir string
	// Capacity is the most that may lie there. A share is one of what the file system has free when
	// the engine is opened, less Reserve. The default is half of that. Disks on one file system
	// divide what is free there, without the capacities in bytes of others, equally among them.
	Capacity Amount
	// Marks are this space's; zero fields mean those of Config.DiskMarks.
	Marks tier.Marks
	// Node, if set, is the NUMA node that the disk is on, or -1 for none. Data goes to it rather
	// than to disks farther away. Nil means the node that the topology knows for Dir, if FS is nil.
	Node *int
	// Reserve is how many bytes of the file system must stay free.
	Reserve int64
	// FS is the file system that Dir is on; nil means the machine's own. Decorators
	// over that, such as those of tier/disk/faultfs, go here. It stays the caller's, may
	// serve several volumes, and must be there until the engine is closed.
	FS disk.FS
	// Encrypt makes the volume write nothing but what is encrypted and authenticated
	// (AES-GCM). What was changed on the disk is reported as convert.ErrCorrupt.
	Encrypt bool
	// Key is the secret, of 16, 24 or 32 bytes, that each volume derives a key of its own from. The
	// caller owns it and may overwrite it once Open has returned. If it is nil, the volume makes a
	// key. No key is ever written, and those of volumes are overwritten when the engine is closed.
	// With Persist a key is required, and the next engine needs the same. With another one, or
	// none, that engine is not opened (disk.ErrKey), and what persists stays as it is. Engines with
	// different keys need different directories.
	Key []byte
	// Persist makes the engine record what it writes there, in files with names. When the process
	// ends without closing the engine, be it killed, the next engine with Persist on the same Dir
	// finds the batches that were there: see Engine.Persisted. If several processes have ended so,
	// each disk finds those of one of them. The engine warns of the others, which later engines
	// find, and may warn of those of a process that still runs. Batches do not survive a failure of
	// the system or of its power. The disk needs a Capacity in bytes, because what persists takes
	// part of it, and with Encrypt a Key. Engines that are open at the same time have different
	// directories in Dir.
	Persist bool
}
