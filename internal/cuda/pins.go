package cuda

import (
	"cmp"
	"errors"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// pins is the host memory that devices have pinned. Each piece is registered once, and stays so
// until its last user is done with it.
type pins struct {
	turn chan struct{} // holds a token while a goroutine reads the list, or registers memory, which is slow
	list []*pin
}

// pin is registered memory, n bytes at addr. Others in the process may have registered it, and end
// that.
//
// A registration ends with its context, even if others use the memory. So where the memory was
// registered in the primary context of a device, that context is kept for as long.
type pin struct {
	addr   uintptr
	n      int64
	users  []pinUser
	others bool
	by     *Device // in whose context it was registered
}

// pinUser is a device that has pinned a pin's memory, or a part of it.
type pinUser struct {
	dev  *Device
	addr uintptr
	n    int64
}

// within reports whether the n > 0 bytes at addr lie in the size bytes at start.
func within(addr uintptr, n int64, start uintptr, size int64) bool {
	return addr >= start && addr-start < uintptr(size) && n <= size-int64(addr-start)
}

// Pin pins n > 0 bytes at addr for all devices, unless one has done so. They must not be on Go's
// heap, and must stay until all devices have ended the pin (Unpin). It may take tenths of a second
// for each GiB, and waits for other calls. Memory that d has pinned already is not pinned again.
//
// Where the context of the first device is adopted, and not the device's own, it must be there
// until the last has ended the pin.
func (d *Device) Pin(addr uintptr, n int64) error {
	all := &d.lib.pins
	all.turn <- struct{}{}
	defer func() { <-all.turn }()
	user := pinUser{d, addr, n}
	for _, p := range all.list {
		if !within(addr, n, p.addr, p.n) {
			continue
		}
		if !slices.ContainsFunc(p.users, func(u pinUser) bool { return u.dev == d && within(addr, n, u.addr, u.n) }) {
			p.users = append(p.users, user)
		}
		return nil
	}
	p := &pin{addr: addr, n: n, users: []pinUser{user}, by: d}
	if d.primary {
		if _, err := d.lib.retain(d.handle); err != nil {
			return err
		}
	}
	err := d.Here(func(c *Calls) error {
		err := c.RegisterHost(addr, n)
		// The driver returns this code also where another part of the process has registered a
		// single byte.
		if p.others = errors.Is(err, ErrHostMemoryAlreadyRegistered) && c.HostRegistered(addr, n); p.others {
			c.KnowHost(addr, n)
			return nil
		}
		return err
	})
	if err != nil {
		return errors.Join(err, p.leaveContext())
	}
	all.list = append(all.list, p)
	return nil
}

// leaveContext gives up the context that was kept for the registration.
func (p *pin) leaveContext() error {
	if !p.by.primary {
		return nil
	}
	return p.by.lib.release(p.by.handle)
}

// Unpin ends what the device's Pin of the memory at addr began; 0 means all of its pins. With its
// last user, memory is not pinned any more. No copy of the device may be using it.
func (c *Calls) Unpin(addr uintptr) (err error) {
	all := &c.pins
	all.turn <- struct{}{}
	defer func() { <-all.turn }()
	all.list = slices.DeleteFunc(all.list, func(p *pin) bool {
		p.users = slices.DeleteFunc(p.users, func(u pinUser) bool {
			return u.dev == c.dev && (addr == 0 || u.addr == addr)
		})
		if len(p.users) > 0 {
			return false
		}
		err = cmp.Or(err, c.unregister(p))
		return true
	})
	return err
}

// unregister ends a registration. It does so in the context of c, which may be another than that of
// the registration, because a registration is for all. If the driver refuses, the call is repeated
// in that one.
func (c *Calls) unregister(p *pin) error {
	if p.others {
		c.pinned.remove(p.addr)
		return p.leaveContext()
	}
	err := c.UnregisterHost(p.addr)
	if err != nil && c.dev.ctx != p.by.ctx && c.pushContext(p.by.ctx) == nil {
		if c.UnregisterHost(p.addr) == nil {
			err = nil
		}
		_ = c.popContext() // as in Device.current
	}
	return errors.Join(err, p.leaveContext())
}

// ranges is the host memory that is pinned, by this module's calls or, as far as it was told, by
// others. Copies are refused for other memory: the driver would take an address of Go's heap, and
// write there when the memory is in use for something else. The list changes when arenas and staging memory are
// pinned, and is read for every copy, so reading takes no lock.
type ranges struct {
	mu  lockrank.Mutex[lockrank.Device] // guards changes
	all atomic.Pointer[[]hostRange]     // by address; never changed in place
}

type hostRange struct {
	addr uintptr
	n    int64
}

// find returns all ranges, and the index of the last one that begins at addr or before; -1 for none.
func (r *ranges) find(addr uintptr) (all []hostRange, i int) {
	if p := r.all.Load(); p != nil {
		all = *p
	}
	i, found := slices.BinarySearchFunc(all, addr, func(x hostRange, addr uintptr) int {
		return cmp.Compare(x.addr, addr)
	})
	if !found {
		i--
	}
	return all, i
}

// hold reports whether all n bytes at addr lie in one range. No bytes do.
func (r *ranges) hold(addr uintptr, n int64) bool {
	if n <= 0 {
		return n == 0
	}
	all, i := r.find(addr)
	return i >= 0 && within(addr, n, all[i].addr, all[i].n)
}

func (r *ranges) add(addr uintptr, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	all, i := r.find(addr)
	all = slices.Insert(slices.Clone(all), i+1, hostRange{addr, n})
	r.all.Store(&all)
}

func (r *ranges) remove(addr uintptr) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if all, i := r.find(addr); i >= 0 && all[i].addr == addr {
		all = slices.Delete(slices.Clone(all), i, i+1)
		r.all.Store(&all)
	}
}
