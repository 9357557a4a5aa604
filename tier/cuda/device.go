package cuda

import (
	"errors"
	"fmt"
	"math"
	"sync"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/gate"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/loss"
	"github.com/spillway-db/spillway/tier"
)

// granule is what allocations are rounded up to.
const granule = 512

// gpu is a GPU. It implements tier.Device, tier.Computer, tier.Pinner, tier.Borrower, tier.Lender
// and tier.Losable and is safe for concurrent use; a stream belongs to one goroutine at a time.
type gpu struct {
	cfg    Config
	driver *Driver
	dev    *cuda.Device
	source source
	gate   gate.Gate
	bounce staging
	waits  sync.WaitGroup // goroutines that wait for events
	given  chan struct{}  // closed when Close has given up all that is not a stream

	pinning chan struct{} // holds a token while a goroutine pins host memory, which is slow

	mu struct {
		lockrank.Mutex[lockrank.Device]
		table   table
		loans   loans
		live    int64
		retired int64
		streams map[*stream]struct{}
		pins    []share
		shared  map[*cuda.Event]struct{} // the events that ShareEvent returned and that were not ended
		lent    int                      // users of the memory besides the device; Close leaves the rest to them
		rest    *cuda.Rest               // what the last of them gives up
		peers   map[*gpu]peerState       // what is known of them; those that may write here are in it, too
	}
	loss loss.Signal // of the context
}

var (
	_ tier.Device   = (*gpu)(nil)
	_ tier.Computer = (*gpu)(nil)
	_ tier.Pinner   = (*gpu)(nil)
	_ tier.Borrower = (*gpu)(nil)
	_ tier.Lender   = (*gpu)(nil)
	_ tier.Losable  = (*gpu)(nil)
)

// Open opens a device, which is also a tier.Computer, Pinner, Borrower, Lender and Losable, as far
// as the driver can do that. The caller must Close it.
func (d *Driver) Open(cfg Config) (tier.Device, error) {
	g, err := d.open(cfg)
	if err != nil {
		return nil, err
	}
	return g, nil
}

func (d *Driver) open(cfg Config) (*gpu, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	open := func() (*cuda.Device, error) { return d.lib.Open(cfg.Ordinal) }
	if cfg.Context != 0 {
		open = func() (*cuda.Device, error) { return d.lib.Adopt(cfg.Ordinal, cuda.Context(cfg.Context)) }
	}
	dev, err := open()
	if err != nil {
		return nil, err
	}
	if cfg.Context != 0 {
		if err := checkContext(dev, cfg.Ordinal); err != nil {
			return nil, errors.Join(err, dev.Close())
		}
	}
	x := &gpu{cfg: cfg, driver: d, dev: dev, given: make(chan struct{}), pinning: make(chan struct{}, 1)}
	x.bounce.dev = x
	x.mu.streams = make(map[*stream]struct{})
	x.mu.peers = make(map[*gpu]peerState)
	x.mu.shared = make(map[*cuda.Event]struct{})
	x.mu.table.init()
	if err := x.getMemory(); err != nil {
		return nil, errors.Join(fmt.Errorf("cuda: device %d: %w", cfg.Ordinal, err), dev.Close())
	}
	// Loading the kernel may wait for work in progress, of which there is none yet. If it fails,
	// the first digest returns the error.
	_ = dev.PrepareDigest()
	return x, nil
}

// checkContext returns an error unless the context of dev is one of the GPU that it is to be.
func checkContext(dev *cuda.Device, ordinal int) error {
	var of int
	err := dev.Here(func(c *cuda.Calls) (err error) { of, err = c.Ordinal(); return err })
	if err != nil {
		return fmt.Errorf("cuda: device %d: asking which device the context is of: %w", ordinal, err)
	}
	if of != ordinal {
		// The device would count on one GPU's memory and take the other's.
		return fmt.Errorf(
			"cuda: device %d: the context is of another GPU, device %d: "+
				"set Config.Ordinal to %[2]d, or Config.Context to a context of device %[1]d",
			ordinal,
			of,
		)
	}
	return nil
}

// getMemory decides how much there is, and makes what it comes from.
func (d *gpu) getMemory() error {
	free, total, err := d.driverMemory()
	if err != nil {
		return err
	}
	if d.cfg.Memory == 0 {
		d.cfg.Memory = free - free/16
	}
	d.cfg.Memory = min(d.cfg.Memory, total) / granule * granule
	if d.cfg.Memory < granule {
		return fmt.Errorf("%d bytes of its memory are free: %w", free, tier.ErrNoSpace)
	}
	if d.cfg.OnePiece || !d.dev.Info().Pools {
		d.source, err = newPiece(d.dev, d.cfg.Memory)
	} else {
		d.source, err = newPool(d.dev)
	}
	return err
}

func (d *gpu) driverMemory() (free, total int64, err error) {
	err = d.dev.Here(func(c *cuda.Calls) (err error) { free, total, err = c.MemInfo(); return err })
	return free, total, err
}

// Info implements tier.Device.
func (d *gpu) Info() tier.DeviceInfo {
	i := d.dev.Info()
	return tier.DeviceInfo{
		Name:    i.Name,
		Backend: "cuda",
		UUID:    i.UUID,
		PCI:     i.PCI,
		Node:    d.cfg.Node,
		Driver:  "CUDA " + d.driver.Version(),
	}
}

// Ordinal returns the GPU's number among those that the driver shows.
func (d *gpu) Ordinal() int { return d.cfg.Ordinal }

// Context returns the CUcontext that the device works in.
func (d *gpu) Context() uintptr { return uintptr(d.dev.Context()) }

// Charge implements tier.Device.
func (d *gpu) Charge(size int64) int64 {
	if size > math.MaxInt64-granule {
		return math.MaxInt64 / granule * granule
	}
	return (max(0, size) + granule - 1) / granule * granule
}

// MemInfo implements tier.Device. Free is what can still be allocated here: others may have taken
// part of what is not allocated yet. A driver that does not answer has nothing free.
func (d *gpu) MemInfo() (free, total int64) {
	free, err := d.FreeBytes()
	if err != nil {
		return 0, d.cfg.Memory
	}
	return free, d.cfg.Memory
}

// FreeBytes returns the bytes that can still be allocated, or why that is not known.
func (d *gpu) FreeBytes() (int64, error) {
	if !d.gate.Enter() {
		return 0, tier.ErrClosed
	}
	defer d.gate.Leave()
	there, err := d.source.available()
	if err != nil {
		return 0, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return max(0, min(d.cfg.Memory-d.mu.live-d.mu.retired, there)), nil
}

// Outstanding implements tier.Device.
func (d *gpu) Outstanding() int64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.live + d.mu.retired
}

// Reap implements tier.Device. The device takes back by itself what an event has shown to be done.
// Reap makes sure that there is an event behind each free. It returns 0.
func (d *gpu) Reap() int64 {
	if !d.gate.Enter() {
		return 0
	}
	defer d.gate.Leave()
	for _, s := range d.streams(func(s *stream) bool { return len(s.due.frees) > 0 }) {
		s.recordForOthers()
	}
	return 0
}

// streams lists the streams that f accepts.
func (d *gpu) streams(f func(*stream) bool) (found []*stream) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for s := range d.mu.streams {
		if f(s) {
			found = append(found, s)
		}
	}
	return found
}

// Close implements tier.Device. It waits for the work on all streams, and with them for the events
// that they wait for.
func (d *gpu) Close() error {
	if !d.gate.Shut() {
		return tier.ErrClosed
	}
	d.gate.Wait()
	var errs []error
	for _, s := range d.streams(func(*stream) bool { return true }) {
		s.shut()
		errs = append(errs, s.end())
	}
	d.waits.Wait()
	d.forgetPeers()
	lent := d.isLent()
	errs = append(errs, d.dev.Surely(func(c *cuda.Calls) error { return d.giveBack(c, !lent) }))
	close(d.given)
	if lent {
		errs = append(errs, d.detach())
	} else {
		errs = append(errs, d.dev.Close())
	}
	return firstOf(append([]error{d.loss.Err()}, errs...)) // the reason of whatever followed
}

// giveBack gives up all that is not a stream, or, while memory is lent, what no borrower needs.
func (d *gpu) giveBack(c *cuda.Calls, all bool) error {
	d.mu.Lock()
	pins := d.mu.pins
	d.mu.pins = nil
	d.mu.Unlock()
	var errs []error
	for _, p := range pins {
		errs = append(errs, p.pin.End(c))
	}
	errs = append(errs, d.bounce.close(c))
	if all {
		errs = append(errs, d.giveBackShared(c))
	} else {
		d.source.trim(c)
	}
	return firstOf(errs)
}

// giveBackShared gives up the memory, and the events that others may wait for.
func (d *gpu) giveBackShared(c *cuda.Calls) error {
	d.mu.Lock()
	shared := d.mu.shared
	d.mu.shared = nil
	d.mu.Unlock()
	var errs []error
	for e := range shared {
		errs = append(errs, c.DestroyEvent(*e))
	}
	return firstOf(append(errs, d.source.close(c, d.mu.table.all())))
}

// firstOf returns the first error that there is. When a context is lost all calls return the same.
func firstOf(errs []error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// own returns s as an open stream of this device that has room for work, and holds the device open
// until the caller leaves the gate, unless there is an error.
func (d *gpu) own(s tier.Stream) (*stream, error) {
	mine, ok := s.(*stream)
	if !ok || mine == nil || mine.dev != d {
		return nil, fmt.Errorf("cuda: a stream of type %T is not one of this device", s)
	}
	if !d.gate.Enter() {
		return nil, tier.ErrClosed
	}
	if mine.isClosed() {
		d.gate.Leave()
		return nil, fmt.Errorf("cuda: the stream is %w", tier.ErrClosed)
	}
	mine.makeRoom(1)
	return mine, nil
}

// wrapped returns the device of this package that dev is, or wraps.
func wrapped(dev tier.Device) (*gpu, error) {
	d, ok := tier.As[*gpu](dev)
	if !ok {
		return nil, fmt.Errorf("cuda: a copy to a device of type %T: %w", dev, tier.ErrNotSupported)
	}
	return d, nil
}

// OnLost implements tier.Losable: for a context that was ended by an error, which the driver
// returns from a call or from work.
func (d *gpu) OnLost(f func(why error)) (cancel func()) { return d.loss.OnLost(f) }

// suspect is called with each error that may mean a loss, and reports whether it does. Some work
// also uses other contexts, and it may be one of those that is lost. Some errors may mean anything.
// So the driver gets a query that is about this context alone.
func (d *gpu) suspect(err error) (lost bool) {
	if !cuda.Lost(err) && !cuda.MaybeLost(err) {
		return false
	}
	if d.loss.Err() == nil {
		if _, _, own := d.driverMemory(); !cuda.Lost(own) && !cuda.MaybeLost(own) {
			return false
		}
		d.loss.Lose(err)
	}
	return true
}

// refused is suspect for calls that are about this context alone: if one is refused because a
// context is lost, it is this one.
func (d *gpu) refused(err error) (lost bool) {
	if !cuda.Lost(err) {
		return d.suspect(err)
	}
	d.loss.Lose(err)
	return true
}
