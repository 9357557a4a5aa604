package spillway

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"slices"
	"time"

	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/reservation/quota"
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

// Config configures an Engine. The zero value takes everything from the
// machine: its GPU or a simulated one, a pinned host space on each NUMA node,
// and the temporary directory's disk.
type Config struct {
	// GPUs are the GPU spaces, gpu:0 onwards. Nil means one with defaults; an
	// empty list, which is not nil, means none.
	GPUs []GPUConfig
	// HostMemory is the size of the pinned host memory in bytes, shared evenly
	// by the NUMA nodes. 0 means a quarter of the memory that the process may use,
	// and no more than half of any node's.
	HostMemory int64
	// Hosts are the pinned host spaces, host:0 onwards; HostMemory must not be set then. Nil
	// means one on each NUMA node whose memory the process may use. Configure makes
	// others.
	Hosts []HostConfig
	// Disks are the spill volumes, disk:0 onwards. What goes to any disk is spread over
	// them in proportion to how fast each is written. Nil means one with defaults;
	// an empty list, which is not nil, means none.
	Disks []DiskConfig

	// The marks of each tier; zero fields mean tier.DefaultFractions.
	GPUMarks, HostMarks, DiskMarks tier.Fractions

	// Policy chooses what the monitor moves down; nil means monitor.PlanOrder.
	Policy monitor.Policy
	// MonitorPeriod is how often the monitor looks without being woken, at least every
	// monitor.MinPeriod; 0 means 50 ms.
	MonitorPeriod time.Duration

	// StuckAfter is how long nothing may change before a wait for room, as of Put, Acquire or a
	// Reader, ends with a reservation.DeadlockError, because open handles or records keep so
	// much that it could not be served whatever else became free. Make it longer than the
	// longest work on open batches. 0 means 30 s; below 0 such
	// waits end with their contexts. Owners (reservation.Owner, RunTask) need not wait for
	// it: what they hold is known.
	StuckAfter time.Duration

	// Codec is how what goes to disk is compressed. The zero value, convert.CodecAuto,
	// compresses where that is faster than writing what is there, as measured.
	Codec convert.Codec
	// Permits limits what transfers with disks have under way: bytes of host memory, and
	// spill slots. The zero value is that of permit.Config. It needs a budget
	// permit.Host, and at least two slots, of which one is the monitor's.
	Permits permit.Config
	// PermitPool, if set, is used instead of a pool of the engine's own, under the same
	// terms, so that several engines share one limit; Permits must not be set then. The
	// engine does not close it, and it must be open for as long as the engine is.
	PermitPool *permit.Pool
	// Admission says which tasks may start; its zero fields mean the defaults.
	Admission admission.Rules

	// Quota limits the GPU memory that the engine's spaces take together, and says
	// whether other processes are asked. Nil means what quota.FromEnv finds in the
	// environment, where a variable that says nothing sensible makes Open fail; a
	// pointer to the zero value means no limit, whatever is there.
	//
	// Each engine is limited by itself, unless they join a ledger: engines of one process
	// that are to be one limit together are given the same SharedQuota.
	Quota *quota.Settings
	// SharedQuota, if set, is the limit that the spaces are under in place of one of the
	// engine's own. Quota must not set a limit then.
	SharedQuota *quota.Quota
	// QuotaOver, if set, is told when more is in use than a lowered limit allows, once
	// until it is not so any more. Of a SharedQuota its own options say who is told.
	QuotaOver func(quota.Over)

	// CUDALibrary is the path of NVIDIA's driver library; empty means libcuda.so.1, as the dynamic linker finds it.
	CUDALibrary string

	// Topology is what the machine has; nil means that Open discovers it.
	Topology *topology.Topology
	// Logger gets warnings; nil means slog.Default. A line is lost when its handler panics.
	Logger *slog.Logger
	// MoveEvents and MonitorEvents are told what happens; all may be nil.
	MoveEvents    convert.Events
	MonitorEvents monitor.Events
}

// GPUConfig configures one GPU space.
//
// A GPU that is lost while the engine is open, after an error of the driver that ends its context or when it has fallen off the bus, is
// passed by. Put and moves go to other GPUs, or to slower tiers where their strategy names these; whoever asks for that GPU alone, or
// waits for it, gets a *tier.LostError at once, and so does who opens a batch that is only there: it can be dropped. Warnings
// and Stats tell of it. Batches elsewhere are not affected. A Device of the program's own, or what Open returns, is treated so if it is a tier.Losable.
type GPUConfig struct {
	Backend Backend
	// ID says which of the machine's GPUs it is, by its UUID or PCI address in any of the usual spellings
	// (0000:17:00.0, 00000000:17:00.0, 17:00.0), or by the beginning of one GPU's UUID, as GPU-8932f937; if it is that of
	// several, Open returns an AmbiguousGPUError. Empty means any that no other space has: the one
	// of which the fewest bytes are in use, by the topology or in the node's ledger, then that with the fewest holders there, then
	// by UUID.
	ID string
	// Memory is the size of the space in bytes, and no more than the device says that
	// it has. 0 means what is free on the device; of a simulated one 256 MiB, or an eighth
	// of the host's memory if that is less, for it lies in that. That is also the most of a simulated
	// one that stands in for a GPU with an ID.
	Memory int64
	// Share is the size of the space instead of Memory, as a share of what the card has: above 0, up to 1. It is for spaces
	// that a backend's GPU serves; if that is a simulated one, Open returns ErrShareOfSimulated.
	Share float64
	// Node, if set, is the NUMA node that the space counts as nearest to, or -1 for none. Nil
	// means what the device says; a simulated one is given a node of its own.
	Node *int
	// Device, if set, is used instead of a backend's own: pooled, decorated, or
	// one that the program already has. The engine closes it only if Own is set.
	Device tier.Device
	Own    bool
	// Open, if set, makes the device instead of a backend: plain, pooled or
	// stream-ordered. The engine closes it. memory is Memory, so 0 leaves the size to
	// Open.
	Open func(ctx context.Context, memory int64) (tier.Device, error)
	// Wrap, if set, is given the device, wherever it comes from, and returns what the
	// engine is to use in its place: decorators, such as those of reservation/budget,
	// in any order. Where the engine closes the device it closes what Wrap returned.
	//
	// What a tier.Limited among them has is charged for everything that is promised in
	// the space. Engines that share a budget each take what the others leave: what
	// finds no room goes to a slower tier, or waits, as it does when the space is full.
	Wrap func(tier.Device) (tier.Device, error)
}

// HostConfig configures one pinned host space.
type HostConfig struct {
	// Memory is its size in bytes.
	Memory int64
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
	// Capacity is the most that may lie there, in bytes. 0 means half of what the
	// file system has free, or Share of it.
	Capacity int64
	// Share is the part of what the file system has free, less Reserve, that may be
	// taken if Capacity is 0: up to 1, and 0 means a half.
	Share float64
	// Node, if set, is the NUMA node that the disk is on, or -1 for none: data then goes to it
	// rather than to disks farther away. Nil means that all are equally near.
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
	// Key is the secret, of 16, 24 or 32 bytes, that each volume derives a key of its
	// own from; it stays the caller's, who may overwrite it once Open has returned. Nil:
	// the volume makes a key. No key is ever written, and those of volumes are
	// overwritten when the engine is closed. With Persist it must be given, and the next
	// engine needs the same: with another one, or none, it is not opened (disk.ErrKey), and
	// what persists stays as it is. Engines with different keys need different directories.
	Key []byte
	// Persist makes the engine record what it writes there, in files with names. When the process
	// ends without closing the engine, be it killed, the next engine with Persist on the same Dir
	// finds the batches that were there: see Engine.Persisted. They do not survive a failure of the
	// system or of its power. The disk needs a Capacity, for what persists takes part of it, and
	// with Encrypt a Key. Engines that are open at the same time have different directories in Dir.
	Persist bool
}

const (
	defaultGPUMemory  = 256 << 20
	defaultStreams    = 16        // lent to one borrower at a time, so that many moves can run
	stagingChunk      = 512 << 10 // what is in use of it stays in the caches; see host.Staging
	stagingChunks     = 16        // two transfers between device and disk at full depth
	stagingMaxShare   = 8         // staging takes at most 1/8 of a host space
	smallestHostSpace = 64 * tier.Page
)

// Validate says what is wrong with c, for everything that can be told without
// the machine. Open calls it.
func (c Config) Validate() error {
	var errs []error
	for i, g := range c.GPUs {
		switch {
		case g.Backend != Auto && g.Backend != Sim && g.Backend != CUDA:
			errs = append(errs, fmt.Errorf("gpu:%d: backend %q is unknown: want sim, cuda or nothing", i, g.Backend))
		case g.Memory < 0:
			errs = append(errs, fmt.Errorf("gpu:%d: memory of %d bytes is negative", i, g.Memory))
		case !(g.Share >= 0 && g.Share <= 1): // NaN is neither
			errs = append(errs, fmt.Errorf("gpu:%d: a share of %v of the memory: want one above 0, up to 1", i, g.Share))
		case g.Share != 0 && g.Memory != 0:
			errs = append(errs, fmt.Errorf("gpu:%d: Memory and Share are both set", i))
		case g.Share != 0 && (g.Device != nil || g.Open != nil):
			errs = append(errs, fmt.Errorf("gpu:%d: Share is for a backend's GPU: give Memory in bytes", i))
		case g.Device != nil && g.Open != nil:
			errs = append(errs, fmt.Errorf("gpu:%d: Device and Open are both set: a space has one device", i))
		}
	}
	if c.HostMemory < 0 {
		errs = append(errs, fmt.Errorf("host memory of %d bytes is negative", c.HostMemory))
	} else if c.HostMemory > 0 && c.HostMemory < smallestHostSpace {
		errs = append(errs, fmt.Errorf("host memory of %d bytes is too little: the least is %d", c.HostMemory, int64(smallestHostSpace)))
	}
	errs = append(errs, c.validateHosts(), c.validateNodes())
	for i, d := range c.Disks {
		switch {
		case !(d.Share >= 0 && d.Share <= 1): // NaN is neither
			errs = append(errs, fmt.Errorf("disk:%d: a share of %v: want one from 0 to 1", i, d.Share))
		case d.Share > 0 && d.Capacity > 0:
			errs = append(errs, fmt.Errorf("disk:%d: capacity and share are both set", i))
		}
		if d.Capacity < 0 || d.Reserve < 0 {
			errs = append(errs, fmt.Errorf("disk:%d: capacity and reserve must not be negative", i))
		}
		if err := disk.CheckKey(d.Encrypt, d.Key, d.Persist); err != nil {
			errs = append(errs, fmt.Errorf("disk:%d: %w", i, err))
		}
		if d.Persist && d.Capacity == 0 {
			errs = append(errs, fmt.Errorf("disk:%d: with Persist it needs a capacity: a share of what is free would not hold what persists", i))
		}
	}
	for _, m := range [...]struct {
		kind  tier.Kind
		marks tier.Fractions
	}{{tier.GPU, c.GPUMarks}, {tier.Host, c.HostMarks}, {tier.Disk, c.DiskMarks}} {
		if err := m.marks.Or(tier.DefaultFractions(m.kind)).Validate(); err != nil {
			errs = append(errs, fmt.Errorf("%s marks: %w", m.kind, err))
		}
	}
	if err := c.Codec.Validate(); err != nil {
		errs = append(errs, err)
	}
	errs = append(errs, c.validatePermits())
	if c.Quota != nil {
		errs = append(errs, c.Quota.Validate())
		if c.SharedQuota != nil && (!c.Quota.Limit.IsZero() || c.Quota.Ratio != nil) {
			errs = append(errs, errors.New("quota: there are both a quota that is shared and a limit of the engine's own"))
		}
	}
	if c.MonitorPeriod != 0 && c.MonitorPeriod < monitor.MinPeriod {
		errs = append(errs, fmt.Errorf("monitor period %v: want at least %v, or 0 for %v", c.MonitorPeriod, monitor.MinPeriod, monitor.DefaultPeriod))
	}
	errs = append(errs, c.Admission.Validate())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("spillway: %w", err)
	}
	return nil
}

// validateHosts refuses host spaces that could not be made, or for GPUs that there
// are not.
func (c Config) validateHosts() error {
	var errs []error
	if c.Hosts != nil && c.HostMemory != 0 {
		errs = append(errs, errors.New("HostMemory and Hosts are both set: the latter have sizes of their own"))
	}
	if c.Hosts != nil && len(c.Hosts) == 0 {
		errs = append(errs, errors.New("no host space in Hosts: want at least one host space, or nil for the machine's"))
	}
	gpus := len(c.GPUs)
	if c.GPUs == nil {
		gpus = 1
	}
	sum := int64(0)
	for i, h := range c.Hosts {
		switch {
		case h.Memory < smallestHostSpace:
			errs = append(errs, fmt.Errorf("host:%d: memory of %d bytes is too little: the least is %d", i, h.Memory, int64(smallestHostSpace)))
		case h.Memory > math.MaxInt64-sum:
			errs = append(errs, fmt.Errorf("host:%d: memory of %d bytes is more than can be counted with the others", i, h.Memory))
		default:
			sum += h.Memory
		}
		if h.Node < topology.Unknown {
			errs = append(errs, fmt.Errorf("host:%d: NUMA node %d: want a node from 0, or -1 for any", i, h.Node))
		}
		for _, g := range h.GPUs {
			if g < 0 || g >= gpus {
				errs = append(errs, fmt.Errorf("host:%d: there is no gpu:%d that it could be set apart for", i, g))
			}
		}
	}
	return errors.Join(errs...)
}

func (c Config) validateNodes() error {
	var errs []error
	for i, g := range c.GPUs {
		if g.Node != nil && *g.Node < topology.Unknown {
			errs = append(errs, fmt.Errorf("gpu:%d: NUMA node %d: want a node from 0, or -1 for none", i, *g.Node))
		}
	}
	for i, d := range c.Disks {
		if d.Node != nil && *d.Node < topology.Unknown {
			errs = append(errs, fmt.Errorf("disk:%d: NUMA node %d: want a node from 0, or -1 for none", i, *d.Node))
		}
	}
	return errors.Join(errs...)
}

// validatePermits refuses a pool with which nothing could be written, or read.
func (c Config) validatePermits() error {
	if c.PermitPool != nil {
		if !c.Permits.IsZero() {
			return errors.New("permits: there are both a pool and a configuration of one")
		}
		s := c.PermitPool.Slots()
		_, host := c.PermitPool.Total(permit.Host)
		return enoughPermits(s.Total, s.Limited, host)
	}
	if err := c.Permits.Validate(); err != nil {
		return err
	}
	slots, limited := c.Permits.Slots.Limit()
	host := c.Permits.Budgets == nil || slices.ContainsFunc(c.Permits.Budgets, func(b permit.Budget) bool { return b.Name == permit.Host })
	return enoughPermits(slots, limited, host)
}

func enoughPermits(slots int, limited, host bool) error {
	switch {
	case !host:
		return fmt.Errorf("permits: there is no budget %q, which transfers with disks take from", permit.Host)
	case limited && slots < 2:
		return fmt.Errorf("permits: %d slots are too few: one is the monitor's, and one at least must be for all others", slots)
	}
	return nil
}

func (c Config) withDefaults() Config {
	if c.GPUs == nil {
		c.GPUs = []GPUConfig{{}}
	}
	if c.Disks == nil {
		c.Disks = []DiskConfig{{}}
	}
	c.Disks = slices.Clone(c.Disks) // the caller's stays as it is
	for i := range c.Disks {
		if c.Disks[i].Dir == "" {
			c.Disks[i].Dir = os.TempDir()
		}
	}
	c.Logger = guard.Logger(c.Logger) // it is called from everywhere
	return c
}
