package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/spillway-db/spillway/tier"
)

// probeSize is how much is copied to see whether it arrives: several pages of the IOMMU,
// which are what goes astray.
const probeSize = 64 << 10

var errAltered = errors.New("other bytes arrived than were copied")

// CheckPeers copies a pattern between each two devices of which the driver says that they
// reach each other, both ways, and compares what arrives. It calls wrong with the indices of each
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
			if errors.Is(err, tier.ErrNotSupported) || from.loss.Err() != nil || to.loss.Err() != nil || err == nil && same {
				continue
			}
			from.distrust(to)
			to.distrust(from)
			why := errAltered
			if err != nil {
				why = fmt.Errorf("a copy failed: %w", err)
			}
			wrong(i, j, why)
		}
	}
}

// distrust has copies to the peer refused from now on.
func (d *gpu) distrust(peer *gpu) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.peers != nil { // or it is being closed
		d.mu.peers[peer] = peerWrong
	}
}

// probe copies a pattern to the peer and reports whether it has arrived. A pair that does not
// reach each other, was found wrong, or cannot be tried is tier.ErrNotSupported.
func (d *gpu) probe(peer *gpu) (same bool, err error) {
	near, nerr := newProbe(d)
	defer near.close()
	far, ferr := newProbe(peer)
	defer far.close()
	if err := errors.Join(nerr, ferr); err != nil {
		return false, fmt.Errorf("%w: %w", tier.ErrNotSupported, err) // which says nothing of the way between them
	}
	if err := near.copyTo(far); err != nil {
		return false, err
	}
	got, err := far.read()
	return bytes.Equal(got, near.pattern), err
}

// probe is some memory of a device with a pattern.
type probe struct {
	dev     *gpu
	s       tier.Stream
	addr    tier.Addr // 0: none
	pattern []byte
}

func newProbe(d *gpu) (p *probe, err error) {
	p = &probe{dev: d, pattern: make([]byte, probeSize)}
	for i := range p.pattern {
		p.pattern[i] = byte(rand.Uint32())
	}
	if p.s, err = d.NewStream(); err != nil {
		return p, err
	}
	if p.addr, err = d.Alloc(p.s, probeSize); err != nil {
		return p, err
	}
	return p, errors.Join(d.CopyToDevice(p.s, p.addr, p.pattern), p.s.Sync())
}

func (p *probe) copyTo(far *probe) error {
	return errors.Join(p.dev.CopyPeer(p.s, far.addr, far.dev, p.addr, probeSize), p.s.Sync())
}

func (p *probe) read() ([]byte, error) {
	got := make([]byte, probeSize)
	return got, errors.Join(p.dev.CopyToHost(p.s, got, p.addr), p.s.Sync())
}

// close gives up what there is. The device's Close reports what cannot be.
func (p *probe) close() {
	if p.s == nil {
		return
	}
	if p.addr != 0 {
		_ = p.dev.Free(p.s, p.addr)
	}
	_ = p.s.Sync()
	_ = p.s.Close()
}
