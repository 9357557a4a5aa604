package cuda

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// peerState is what a device knows of a peer.
type peerState uint8

const (
	peerMet     peerState = iota // it may write here
	peerReached                  // work of this device may write there
	peerWrong                    // the driver says so, and it is not true: see CheckPeers
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
	d.mu.Lock()
	state := d.mu.peers[peer]
	d.mu.Unlock()
	switch state {
	case peerReached:
		return nil
	case peerWrong:
		from, to := d.dev.Info(), peer.dev.Info()
		return fmt.Errorf(
			"cuda: %s (%s) and %s (%s) do not copy to each other: %w",
			from.Name,
			from.PCI,
			to.Name,
			to.PCI,
			tier.ErrNotSupported,
		)
	}
	if !d.driver.lib.Same(peer.driver.lib) {
		return fmt.Errorf("cuda: the devices belong to different drivers: %w", tier.ErrNotSupported)
	}
	// A GPU can reach its own memory, from whichever context, but is no peer of itself: the driver
	// would refuse to make it one.
	if d.dev.Info().Ordinal != peer.dev.Info().Ordinal {
		if err := d.enable(peer); err != nil {
			return err
		}
	}
	d.meet(peer, peerReached)
	peer.meet(d, peerMet)
	return nil
}

// meet notes that there is a peer, and what is known of it if that is more than before.
func (d *gpu) meet(peer *gpu, state peerState) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.peers[peer] = max(d.mu.peers[peer], state)
}

// forgetPeers makes the device unknown to its peers, which would keep it in memory for as long as
// they exist. It is being closed, so no new peer finds it.
func (d *gpu) forgetPeers() {
	d.mu.Lock()
	peers := d.mu.peers
	d.mu.peers = nil
	d.mu.Unlock()
	for p := range peers {
		p.mu.Lock()
		delete(p.mu.peers, d)
		p.mu.Unlock()
	}
}

func (d *gpu) enable(peer *gpu) error {
	from, to := d.dev.Info(), peer.dev.Info()
	can, err := d.driver.lib.CanAccessPeer(from.Ordinal, to.Ordinal)
	if err != nil {
		return err
	}
	if !can {
		return fmt.Errorf(
			"cuda: %s (%s) cannot reach the memory of %s (%s): %w",
			from.Name,
			from.PCI,
			to.Name,
			to.PCI,
			tier.ErrNotSupported,
		)
	}
	err = d.dev.Here(func(c *cuda.Calls) error { return c.EnablePeer(peer.dev.Context()) })
	if err != nil && !errors.Is(err, cuda.ErrPeerAccessAlreadyEnabled) {
		return err
	}
	return peer.source.show(d.dev)
}
