package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/tier"
)

// loan is borrowed memory.
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

func compareLoan(l *loan, addr tier.Addr) int { return cmp.Compare(l.addr, addr) }

// hold reports whether the n > 0 bytes at addr lie in one loan.
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

// Why bytes cannot be borrowed. The error says which byte it is.
var (
	// ErrNotAllocated: the bytes are not allocated, or not in one piece.
	ErrNotAllocated = errors.New("it is not inside an allocation")
	// ErrNotAccessible: a program has mapped memory there (cuMemMap) and not let this GPU read and
	// write it (cuMemSetAccess).
	ErrNotAccessible = errors.New("it is mapped memory that this GPU may not read and write: let it (cuMemSetAccess)")
)

// borrowError says which byte of those to be borrowed is none that can be. It matches
// ErrNotAllocated or ErrNotAccessible.
type borrowError struct {
	Addr  tier.Addr
	Size  int64
	At    tier.Addr // the first that cannot be borrowed
	Cause error
}

func (e *borrowError) Error() string {
	return fmt.Sprintf(
		"cuda: borrowing %d bytes at address %#x: of byte %d: %v",
		e.Size,
		uint64(e.Addr),
		uint64(e.At-e.Addr),
		e.Cause,
	)
}

// Unwrap returns the cause.
func (e *borrowError) Unwrap() error { return e.Cause }

// Borrow implements tier.Borrower. The driver is queried whether the bytes are allocated: some of
// its calls would take an invalid address for one of the host's. Memory that a program has mapped
// itself (cuMemMap) is borrowed also if it is of several pieces, one behind the other. What cannot
// be borrowed is ErrNotAllocated or ErrNotAccessible.
func (d *gpu) Borrow(addr tier.Addr, size int64) (giveBack func(), err error) {
	if size <= 0 {
		return nil, fmt.Errorf("cuda: borrowing %d bytes", size)
	}
	if !d.gate.Enter() {
		return nil, tier.ErrClosed
	}
	defer d.gate.Leave()
	d.mu.Lock()
	_, notOurs := d.mu.table.Find(addr, size)
	d.mu.Unlock()
	if notOurs == nil {
		return func() {}, nil
	}
	if base := tier.Addr(d.source.base); base != 0 && addr >= base && addr-base < tier.Addr(d.source.n) {
		return nil, &borrowError{addr, size, addr, ErrNotAllocated}
	}
	if err := d.dev.Here(func(c *cuda.Calls) error { return lent(c, addr, size) }); err != nil {
		return nil, err
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

// mappingGranule is what access to mapped memory changes by.
const mappingGranule = 2 << 20

// lent returns an error unless others have allocated, or mapped, all of the bytes, and the GPU may
// use them.
func lent(c *cuda.Calls, addr tier.Addr, size int64) error {
	refuse := func(at cuda.Ptr, why error) error { return &borrowError{addr, size, tier.Addr(at), why} }
	end := cuda.Ptr(addr) + cuda.Ptr(size)
	if end < cuda.Ptr(addr) {
		return refuse(cuda.Ptr(addr), ErrNotAllocated)
	}
	for at := cuda.Ptr(addr); ; {
		base, n, err := c.AddressRange(at)
		if errors.Is(err, cuda.ErrNotFound) || errors.Is(err, cuda.ErrInvalidValue) {
			return refuse(at, fmt.Errorf("%w: %w", ErrNotAllocated, err))
		}
		if err != nil {
			return err
		}
		next := min(end, base+cuda.Ptr(n))
		if next <= at || c.Reserved(at) {
			return refuse(at, ErrNotAllocated)
		}
		mapped, barred := accessible(c, at, next)
		switch {
		case barred != 0:
			return refuse(barred, ErrNotAccessible)
		case next == end:
			return nil
		case !mapped: // the next allocation is another one, if it is there
			return refuse(next, ErrNotAllocated)
		}
		at = next
	}
}

// accessible reports whether the memory from at up to end, which is one allocation's, was mapped by
// a program. barred is the first byte that the GPU may not use; 0: none. The GPU may use the
// driver's own allocation on it or on a peer, whatever the driver reports of access to it.
func accessible(c *cuda.Calls, at, end cuda.Ptr) (mapped bool, barred cuda.Ptr) {
	if !c.ProgramMapped(at) {
		return false, 0
	}
	for ; at < end; at = (at + mappingGranule) &^ (mappingGranule - 1) {
		may, err := c.MayUse(at)
		if err != nil {
			return mapped, 0 // it does not know
		}
		if mapped = true; !may {
			return true, at
		}
	}
	return mapped, 0
}
