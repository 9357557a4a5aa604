package faultdev

import (
	"errors"

	"github.com/spillway-db/spillway/tier"
)

// place is the memory that work writes to: bytes of the host, or of a device.
type place struct {
	host []byte

	dev  tier.Device
	addr tier.Addr
	size int64
}

// length returns how many bytes a region copies.
func length(r tier.Region) int64 { return max(r.Size, int64(len(r.HostDst)), int64(len(r.HostSrc))) }

// destination returns where one of the regions is copied to. Longer regions are chosen more often.
func (d *device) destination(regions []tier.Region, total int64) place {
	if total <= 0 {
		return place{}
	}
	at := int64(0)
	if len(regions) > 1 {
		at = d.rules.Below(total)
	}
	for _, r := range regions {
		n := length(r)
		if at < n {
			return place{r.HostDst, d.inner, r.Dst, n}
		}
		at -= n
	}
	return place{}
}

// flip changes a bit at p once the work on s is done. If that work fails, the stream reports it and
// flip changes nothing.
func (d *device) flip(s tier.Stream, p place) error {
	size := max(p.size, int64(len(p.host)))
	if size <= 0 || s.Sync() != nil {
		return nil
	}
	bit := d.rules.Below(size * 8)
	mask := byte(1) << (bit % 8)
	if p.host != nil {
		p.host[bit/8] ^= mask
		return nil
	}
	own, err := p.dev.NewStream() // s may belong to another device
	if err != nil {
		return err
	}
	b, addr := make([]byte, 1), p.addr+tier.Addr(bit/8)
	if err = errors.Join(p.dev.CopyRegions(own, []tier.Region{{HostDst: b, Src: addr}}), own.Sync()); err == nil {
		b[0] ^= mask
		err = errors.Join(p.dev.CopyRegions(own, []tier.Region{{Dst: addr, HostSrc: b}}), own.Sync())
	}
	return errors.Join(err, own.Close())
}
