package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// CopyPeer implements tier.Device, also for devices that wrap one of this package and have a method
// Unwrap() tier.Device. GPUs that cannot reach each other's memory are tier.ErrNotSupported: the
// driver would copy through the host, in uncounted memory.
func (d *gpu) CopyPeer(ts tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	peer, err := wrapped(dstDevice)
	if err != nil {
		return err
	}
	if peer == d {
		return d.CopyRegions(ts, []tier.Region{{Dst: dst, Src: src, Size: size}})
	}
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	if !peer.gate.Enter() {
		return fmt.Errorf("cuda: the peer is %w", tier.ErrClosed)
	}
	defer peer.gate.Leave()
	if err := errors.Join(peer.at(dst, size), d.at(src, size)); err != nil {
		return err
	}
	if err := d.reach(peer); err != nil || size == 0 {
		return err
	}
	return s.put(due{}, func(c *cuda.Calls) error {
		return c.CopyPeer(s.handle, cuda.Ptr(dst), peer.dev.Context(), cuda.Ptr(src), d.dev.Context(), size)
	})
}

// reach makes the peer's memory reachable for work of this device, once.
func (d *gpu) reach(peer *gpu) error {
	from, to := d.dev.Info(), peer.dev.Info()
	refuse := func(why string) error {
		return fmt.Errorf("cuda: %s (%s) %s %s (%s): %w",
			from.Name, from.PCI, why, to.Name, to.PCI, tier.ErrNotSupported)
	}
	d.mu.Lock()
	reached, known := d.mu.peers[peer.key]
	d.mu.Unlock()
	switch {
	case reached:
		return nil
	case known: // see CheckPeers
		return refuse("does not copy reliably to")
	case !d.driver.lib.Same(peer.driver.lib):
		return fmt.Errorf("cuda: the devices belong to different drivers: %w", tier.ErrNotSupported)
	}
	// A GPU can reach its own memory, from whichever context, but is no peer of itself: the driver
	// would refuse to make it one.
	if from.Ordinal != to.Ordinal {
		can, err := d.driver.lib.CanAccessPeer(from.Ordinal, to.Ordinal)
		if err == nil && !can {
			err = refuse("cannot reach the memory of")
		}
		if err != nil {
			return err
		}
		err = d.dev.Here(func(c *cuda.Calls) error { return c.EnablePeer(peer.dev.Context()) })
		if err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) {
			return err
		}
		if peer.source.pool != 0 {
			err = peer.dev.Here(func(c *cuda.Calls) error { return c.ShowPool(peer.source.pool, from.Ordinal) })
			if errors.Is(err, cuda.ErrNotSupported) {
				err = fmt.Errorf("cuda: letting another GPU into a pool: %w: %w", tier.ErrNotSupported, err)
			}
			if err != nil {
				return err
			}
		}
	}
	d.setPeer(peer, true)
	return nil
}

// setPeer notes whether copies to the peer work.
func (d *gpu) setPeer(peer *gpu, works bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if known, there := d.mu.peers[peer.key]; !there || known {
		d.mu.peers[peer.key] = works
	}
}

// probeSize is how much is copied to see whether it arrives: several pages of the IOMMU,
// which are what goes astray.
const probeSize = 64 << 10

var errAltered = errors.New("other bytes arrived than were copied")

// CheckPeers copies a pattern between each two devices that reach each other according to the
// driver, both ways, and compares what arrives. It calls wrong with the indices of each
// pair in which it does not, and why. From then on copies between the two are
// tier.ErrNotSupported, both ways, so that they are made through host memory. Devices that are none
// of this package, or do not wrap one, are left out, as are those that are lost. Some of the memory
// of each is needed for a moment, so it should be called before that is given out. It may take some
// milliseconds a pair.
func CheckPeers(devices []tier.Device, wrong func(from, to int, why error)) {
	for i, one := range devices {
		for j, other := range devices {
			from, ferr := wrapped(one)
			to, terr := wrapped(other)
			if i == j || ferr != nil || terr != nil || from == to || from.dev.Info().Ordinal == to.dev.Info().Ordinal {
				continue
			}
			same, err := from.probe(to)
			if errors.Is(err, tier.ErrNotSupported) || from.loss.Err() != nil || to.loss.Err() != nil ||
				err == nil && same {
				continue
			}
			from.setPeer(to, false)
			to.setPeer(from, false)
			why := errAltered
			if err != nil {
				why = fmt.Errorf("a copy failed: %w", err)
			}
			wrong(i, j, why)
		}
	}
}

// probe copies a pattern to the peer and reports whether it has arrived. A pair that does not
// reach each other, was found wrong, or cannot be tried is tier.ErrNotSupported.
func (d *gpu) probe(peer *gpu) (same bool, err error) {
	pattern, got := make([]byte, probeSize), make([]byte, probeSize)
	for i := range pattern {
		pattern[i] = byte(rand.Uint32())
	}
	near, from, nerr := d.lay(pattern)
	defer d.giveUp(near, from)
	far, to, ferr := peer.lay(got) // other bytes
	defer peer.giveUp(far, to)
	if err := errors.Join(nerr, ferr); err != nil {
		return false, fmt.Errorf("%w: %w", tier.ErrNotSupported, err) // which says nothing of the way between them
	}
	if err := errors.Join(d.CopyPeer(near, to, peer, from, probeSize), near.Sync()); err != nil {
		return false, err
	}
	err = errors.Join(peer.CopyRegions(far, []tier.Region{{HostDst: got, Src: to}}), far.Sync())
	return bytes.Equal(got, pattern), err
}

// lay returns probeSize bytes of memory, which begin with b, and a stream. Both are for giveUp, also
// after an error.
func (d *gpu) lay(b []byte) (s tier.Stream, addr tier.Addr, err error) {
	if s, err = d.NewStream(); err != nil {
		return nil, 0, err
	}
	if addr, err = d.Alloc(s, probeSize); err != nil {
		return s, 0, err
	}
	return s, addr, errors.Join(d.CopyRegions(s, []tier.Region{{Dst: addr, HostSrc: b}}), s.Sync())
}

// giveUp gives up what there is. The device's Close reports what cannot be.
func (d *gpu) giveUp(s tier.Stream, addr tier.Addr) {
	if addr != 0 {
		_ = d.Free(s, addr)
	}
	if s != nil {
		_ = s.Sync()
		_ = s.Close()
	}
}
