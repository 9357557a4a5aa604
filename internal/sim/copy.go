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

// submit asks the fault hook and puts w on s, unless it is work of no bytes.
func (d *gpu) submit(s *stream, w work) (err error) {
	if w.index, err = d.ask(w.kind, w.bytes); err != nil || w.bytes == 0 {
		return err
	}
	return s.put(w)
}

// CopyToDevice implements tier.Device.
func (d *gpu) CopyToDevice(s tier.Stream, dst tier.Addr, src []byte) error {
	return d.copy(s, OpCopyToDevice, d, []tier.Region{{Dst: dst, HostSrc: src}})
}

// CopyToHost implements tier.Device.
func (d *gpu) CopyToHost(s tier.Stream, dst []byte, src tier.Addr) error {
	return d.copy(s, OpCopyToHost, d, []tier.Region{{HostDst: dst, Src: src}})
}

// CopyPeer implements tier.Device. Simulated devices reach each other, also
// through devices that wrap one and have a method Unwrap() tier.Device.
func (d *gpu) CopyPeer(s tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	peer, ok := tier.As[*gpu](dstDevice)
	if !ok {
		return fmt.Errorf("sim: a copy to a device of type %T: %w", dstDevice, tier.ErrNotSupported)
	}
	kind := OpCopyPeer
	if peer == d {
		kind = OpCopyRegions
	}
	return d.copy(s, kind, peer, []tier.Region{{Dst: dst, Src: src, Size: size}})
}

// CopyRegions implements tier.Device.
func (d *gpu) CopyRegions(s tier.Stream, regions []tier.Region) error {
	return d.copy(s, OpCopyRegions, d, regions)
}

// copy puts all copies between devices and host memory on a stream, as one piece of work. The
// addresses of destinations are those of peer, which may be d.
func (d *gpu) copy(ts tier.Stream, kind OpKind, peer *gpu, regions []tier.Region) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	w := work{kind: kind, peer: peer, copies: make([]sumcopy.Copy, 0, len(regions))}
	for i, r := range regions {
		if err := w.add(d, r); err != nil {
			return fmt.Errorf("sim: %s: copy %d of %d: %w", kind, i, len(regions), err)
		}
	}
	if peer != d {
		w.outward = w.bytes
	}
	return d.submit(s, w)
}

// add adds one copy to w, whose source is memory of d or of the host.
func (w *work) add(d *gpu, r tier.Region) (err error) {
	c := sumcopy.Copy{Dst: r.HostDst, Src: r.HostSrc}
	n := r.Size
	if host := max(len(r.HostDst), len(r.HostSrc)); r.HostDst != nil || r.HostSrc != nil {
		if n != 0 && n != int64(host) {
			return fmt.Errorf("a size of %d with %d bytes of host memory", n, host)
		}
		n = int64(host)
	}
	switch {
	case r.HostDst != nil && r.HostSrc != nil:
		return errors.New("both sides are host memory")
	case n < 0:
		return fmt.Errorf("a range of %d bytes", n)
	case n == 0:
		return nil // any address will do
	case r.HostDst == nil && r.HostSrc == nil && w.peer == d && r.Dst < r.Src+tier.Addr(n) && r.Src < r.Dst+tier.Addr(n):
		return fmt.Errorf("%d bytes from address %#x to %#x overlap", n, uint64(r.Src), uint64(r.Dst))
	}
	if c.Dst == nil {
		if c.Dst, err = w.use(w.peer, r.Dst, n); err != nil {
			return err
		}
	} else {
		w.outward += n
	}
	if c.Src == nil {
		if c.Src, err = w.use(d, r.Src, n); err != nil {
			return err
		}
	} else {
		w.inward += n
	}
	w.bytes += n
	w.copies = append(w.copies, c)
	return nil
}

// use returns n > 0 bytes of live device memory, which w uses.
func (w *work) use(d *gpu, addr tier.Addr, n int64) ([]byte, error) {
	a, b, err := d.find(addr, n)
	if err == nil {
		w.uses = append(w.uses, a)
	}
	return b, err
}

// Fill implements tier.Device.
func (d *gpu) Fill(ts tier.Stream, dst tier.Addr, value byte, size int64) (err error) {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	w := work{kind: OpFill, peer: d, bytes: size, value: value}
	switch {
	case size < 0:
		return fmt.Errorf("sim: filling %d bytes", size)
	case size > 0:
		if w.memory, err = w.use(d, dst, size); err != nil {
			return err
		}
	}
	return d.submit(s, w)
}

// Digest implements tier.Computer.
func (d *gpu) Digest(ts tier.Stream, src tier.Addr, size, first int64, out *tier.Digest) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	w := work{kind: OpDigest, peer: d, bytes: size, first: first, digest: out}
	switch {
	case src%8 != 0:
		return fmt.Errorf("sim: a digest from address %#x, which is not a multiple of 8", uint64(src))
	case out == nil:
		return errors.New("sim: a digest without a destination")
	case size < 0:
		return fmt.Errorf("sim: a digest of %d bytes", size)
	case size > 0:
		if w.memory, err = w.use(d, src, size); err != nil {
			return err
		}
	}
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
	return s.record()
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
	for _, a := range w.uses {
		if a.gone.Load() {
			return errFreed
		}
	}
	if w.peer != d {
		if !w.peer.guests.Enter() {
			return fmt.Errorf("the peer is %w", tier.ErrClosed)
		}
		defer w.peer.guests.Leave()
	}
	arrival := d.toDevice.book(w.inward)
	if out := d.fromDevice.book(w.outward); out.After(arrival) {
		arrival = out
	}
	switch w.kind {
	case OpFill:
		fill(w.memory, w.value)
	case OpDigest:
		*w.digest = tier.DigestBytes(w.memory, w.first)
	default:
		sumcopy.Gather(w.copies)
	}
	if !arrival.IsZero() {
		time.Sleep(time.Until(arrival))
	}
	return nil
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
