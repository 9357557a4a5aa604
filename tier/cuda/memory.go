package cuda

import (
	"errors"
	"fmt"
	"math"

	"github.com/google/btree"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// allocation is a piece of the device's memory.
type allocation struct {
	addr   tier.Addr
	size   int64 // as asked for; access ends here
	charge int64 // as taken
}

// table is the live allocations by address.
type table struct {
	tree  *btree.BTreeG[*allocation]
	pivot allocation
	found *allocation
	catch btree.ItemIteratorG[*allocation]
}

func (t *table) init() {
	t.tree = btree.NewG(32, func(a, b *allocation) bool { return a.addr < b.addr })
	t.catch = func(a *allocation) bool { t.found = a; return false }
}

// start returns the allocation that starts at addr.
func (t *table) start(addr tier.Addr) (*allocation, error) {
	t.pivot.addr = addr
	if a, ok := t.tree.Get(&t.pivot); ok {
		return a, nil
	}
	return nil, fmt.Errorf("cuda: no allocation starts at address %#x", uint64(addr))
}

// hold returns an error unless [addr, addr+n), n > 0, lies in one allocation.
func (t *table) hold(addr tier.Addr, n int64) error {
	t.found, t.pivot.addr = nil, addr
	t.tree.DescendLessOrEqual(&t.pivot, t.catch)
	a := t.found
	if a == nil || addr-a.addr >= tier.Addr(a.charge) {
		return fmt.Errorf("cuda: address %#x is not inside an allocation", uint64(addr))
	}
	if off := int64(addr - a.addr); n > a.size-off {
		return fmt.Errorf(
			"cuda: %d bytes at address %#x leave the allocation of %d bytes that starts %d before",
			n,
			uint64(addr),
			a.size,
			off,
		)
	}
	return nil
}

func (t *table) all() (list []*allocation) {
	t.tree.Ascend(func(a *allocation) bool { list = append(list, a); return true })
	return list
}

// errRefused means that there is no room although the device's books have some.
var errRefused = errors.New("no room")

// Alloc implements tier.Device.
func (d *gpu) Alloc(ts tier.Stream, size int64) (tier.Addr, error) {
	if size <= 0 {
		return 0, fmt.Errorf("cuda: cannot allocate %d bytes", size)
	}
	s, err := d.own(ts)
	if err != nil {
		return 0, err
	}
	defer d.gate.Leave()
	charge := d.Charge(size)
	if err := d.promise(size, charge); err != nil {
		return 0, err
	}
	addr, err := d.source.alloc(s, charge)
	d.suspect(err)
	d.mu.Lock()
	if err != nil {
		d.mu.live -= charge
		left := d.cfg.Memory - d.mu.live - d.mu.retired
		d.mu.Unlock()
		if !errors.Is(err, errRefused) {
			return 0, err
		}
		return 0, d.fragmented(size, charge, left)
	}
	d.mu.table.tree.ReplaceOrInsert(&allocation{addr, size, charge})
	d.mu.Unlock()
	return addr, nil
}

// promise counts charge bytes as live if there is room for them.
func (d *gpu) promise(size, charge int64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	left := d.cfg.Memory - d.mu.live - d.mu.retired
	if charge > left {
		return &tier.NoSpaceError{Requested: size, Available: left}
	}
	d.mu.live += charge
	return nil
}

// fragmented is the error of an allocation for which there is no room, although the books have
// left bytes: others have them, or they are not in one piece.
func (d *gpu) fragmented(size, charge, left int64) error {
	full := &tier.NoSpaceError{Requested: size, Available: left}
	if there, err := d.source.available(); err == nil {
		full.Available = min(left, there)
	}
	if full.Available >= charge {
		full.Largest = d.source.largest(charge - granule)
	}
	return full
}

// Free implements tier.Device.
func (d *gpu) Free(ts tier.Stream, addr tier.Addr) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	a, err := d.retire(addr)
	if err != nil {
		return err
	}
	err = d.source.free(s, a)
	if d.refused(err) { // and the memory is lost, too
		d.mu.Lock()
		defer d.mu.Unlock()
		d.mu.retired -= a.charge
		return nil
	}
	if err != nil {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.mu.table.tree.ReplaceOrInsert(a)
		d.mu.live += a.charge
		d.mu.retired -= a.charge
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.due.frees = append(s.due.frees, a)
	return nil
}

// retire takes the allocation at addr out of those that can be used.
func (d *gpu) retire(addr tier.Addr) (*allocation, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	a, err := d.mu.table.start(addr)
	if err != nil {
		return nil, err
	}
	d.mu.table.tree.Delete(a)
	d.mu.live -= a.charge
	d.mu.retired += a.charge
	return a, nil
}

// at returns an error unless the n bytes at addr are live memory. Of no bytes, any address will do.
func (d *gpu) at(addr tier.Addr, n int64) error {
	if n < 0 {
		return fmt.Errorf("cuda: a range of %d bytes", n)
	}
	if n == 0 {
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	err := d.mu.table.hold(addr, n)
	if err != nil && d.mu.loans.hold(addr, n) {
		return nil
	}
	return err
}

// source is where a device's memory comes from. Sizes are multiples of the granule.
type source interface {
	// alloc returns memory for work on s, or errRefused.
	alloc(s *stream, n int64) (tier.Addr, error)
	// free gives a back when the work on s so far is done.
	free(s *stream, a *allocation) error
	// reclaimed is called when that has happened.
	reclaimed(a *allocation)
	// has reports whether addr is in memory that the source hands out itself, so that the driver
	// does not know what of it is in use.
	has(addr tier.Addr) bool
	// available returns how many bytes can be had, in however many pieces.
	available() (int64, error)
	// scratch returns granule bytes that are in no books, for a stream to have until it gives them
	// back. The stream's work with them is done by then.
	scratch(s *stream) (tier.Addr, error)
	unscratch(s *stream, addr tier.Addr) error
	// largest returns the longest piece that can be had, or most if that is not known.
	largest(most int64) int64
	// show lets work of another GPU reach the memory.
	show(to *cuda.Device) error
	// trim gives the driver back what is not live, as far as it can.
	trim(c *cuda.Calls)
	// close gives everything up, also what is live.
	close(c *cuda.Calls, live []*allocation) error
}

// pool is a pool of the driver's.
type pool struct {
	dev  *cuda.Device
	pool cuda.Pool
}

// newPool makes a pool that keeps what is freed: to give memory back to the system at each
// synchronization, as a pool does of itself, and to get it again, is slow.
//
// It does not make streams wait for each other, either. A driver would silently have the stream of
// an allocation wait for a free on another stream that has not had its turn. That stream may itself
// wait for work behind the allocation. Nothing is lost by it. Memory is retired until its free has
// had its turn, so the books have room for the allocation besides. The driver reuses memory whose
// free is done, or is behind an event that the stream has waited for.
func newPool(dev *cuda.Device) (*pool, error) {
	p := &pool{dev: dev}
	return p, dev.Here(func(c *cuda.Calls) (err error) {
		if p.pool, err = c.NewPool(0); err != nil {
			return err
		}
		if err = c.SetPoolNumber(p.pool, cuda.PoolReleaseThreshold, math.MaxInt64); err != nil {
			return errors.Join(err, c.DestroyPool(p.pool))
		}
		_ = c.SetPoolFlag(
			p.pool,
			cuda.PoolReuseMakesWait,
			false,
		) // refused, there are such waits; all else is as it was
		return nil
	})
}

func (p *pool) alloc(s *stream, n int64) (addr tier.Addr, err error) {
	var at cuda.Ptr
	err = p.dev.Here(func(c *cuda.Calls) (err error) { at, err = c.AllocAsync(s.handle, p.pool, n); return err })
	if errors.Is(err, cuda.ErrOutOfMemory) {
		return 0, fmt.Errorf("%w: %w", errRefused, err)
	}
	return tier.Addr(at), err
}

func (p *pool) free(s *stream, a *allocation) error {
	return p.dev.Here(func(c *cuda.Calls) error { return c.FreeAsync(s.handle, cuda.Ptr(a.addr)) })
}

func (p *pool) reclaimed(*allocation) {}

func (p *pool) has(tier.Addr) bool { return false }

// available is what the driver has free and what the pool has and does not use.
func (p *pool) available() (int64, error) {
	var free, reserved, used int64
	err := p.dev.Here(func(c *cuda.Calls) (err error) {
		if free, _, err = c.MemInfo(); err != nil {
			return err
		}
		if reserved, err = c.PoolNumber(p.pool, cuda.PoolReserved); err != nil {
			return err
		}
		used, err = c.PoolNumber(p.pool, cuda.PoolUsed)
		return err
	})
	return free + max(0, reserved-used), err
}

func (p *pool) scratch(s *stream) (tier.Addr, error) { return p.alloc(s, granule) }

func (p *pool) unscratch(s *stream, addr tier.Addr) error {
	return s.dev.dev.Surely(func(c *cuda.Calls) error {
		err := c.FreeAsync(s.handle, cuda.Ptr(addr))
		if err != nil {
			err = c.Free(cuda.Ptr(addr))
		}
		return err
	})
}

func (p *pool) largest(most int64) int64 { return most }

func (p *pool) show(to *cuda.Device) error {
	if !p.dev.Library().HasPoolAccess() {
		return fmt.Errorf("cuda: the driver cannot let other GPUs into a pool: %w", tier.ErrNotSupported)
	}
	return p.dev.Here(func(c *cuda.Calls) error { return c.ShowPool(p.pool, to.Info().Ordinal) })
}

func (p *pool) trim(c *cuda.Calls) { _ = c.TrimPool(p.pool, 0) } // refused, it goes with the rest

func (p *pool) close(c *cuda.Calls, live []*allocation) error {
	var errs []error
	for _, a := range live {
		errs = append(errs, c.Free(cuda.Ptr(a.addr)))
	}
	return firstOf(append(errs, c.DestroyPool(p.pool)))
}

// piece is one allocation of the driver's that is handed out here.
type piece struct {
	dev  *cuda.Device
	base tier.Addr
	n    int64

	mu struct {
		lockrank.Mutex[lockrank.Device]
		line *extent.Allocator
		rest *extent.Allocator // behind the line, for scratch
	}
}

// scratchRoom is what streams share for scratch: more than there are streams, as a rule.
const scratchRoom = 64 * granule

func newPiece(dev *cuda.Device, n int64) (*piece, error) {
	p := &piece{dev: dev, n: n}
	p.mu.line = extent.New(n)
	return p, dev.Here(func(c *cuda.Calls) error {
		room := int64(scratchRoom)
		at, err := c.Alloc(n + room)
		if errors.Is(err, cuda.ErrOutOfMemory) { // just what there is: without scratch, then
			room = 0
			at, err = c.Alloc(n)
		}
		p.base, p.mu.rest = tier.Addr(at), extent.New(room)
		if errors.Is(err, cuda.ErrOutOfMemory) {
			return fmt.Errorf("%d bytes cannot be had in one piece: %w: %w", n, tier.ErrNoSpace, err)
		}
		return err
	})
}

func (p *piece) scratch(*stream) (tier.Addr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	off, ok := p.mu.rest.Alloc(granule)
	if !ok {
		return 0, errRefused
	}
	return p.base + tier.Addr(p.n+off), nil
}

func (p *piece) unscratch(_ *stream, addr tier.Addr) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.rest.Free(int64(addr-p.base)-p.n, granule)
	return nil
}

func (p *piece) alloc(_ *stream, n int64) (tier.Addr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	off, ok := p.mu.line.Alloc(n)
	if !ok {
		return 0, errRefused
	}
	return p.base + tier.Addr(off), nil
}

func (p *piece) free(*stream, *allocation) error { return nil }

func (p *piece) reclaimed(a *allocation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.line.Free(int64(a.addr-p.base), a.charge)
}

func (p *piece) has(addr tier.Addr) bool {
	return addr >= p.base && addr-p.base < tier.Addr(p.n+scratchRoom)
}

func (p *piece) available() (int64, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.line.FreeBytes(), nil
}

func (p *piece) largest(int64) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.line.Largest()
}

// show has nothing to do: peers reach what the driver has not taken from a pool.
func (p *piece) show(*cuda.Device) error { return nil }

func (p *piece) trim(*cuda.Calls) {}

func (p *piece) close(c *cuda.Calls, _ []*allocation) error { return c.Free(cuda.Ptr(p.base)) }
