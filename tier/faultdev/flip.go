package faultdev

import (
	"errors"

	"github.com/spillway-db/spillway/tier"
)

// place is what work writes to: bytes of the host, or of a device.
type place struct {
	host []byte

	dev       tier.Device
	addr      tier.Addr
	size      int64
	elsewhere bool // the device is not that of the stream
}

// length returns how many bytes a region is about.
func length(r tier.Region) int64 { return max(r.Size, int64(len(r.HostDst)), int64(len(r.HostSrc))) }

// oneOf returns the destination of one of the regions, each as likely as it is long.
func (d *device) oneOf(regions []tier.Region, total int64) place {
	if total <= 0 {
		return place{}
	}
	at := d.rules.Below(total)
	for _, r := range regions {
		if n := length(r); at >= n {
			at -= n
			continue
		}
		if r.HostDst != nil {
			return place{host: r.HostDst}
		}
		return place{dev: d.inner, addr: r.Dst, size: length(r)}
	}
	return place{}
}

// flip changes a bit of p when the work on s is done. If that work fails, the stream reports it,
// and there is nothing to change.
func (d *device) flip(s tier.Stream, p place) error {
	size := max(p.size, int64(len(p.host)))
	if size <= 0 || s.Sync() != nil {
		return nil
	}
	bit := d.rules.Below(size * 8)
	if p.host != nil {
		p.host[bit/8] ^= 1 << (bit % 8)
		return nil
	}
	if !p.elsewhere {
		return flipOn(p.dev, s, p.addr+tier.Addr(bit/8), byte(1)<<(bit%8))
	}
	own, err := p.dev.NewStream()
	if err != nil {
		return err
	}
	return errors.Join(flipOn(p.dev, own, p.addr+tier.Addr(bit/8), byte(1)<<(bit%8)), own.Close())
}

// flipOn changes a byte in a device's memory.
func flipOn(dev tier.Device, s tier.Stream, addr tier.Addr, mask byte) error {
	b := make([]byte, 1)
	if err := errors.Join(dev.CopyToHost(s, b, addr), s.Sync()); err != nil {
		return err
	}
	b[0] ^= mask
	return errors.Join(dev.CopyToDevice(s, addr, b), s.Sync())
}
