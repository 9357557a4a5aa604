package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/inject"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// defaultMemory is the default size of each GPU space and of the host space, in bytes. It is small
// enough that a table several times larger goes through any disk in seconds, and large enough for
// batches of a few MiB.
const defaultMemory = 64 << 20

// stallTimeout is the default of --stall-timeout. It is shorter than an engine's own default: while
// a run loads, nobody consumes batches, so full memories stay full.
const stallTimeout = 5 * time.Second

// engineFlags are the options of an engine, for all commands that open one. A command sets the fields of
// the second part before it calls register or open.
type engineFlags struct {
	// config holds the flags that documents report as they were given. A codec that is set before
	// register is the default.
	config                report.Config
	gpus                  int         // the most GPUs that are used; 0: all
	gpuMemory, hostMemory tier.Amount // of each GPU, and of the process
	disks                 diskFlags
	period, stallTimeout  time.Duration
	faults                []inject.Spec
	given                 func(flag string) bool // reports whether a flag is on the command line

	noGPUs bool // the command works without GPUs
	// Memories without a given size take at most 1/share of the process's memory each, and the
	// command's own buffers twice that; 0: there is no such limit.
	share   int64
	buffers int64                // bytes that the command takes in addition to the spaces and the heap
	seed    uint64               // of faults by chance
	events  func(spillway.Event) // gets the engine's events; may be nil

	// probe checks that files can be created in a directory, and diskOf describes its file system.
	// register sets them; tests replace them.
	probe  func(dir string) error
	diskOf func(ctx context.Context, dir string, opt topology.Options) (topology.Location, error)
}

// register adds the flags. Each GPU and the host get memory bytes by default.
func (e *engineFlags) register(f *pflag.FlagSet, memory int64) {
	c, each, marks := &e.config, tier.Amount{Bytes: memory}, tier.Marks{}.In(tier.GPU)
	c.WriteAheadBytesPerS = 64 << 20
	e.given, e.probe, e.diskOf = f.Changed, probeDir, topology.DiskOf

	f.Var(choice(&c.GPU, "auto", "auto", "cuda", "sim"), "gpu",
		"GPU `BACKEND`: auto (real GPUs, or a simulated one if there are none), cuda or sim")
	intVar(f, &e.gpus, "gpus", 0, 1, 64,
		"use at most `N` GPUs; with --gpu sim, simulate N (default all, or one simulated)")
	f.TextVar(&e.gpuMemory, "gpu-memory", each,
		"`SIZE` of the space on each GPU, such as 512MiB, or 25% of a real GPU's memory")
	f.TextVar(&e.hostMemory, "host-memory", each,
		"`SIZE` of the pinned host memory, such as 512MiB, or 25% of the process's memory")
	f.Func("disk", "spill to directory `DIR[=SIZE]`, with SIZE in bytes or as a share of the free space "+
		"(repeatable; default the temp directory with half of its free space)", e.disks.add)
	f.Float64Var(&c.Limit, "limit", marks.Limit, "largest share of GPU and host memory in use, from 0 to 1")
	f.Float64Var(&c.Trigger, "trigger", marks.Trigger,
		"share of GPU and host memory in use, from 0 to 1, at which the monitor starts to evict batches")
	f.Float64Var(&c.Stop, "stop", marks.Stop,
		"share of GPU and host memory in use, from 0 to 1, at which the monitor stops at the latest")
	policies := monitor.Names()
	f.Var(choice(&c.Policy, policies[0], policies...), "policy",
		"order of eviction, by `NAME`: "+strings.Join(policies, ", "))
	f.Var(choice(&c.Codec, cmp.Or(c.Codec, "auto"), "auto", "none", "s2", "zstd", "bitpack"), "codec",
		"compress batches on disk, by `NAME`: none, s2, zstd, bitpack, or auto for the fastest on this machine")
	f.BoolVar(&c.Encrypt, "encrypt", false, "encrypt spill files, with a key that is never written (default off)")
	f.DurationVar(&e.period, "monitor-period", 50*time.Millisecond,
		"`TIME` between the monitor's own checks of the memories, such as 50ms")
	f.DurationVar(&e.stallTimeout, "stall-timeout", stallTimeout,
		"fail waiting requests after this `TIME` without progress while every tier is full")
	f.Var((*sizeFlag)(&c.WriteAheadBytesPerS), "write-ahead",
		"copy at most `SIZE` bytes a second to disk before their room is needed, such as 64MiB, or off")
	intVar(f, &c.MovesPerEdge, "moves-per-edge", 2, 1, monitor.MaxMovesPerEdge,
		"the monitor makes at most `N` concurrent moves from one space to another")
	intVar(f, &c.DiskSlots, "disk-slots", 16, 1, 1<<16,
		"at most `N` concurrent transfers write to disks; the monitor may make one more")
	f.Var((*sizeFlag)(&c.DiskThrottleBytesPerS), "disk-throttle",
		"limit each spill directory to `SIZE` bytes a second, reads and writes together, such as 200MiB, or off")
	f.Func("fault", "inject faults (repeatable; default none): `SPEC` has op=read|write|alloc|copy and "+
		"kind=eio|enospc|short|bitflip|oom|slow[:MS], and may have p=F (chance of each operation), "+
		"at=N (the Nth, from 1), times=N (at most N) and path=GLOB (for reads and writes), separated by commas; "+
		"alloc and copy are counted on each GPU separately", func(text string) error {

		spec, err := inject.Parse(text)
		e.faults = append(e.faults, spec)
		return err
	})
}

// validate returns an error for values that are wrong on any machine.
func (e *engineFlags) validate() error {
	switch err := e.marks().Validate(); {
	case err != nil:
		return fail.Usagef("%w (set --stop < --trigger <= --limit <= 1)", err)
	case e.period < monitor.MinPeriod:
		return fail.Usagef("--monitor-period %v must be at least %v (such as 50ms)", e.period, monitor.MinPeriod)
	case e.stallTimeout <= 0:
		return fail.Usagef("--stall-timeout %v must be above 0 (such as 30s)", e.stallTimeout)
	}
	return nil
}

func (e *engineFlags) marks() tier.Marks {
	return tier.Marks{Limit: e.config.Limit, Trigger: e.config.Trigger, Stop: e.config.Stop}
}

// intFlag is a flag that takes a whole number from min to max.
type intFlag struct {
	to       *int
	min, max int
}

// intVar adds an intFlag with a default value.
func intVar(f *pflag.FlagSet, to *int, name string, value, min, max int, usage string) {
	*to = value
	f.Var(intFlag{to, min, max}, name, usage)
}

// Set implements pflag.Value.
func (i intFlag) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil || n < i.min || n > i.max {
		return fmt.Errorf("want a number from %d to %d", i.min, i.max)
	}
	*i.to = n
	return nil
}

// String implements pflag.Value.
func (i intFlag) String() string { return strconv.Itoa(*i.to) }

// Type implements pflag.Value.
func (intFlag) Type() string { return "int" }

// sizeFlag is a flag that takes a number of bytes, or "off" for 0.
type sizeFlag int64

// Set implements pflag.Value.
func (f *sizeFlag) Set(s string) error {
	if s == "off" {
		*f = 0
		return nil
	}
	n, err := size.Parse(s)
	if err != nil {
		return fmt.Errorf("want a number of bytes, such as 64MiB, or off: %w", err)
	}
	*f = sizeFlag(n)
	return nil
}

// String implements pflag.Value.
func (f *sizeFlag) String() string {
	if *f == 0 {
		return "off"
	}
	return size.Format(int64(*f))
}

// Type implements pflag.Value.
func (*sizeFlag) Type() string { return "size" }

// diskFlags are the values of --disk.
type diskFlags []diskFlag

type diskFlag struct {
	dir      string
	capacity tier.Amount // not set: the engine's default
}

// add adds DIR or DIR=SIZE. It does not divide the name of an existing directory.
func (d *diskFlags) add(s string) (err error) {
	f := diskFlag{dir: s}
	if i := strings.LastIndexByte(s, '='); i >= 0 && !isDir(s) {
		f.dir = s[:i]
		f.capacity, err = tier.ParseAmount(s[i+1:])
	}
	if err == nil && f.dir == "" {
		err = errors.New("the directory is missing")
	}
	if err != nil {
		return fmt.Errorf("want DIR or DIR=SIZE: %w", err)
	}
	*d = append(*d, f)
	return nil
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}
