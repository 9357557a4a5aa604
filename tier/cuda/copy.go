package cuda

import (
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
)

// maxStaged is how many bytes of pinned memory may wait for an event before one is recorded
// for their sake.
const maxStaged = 8 << 20

// put calls f, which puts work on s, and notes what is due when it is done. Nothing is put on a
// stream that has failed: the driver, or the GPU, would leave it undone.
func (s *stream) put(work due, f func(c *cuda.Calls) error) error {
	d := s.dev
	d.mu.Lock()
	s.busy = true
	skip := s.err != nil
	d.mu.Unlock()
	var err error
	if !skip {
		err = d.dev.Here(f)
		d.suspect(err)
	}
	if skip || err != nil {
		d.bounce.put(work.chunks()...)
		return err
	}
	d.mu.Lock()
	s.due.add(work)
	full := s.due.bytes > maxStaged
	d.mu.Unlock()
	if full {
		_, _ = s.record() // refused, it is tried with the next
	}
	return nil
}

// Fill implements tier.Device.
func (d *gpu) Fill(ts tier.Stream, dst tier.Addr, value byte, size int64) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	if err := d.at(dst, size); err != nil || size == 0 {
		return err
	}
	return s.put(due{}, func(c *cuda.Calls) error { return c.Fill(s.handle, cuda.Ptr(dst), value, size) })
}

// CopyRegions implements tier.Device: by one call where the driver has one for it (CUDA 12.8), else
// by one a region. Should one of those be refused, after others were put on the stream, the stream
// has failed. Host memory that is not pinned is read before CopyRegions returns.
func (d *gpu) CopyRegions(ts tier.Stream, regions []tier.Region) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	var work due
	copies := make([]cuda.Copy, 0, len(regions))
	for i, r := range regions {
		p, err := d.region(r, &work)
		if err != nil {
			d.bounce.put(work.chunks()...)
			return fmt.Errorf("cuda: region %d of %d: %w", i, len(regions), err)
		}
		if p.Size > 0 {
			copies = append(copies, p)
		}
	}
	if len(copies) == 0 {
		return nil
	}
	if len(copies) > 1 {
		s.makeRoom(len(copies) - 1) // for the first there is
		if d.driver.lib.Batch() != "" {
			return s.put(work, func(c *cuda.Calls) error { return c.CopyBatch(s.handle, copies) })
		}
	}
	return s.put(work, func(c *cuda.Calls) error { return s.oneByOne(c, copies) })
}

// region checks a region, and returns it as the driver wants it. Host memory that is not pinned is
// replaced with a chunk of the device's own, which work then has.
func (d *gpu) region(r tier.Region, work *due) (p cuda.Copy, err error) {
	if p.Size, err = devpool.RegionSize(r); err != nil {
		return p, err
	}
	if r.HostDst == nil {
		p.Dst = cuda.Ptr(r.Dst)
		err = d.at(r.Dst, p.Size)
	}
	if r.HostSrc == nil && err == nil {
		p.Src = cuda.Ptr(r.Src)
		err = d.at(r.Src, p.Size)
	}
	mem, side := r.HostSrc, &p.HostSrc
	if r.HostDst != nil {
		mem, side = r.HostDst, &p.HostDst
	}
	if err != nil || len(mem) == 0 {
		return p, err
	}
	*side = extent.Address(mem)
	if d.driver.lib.Pinned(*side, p.Size) {
		return p, nil
	}
	b, err := d.bounce.get(p.Size)
	if err != nil {
		return p, err
	}
	if r.HostDst != nil {
		work.outs = append(work.outs, out{mem, b})
	} else {
		copy(b, mem)
		work.spent = append(work.spent, b)
	}
	work.bytes += int64(cap(b))
	*side = extent.Address(b)
	return p, nil
}

// oneByOne puts copies on the stream by a call for each.
func (s *stream) oneByOne(c *cuda.Calls, copies []cuda.Copy) error {
	for i, p := range copies {
		var err error
		switch {
		case p.HostSrc != 0:
			err = c.CopyToDevice(s.handle, p.Dst, p.HostSrc, p.Size)
		case p.HostDst != 0:
			err = c.CopyToHost(s.handle, p.HostDst, p.Src, p.Size)
		default:
			err = c.CopyOnDevice(s.handle, p.Dst, p.Src, p.Size)
		}
		if err != nil && i > 0 {
			err = fmt.Errorf("cuda: copy %d of %d was refused: %w", i, len(copies), err)
			s.fail(err)
			// Those before it are under way, from and to memory that must not be used again before
			// they are done.
			_ = again(func() error { return c.SyncStream(s.handle) })
		}
		if err != nil {
			return err
		}
	}
	return nil
}
