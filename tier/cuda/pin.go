package cuda

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/cuda"
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
	x := share{at: cuda.AddressOf(mem), n: int64(len(mem))}
	d.pinning <- struct{}{}
	defer func() { <-d.pinning }()
	d.mu.Lock()
	pinned := slices.ContainsFunc(d.mu.pins, func(p share) bool {
		return x.at >= p.at && x.at+uintptr(x.n) <= p.at+uintptr(p.n)
	})
	d.mu.Unlock()
	if pinned {
		return nil
	}
	var err error
	x.pin, err = d.dev.PinHost(x.at, x.n)
	if errors.Is(err, cuda.ErrHostMemoryAlreadyRegistered) {
		return fmt.Errorf("cuda: pinning %d bytes of host memory, of which others have pinned a part: %w", x.n, err)
	}
	if err != nil {
		return fmt.Errorf("cuda: pinning %d bytes of host memory: %w", x.n, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.pins = append(d.mu.pins, x)
	return nil
}

// share is the device's part in host memory that is pinned.
type share struct {
	at  uintptr
	n   int64
	pin *cuda.Pin
}

// Unpin implements tier.Pinner. No copy of the device may be using mem. While the device is being
// closed it waits until that has unpinned mem. So after Unpin of each device that has pinned mem,
// the caller may unmap it.
func (d *gpu) Unpin(mem []byte) error {
	if !d.gate.Enter() {
		<-d.given
		return tier.ErrClosed
	}
	defer d.gate.Leave()
	at := cuda.AddressOf(mem)
	d.mu.Lock()
	var x share
	i := slices.IndexFunc(d.mu.pins, func(p share) bool { return p.at == at })
	if i >= 0 {
		x = d.mu.pins[i]
		d.mu.pins = slices.Delete(d.mu.pins, i, i+1)
	}
	d.mu.Unlock()
	if i < 0 {
		return nil
	}
	return d.dev.Surely(x.pin.End)
}
