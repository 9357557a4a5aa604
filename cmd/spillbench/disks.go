package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strings"
	"syscall"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// diskFlag is one --disk.
type diskFlag struct {
	dir      string
	capacity tier.Amount // not set: the engine's default
}

// diskFlags is the flag that collects them.
type diskFlags []diskFlag

// Set parses DIR or DIR=SIZE. A directory whose name ends like a size may be written with a slash
// behind it.
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

// String returns the text that Set parses.
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

// leastDisk is how much must be free in a spill directory: the engine takes a half.
const leastDisk = 2 * tier.Page

// errNoRoom reports that a spill directory's file system is full.
var errNoRoom = errors.New("there is no room")

// spillDisks checks the spill directories and works out their sizes. It leaves out those without
// room, with a note, if another has some.
func (e *engineFlags) spillDisks(ctx context.Context, log *notes) ([]spillway.DiskConfig, error) {
	if len(e.disks) == 0 {
		dir := os.TempDir()
		if err := e.usableDir(dir); err != nil {
			return nil, fail.Environmentf("the temp directory %s: %w (name another with --disk DIR)", dir, err)
		}
		return []spillway.DiskConfig{{Dir: dir, Encrypt: e.encrypt}}, nil
	}
	var disks []spillway.DiskConfig
	var full error
	for _, f := range e.disks {
		capacity, err := e.spillCapacity(ctx, f)
		switch {
		case err == nil:
			disks = append(disks, spillway.DiskConfig{Dir: f.dir, Capacity: spillway.Bytes(capacity), Encrypt: e.encrypt})
		case errors.Is(err, errNoRoom):
			full = cmp.Or(full, err)
			log.add(f.dir, "left out: "+err.Error())
		default:
			return nil, err
		}
	}
	if len(disks) == 0 {
		return nil, full
	}
	return disks, nil
}

// spillCapacity checks one spill directory and returns its size in bytes, or 0 for the engine's
// default. The error matches errNoRoom if the file system is full.
func (e *engineFlags) spillCapacity(ctx context.Context, f diskFlag) (int64, error) {
	noRoom := func(why any) error {
		return &fail.Error{
			Status: fail.Environment, Err: fmt.Errorf("--disk %s: %w: %v", f.dir, errNoRoom, why),
			Fix: "make room there, or name another directory; or have your quota raised",
		}
	}
	switch err := e.usableDir(f.dir); {
	case errors.Is(err, syscall.EDQUOT):
		return 0, noRoom(syscall.EDQUOT)
	case errors.Is(err, syscall.ENOSPC):
		return 0, noRoom(syscall.ENOSPC)
	case err != nil:
		return 0, fail.Usagef("--disk %s: %w (name a directory that you may write to)", f.dir, err)
	}
	where, err := e.locate(ctx, f.dir)
	if err != nil {
		return 0, err
	}
	if where.FreeBytes >= 0 && where.FreeBytes < leastDisk {
		return 0, noRoom(fmt.Sprintf("%d bytes are free", where.FreeBytes))
	}
	capacity, err := f.capacity.Of(where.FreeBytes)
	if err != nil {
		return 0, fail.Usagef("--disk %s: %w", f.dir, err)
	}
	if !f.capacity.IsZero() && capacity < tier.Page {
		return 0, fail.Usagef("--disk %s=%s is less than any batch takes (give at least 4KiB)", f.dir, f.capacity)
	}
	return capacity, nil
}

// usableDir checks that files can be made in dir.
func (e *engineFlags) usableDir(dir string) error {
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return errors.New("no such directory")
	case err != nil:
		return pathless(err)
	case !info.IsDir():
		return errors.New("not a directory")
	}
	probe := probeDir
	if e.probe != nil {
		probe = e.probe
	}
	if err := probe(dir); err != nil {
		return fmt.Errorf("not writable: %w", pathless(err))
	}
	return nil
}

// locate returns what a directory is on.
func (e *engineFlags) locate(ctx context.Context, dir string) (topology.Location, error) {
	if e.diskOf != nil {
		return e.diskOf(ctx, dir, topology.Options{})
	}
	return topology.DiskOf(ctx, dir, topology.Options{})
}

// sealing is how much memory a volume that encrypts maps for the requests of four transfers.
const sealing = 4 * volumes.DefaultDepth * (volumes.DefaultRequest + tier.Page)

// planMemory plans the memory of the process: the GPU and host spaces take so many bytes of it, and
// spill directories on file systems in memory take some of the rest. Those without a size of their
// own share it; one that does not fit is an error. Go's heap is limited to what remains.
func (e *engineFlags) planMemory(ctx context.Context, top *topology.Topology, memory int64,
	disks []spillway.DiskConfig) (headroom.Plan, error) {

	beside := e.beside
	if e.encrypt {
		beside += sealing * int64(len(disks))
	}
	plan, err := headroom.Divide(top.Limits, memory, beside)
	if err != nil {
		return plan, err
	}
	for i := range disks {
		d := &disks[i]
		where, err := e.locate(ctx, d.Dir)
		if err != nil {
			return plan, err
		}
		if !where.InMemory() {
			continue
		}
		left := int64(math.MaxInt64)
		if plan.Heap > 0 {
			left = (plan.Heap - headroom.LeastHeap) / tier.Page * tier.Page
		}
		short := ""
		switch {
		case left < tier.Page:
			short = "nothing is left"
		case d.Capacity.Bytes > left:
			have, want := size.Apart(left, d.Capacity.Bytes)
			short = fmt.Sprintf("%s are left, and not %s", have, want)
		case d.Capacity.IsZero() && where.FreeBytes >= 0:
			d.Capacity.Bytes = min(where.FreeBytes/2, left/int64(len(disks)-i)) / tier.Page * tier.Page
		}
		if short != "" {
			return plan, &fail.Error{
				Status: fail.Environment, Fix: "name a directory on a disk with --disk DIR, or give the process more memory",
				Err: fmt.Errorf("the spill directory %s is in memory (%s), of which %s: the process may have %s (%s)",
					d.Dir, where.FileSystem, short, size.Approx(top.Limits.MemoryBytes), top.Limits.MemorySource),
			}
		}
		memory += d.Capacity.Bytes
		if plan, err = headroom.Divide(top.Limits, memory, beside); err != nil {
			return plan, err
		}
	}
	plan.Apply()
	return plan, nil
}
