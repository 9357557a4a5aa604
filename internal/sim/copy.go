package sim

import (
	"errors"
	"fmt"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/tier"
)

// errFreed is how work fails whose memory was given back on another stream
// before the work ran.
var errFreed = errors.New("memory that it uses was freed on another stream and is gone")

// at returns n bytes of live device memory. Of no bytes, any address will do.
func (d *gpu) at(addr tier.Addr, n int64) (allocated, error) {
	if n < 0 {
		return allocated{}, fmt.Errorf("sim: a range of %d bytes", n)
	}
	if n == 0 {
		return allocated{}, nil
	}
	a, off, err := d.find(addr, n)
	if err != nil {
		return allocated{}, err
	}
	return allocated{a, d.bytes(off, n)}, nil
}

// submit asks the fault hook and puts w on s. Of no bytes there is nothing to do.
func (d *gpu) submit(s *stream, w work) (err error) {
	if w.index, err = d.ask(w.kind, w.bytes); err != nil || w.bytes == 0 {
		return err
	}
	return s.put(w)
}

// CopyToDevice implements tier.Device.
func (d *gpu) CopyToDevice(ts tier.Stream, dst tier.Addr, src []byte) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	n := int64(len(src))
	to, err := d.at(dst, n)
	if err != nil {
		return err
	}
	return d.submit(s, work{kind: OpCopyToDevice, bytes: n, dst: to, src: allocated{b: src}, inward: n})
}

// CopyToHost implements tier.Device.
func (d *gpu) CopyToHost(ts tier.Stream, dst []byte, src tier.Addr) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	n := int64(len(dst))
	from, err := d.at(src, n)
	if err != nil {
		return err
	}
	return d.submit(s, work{kind: OpCopyToHost, bytes: n, dst: allocated{b: dst}, src: from, outward: n})
}

// within returns the two sides of a copy on the device.
func (d *gpu) within(dst, src tier.Addr, size int64) (pair, error) {
	to, err := d.at(dst, size)
	if err != nil {
		return pair{}, err
	}
	from, err := d.at(src, size)
	if err != nil {
		return pair{}, err
	}
	if dst < src+tier.Addr(size) && src < dst+tier.Addr(size) {
		return pair{}, fmt.Errorf("sim: a copy of %d bytes from address %#x to %#x overlaps itself",
			size, uint64(src), uint64(dst))
	}
	return pair{to, from}, nil
}

// CopyPeer implements tier.Device. Simulated devices reach each other, also
// through devices that wrap one and have a method Unwrap() tier.Device.
func (d *gpu) CopyPeer(ts tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	peer, ok := tier.As[*gpu](dstDevice)
	if !ok {
		return fmt.Errorf("sim: a copy to a device of type %T: %w", dstDevice, tier.ErrNotSupported)
	}
	if peer == d {
		return d.CopyRegions(ts, []tier.Region{{Dst: dst, Src: src, Size: size}})
	}
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	to, err := peer.at(dst, size)
	if err != nil {
		return err
	}
	from, err := d.at(src, size)
	if err != nil {
		return err
	}
	return d.submit(s, work{kind: OpCopyPeer, bytes: size, dst: to, src: from, peer: peer, outward: size})
}

// CopyRegions implements tier.Device.
func (d *gpu) CopyRegions(ts tier.Stream, regions []tier.Region) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	w := work{kind: OpCopyRegions, pairs: make([]pair, 0, len(regions))}
	for i, r := range regions {
		p, err := d.region(r)
		if err != nil {
			return fmt.Errorf("sim: region %d of %d: %w", i, len(regions), err)
		}
		n := int64(len(p.dst.b))
		if n == 0 {
			continue
		}
		w.bytes += n
		if p.src.a == nil {
			w.inward += n
		}
		if p.dst.a == nil {
			w.outward += n
		}
		w.pairs = append(w.pairs, p)
	}
	return d.submit(s, w)
}

func (d *gpu) region(r tier.Region) (p pair, err error) {
	host := r.HostSrc
	if host == nil {
		host = r.HostDst
	}
	switch {
	case r.HostDst != nil && r.HostSrc != nil:
		return pair{}, errors.New("both sides are host memory")
	case host != nil && r.Size != 0 && r.Size != int64(len(host)):
		return pair{}, fmt.Errorf("a size of %d with %d bytes of host memory", r.Size, len(host))
	case r.HostSrc != nil:
		p.src.b = host
		p.dst, err = d.at(r.Dst, int64(len(host)))
		return p, err
	case r.HostDst != nil:
		p.dst.b = host
		p.src, err = d.at(r.Src, int64(len(host)))
		return p, err
	}
	return d.within(r.Dst, r.Src, r.Size)
}

// Fill implements tier.Device.
func (d *gpu) Fill(ts tier.Stream, dst tier.Addr, value byte, size int64) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	to, err := d.at(dst, size)
	if err != nil {
		return err
	}
	return d.submit(s, work{kind: OpFill, bytes: size, dst: to, value: value})
}

// Digest implements tier.Computer.
func (d *gpu) Digest(ts tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	switch {
	case src%8 != 0:
		return fmt.Errorf("sim: a digest from address %#x, which is not a multiple of 8", uint64(src))
	case out == nil:
		return errors.New("sim: a digest without a destination")
	}
	from, err := d.at(src, size)
	if err != nil {
		return err
	}
	w := work{kind: OpDigest, bytes: size, src: from, first: first, digest: out}
	if w.index, err = d.ask(w.kind, w.bytes); err != nil {
		return err
	}
	return s.put(w) // also of no bytes: *out is to be set
}

// Record implements tier.Device.
func (d *gpu) Record(ts tier.Stream) (tier.Event, error) {
	s, err := d.own(ts)
	if err != nil {
		return nil, err
	}
	if _, err := d.ask(OpRecord, 0); err != nil {
		return nil, err
	}
	e := new(event)
	if s.idle() { // no worker need be started to complete it
		e.complete(s.Err())
		return e, nil
	}
	if err := s.put(work{kind: OpRecord, record: e}); err != nil {
		return nil, err
	}
	return e, nil
}

// WaitEvent implements tier.Device. e may be any event, also another backend's.
// While it is not done, the stream and the device cannot be closed.
func (d *gpu) WaitEvent(ts tier.Stream, e tier.Event) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	if e == nil {
		return errors.New("sim: no event to wait for")
	}
	if _, err := d.ask(OpWaitEvent, 0); err != nil {
		return err
	}
	select {
	case <-e.Done():
		if e.Err() == nil {
			return nil
		}
	default:
	}
	return s.put(work{kind: OpWaitEvent, wait: e})
}

// move does the work that moves or computes bytes.
func (s *stream) move(w *work) error {
	d := s.dev
	if d.faults != nil {
		if err := d.faults(Op{Kind: w.kind, Stage: Run, Index: w.index, Bytes: w.bytes}); err != nil {
			return err
		}
	}
	if w.dst.gone() || w.src.gone() {
		return errFreed
	}
	arrival := later(d.toDevice.book(w.inward), d.fromDevice.book(w.outward))
	switch w.kind {
	case OpCopyRegions:
		copies := make([]sumcopy.Copy, len(w.pairs))
		for i, p := range w.pairs {
			if p.dst.gone() || p.src.gone() {
				return errFreed
			}
			copies[i] = sumcopy.Copy{Dst: p.dst.b, Src: p.src.b}
		}
		sumcopy.Gather(copies)
	case OpCopyPeer:
		if !w.peer.guests.Enter() {
			return fmt.Errorf("the peer is %w", tier.ErrClosed)
		}
		sumcopy.Spread(w.dst.b, w.src.b)
		w.peer.guests.Leave()
	case OpFill:
		fill(w.dst.b, w.value)
	case OpDigest:
		*w.digest = tier.DigestBytes(w.src.b, w.first)
	default:
		sumcopy.Spread(w.dst.b, w.src.b)
	}
	if !arrival.IsZero() {
		time.Sleep(time.Until(arrival))
	}
	return nil
}

func (a allocated) gone() bool { return a.a != nil && a.a.gone.Load() }

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// fill sets b to value at the speed of copies: what is filled already, up to
// what first-level caches hold, is the source of the next.
func fill(b []byte, value byte) {
	if value == 0 {
		clear(b)
		return
	}
	if len(b) == 0 {
		return
	}
	b[0] = value
	for done := 1; done < len(b); {
		done += copy(b[done:], b[:min(done, 16<<10)])
	}
}

// link models one direction between host and device, which all streams share:
// transfers follow each other at its rate, and each is done a latency after its
// last byte has passed.
type link struct {
	bytesPerSecond int64 // 0: as fast as memory
	latency        time.Duration

	mu struct {
		lockrank.Mutex[lockrank.Device]
		free time.Time // when the last transfer booked so far has passed
	}
}

// book takes the link for n bytes and returns when they have arrived; the zero
// time if nothing is modelled or there is nothing to transfer.
func (l *link) book(n int64) time.Time {
	if n == 0 || l.bytesPerSecond == 0 && l.latency == 0 {
		return time.Time{}
	}
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mu.free.Before(now) {
		l.mu.free = now
	}
	if l.bytesPerSecond > 0 {
		l.mu.free = l.mu.free.Add(time.Duration(float64(n) / float64(l.bytesPerSecond) * float64(time.Second)))
	}
	return l.mu.free.Add(l.latency)
}
