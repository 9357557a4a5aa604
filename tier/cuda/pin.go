package cuda

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// Pin implements tier.Pinner: it registers mem with the driver, for all GPUs, which takes some tenths of a second for each GiB
// and makes all of its pages present. mem must not be Go's memory, nor be given back to the system,
// whole or in part, before it is unpinned.
func (d *Device) Pin(mem []byte) error {
	if len(mem) == 0 {
		return errors.New("cuda: no memory to pin")
	}
	if !d.gate.enter() {
		return tier.ErrClosed
	}
	defer d.gate.leave()
	at, n := cuda.AddressOf(mem), int64(len(mem))
	if d.driver.lib.Pinned(at, n) {
		return nil // by another device of this driver
	}
	if err := d.dev.Here(func(c *cuda.Calls) error { return c.RegisterHost(at, n) }); err != nil {
		return fmt.Errorf("cuda: pinning %d bytes of host memory: %w", n, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.pins = append(d.mu.pins, at)
	return nil
}

// Unpin implements tier.Pinner. No copy may be using mem. What another device has pinned is left to that.
func (d *Device) Unpin(mem []byte) error {
	if !d.gate.enter() {
		return tier.ErrClosed // which has unpinned it
	}
	defer d.gate.leave()
	at := cuda.AddressOf(mem)
	d.mu.Lock()
	i := slices.Index(d.mu.pins, at)
	if i >= 0 {
		d.mu.pins = slices.Delete(d.mu.pins, i, i+1)
	}
	d.mu.Unlock()
	if i < 0 {
		return nil
	}
	return d.surely(func(c *cuda.Calls) error { return c.UnregisterHost(at) })
}
