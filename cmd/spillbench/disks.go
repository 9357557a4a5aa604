package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"syscall"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// leastDisk is how many bytes must be free in a spill directory: the engine takes half of them.
const leastDisk = 2 * tier.Page

// addDisks checks the spill directories, works out their sizes, and adds them to the configuration. It
// leaves out full ones, with a note, if another has room.
func (e *engineFlags) addDisks(ctx context.Context, m *machine) error {
	given := e.disks
	if len(given) == 0 {
		given = diskFlags{{dir: os.TempDir()}}
	}
	var full error // the first of a directory without room
	for _, f := range given {
		where, err := topology.Location{}, e.probe(f.dir)
		if err != nil && len(e.disks) == 0 {
			return fail.Environmentf("the temp directory %s: not writable: %w (name another with --disk DIR)",
				f.dir, pathless(err))
		}
		noRoom := errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.ENOSPC)
		if err != nil && !noRoom {
			return fail.Usagef("--disk %s: not writable: %w (name a directory that you may write to)",
				f.dir, pathless(err))
		}
		if err == nil {
			if where, err = e.diskOf(ctx, f.dir, topology.Options{}); err != nil {
				return err
			}
			if noRoom = where.FreeBytes >= 0 && where.FreeBytes < leastDisk; noRoom {
				err = fmt.Errorf("%d bytes are free", where.FreeBytes)
			}
		}
		if noRoom {
			err = fail.Environmentf("--disk %s: there is no room: %v (make room there, or name another directory; "+
				"or have your quota raised)", f.dir, pathless(err))
			m.notes.add(f.dir, "left out: "+err.Error())
			full = cmp.Or(full, err)
			continue
		}
		capacity, err := f.capacity.Of(where.FreeBytes)
		if err != nil {
			return fail.Usagef("--disk %s: %w", f.dir, err)
		}
		if !f.capacity.IsZero() && capacity < tier.Page {
			return fail.Usagef("--disk %s=%s is less than any batch takes (give at least 4KiB)", f.dir, f.capacity)
		}
		m.opened.Disks = append(m.opened.Disks, spillway.DiskConfig{
			Dir: f.dir, Capacity: spillway.Bytes(capacity), Encrypt: e.config.Encrypt, FS: m.faults.Volume(),
		})
		m.config.Disks = append(m.config.Disks, report.Disk{Dir: f.dir, CapacityGiven: capacity > 0})
	}
	if len(m.opened.Disks) == 0 {
		return full
	}
	return nil
}

// sealing is how many bytes of memory a volume that encrypts maps for the requests of four transfers.
const sealing = 4 * volumes.DefaultDepth * (volumes.DefaultRequest + tier.Page)

// planMemory divides the memory of the process. The GPU and host spaces take memory bytes of it, and
// spill directories on file systems in memory take some of the rest. Those without a size of their
// own share it; one that does not fit is an error. Go's heap is limited to what remains.
func (e *engineFlags) planMemory(ctx context.Context, limits topology.Limits, memory int64,
	disks []spillway.DiskConfig) (plan headroom.Plan, err error) {

	beside := e.beside
	if e.config.Encrypt {
		beside += sealing * int64(len(disks))
	}
	if plan, err = headroom.Divide(limits, memory, beside); err != nil {
		return plan, err
	}
	for i := range disks {
		d := &disks[i]
		where, err := e.diskOf(ctx, d.Dir, topology.Options{})
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
		if d.Capacity.IsZero() && where.FreeBytes >= 0 {
			d.Capacity.Bytes = min(where.FreeBytes/2, left/int64(len(disks)-i)) / tier.Page * tier.Page
		}
		if want := max(tier.Page, d.Capacity.Bytes); want > left {
			have, want := size.Apart(left, want)
			return plan, fail.Environmentf("the spill directory %s is in memory (%s), "+
				"of which %s are left, and not %s: the process may have %s (%s) "+
				"(name a directory on a disk with --disk DIR, or give the process more memory)",
				d.Dir, where.FileSystem, have, want, size.Approx(limits.MemoryBytes), limits.MemorySource)
		}
		memory += d.Capacity.Bytes
		if plan, err = headroom.Divide(limits, memory, beside); err != nil {
			return plan, err
		}
	}
	plan.Apply()
	return plan, nil
}
