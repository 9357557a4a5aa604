package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/simulate"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/topology"
)

// defaultMemory is the default size of each GPU space and of the host space. It is small enough that
// a table several times larger goes through any disk in seconds, and large enough for batches of a
// few MiB.
const defaultMemory = 64 << 20

// stuckAfter is shorter than an engine's own default: while a run loads nobody consumes, so full
// memories stay full.
const stuckAfter = 5 * time.Second

// The defaults of spillway.Config.MovesPerEdge and permit.Config.Slots, and bounds.
const (
	defaultMovesPerEdge = 2
	defaultDiskSlots    = 16
	maxDiskSlots        = 1 << 16
	maxGPUs             = 64
)

// engineFlags are the flags of all commands that open an engine.
type engineFlags struct {
	gpu                  string
	gpus                 int         // 0: all
	gpuMemory            tier.Amount // of each GPU
	hostMemory           tier.Amount
	disks                diskFlags
	limit, trigger, stop float64
	policy               string
	codec                string
	encrypt              bool
	period               time.Duration
	stuckAfter           time.Duration
	ahead                rateFlag
	movesPerEdge         int
	diskSlots            int
	throttle             tier.Amount
	faults               inject.Specs
	seed                 uint64 // of faults by chance

	// noGPUs is set if the command works without GPUs.
	noGPUs bool
	// beside is how many bytes of memory the command takes beside the spaces and the heap.
	beside int64
	// probe checks that files can be made in a directory, and diskOf describes its file system.
	// Nil: probeDir and topology.DiskOf.
	probe  func(dir string) error
	diskOf func(ctx context.Context, dir string, opt topology.Options) (topology.Location, error)
	// watch returns the file system of a volume that has neither faults nor a rate; may be nil.
	watch  func(disk int) disk.FS
	trace  *simulate.Recorder   // of the engine's events; may be nil
	events func(spillway.Event) // for the engine's events; may be nil
}

// register adds the flags. A codec and a rate of copies ahead that are set are the defaults.
func (e *engineFlags) register(f *pflag.FlagSet, memory int64) {
	each := tier.Amount{Bytes: memory}
	def := tier.Fractions{}.In(tier.GPU)
	policies := monitor.Names()
	e.ahead = cmp.Or(e.ahead, 64<<20)
	f.Var(choice(&e.gpu, "auto", "auto", "cuda", "sim"), "gpu",
		"GPU backend `NAME`: auto (real GPUs, or one that is simulated if there are none), cuda or sim")
	f.Func("gpus", "use at most `N` GPUs; with --gpu sim simulate N (default all, or one that is simulated)", func(s string) (err error) {
		if e.gpus, err = strconv.Atoi(s); err != nil || e.gpus < 1 || e.gpus > maxGPUs {
			return fmt.Errorf("want a number from 1 to %d", maxGPUs)
		}
		return nil
	})
	f.TextVar(&e.gpuMemory, "gpu-memory", each, "`SIZE` of the space on each GPU, such as 512MiB, or 25% of a real GPU's memory")
	f.TextVar(&e.hostMemory, "host-memory", each, "`SIZE` of the pinned host memory, such as 512MiB, or 25% of the process's memory")
	f.Var(&e.disks, "disk", "spill directory `DIR[=SIZE]`; SIZE is in bytes or a share of the free space (repeatable; "+
		"default the temp directory with half of its free space)")
	f.Float64Var(&e.limit, "limit", def.Limit, "largest share of GPU and host memory that is handed out")
	f.Float64Var(&e.trigger, "trigger", def.Trigger, "share of GPU and host memory at which batches start to move down")
	f.Float64Var(&e.stop, "stop", def.Stop, "share of GPU and host memory at which they stop at the latest")
	f.Var(choice(&e.policy, policies[0], policies...), "policy", "what moves down first, by `NAME`: "+strings.Join(policies, ", "))
	f.Var(choice(&e.codec, cmp.Or(e.codec, convert.CodecAuto.String()), codecs()...), "codec",
		"compress what goes to disk, by `NAME`: none, s2, zstd, bitpack, or auto for the fastest on this machine")
	f.BoolVar(&e.encrypt, "encrypt", false, "encrypt what goes to disk, with a key that is never written")
	f.DurationVar(&e.period, "monitor-period", 50*time.Millisecond, "how often the monitor checks the memories without being woken")
	f.DurationVar(&e.stuckAfter, "stuck-after", stuckAfter, "fail requests for room after nothing has changed for so long in full memories")
	f.Var(&e.ahead, "write-ahead", "copy at most `SIZE` a second to disk while nothing else needs it, such as 64MiB, or off")
	f.IntVar(&e.movesPerEdge, "moves-per-edge", defaultMovesPerEdge, "the monitor makes at most `N` moves at once from one space to another")
	f.IntVar(&e.diskSlots, "disk-slots", defaultDiskSlots, "at most `N` transfers write to disks at once; the monitor may make one more")
	f.TextVar(&e.throttle, "disk-throttle", e.throttle, "let each spill directory pass at most `SIZE` a second, such as 200MiB, reads and writes together")
	f.Var(&e.faults, "fault", "make a fault (repeatable): `SPEC` is op=read|write|alloc|copy,kind=eio|enospc|short|bitflip|oom|slow[:MS] and "+
		"p=F (chance of each), at=N (the Nth, 1 is the first), times=N (how many at most), path=GLOB (of reads and writes)")
}

// codecs returns the names of all codecs.
func codecs() (names []string) {
	for c := convert.CodecAuto; ; c++ {
		if _, err := convert.ParseCodec(c.String()); err != nil {
			return names
		}
		names = append(names, c.String())
	}
}

// validate refuses values that are wrong on any machine.
func (e *engineFlags) validate() error {
	if err := e.marks().Validate(); err != nil {
		return fail.Usagef("%s (set --stop < --trigger <= --limit <= 1)", strings.TrimPrefix(err.Error(), "tier: "))
	}
	if e.period < monitor.MinPeriod {
		return fail.Usagef("--monitor-period %v must be at least %v (such as 50ms)", e.period, monitor.MinPeriod)
	}
	for _, n := range []bounded{
		{"moves-per-edge", int64(e.movesPerEdge), 1, monitor.MaxMovesPerEdge},
		{"disk-slots", int64(e.diskSlots), 1, maxDiskSlots},
	} {
		if err := n.validate(); err != nil {
			return err
		}
	}
	if e.stuckAfter <= 0 {
		return fail.Usagef("--stuck-after %v must be above 0 (such as 30s)", e.stuckAfter)
	}
	if e.gpuMemory.Share != 0 && e.gpu == "sim" {
		return fail.Usagef("--gpu-memory %s: a share has no meaning for a simulated GPU (give a size, such as 512MiB)", e.gpuMemory)
	}
	if e.throttle.Share != 0 {
		return fail.Usagef("--disk-throttle %s: a share of a disk's speed is not known (give a size, such as 200MiB)", e.throttle)
	}
	return nil
}

func (e *engineFlags) marks() tier.Fractions {
	return tier.Fractions{Limit: e.limit, Trigger: e.trigger, Stop: e.stop}
}

// rateFlag is bytes a second, or off.
type rateFlag int64

const off rateFlag = -1

// Set parses a size, or off.
func (r *rateFlag) Set(s string) error {
	if *r = off; s == "off" {
		return nil
	}
	a, err := tier.ParseAmount(s)
	if err == nil && a.Share != 0 {
		err = errors.New("a share of a disk's speed is not known")
	}
	if err != nil {
		return fmt.Errorf("want a size, such as 64MiB, or off: %w", err)
	}
	*r = rateFlag(a.Bytes)
	return nil
}

// String prints what Set parses.
func (r *rateFlag) String() string {
	if *r < 0 {
		return "off"
	}
	return tier.Amount{Bytes: int64(*r)}.String()
}

// Type names the value in a usage text.
func (*rateFlag) Type() string { return "size" }
