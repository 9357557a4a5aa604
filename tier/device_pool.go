package tier

import (
	"errors"
	"fmt"
	"sync"
)

// DevicePool is the Pool of a GPU space: it allocates from a Device, and counts
// what was freed as reclaimed when the device is done with it.
type DevicePool struct {
	dev Device

	// turn holds one token; who has taken it owns the fields below, and with them
	// the pool's stream, which carries nothing but allocations and frees. It is a
	// channel because a ranked mutex must not be held while the device is called:
	// what wraps a device may log there, or fail on purpose.
	turn   chan struct{}
	stream Stream
	live   int           // handed out and not freed
	stuck  []refusedFree // tried again at the next chance, and when the pool closes
	closed bool

	retired sync.WaitGroup // one for each free that the device is not done with
}

// refusedFree is a free that the device refused; its bytes stay retired.
type refusedFree struct {
	addr      Addr
	freed     bool // only the event after the free was refused
	reclaimed func()
}

type deviceMemory struct {
	dev  Device
	addr Addr
	size int64
}

func (m *deviceMemory) Size() int64    { return m.size }
func (m *deviceMemory) Device() Device { return m.dev }
func (m *deviceMemory) Addr() Addr     { return m.addr }

// NewDevicePool returns a pool over dev. Closing the pool does not close dev.
func NewDevicePool(dev Device) (*DevicePool, error) {
	s, err := dev.NewStream()
	if err != nil {
		return nil, fmt.Errorf("tier: opening the allocation stream: %w", err)
	}
	p := &DevicePool{dev: dev, stream: s, turn: make(chan struct{}, 1)}
	p.turn <- struct{}{}
	return p, nil
}

// Device returns the device that the pool allocates from.
func (p *DevicePool) Device() Device { return p.dev }

// Charge returns what size bytes take on the device.
func (p *DevicePool) Charge(size int64) int64 { return p.dev.Charge(size) }

// Alloc allocates one contiguous piece; cuts are ignored. When it returns, the
// memory may be used on every stream. A device that has no room is asked once
// more, after what is retired has come back.
func (p *DevicePool) Alloc(size int64, _ []int64) (Memory, error) {
	addr, ready, err := p.alloc(size)
	if errors.Is(err, ErrNoSpace) {
		if e, settled := p.settle(); settled {
			<-e.Done() // frees only: what they wait for was done before
			p.dev.Reap()
			addr, ready, err = p.alloc(size)
		}
	}
	if err != nil {
		return nil, err
	}
	<-ready.Done()
	m := &deviceMemory{p.dev, addr, size}
	if err := ready.Err(); err != nil {
		p.Free(m, func() {})
		return nil, fmt.Errorf("tier: allocating %d bytes on the device: %w", size, err)
	}
	return m, nil
}

func (p *DevicePool) alloc(size int64) (Addr, Event, error) {
	<-p.turn
	defer func() { p.turn <- struct{}{} }()
	if p.closed {
		return 0, nil, ErrClosed
	}
	if err := p.renew(); err != nil {
		return 0, nil, err
	}
	p.retry()
	addr, err := p.dev.Alloc(p.stream, size)
	if err != nil {
		return 0, nil, err
	}
	ready, err := p.dev.Record(p.stream)
	if err != nil {
		if ferr := p.dev.Free(p.stream, addr); ferr != nil {
			p.stuck = append(p.stuck, refusedFree{addr: addr, reclaimed: func() {}})
		}
		return 0, nil, fmt.Errorf("tier: allocating %d bytes on the device: %w", size, err)
	}
	p.live++
	return addr, ready, nil
}

// renew opens another stream in place of one that has failed, which would fail
// everything to come. The caller has the turn.
func (p *DevicePool) renew() error {
	if p.stream.Err() == nil {
		return nil
	}
	s, err := p.dev.NewStream()
	if err != nil {
		return fmt.Errorf("tier: the allocation stream failed (%w) and no other could be opened: %w", p.stream.Err(), err)
	}
	old := p.stream
	p.stream = s
	_ = old.Close() // why it failed was told to who waited for its work
	return nil
}

// settle returns an event behind everything freed so far.
func (p *DevicePool) settle() (Event, bool) {
	<-p.turn
	defer func() { p.turn <- struct{}{} }()
	if p.closed {
		return nil, false
	}
	e, err := p.dev.Record(p.stream)
	return e, err == nil
}

// Free gives m back; reclaimed is called when the device is done with it. All
// work that uses m on other streams must be done.
func (p *DevicePool) Free(m Memory, reclaimed func()) {
	<-p.turn
	p.live--
	done := p.free(refusedFree{addr: m.(*deviceMemory).addr, reclaimed: reclaimed})
	wait := done != nil && !isClosed(done)
	closed, last := p.closed, p.closed && p.live == 0
	if wait && !closed {
		p.retired.Add(1)
	}
	p.turn <- struct{}{}

	switch {
	case done == nil: // stuck
	case !wait:
		reclaimed()
	case closed: // nobody would wait for a goroutine any more
		<-done
		reclaimed()
	default:
		go func() { // ends with the device's work; Close waits for it
			defer p.retired.Done()
			<-done
			reclaimed()
		}()
	}
	if last {
		p.finish()
	}
}

// free puts f on the pool's stream and returns what tells its end; nil if the
// device refused, and then f is kept. The caller has the turn.
func (p *DevicePool) free(f refusedFree) <-chan struct{} {
	if !f.freed {
		err := p.dev.Free(p.stream, f.addr)
		if errors.Is(err, ErrClosed) { // the device is gone, and its memory with it
			return closedChannel
		}
		if err != nil {
			p.stuck = append(p.stuck, f)
			return nil
		}
		f.freed = true
	}
	e, err := p.dev.Record(p.stream)
	if errors.Is(err, ErrClosed) {
		return closedChannel
	}
	if err != nil {
		p.stuck = append(p.stuck, f)
		return nil
	}
	return e.Done()
}

// retry puts the frees on the stream again that were refused. The caller has
// the turn.
func (p *DevicePool) retry() {
	stuck := p.stuck
	p.stuck = nil
	for _, f := range stuck {
		if done := p.free(f); done != nil {
			p.retired.Add(1)
			go func() { // reclaimed must not be called while the turn is taken
				defer p.retired.Done()
				<-done
				f.reclaimed()
			}()
		}
	}
}

// Close waits until everything freed is reclaimed. The pool's stream is closed
// when nothing is handed out any more.
func (p *DevicePool) Close() error {
	<-p.turn
	if p.closed {
		p.turn <- struct{}{}
		return ErrClosed
	}
	p.retry()
	p.closed = true
	last := p.live == 0
	p.turn <- struct{}{}
	p.retired.Wait()
	if last {
		return p.finish()
	}
	return nil
}

// finish closes the stream behind the last free. It reports what the device
// would never take back: that is reclaimed as far as the books go.
func (p *DevicePool) finish() error {
	err := p.stream.Close()
	if errors.Is(err, ErrClosed) { // with the device
		err = nil
	}
	for _, f := range p.stuck {
		err = errors.Join(err, fmt.Errorf("tier: the device refuses to take %#x back", f.addr))
		f.reclaimed()
	}
	return err
}

var closedChannel = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
