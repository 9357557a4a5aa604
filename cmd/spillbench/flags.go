package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
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

// defaultMemory is the default size of the GPU space and of the host space. It is small enough that
// a table several times larger goes through any disk in seconds, and large enough for batches of a
// few MiB.
const defaultMemory = 64 << 20

// stuckAfter is shorter than an engine's own patience: while a run loads nobody consumes, so what is
// full stays full.
const stuckAfter = 5 * time.Second

// The defaults of spillway.Config.MovesPerEdge and permit.Config.Slots.
const (
	defaultMovesPerEdge = 2
	defaultDiskSlots    = 16
	maxDiskSlots        = 1 << 16
)

// engineFlags describe the engine that a command opens.
type engineFlags struct {
	gpu                  string
	gpuMemory            tier.Amount
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

	// beside is how many bytes of memory the command takes beside the spaces and the heap.
	beside int64
	// probe and diskOf say whether files can be made in a directory, and how much room it has.
	// Nil: probeDir and topology.DiskOf.
	probe  func(dir string) error
	diskOf func(ctx context.Context, dir string, opt topology.Options) (topology.Location, error)
	// watch returns the file system of a volume that has neither faults nor a rate; may be nil.
	watch  func(disk int) disk.FS
	trace  *simulate.Recorder   // of the engine's events; may be nil
	events func(spillway.Event) // for the engine's events; may be nil
}

// register adds the flags; a codec that is set is the default.
func (e *engineFlags) register(f *pflag.FlagSet, memory int64) {
	each := tier.Amount{Bytes: memory}
	def := tier.Fractions{}.In(tier.GPU)
	f.Var(choice(&e.gpu, "gpu", "auto"), "gpu", "GPU backend `NAME`: auto (a real one if there is one for it, else sim), cuda or sim")
	f.TextVar(&e.gpuMemory, "gpu-memory", each, "`SIZE` of the GPU space, such as 512MiB or, of a real GPU, 25% of what the card has")
	f.TextVar(&e.hostMemory, "host-memory", each, "`SIZE` of the pinned host memory, such as 512MiB or 25% of what the process may use")
	f.Var(&e.disks, "disk", "spill directory `DIR[=SIZE]`, with at most so much in it, as bytes or a share of what is free (repeatable; default the temp directory, half of what is free)")
	f.Float64Var(&e.limit, "limit", def.Limit, "largest share of GPU and host memory that is handed out")
	f.Float64Var(&e.trigger, "trigger", def.Trigger, "share of GPU and host memory at which batches start to move down")
	f.Float64Var(&e.stop, "stop", def.Stop, "share of GPU and host memory at which they stop at the latest")
	f.Var(choice(&e.policy, "policy", monitor.Names()[0]), "policy", "what moves down first, by `NAME`: "+strings.Join(monitor.Names(), ", "))
	f.Var(choice(&e.codec, "codec", cmp.Or(e.codec, convert.CodecAuto.String())), "codec", "how what goes to disk is compressed, by `NAME`: none, s2, zstd, bitpack, or auto for whichever is fastest here")
	f.BoolVar(&e.encrypt, "encrypt", false, "encrypt what goes to disk, with a key that is made at start and never written")
	f.DurationVar(&e.period, "monitor-period", 50*time.Millisecond, "how often the monitor looks without being woken")
	f.DurationVar(&e.stuckAfter, "stuck-after", stuckAfter, "how long nothing may change before who waits for room in full memories is refused")
	e.ahead = cmp.Or(e.ahead, 64<<20)
	f.Var(&e.ahead, "write-ahead", "`SIZE` such as 64MiB that is copied to disk at most in a second while nothing else is needed, or off")
	f.IntVar(&e.movesPerEdge, "moves-per-edge", defaultMovesPerEdge, "how many moves the monitor has under way from one space to one other, as `N`")
	f.IntVar(&e.diskSlots, "disk-slots", defaultDiskSlots, "how many transfers write to disks at once at most, as `N`; the monitor may have one more")
	f.TextVar(&e.throttle, "disk-throttle", e.throttle, "`SIZE` such as 200MiB that each spill directory's reads and writes together pass at most in a second")
	f.Var(&e.faults, "fault", "make a fault (repeatable): `SPEC` is op=read|write|alloc|copy,kind=eio|enospc|short|bitflip|oom|slow[:MS] and p=F (chance of each), at=N (the Nth, 1 is the first), times=N (how many at most), path=GLOB (of reads and writes)")
}

// must panics on an error that only a wrong constant can make.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// validate says what is wrong with the flags by themselves.
func (e *engineFlags) validate() error {
	for _, flag := range [][2]string{{"gpu", e.gpu}, {"policy", e.policy}, {"codec", e.codec}} {
		if err := chosen(flag[0], flag[1]); err != nil {
			return err
		}
	}
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

// diskFlag is one --disk.
type diskFlag struct {
	dir      string
	capacity tier.Amount // not set: the engine's default
}

// diskFlags is the flag that collects them.
type diskFlags []diskFlag

// Set parses DIR or DIR=SIZE. A directory whose name ends like a size may be
// written with a slash behind it.
func (d *diskFlags) Set(s string) error {
	f := diskFlag{dir: s}
	if i := strings.LastIndexByte(s, '='); i >= 0 && !isDir(s) {
		f.dir = s[:i]
		var err error
		if f.capacity, err = tier.ParseAmount(s[i+1:]); err != nil {
			return fmt.Errorf("want DIR or DIR=SIZE: %w", err)
		}
	}
	if f.dir == "" {
		return fmt.Errorf("want DIR or DIR=SIZE: the directory is missing")
	}
	*d = append(*d, f)
	return nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

// String prints what Set parses.
func (d *diskFlags) String() string {
	var parts []string
	for _, f := range *d {
		s := f.dir
		if !f.capacity.IsZero() {
			s += "=" + f.capacity.String()
		}
		parts = append(parts, s)
	}
	return strings.Join(parts, " ")
}

// Type names the value in a usage text.
func (*diskFlags) Type() string { return "dir[=size]" }
