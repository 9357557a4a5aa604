package devpool

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/tier"
)

// Granule is what a device's allocations are rounded up to. A device that embeds it has the method
// Charge of tier.Device.
type Granule int64

// Charge implements tier.Device.
func (g Granule) Charge(size int64) int64 {
	n := int64(g)
	if size > math.MaxInt64-n {
		return math.MaxInt64 / n * n
	}
	return (max(0, size) + n - 1) / n * n
}

// RegionSize returns how many bytes a region copies, or an error if the region is wrong.
func RegionSize(r tier.Region) (int64, error) {
	host := int64(max(len(r.HostSrc), len(r.HostDst)))
	switch {
	case r.HostSrc != nil && r.HostDst != nil:
		return 0, errors.New("both sides are host memory")
	case r.HostSrc == nil && r.HostDst == nil:
		if r.Size > 0 && r.Dst < r.Src+tier.Addr(r.Size) && r.Src < r.Dst+tier.Addr(r.Size) {
			return 0, fmt.Errorf("%d bytes from address %#x to %#x overlap", r.Size, uint64(r.Src), uint64(r.Dst))
		}
		return r.Size, nil
	case r.Size != 0 && r.Size != host:
		return 0, fmt.Errorf("a size of %d with %d bytes of host memory", r.Size, host)
	}
	return host, nil
}

// Allocation is a piece of a device's memory. It is live while it is in a Table. From a free to the
// end of the work before that it is retired: known to the stream of the free, and to work that uses
// it, but no longer in the table.
type Allocation struct {
	Addr   tier.Addr
	Size   int64       // as asked for; access ends here
	Charge int64       // as taken from the device
	Gone   atomic.Bool // set when the memory may be another allocation's
}

// Table is the live allocations of a device, by address. It has no lock: its owner's guards it.
type Table struct {
	*btree.BTreeG[*Allocation]
	backend string // in errors

	pivot Allocation // of a search
	found *Allocation
	catch btree.ItemIteratorG[*Allocation]
}

// NewTable returns an empty table. backend begins its errors.
func NewTable(backend string) *Table {
	t := &Table{backend: backend}
	t.BTreeG = btree.NewG(32, func(a, b *Allocation) bool { return a.Addr < b.Addr })
	// One closure for all searches, because one for each call would be allocated.
	t.catch = func(a *Allocation) bool { t.found = a; return false }
	return t
}

// Find returns the allocation in which the n bytes at addr lie. Of no bytes any address will do,
// and there is none.
func (t *Table) Find(addr tier.Addr, n int64) (*Allocation, error) {
	if n < 0 {
		return nil, fmt.Errorf("%s: a range of %d bytes", t.backend, n)
	}
	if n == 0 {
		return nil, nil
	}
	t.found, t.pivot.Addr = nil, addr
	t.DescendLessOrEqual(&t.pivot, t.catch)
	a := t.found
	if a == nil || addr-a.Addr >= tier.Addr(a.Charge) {
		return nil, fmt.Errorf("%s: address %#x is not inside an allocation", t.backend, uint64(addr))
	}
	if off := int64(addr - a.Addr); n > a.Size-off {
		return nil, fmt.Errorf("%s: %d bytes at address %#x leave the allocation of %d bytes that starts %d before",
			t.backend, n, uint64(addr), a.Size, off)
	}
	return a, nil
}
