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
// whole or in part, before it is unpinned. What another device of this driver has pinned stays that device's to end, after which
// copies of this one go by other memory: devices that share memory are to be closed together.
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
	p := pin{at: at}
	err := d.dev.Here(func(c *cuda.Calls) error {
		err := c.RegisterHost(at, n)
		// By somebody else who uses the driver; which it says of any byte that is.
		if errors.Is(err, cuda.ErrHostMemoryAlreadyRegistered) && c.HostRegistered(at, n) {
			p.others = true
			c.KnowHost(at, n)
			return nil
		}
		return err
	})
	if errors.Is(err, cuda.ErrHostMemoryAlreadyRegistered) {
		return fmt.Errorf("cuda: pinning %d bytes of host memory, of which others have pinned a part: %w", n, err)
	}
	if err != nil {
		return fmt.Errorf("cuda: pinning %d bytes of host memory: %w", n, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.pins = append(d.mu.pins, p)
	return nil
}

// pin is host memory that the device's copies may use.
type pin struct {
	at     uintptr
	others bool // others have registered it, and end that
}

func (p pin) end(c *cuda.Calls) error {
	if p.others {
		c.ForgetHost(p.at)
		return nil
	}
	return c.UnregisterHost(p.at)
}

// Unpin implements tier.Pinner. No copy may be using mem. What another device has pinned is left to that. While the device is
// being closed it waits until that has unpinned mem: whoever calls it may go on to unmap mem.
func (d *Device) Unpin(mem []byte) error {
	if !d.gate.enter() {
		<-d.given
		return tier.ErrClosed
	}
	defer d.gate.leave()
	at := cuda.AddressOf(mem)
	d.mu.Lock()
	var p pin
	i := slices.IndexFunc(d.mu.pins, func(p pin) bool { return p.at == at })
	if i >= 0 {
		p = d.mu.pins[i]
		d.mu.pins = slices.Delete(d.mu.pins, i, i+1)
	}
	d.mu.Unlock()
	if i < 0 {
		return nil
	}
	return d.surely(p.end)
}
