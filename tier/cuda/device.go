package cuda

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// gpu is a GPU. It implements tier.Device, tier.Pinner, tier.Borrower, tier.Lender and tier.Losable
// and is safe for concurrent use; a stream belongs to one goroutine at a time.
//
// The device is open while gate is. Calls enter the gate, so Close has the device to itself once it
// has shut the gate and the last of them has left. Close ends the streams, the goroutines in waits,
// the pins and the staging memory, in this order, and then the device's thread.
//
// A closed device still has its memory, its shared events and its context as long as memory is lent.
// The last user of the memory gives them up.
//
// A device is lost when the driver reports that its context is. It stays open, its frees count as
// done, and work on its streams fails.
type gpu struct {
	devpool.Granule
	cfg    Config
	driver *Driver
	dev    *cuda.Device
	source source
	gate   guard.Gate
	bounce staging
	waits  sync.WaitGroup // goroutines that wait for events
	given  chan struct{}  // closed when Close has unpinned all host memory
	key    *byte          // by which others know the device, which they must not keep in memory

	// users are the device, until Close has ended all else, and the loans of its memory. The last
	// one gives up the memory and the context.
	users atomic.Int64

	mu struct {
		lockrank.Mutex[lockrank.Device]
		table   *devpool.Table
		loans   loans
		live    int64
		retired int64
		streams map[*stream]struct{}
		shared  map[*cuda.Event]struct{} // the events that ShareEvent returned and that were not ended
		peers   map[*byte]bool           // by key: whether this device copies to the peer, as far as is known
	}
	loss devpool.Loss // of the context
}

var (
	_ tier.Device   = (*gpu)(nil)
	_ tier.Pinner   = (*gpu)(nil)
	_ tier.Borrower = (*gpu)(nil)
	_ tier.Lender   = (*gpu)(nil)
	_ tier.Losable  = (*gpu)(nil)
)

// Open opens a device, which is also a tier.Pinner, Borrower, Lender and Losable, as far as the
// driver can do that. The caller must Close it.
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
	dev, err := d.lib.Open(cfg.Ordinal, cuda.Context(cfg.Context))
	if err != nil {
		return nil, err
	}
	x := &gpu{Granule: granule, cfg: cfg, driver: d, dev: dev, given: make(chan struct{}), key: new(byte)}
	x.bounce.dev = x
	x.users.Store(1)
	x.mu.table = devpool.NewTable("cuda")
	x.mu.streams = make(map[*stream]struct{})
	x.mu.peers = make(map[*byte]bool)
	x.mu.shared = make(map[*cuda.Event]struct{})
	if cfg.Context != 0 {
		err = x.checkContext()
	}
	if err == nil {
		err = x.openMemory()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cuda: device %d: %w", cfg.Ordinal, err), dev.Close())
	}
	return x, nil
}

// checkContext returns an error unless the context is one of the GPU that it is to be.
func (d *gpu) checkContext() error {
	var of int
	err := d.dev.Here(func(c *cuda.Calls) (err error) { of, err = c.Ordinal(); return err })
	if err != nil {
		return fmt.Errorf("asking which device the context is of: %w", err)
	}
	if of != d.cfg.Ordinal {
		// The device would count on one GPU's memory and take the other's.
		return fmt.Errorf("the context is of another GPU, device %d: "+
			"set Config.Ordinal to %[1]d, or Config.Context to a context of device %[2]d", of, d.cfg.Ordinal)
	}
	return nil
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

// Reap implements tier.Device. The device takes back by itself what an event has shown to be done.
// Reap makes sure that there is an event behind each free. It returns 0.
func (d *gpu) Reap() int64 {
	if !d.gate.Enter() {
		return 0
	}
	defer d.gate.Leave()
	for _, s := range d.streams(func(s *stream) bool { return len(s.due.frees) > 0 }) {
		select {
		case s.turn <- struct{}{}:
			if !s.closed.Load() { // a closer records afterwards, and so gives the stream up after this
				_, _ = s.recordInTurn() // refused, it is tried again
			}
			<-s.turn
		default: // another goroutine is recording
		}
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
// that they wait for. The memory stays, with its context and the events that ShareEvent returned,
// until the last loan of it ends.
func (d *gpu) Close() error {
	if !d.gate.Shut() {
		return tier.ErrClosed
	}
	d.gate.Wait()
	var errs []error
	for _, s := range d.streams(func(*stream) bool { return true }) {
		s.closed.Store(true)
		errs = append(errs, s.end())
	}
	d.waits.Wait()
	errs = append(errs, d.dev.Surely(func(c *cuda.Calls) error {
		errs := []error{c.Unpin(0), d.bounce.close(c)}
		if d.source.pool != 0 && d.users.Load() > 1 {
			_ = c.TrimPool(d.source.pool) // refused, it goes with the rest
		}
		return firstOf(errs)
	}))
	close(d.given)
	errs = append(errs, d.dev.Stop(), d.takeBack())
	return firstOf(append([]error{d.loss.Err()}, errs...)) // the reason of whatever followed
}

// Lend implements tier.Lender. After Close the context stays, too, without a thread. The last call
// of back gives it up, on the calling thread. A context of the program's (Config.Context) must
// exist until then.
func (d *gpu) Lend() (back func() error, err error) {
	if !d.gate.Enter() {
		return nil, tier.ErrClosed
	}
	defer d.gate.Leave()
	d.users.Add(1)
	return sync.OnceValue(d.takeBack), nil
}

// takeBack ends one use of the memory. The last gives the memory and the context up.
func (d *gpu) takeBack() error {
	if d.users.Add(-1) > 0 {
		return nil
	}
	return d.dev.End(d.closeMemory)
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
	if mine.closed.Load() {
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
		return nil, fmt.Errorf("cuda: a device of type %T is not one of this package: %w", dev, tier.ErrNotSupported)
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
		own := d.dev.Here(func(c *cuda.Calls) error { _, _, err := c.MemInfo(); return err })
		if !cuda.Lost(own) && !cuda.MaybeLost(own) {
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
