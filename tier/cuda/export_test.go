package cuda

import (
	"slices"

	"github.com/spillway-db/spillway/internal/cuda"
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

// HasWord reports whether the word of s is in memory that is staged.
func (d *Device) HasWord(s tier.Stream) bool {
	at := cuda.AddressOf(s.(*stream).word)
	d.bounce.mu.Lock()
	defer d.bounce.mu.Unlock()
	return slices.ContainsFunc(d.bounce.mu.blocks, func(b *block) bool {
		return at >= b.addr() && at-b.addr() < uintptr(len(b.mem))
	})
}

// Peers returns how many other devices d knows of.
func (d *Device) Peers() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.mu.peers)
}

// Device is what Open returns.
type Device = gpu

// OpenDevice is Open with all that a device can do.
func (d *Driver) OpenDevice(cfg Config) (*Device, error) { return d.open(cfg) }

// BorrowError is the error behind the sentinels.
type BorrowError = borrowError
