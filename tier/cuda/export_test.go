package cuda

import (
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
)

// StagingRest is how much pinned memory is kept for copies of memory that is not pinned, when none
// is under way.
const StagingRest = stagingRest

// Staged returns how much there is now.
func (d *Device) Staged() int64 {
	d.bounce.mu.Lock()
	defer d.bounce.mu.Unlock()
	return d.bounce.mu.bytes
}

// HasWord reports whether the word of s is in pinned memory.
func (d *Device) HasWord(s tier.Stream) bool {
	return d.driver.lib.Pinned(extent.Address(s.(*stream).word), 4)
}

// Device is what Open returns.
type Device = gpu

// OpenDevice is Open with all that a device can do.
func (d *Driver) OpenDevice(cfg Config) (*Device, error) { return d.open(cfg) }

// BorrowError is the error behind the sentinels.
type BorrowError = borrowError

// CopyToDevice copies b to dst.
func (d *gpu) CopyToDevice(s tier.Stream, dst tier.Addr, b []byte) error {
	return d.CopyRegions(s, []tier.Region{{Dst: dst, HostSrc: b}})
}

// CopyToHost copies from src to b.
func (d *gpu) CopyToHost(s tier.Stream, b []byte, src tier.Addr) error {
	return d.CopyRegions(s, []tier.Region{{HostDst: b, Src: src}})
}
