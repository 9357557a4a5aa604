package cuda

import (
	"errors"
	"fmt"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
)

// Pin implements tier.Pinner: it registers mem with the driver, for all GPUs, which takes some
// tenths of a second for each GiB and makes all of its pages present. mem must not be Go's memory,
// nor be given back to the system, whole or in part, before it is unpinned. Devices of one driver
// have the same memory pinned once, and until the last of them has unpinned it or is closed, in
// whichever order.
func (d *gpu) Pin(mem []byte) error {
	if len(mem) == 0 {
		return errors.New("cuda: no memory to pin")
	}
	if !d.gate.Enter() {
		return tier.ErrClosed
	}
	defer d.gate.Leave()
	n := int64(len(mem))
	err := d.dev.Pin(extent.Address(mem), n)
	if errors.Is(err, cuda.ErrHostMemoryAlreadyRegistered) {
		return fmt.Errorf("cuda: pinning %d bytes of host memory, of which others have pinned a part: %w", n, err)
	}
	if err != nil {
		return fmt.Errorf("cuda: pinning %d bytes of host memory: %w", n, err)
	}
	return nil
}

// Unpin implements tier.Pinner. No copy of the device may be using mem. While the device is being
// closed it waits until that has unpinned mem. So after Unpin of each device that has pinned mem,
// the caller may unmap it.
func (d *gpu) Unpin(mem []byte) error {
	if len(mem) == 0 { // none is pinned, and the address of nil means all of it below
		return nil
	}
	if !d.gate.Enter() {
		<-d.given
		return tier.ErrClosed
	}
	defer d.gate.Leave()
	return d.dev.Surely(func(c *cuda.Calls) error { return c.Unpin(extent.Address(mem)) })
}
