package cuda

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
)

// granule is what allocations are rounded up to.
const granule = 512

// source is where a device's memory comes from: a pool of the driver's, or, where there are none or
// the configuration wants it, one allocation of the driver's that the device hands out itself.
type source struct {
	pool cuda.Pool // 0 for one piece

	base cuda.Ptr // of the piece of n bytes
	n    int64
	line *extent.Allocator // guarded by the device's mutex; nil with a pool
}

// openMemory decides how much memory there is, and makes what it comes from.
func (d *gpu) openMemory() error {
	return d.dev.Here(func(c *cuda.Calls) error {
		free, total, err := c.MemInfo()
		if err != nil {
			return err
		}
		if d.cfg.Memory == 0 {
			d.cfg.Memory = free - free/16
		}
		n := min(d.cfg.Memory, total) / granule * granule
		if d.cfg.Memory = n; n < granule {
			return fmt.Errorf("%d bytes of its memory are free: %w", free, tier.ErrNoSpace)
		}
		if !d.cfg.OnePiece && d.dev.Info().Pools {
			d.source.pool, err = c.NewPool()
			return err
		}
		at, err := c.Alloc(n)
		if errors.Is(err, cuda.ErrOutOfMemory) {
			return fmt.Errorf("%d bytes cannot be had in one piece: %w: %w", n, tier.ErrNoSpace, err)
		}
		d.source = source{base: at, n: n, line: extent.New(n)}
		return err
	})
}

// MemInfo implements tier.Device. Free is what can still be allocated here: others may have taken
// part of what is not allocated yet.
func (d *gpu) MemInfo() (free, total int64, err error) {
	total = d.cfg.Memory
	if !d.gate.Enter() {
		return 0, total, tier.ErrClosed
	}
	defer d.gate.Leave()
	there := total
	if d.source.pool != 0 { // what the driver has free and what the pool has and does not use
		err = d.dev.Here(func(c *cuda.Calls) error {
			if there, _, err = c.MemInfo(); err != nil {
				return err
			}
			unused, err := c.PoolUnused(d.source.pool)
			there += unused
			return err
		})
		if err != nil {
			return 0, total, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return max(0, min(total-d.mu.live-d.mu.retired, there)), total, nil
}

// Outstanding implements tier.Device.
func (d *gpu) Outstanding() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.live + d.mu.retired
}

// Alloc implements tier.Device. The bytes are counted as live before the source is asked for them.
func (d *gpu) Alloc(ts tier.Stream, size int64) (tier.Addr, error) {
	if size <= 0 {
		return 0, fmt.Errorf("cuda: cannot allocate %d bytes", size)
	}
	s, err := d.own(ts)
	if err != nil {
		return 0, err
	}
	defer d.gate.Leave()
	a := &devpool.Allocation{Size: size, Charge: d.Charge(size)}
	d.mu.Lock()
	full := &tier.NoSpaceError{Requested: size, Available: d.cfg.Memory - d.mu.live - d.mu.retired}
	if a.Charge > full.Available {
		d.mu.Unlock()
		return 0, full
	}
	d.mu.live += a.Charge
	if d.source.pool == 0 {
		if off, ok := d.source.line.Alloc(a.Charge); ok {
			a.Addr = tier.Addr(d.source.base) + tier.Addr(off)
		} else {
			full.Largest = d.source.line.Largest()
			err = full
		}
	}
	d.mu.Unlock()
	if d.source.pool != 0 {
		err = d.dev.Here(func(c *cuda.Calls) error {
			at, err := c.AllocAsync(s.handle, d.source.pool, a.Charge)
			a.Addr = tier.Addr(at)
			return err
		})
		d.suspect(err)
	}
	d.mu.Lock()
	if err == nil {
		d.mu.table.ReplaceOrInsert(a)
		d.mu.Unlock()
		return a.Addr, nil
	}
	d.mu.live -= a.Charge
	full.Available = d.cfg.Memory - d.mu.live - d.mu.retired
	d.mu.Unlock()
	if errors.Is(err, cuda.ErrOutOfMemory) { // others have the bytes, or they are not in one piece
		if free, _, unknown := d.MemInfo(); unknown == nil {
			full.Available = free
		}
		if full.Available >= a.Charge {
			full.Largest = a.Charge - granule // at most
		}
		err = full
	}
	return 0, err
}

// Free implements tier.Device.
func (d *gpu) Free(ts tier.Stream, addr tier.Addr) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	d.mu.Lock()
	a, err := d.mu.table.Find(addr, 1)
	if err == nil && a.Addr != addr {
		err = fmt.Errorf("cuda: no allocation starts at address %#x", uint64(addr))
	}
	if err != nil {
		d.mu.Unlock()
		return err
	}
	d.mu.table.Delete(a)
	d.mu.live -= a.Charge
	d.mu.retired += a.Charge
	d.mu.Unlock()
	if d.source.pool != 0 {
		err = d.dev.Here(func(c *cuda.Calls) error { return c.FreeAsync(s.handle, cuda.Ptr(a.Addr)) })
	}
	lost := d.refused(err)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case err == nil:
		s.due.frees = append(s.due.frees, a)
	case lost: // and so is the memory
		d.mu.retired -= a.Charge
		err = nil
	default:
		d.mu.table.ReplaceOrInsert(a)
		d.mu.live += a.Charge
		d.mu.retired -= a.Charge
	}
	return err
}

// at returns an error unless the n bytes at addr are live memory. Of no bytes, any address will do.
func (d *gpu) at(addr tier.Addr, n int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	_, err := d.mu.table.Find(addr, n)
	if err != nil && n > 0 && d.mu.loans.hold(addr, n) {
		return nil
	}
	return err
}

// closeMemory gives up all memory, and the events that others may wait for.
func (d *gpu) closeMemory(c *cuda.Calls) error {
	d.mu.Lock()
	shared := d.mu.shared
	d.mu.shared = nil
	d.mu.Unlock()
	var errs []error
	for e := range shared {
		errs = append(errs, c.DestroyEvent(*e))
	}
	if d.source.pool == 0 {
		return firstOf(append(errs, c.Free(d.source.base)))
	}
	d.mu.table.Ascend(func(a *devpool.Allocation) bool { // what is live
		errs = append(errs, c.Free(cuda.Ptr(a.Addr)))
		return true
	})
	return firstOf(append(errs, c.DestroyPool(d.source.pool)))
}
