package cuda

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// loan is memory of somebody else's.
type loan struct {
	addr tier.Addr
	size int64
}

// loans are what is borrowed, by address. Loans may lie in each other, and may be there twice.
type loans struct {
	list    []*loan
	longest int64 // that there ever was
}

func (l *loans) add(x *loan) {
	i, _ := slices.BinarySearchFunc(l.list, x.addr, compareLoan)
	l.list = slices.Insert(l.list, i, x)
	l.longest = max(l.longest, x.size)
}

func (l *loans) remove(x *loan) {
	i, _ := slices.BinarySearchFunc(l.list, x.addr, compareLoan) // the first of those at the address
	for ; i < len(l.list); i++ {
		if l.list[i] == x {
			l.list = slices.Delete(l.list, i, i+1)
			return
		}
	}
}

func compareLoan(l *loan, addr tier.Addr) int {
	switch {
	case l.addr < addr:
		return -1
	case l.addr > addr:
		return 1
	}
	return 0
}

// hold says whether the n > 0 bytes at addr lie in one loan.
func (l *loans) hold(addr tier.Addr, n int64) bool {
	i, _ := slices.BinarySearchFunc(l.list, addr+1, compareLoan)
	for i--; i >= 0; i-- {
		off := addr - l.list[i].addr
		if off >= tier.Addr(l.longest) {
			return false // so are those before
		}
		if off < tier.Addr(l.list[i].size) && n <= l.list[i].size-int64(off) {
			return true
		}
	}
	return false
}

// Borrow implements tier.Borrower. The driver is asked whether somebody has allocated the bytes: an address that is none would, in some of
// its calls, be taken for one of the host's.
func (d *Device) Borrow(addr tier.Addr, size int64) (giveBack func(), err error) {
	if size <= 0 {
		return nil, fmt.Errorf("cuda: borrowing %d bytes", size)
	}
	if !d.gate.enter() {
		return nil, tier.ErrClosed
	}
	defer d.gate.leave()
	if d.owns(addr, size) {
		return func() {}, nil
	}
	if d.source.has(addr) {
		return nil, fmt.Errorf("cuda: the %d bytes at address %#x are not allocated", size, uint64(addr))
	}
	var base cuda.Ptr
	var n int64
	err = d.dev.Here(func(c *cuda.Calls) (err error) { base, n, err = c.AddressRange(cuda.Ptr(addr)); return err })
	if errors.Is(err, cuda.ErrNotFound) || errors.Is(err, cuda.ErrInvalidValue) {
		return nil, fmt.Errorf("cuda: address %#x is not inside an allocation: %w", uint64(addr), err)
	}
	if err != nil {
		return nil, err
	}
	if off := int64(cuda.Ptr(addr) - base); size > n-off {
		return nil, fmt.Errorf("cuda: %d bytes at address %#x leave the allocation of %d bytes that starts %d before", size, uint64(addr), n, off)
	}
	x := &loan{addr, size}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.loans.add(x)
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.mu.loans.remove(x)
	}, nil
}

// owns says whether the device has allocated the bytes.
func (d *Device) owns(addr tier.Addr, size int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.table.hold(addr, size) == nil
}
