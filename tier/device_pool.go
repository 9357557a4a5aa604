package tier

import (
	"errors"
	"fmt"
	"sync"

	"github.com/spillway-db/spillway/internal/lockrank"
)

// DevicePool is the Pool of a GPU space: it allocates from a Device, and counts
// what was freed as reclaimed when the device is done with it.
type DevicePool struct {
	dev Device

	// use serializes the pool's stream, which a goroutine owns at a time. It is
	// held while the device is called; those calls only put work on the stream.
	use struct {
		lockrank.Mutex[lockrank.Backend]
		stream Stream
		closed bool
		stuck  []func() // frees that the device refused; retired until Close
	}
	retired sync.WaitGroup // one for each free that the device is not done with
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
	p := &DevicePool{dev: dev}
	p.use.stream = s
	return p, nil
}

// Device returns the device that the pool allocates from.
func (p *DevicePool) Device() Device { return p.dev }

// Charge returns what size bytes take on the device.
func (p *DevicePool) Charge(size int64) int64 { return p.dev.Charge(size) }

// Alloc allocates one contiguous piece; cuts are ignored. When it returns, the
// memory may be used on every stream.
func (p *DevicePool) Alloc(size int64, _ []int64) (Memory, error) {
	addr, ready, err := p.alloc(size)
	if errors.Is(err, ErrNoSpace) && p.dev.Reap() > 0 {
		addr, ready, err = p.alloc(size) // reaped: one retry
	}
	if err != nil {
		return nil, err
	}
	<-ready.Done()
	if err := ready.Err(); err != nil {
		p.Free(&deviceMemory{p.dev, addr, size}, func() {})
		return nil, fmt.Errorf("tier: allocating %d bytes on the device: %w", size, err)
	}
	return &deviceMemory{p.dev, addr, size}, nil
}

func (p *DevicePool) alloc(size int64) (Addr, Event, error) {
	p.use.Lock()
	defer p.use.Unlock()
	if p.use.closed {
		return 0, nil, ErrClosed
	}
	addr, err := p.dev.Alloc(p.use.stream, size)
	if err != nil {
		return 0, nil, err
	}
	ready, err := p.dev.Record(p.use.stream)
	if err != nil {
		return 0, nil, errors.Join(err, p.dev.Free(p.use.stream, addr))
	}
	return addr, ready, nil
}

// Free gives m back; reclaimed is called when the device is done with it. All
// work that uses m on other streams must be done.
func (p *DevicePool) Free(m Memory, reclaimed func()) {
	done := p.free(m.(*deviceMemory).addr, reclaimed)
	if done == nil {
		return
	}
	select {
	case <-done:
		reclaimed()
		return
	default:
	}
	p.retired.Add(1)
	go func() { // ends with the device's work; Close waits for it
		defer p.retired.Done()
		<-done
		reclaimed()
	}()
}

// free puts the free on the pool's stream and returns what tells its end; nil
// if the device refused, and then the bytes stay retired until Close.
func (p *DevicePool) free(addr Addr, reclaimed func()) <-chan struct{} {
	p.use.Lock()
	defer p.use.Unlock()
	over := make(chan struct{})
	close(over)
	if p.use.closed { // the device is gone or going, and its memory with it
		return over
	}
	if err := p.dev.Free(p.use.stream, addr); err != nil {
		p.use.stuck = append(p.use.stuck, reclaimed)
		return nil
	}
	e, err := p.dev.Record(p.use.stream)
	if err != nil {
		p.use.stuck = append(p.use.stuck, reclaimed)
		return nil
	}
	return e.Done()
}

// Close waits until everything freed is reclaimed and closes the pool's stream.
func (p *DevicePool) Close() error {
	p.use.Lock()
	if p.use.closed {
		p.use.Unlock()
		return ErrClosed
	}
	p.use.closed = true
	s, stuck := p.use.stream, p.use.stuck
	p.use.Unlock()
	p.retired.Wait()
	err := s.Close()
	for _, reclaimed := range stuck {
		reclaimed()
	}
	return err
}
