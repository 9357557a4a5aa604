package cuda

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// mostStaged is how many bytes of pinned memory may wait for an event before one is recorded
// for their sake.
const mostStaged = 8 << 20

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
		d.bounce.drop(work)
		return err
	}
	if work.empty() {
		return nil
	}
	d.mu.Lock()
	earlier := s.due
	s.due = work
	s.due.before(earlier)
	full := s.due.bytes > mostStaged
	d.mu.Unlock()
	if full {
		_, _ = s.record() // refused, it is tried with the next
	}
	return nil
}

// pinned returns where the GPU can read the bytes of mem, or write them if it is to get bytes: there,
// or in pinned memory of the device's own, by way of which they are copied.
func (d *gpu) pinned(mem []byte, gets bool, work *due) (uintptr, error) {
	at := cuda.AddressOf(mem)
	if d.driver.lib.Pinned(at, int64(len(mem))) {
		return at, nil
	}
	b, err := d.bounce.get(int64(len(mem)))
	if err != nil {
		return 0, err
	}
	if gets {
		work.outs = append(work.outs, out{mem, b})
	} else {
		copy(b, mem)
		work.spent = append(work.spent, b)
	}
	work.bytes += int64(cap(b))
	return cuda.AddressOf(b), nil
}

// CopyToDevice implements tier.Device. Memory that is not pinned is read before it returns.
func (d *gpu) CopyToDevice(s tier.Stream, dst tier.Addr, src []byte) error {
	return d.CopyRegions(s, []tier.Region{{Dst: dst, HostSrc: src}})
}

// CopyToHost implements tier.Device.
func (d *gpu) CopyToHost(s tier.Stream, dst []byte, src tier.Addr) error {
	return d.CopyRegions(s, []tier.Region{{Src: src, HostDst: dst}})
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
// has failed.
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
			d.bounce.drop(work)
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

// region checks a region, and returns it as the driver wants it.
func (d *gpu) region(r tier.Region, work *due) (p cuda.Copy, err error) {
	p = cuda.Copy{Dst: cuda.Ptr(r.Dst), Src: cuda.Ptr(r.Src), Size: r.Size}
	host := max(len(r.HostSrc), len(r.HostDst))
	switch {
	case r.HostSrc != nil && r.HostDst != nil:
		return p, errors.New("both sides are host memory")
	case r.HostSrc == nil && r.HostDst == nil:
		if err := errors.Join(d.at(r.Dst, r.Size), d.at(r.Src, r.Size)); err != nil {
			return p, err
		}
		if r.Dst < r.Src+tier.Addr(r.Size) && r.Src < r.Dst+tier.Addr(r.Size) {
			err = fmt.Errorf("%d bytes from address %#x to %#x overlap", r.Size, uint64(r.Src), uint64(r.Dst))
		}
		return p, err
	case r.Size != 0 && r.Size != int64(host):
		return p, fmt.Errorf("a size of %d with %d bytes of host memory", r.Size, host)
	}
	p.Size = int64(host)
	if r.HostSrc != nil {
		p.Src = 0
		if err = d.at(r.Dst, p.Size); err == nil && host > 0 {
			p.HostSrc, err = d.pinned(r.HostSrc, false, work)
		}
		return p, err
	}
	p.Dst = 0
	if err = d.at(r.Src, p.Size); err == nil && host > 0 {
		p.HostDst, err = d.pinned(r.HostDst, true, work)
	}
	return p, err
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
