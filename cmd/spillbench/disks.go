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

// sealing is how many bytes of memory a volume that encrypts maps for the requests of four transfers.
const sealing = volumes.EncryptionBuffers

// addDisks checks the spill directories, works out their sizes, and adds them to the configuration. It
// leaves out full ones, with a note, if another has room.
//
// It also divides the memory of the process, in m.plan. The GPU and host spaces take memory bytes of
// it, and spill directories on file systems in memory take some of the rest. Those without a size of
// their own share it; one that does not fit is an error. Go's heap gets the remainder.
func (e *engineFlags) addDisks(ctx context.Context, m *machine, memory int64) (err error) {
	given := e.disks
	if len(given) == 0 {
		given = diskFlags{{dir: os.TempDir()}}
	}
	limits, buffers := m.opened.Topology.Limits, e.buffers
	if e.config.Encrypt {
		buffers += sealing * int64(len(given))
	}
	if m.plan, err = headroom.Divide(limits, memory, buffers); err != nil {
		return err
	}
	var full error // the first of a directory without room
	for i, f := range given {
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
			m.notes.add("left out: " + err.Error())
			full = cmp.Or(full, err)
			continue
		}
		free, amount := where.FreeBytes, f.capacity // the engine divides what is free on a disk
		if where.InMemory() {
			if free = e.freeFor(ctx, given, where); free == 0 && amount.Share > 0 {
				return fail.Environmentf("--disk %s=%s: the sizes of other directories take all %s that are "+
					"free there (give them less, or name a directory elsewhere)",
					f.dir, amount, size.Approx(where.FreeBytes))
			}
		}
		capacity, err := amount.Of(free) // 0: the engine's default
		if err != nil {
			return fail.Usagef("--disk %s: %w", f.dir, err)
		}
		if !f.capacity.IsZero() && capacity < tier.Page {
			return fail.Usagef("--disk %s=%s is less than any batch takes (give at least 4KiB)", f.dir, f.capacity)
		}
		if where.InMemory() {
			left := int64(math.MaxInt64)
			if m.plan.Heap > 0 {
				left = (m.plan.Heap - headroom.LeastHeap) / tier.Page * tier.Page
			}
			if capacity == 0 && where.FreeBytes >= 0 {
				capacity = min(free/2, left/int64(len(given)-i)) / tier.Page * tier.Page
			}
			if want := max(tier.Page, capacity); want > left {
				have, want := size.Apart(left, want)
				return fail.Environmentf("the spill directory %s is in memory (%s), "+
					"of which %s are left, and not %s: the process may have %s (%s) "+
					"(name a directory on a disk with --disk DIR, or give the process more memory)",
					f.dir, where.FileSystem, have, want, size.Approx(limits.MemoryBytes), limits.MemorySource)
			}
			memory, amount = memory+capacity, spillway.Bytes(capacity)
			if m.plan, err = headroom.Divide(limits, memory, buffers); err != nil {
				return err
			}
		}
		m.opened.Disks = append(m.opened.Disks, spillway.DiskConfig{
			Dir: f.dir, Capacity: amount, Encrypt: e.config.Encrypt, FS: m.faults.Volume(),
		})
		m.config.Disks = append(m.config.Disks, report.Disk{Dir: f.dir, CapacityGiven: !f.capacity.IsZero()})
	}
	if len(m.opened.Disks) == 0 {
		return full
	}
	return nil
}

// freeFor returns how many bytes a directory in memory without a size in bytes may count as free. As in
// spillway.DiskConfig, those on one file system divide what is free there, without the sizes of others.
func (e *engineFlags) freeFor(ctx context.Context, given diskFlags, where topology.Location) int64 {
	free, sharers := where.FreeBytes, int64(0)
	for _, f := range given {
		other, err := e.diskOf(ctx, f.dir, topology.Options{})
		if err != nil || other.Mount != where.Mount {
			continue
		}
		if free -= f.capacity.Bytes; f.capacity.Bytes == 0 {
			sharers++
		}
	}
	if where.Mount == "" || where.FreeBytes < 0 || sharers == 0 {
		return where.FreeBytes
	}
	return max(0, free) / sharers
}
