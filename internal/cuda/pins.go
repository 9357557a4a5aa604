package cuda

import (
	"errors"
	"slices"
)

// pins is the host memory that devices have pinned. Each piece is registered once, until its last
// user is done with it.
type pins struct {
	turn chan struct{} // holds a token while a goroutine reads the list, or registers memory, which is slow
	list []*Pin
}

// Pin is a device's share in host memory that is pinned, to be ended once.
type Pin struct {
	lib    *Library
	addr   uintptr
	n      int64
	users  int
	others bool // others have registered it, and end that
	// home is the device in whose primary context the memory was registered, and which is kept for
	// that. A registration ends with its context, even if others use the memory. No device: -1.
	home int
	ctx  Context // that one, or the one that was adopted
}

// PinHost pins n > 0 bytes at addr for all devices, unless one has done so. They must not be on
// Go's heap, and must stay until all devices have ended the pin. It may take tenths of a second for
// each GiB, and waits for other calls.
//
// Where the context of the first device is adopted, and not the device's own, it must be there
// until the last has ended it.
func (d *Device) PinHost(addr uintptr, n int64) (*Pin, error) {
	all := &d.lib.pins
	all.turn <- struct{}{}
	defer func() { <-all.turn }()
	for _, p := range all.list {
		if p.holds(addr, n) {
			p.users++
			return p, nil
		}
	}
	p := &Pin{lib: d.lib, addr: addr, n: n, users: 1, home: -1, ctx: d.ctx}
	if err := p.begin(d); err != nil {
		return nil, err
	}
	all.list = append(all.list, p)
	return p, nil
}

func (p *Pin) holds(addr uintptr, n int64) bool {
	return addr >= p.addr && addr-p.addr < uintptr(p.n) && n <= p.n-int64(addr-p.addr)
}

// begin registers the memory by way of d.
func (p *Pin) begin(d *Device) error {
	if d.primary {
		if _, err := p.lib.retain(d.info.Ordinal); err != nil {
			return err
		}
		p.home = d.info.Ordinal
	}
	err := d.Here(func(c *Calls) error {
		err := c.RegisterHost(p.addr, p.n)
		// Another user of the driver has registered it; the driver reports that for a single such
		// byte.
		if errors.Is(err, ErrHostMemoryAlreadyRegistered) && c.HostRegistered(p.addr, p.n) {
			p.others = true
			c.KnowHost(p.addr, p.n)
			return nil
		}
		return err
	})
	if err != nil {
		return errors.Join(err, p.leaveHome())
	}
	return nil
}

func (p *Pin) leaveHome() error {
	if p.home < 0 {
		return nil
	}
	return p.lib.release(p.home)
}

// End ends one device's share; with the last of them the memory is not pinned any more. No copy of
// that device may be using it. c is of any context.
func (p *Pin) End(c *Calls) error {
	all := &p.lib.pins
	all.turn <- struct{}{}
	defer func() { <-all.turn }()
	if p.users--; p.users > 0 {
		return nil
	}
	all.list = slices.DeleteFunc(all.list, func(x *Pin) bool { return x == p })
	if p.others {
		c.ForgetHost(p.addr)
		return p.leaveHome()
	}
	return errors.Join(p.unregister(c), p.leaveHome())
}

// unregister does so in the context of c. That may be another than the memory was registered in,
// because a registration is for all. If the driver refuses, the call is repeated in that one.
func (p *Pin) unregister(c *Calls) error {
	err := c.UnregisterHost(p.addr)
	if err == nil || c.dev.ctx == p.ctx || p.lib.pushContext(p.ctx) != nil {
		return err
	}
	defer func() { _ = p.lib.popContext() }() // as in Device.current
	if c.UnregisterHost(p.addr) == nil {
		return nil
	}
	return err
}
