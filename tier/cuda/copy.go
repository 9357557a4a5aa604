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
	var err error
	skip := s.begin()
	if !skip {
		err = d.dev.Here(f)
		d.suspect(err)
	}
	if skip || err != nil {
		for _, b := range work.spent {
			d.bounce.put(b)
		}
		for _, o := range work.outs {
			d.bounce.put(o.from)
		}
		for _, x := range work.sums {
			d.bounce.put(x.from)
		}
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

// begin notes that there is work to come, and reports whether to leave it out because the stream
// has failed.
func (s *stream) begin() (skip bool) {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	s.busy = true
	return s.err != nil
}

// inward returns where the GPU can read src's bytes: there, or where they were copied to.
func (d *gpu) inward(src []byte, work *due) (uintptr, error) {
	at := cuda.AddressOf(src)
	if d.driver.lib.Pinned(at, int64(len(src))) {
		return at, nil
	}
	b, err := d.bounce.get(int64(len(src)))
	if err != nil {
		return 0, err
	}
	copy(b, src)
	work.spent = append(work.spent, b)
	work.bytes += int64(cap(b))
	return cuda.AddressOf(b), nil
}

// outward returns where the GPU can write what is for dst.
func (d *gpu) outward(dst []byte, work *due) (uintptr, error) {
	at := cuda.AddressOf(dst)
	if d.driver.lib.Pinned(at, int64(len(dst))) {
		return at, nil
	}
	b, err := d.bounce.get(int64(len(dst)))
	if err != nil {
		return 0, err
	}
	work.outs = append(work.outs, out{dst, b})
	work.bytes += int64(cap(b))
	return cuda.AddressOf(b), nil
}

// CopyToDevice implements tier.Device. Memory that is not pinned is read before it returns.
func (d *gpu) CopyToDevice(ts tier.Stream, dst tier.Addr, src []byte) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	n := int64(len(src))
	if err := d.at(dst, n); err != nil || n == 0 {
		return err
	}
	var work due
	from, err := d.inward(src, &work)
	if err != nil {
		return err
	}
	return s.put(work, func(c *cuda.Calls) error { return c.CopyToDevice(s.handle, cuda.Ptr(dst), from, n) })
}

// CopyToHost implements tier.Device.
func (d *gpu) CopyToHost(ts tier.Stream, dst []byte, src tier.Addr) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	n := int64(len(dst))
	if err := d.at(src, n); err != nil || n == 0 {
		return err
	}
	var work due
	to, err := d.outward(dst, &work)
	if err != nil {
		return err
	}
	return s.put(work, func(c *cuda.Calls) error { return c.CopyToHost(s.handle, to, cuda.Ptr(src), n) })
}

// within checks both sides of a copy on the device.
func (d *gpu) within(dst, src tier.Addr, size int64) error {
	if err := errors.Join(d.at(dst, size), d.at(src, size)); err != nil {
		return err
	}
	if dst < src+tier.Addr(size) && src < dst+tier.Addr(size) {
		return fmt.Errorf("cuda: a copy of %d bytes from address %#x to %#x overlaps itself", size, uint64(src), uint64(dst))
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
// has failed.
func (d *gpu) CopyRegions(ts tier.Stream, regions []tier.Region) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	for i, r := range regions {
		if err := d.checkRegion(r); err != nil {
			return fmt.Errorf("cuda: region %d of %d: %w", i, len(regions), err)
		}
	}
	var work due
	copies, err := d.copies(regions, &work)
	if err != nil { // which takes chunks back
		return s.put(work, func(*cuda.Calls) error { return err })
	}
	if len(copies) == 0 {
		return nil
	}
	s.makeRoom(len(copies) - 1)
	if d.driver.lib.Batch() != "" && len(copies) > 1 {
		return s.put(work, func(c *cuda.Calls) error { return c.CopyBatch(s.handle, copies) })
	}
	return s.put(work, func(c *cuda.Calls) error { return s.oneByOne(c, copies) })
}

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

func (d *gpu) checkRegion(r tier.Region) error {
	host := r.HostSrc
	if host == nil {
		host = r.HostDst
	}
	switch {
	case r.HostDst != nil && r.HostSrc != nil:
		return errors.New("both sides are host memory")
	case host != nil && r.Size != 0 && r.Size != int64(len(host)):
		return fmt.Errorf("a size of %d with %d bytes of host memory", r.Size, len(host))
	case r.HostSrc != nil:
		return d.at(r.Dst, int64(len(host)))
	case r.HostDst != nil:
		return d.at(r.Src, int64(len(host)))
	}
	return d.within(r.Dst, r.Src, r.Size)
}

// copies translates regions that were found right; those of no bytes are left out.
func (d *gpu) copies(regions []tier.Region, work *due) ([]cuda.Copy, error) {
	copies := make([]cuda.Copy, 0, len(regions))
	for _, r := range regions {
		var p cuda.Copy
		var err error
		switch {
		case len(r.HostSrc) > 0:
			p = cuda.Copy{Dst: cuda.Ptr(r.Dst), Size: int64(len(r.HostSrc))}
			p.HostSrc, err = d.inward(r.HostSrc, work)
		case len(r.HostDst) > 0:
			p = cuda.Copy{Src: cuda.Ptr(r.Src), Size: int64(len(r.HostDst))}
			p.HostDst, err = d.outward(r.HostDst, work)
		case r.HostSrc == nil && r.HostDst == nil:
			p = cuda.Copy{Dst: cuda.Ptr(r.Dst), Src: cuda.Ptr(r.Src), Size: r.Size}
		}
		if err != nil {
			return nil, err
		}
		if p.Size > 0 {
			copies = append(copies, p)
		}
	}
	return copies, nil
}
