// Package sim is a simulated GPU: a tier.Device whose memory is an arena of this
// process that nothing but copies can reach. It is what Spillway runs on where
// there is no GPU, and what its tests run on everywhere; figures measured with
// it are labelled "sim".
//
//	                       +- stream -- queue -- worker -+
//	copy, fill ----------->+- stream -- queue -- worker -+--> arena <-- extent.Allocator
//	                       +- stream -- queue -- worker -+      ^
//	     <-- event <-- Record                                   +-- Alloc, Free: 256-byte granule
//
// It behaves like the real thing where programs can see a difference. Its capacity is hard. Work is
// asynchronous: a call puts it on a stream, whose worker does it later, in order. Only events order
// streams among each other. Freed memory stays retired until the work before the free is done. An
// address is a handle; one that is unknown, of another device, freed or out of its allocation's
// bounds is an error. Unlike the real thing it fails on purpose (NewFaulty) and can be as slow as
// one likes (Config.Latency and the bandwidths). By default it copies as fast as memory can be
// moved.
//
// A worker is a goroutine that starts with the first piece of work and ends
// when the stream runs dry, so an idle device has none. Closing the device waits for
// all of them.
//
// Locks: the mutex of a device guards its memory and its streams. It has rank Device, the last one,
// and is not held while bytes are copied or the fault hook runs.
package sim

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// granule is what allocations are rounded up and aligned to, as CUDA does.
const granule = 256

// addressBits is how far apart two devices' addresses are at least, and so the
// largest memory: 16 TiB.
const addressBits = 44

// Config has the fields of tier/sim's Config, which documents them, in their order.
type Config struct {
	Memory                   int64
	Name                     string
	Node                     int
	BytesPerSecondToDevice   int64
	BytesPerSecondFromDevice int64
	Latency                  time.Duration
	Touch                    bool
}

// Validate checks the configuration.
func (c Config) Validate() error {
	switch {
	case c.Memory < granule:
		return fmt.Errorf("sim: a device memory of %d bytes: want at least %d", c.Memory, granule)
	case c.Memory > 1<<addressBits || c.Memory > math.MaxInt:
		return fmt.Errorf("sim: a device memory of %d bytes: want at most %d",
			c.Memory, int64(min(1<<addressBits, math.MaxInt)))
	case c.Node < -1:
		return fmt.Errorf("sim: NUMA node %d: want -1 for unknown, or a node", c.Node)
	case c.BytesPerSecondToDevice < 0 || c.BytesPerSecondFromDevice < 0:
		return fmt.Errorf("sim: bandwidths of %d and %d bytes per second: want 0 for no limit, or more",
			c.BytesPerSecondToDevice, c.BytesPerSecondFromDevice)
	case c.Latency < 0:
		return fmt.Errorf("sim: a latency of %v", c.Latency)
	}
	return nil
}

// gpu is a simulated GPU. It implements tier.Device and tier.Lender and is safe for concurrent use; a
// stream belongs to one goroutine at a time.
//
// Close sets mu.closed, so that calls fail, waits for the work on all streams and for the guests,
// and ends the goroutine that touches pages. The arena is unmapped by its last user, which may be a
// loan that outlives the device.
type gpu struct {
	devpool.Granule
	cfg    Config
	faults func(Op) error // nil for none
	ops    atomic.Int64   // operations so far
	base   tier.Addr      // address of the arena's first byte
	memory host.Mapping
	arena  []byte // of memory

	window       *host.Window
	stopTouching chan struct{}
	touching     sync.WaitGroup
	touched      atomic.Int64 // bytes of the arena that were touched ahead of use

	guests guard.Gate   // users of the memory besides the streams: copies of other devices
	users  atomic.Int64 // of the arena: the loans, and the device until Close has ended all else

	mu struct {
		lockrank.Mutex[lockrank.Device]
		line     *extent.Allocator
		allocs   *devpool.Table
		streams  map[*stream]struct{}
		closed   bool  // no calls any more
		external int64 // bytes that others hold

		toDevice, fromDevice time.Time // see book
	}
}

var (
	_ tier.Device = (*gpu)(nil)
	_ tier.Lender = (*gpu)(nil)
)

// New returns a device, which is also a tier.Lender. For tests it has a method
// SetExternal(bytes int64): the device behaves as if others held so much of it. The caller must
// Close it.
func New(cfg Config) (tier.Device, error) { return NewFaulty(cfg, nil) }

// NewFaulty is New of a device that asks faults, if set, twice about operations: when they are put
// on a stream, and when they run; see Stage. An error that it returns refuses the operation or
// fails it. It is called with no lock held, from the goroutine that calls the device or from a
// stream's worker, and may block: work waits for it.
func NewFaulty(cfg Config, faults func(Op) error) (tier.Device, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg.Memory = cfg.Memory / granule * granule
	cfg.Name = cmp.Or(cfg.Name, "simulated GPU")
	memory, err := host.Map(cfg.Memory)
	if err != nil {
		return nil, fmt.Errorf("sim: mapping %d bytes: %w", cfg.Memory, err)
	}
	d := &gpu{
		Granule: granule,
		cfg:     cfg,
		faults:  faults,
		// Somewhere else for each device, so that one's addresses mean nothing to another.
		base:         tier.Addr(rand.Uint64N(1<<(62-addressBits))+1) << addressBits,
		memory:       memory,
		arena:        memory.Bytes(),
		window:       host.NewWindow(cfg.Memory),
		stopTouching: make(chan struct{}),
	}
	d.mu.line = extent.New(cfg.Memory)
	d.mu.allocs = devpool.NewTable("sim")
	d.mu.streams = make(map[*stream]struct{})
	d.users.Store(1)
	if cfg.Touch {
		d.touching.Go(func() {
			labels.Touch.Set()
			d.touch()
		})
	}
	return d, nil
}

// touchStep is how much is touched between two looks at stopTouching: two huge pages, about a
// millisecond's worth, because closing a device waits for one step and so does an unmapping
// elsewhere in the process.
const touchStep = 4 << 20

// touch makes the pages of the arena present, some way ahead of their use. Their bytes do not
// change, so copies may go on meanwhile.
func (d *gpu) touch() {
	for part := range slices.Chunk(d.arena, touchStep) {
		if !d.window.Wait(d.touched.Load(), d.stopTouching) || d.memory.Touch(part) != nil {
			return // without memory for it now, first writes report that
		}
		d.touched.Add(int64(len(part)))
	}
}

// Info implements tier.Device.
func (d *gpu) Info() tier.DeviceInfo {
	return tier.DeviceInfo{Name: d.cfg.Name, Backend: "sim", Node: d.cfg.Node}
}

// Alloc implements tier.Device. The memory can be used at once.
func (d *gpu) Alloc(s tier.Stream, size int64) (tier.Addr, error) {
	if size <= 0 {
		return 0, fmt.Errorf("sim: cannot allocate %d bytes", size)
	}
	if _, _, err := d.begin(s, OpAlloc, size); err != nil {
		return 0, err
	}
	charge := d.Charge(size)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return 0, tier.ErrClosed
	}
	full := &tier.NoSpaceError{Requested: size, Available: max(0, d.mu.line.FreeBytes()-d.mu.external)}
	if charge > full.Available {
		return 0, full
	}
	off, ok := d.mu.line.Alloc(charge)
	if !ok {
		full.Largest = d.mu.line.Largest()
		return 0, full
	}
	addr := d.base + tier.Addr(off)
	d.mu.allocs.ReplaceOrInsert(&devpool.Allocation{Addr: addr, Size: size, Charge: charge})
	d.window.Reach(off + charge)
	return addr, nil
}

// Free implements tier.Device.
func (d *gpu) Free(ts tier.Stream, addr tier.Addr) error {
	var w work
	if _, err := d.find(&w, addr, 1); err != nil {
		return err
	}
	a := w.uses[0]
	if a.Addr != addr {
		return fmt.Errorf("sim: no allocation starts at address %#x", uint64(addr))
	}
	s, _, err := d.begin(ts, OpFree, a.Size)
	if err != nil {
		return err
	}
	d.mu.Lock()
	_, live := d.mu.allocs.Delete(a)
	running := s.running
	if live && running {
		s.queue = append(s.queue, work{kind: OpFree, free: a})
	}
	d.mu.Unlock()
	switch {
	case !live:
		return fmt.Errorf("sim: the allocation at address %#x was freed meanwhile", uint64(addr))
	case !running:
		d.reclaim(a)
	}
	return nil
}

// poisonLimit bounds what an invariants build overwrites of freed memory, at its start: untouched
// memory of a large device should stay so.
const poisonLimit = 1 << 20

// reclaim gives a retired allocation back to the arena.
func (d *gpu) reclaim(a *devpool.Allocation) {
	a.Gone.Store(true)
	off := int64(a.Addr - d.base)
	if invariants.Enabled && d.guests.Enter() { // the arena must not go meanwhile
		fill(d.arena[off:][:min(a.Charge, poisonLimit)], 0xdb)
		d.guests.Leave()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.line.Free(off, a.Charge)
}

// find returns the n bytes at addr, which w uses: all of them must be in one live allocation. Of no
// bytes, any address will do.
func (d *gpu) find(w *work, addr tier.Addr, n int64) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, tier.ErrClosed
	}
	a, err := d.mu.allocs.Find(addr, n)
	if a == nil {
		return nil, err
	}
	w.uses = append(w.uses, a)
	off := int64(addr - d.base)
	return d.arena[off : off+n : off+n], nil
}

// begin returns ts as an open stream of this device, numbers an operation on it, and asks the fault
// hook whether that may be put on the stream.
func (d *gpu) begin(ts tier.Stream, kind OpKind, n int64) (s *stream, index int64, err error) {
	s, ok := ts.(*stream)
	if !ok || s == nil || s.dev != d {
		return nil, 0, fmt.Errorf("sim: a stream of type %T is not one of this device", ts)
	}
	if s.closed.Load() {
		return nil, 0, fmt.Errorf("sim: the stream is %w", tier.ErrClosed)
	}
	index = d.ops.Add(1) - 1
	if d.faults != nil {
		if err = d.faults(Op{Kind: kind, Stage: Submit, Index: index, Bytes: n}); err != nil {
			err = fmt.Errorf("sim: %s refused: %w", kind, err)
		}
	}
	return s, index, err
}

// NewStream implements tier.Device.
func (d *gpu) NewStream() (tier.Stream, error) {
	s := &stream{dev: d}
	if _, _, err := d.begin(s, OpNewStream, 0); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, tier.ErrClosed
	}
	d.mu.streams[s] = struct{}{}
	return s, nil
}

// MemInfo implements tier.Device.
func (d *gpu) MemInfo() (free, total int64, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return max(0, d.mu.line.FreeBytes()-d.mu.external), d.cfg.Memory, nil
}

// SetExternal makes the device behave as if others held n of its bytes, as other processes
// do on a GPU: so much less is free. Existing allocations stay, also if they are more
// than that.
func (d *gpu) SetExternal(n int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.external = max(0, n)
}

// Outstanding implements tier.Device.
func (d *gpu) Outstanding() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cfg.Memory - d.mu.line.FreeBytes()
}

// Reap implements tier.Device. The device takes back by itself what was freed,
// so there is never anything to do.
func (d *gpu) Reap() int64 { return 0 }

// Close implements tier.Device. It waits for the work on all streams, and with
// them for the events that they wait for.
func (d *gpu) Close() error {
	d.mu.Lock()
	if d.mu.closed {
		d.mu.Unlock()
		return tier.ErrClosed
	}
	d.mu.closed = true
	streams := d.mu.streams
	d.mu.streams = nil
	d.mu.Unlock()
	d.guests.Shut()

	for s := range streams {
		s.closed.Store(true) // some may be closed already, and have work
		<-s.mark().done
	}
	d.guests.Wait()
	close(d.stopTouching)
	d.touching.Wait()
	return d.takeBack()
}

// Lend implements tier.Lender.
func (d *gpu) Lend() (back func() error, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.mu.closed {
		return nil, tier.ErrClosed
	}
	d.users.Add(1)
	return sync.OnceValue(d.takeBack), nil
}

// takeBack ends one use of the arena, and the arena with the last.
func (d *gpu) takeBack() error {
	if d.users.Add(-1) > 0 {
		return nil
	}
	return d.memory.Release()
}

// Pointer returns where the n bytes at addr are in the process's memory. It is for programs that
// get a device's memory as it is, such as the consumers of package convert/cdevice. It is valid
// only while the allocation is there. Accesses through it are not ordered by streams.
func (d *gpu) Pointer(addr tier.Addr, n int64) (uintptr, error) {
	b, err := d.find(new(work), addr, max(1, n))
	if err != nil {
		return 0, err
	}
	return extent.Address(b), nil
}

// AddrOf returns the address of what is at p in the process's memory.
func (d *gpu) AddrOf(p uintptr) (tier.Addr, error) {
	first := extent.Address(d.arena)
	if p < first || p-first >= uintptr(len(d.arena)) {
		return 0, fmt.Errorf("sim: the memory at %#x is not the device's", p)
	}
	return d.base + tier.Addr(p-first), nil
}
