package cuda

import "unsafe"

// Numbers of the driver for memory of a device that is pinned there, and what peers may do.
const (
	allocationPinned  = 1
	locationDevice    = 1
	accessReadWrite   = 3
	poolPropertyBytes = 88
)

// location is where memory lies.
type location struct{ kind, id int32 }

// poolProperties are what a pool is made by. The fields behind the size came later, and
// were reserved before: zero is right for all versions.
type poolProperties struct {
	allocation, handles int32
	location            location
	security            uintptr
	maxSize             uintptr
	_                   [56]byte
}

var _ [poolPropertyBytes]byte = [unsafe.Sizeof(poolProperties{})]byte{}

// poolAccess lets a device into a pool.
type poolAccess struct {
	location location
	flags    int32
}

// NewPool creates a pool on the device of at most maxSize bytes, 0 for no limit, which is all that
// drivers before 12.2 know.
func (c *Calls) NewPool(maxSize int64) (Pool, error) {
	dev, err := c.lib.handle(c.dev.info.Ordinal)
	if err != nil {
		return 0, err
	}
	properties := poolProperties{
		allocation: allocationPinned,
		location:   location{locationDevice, dev},
		maxSize:    uintptr(maxSize),
	}
	var p Pool
	err = c.lib.call(&c.lib.sym.poolCreate, uintptr(unsafe.Pointer(&p)), uintptr(unsafe.Pointer(&properties)))
	return p, err
}

// DestroyPool gives p up, from which nothing may be allocated any more.
func (c *Calls) DestroyPool(p Pool) error { return c.lib.call(&c.lib.sym.poolDestroy, uintptr(p)) }

// TrimPool gives back what p reserves and does not use, down to keep bytes.
func (c *Calls) TrimPool(p Pool, keep int64) error {
	return c.lib.call(&c.lib.sym.poolTrim, uintptr(p), uintptr(keep))
}

// PoolNumber returns a number of p, in bytes.
func (c *Calls) PoolNumber(p Pool, which PoolNumber) (int64, error) {
	var v uint64
	err := c.lib.call(&c.lib.sym.poolGet, uintptr(p), uintptr(which), uintptr(unsafe.Pointer(&v)))
	return int64(v), err
}

// SetPoolNumber sets one that can be set.
func (c *Calls) SetPoolNumber(p Pool, which PoolNumber, v int64) error {
	n := uint64(v)
	return c.lib.call(&c.lib.sym.poolSet, uintptr(p), uintptr(which), uintptr(unsafe.Pointer(&n)))
}

// SetPoolFlag sets a flag.
func (c *Calls) SetPoolFlag(p Pool, which PoolFlag, on bool) error {
	var v int32
	if on {
		v = 1
	}
	return c.lib.call(&c.lib.sym.poolSet, uintptr(p), uintptr(which), uintptr(unsafe.Pointer(&v)))
}

// ShowPool lets another device reach the memory of p, which EnablePeer does not.
func (c *Calls) ShowPool(p Pool, peer int) error {
	dev, err := c.lib.handle(peer)
	if err != nil {
		return err
	}
	access := poolAccess{location{locationDevice, dev}, accessReadWrite}
	return c.lib.call(&c.lib.sym.poolAccess, uintptr(p), uintptr(unsafe.Pointer(&access)), 1)
}
