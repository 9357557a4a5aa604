package cuda

import (
	"errors"
	"fmt"

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
