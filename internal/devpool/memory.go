package devpool

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// Memory is the tier.Pool of a GPU space: it allocates from a tier.Device, and counts
// what was freed as reclaimed when the device is done with it.
type Memory struct {
	Panics guard.Log // of the device, at frees; its Logger may be set before the first call

	dev tier.Device

	// turn holds one token. The goroutine that has taken it owns the fields below, and with them
	// the pool's stream, which carries only allocations and frees. It is a channel because a ranked
	// mutex must not be held while the device is called: a wrapper of the device may log there, or
	// fail on purpose.
	turn   chan struct{}
	stream tier.Stream
	live   int           // handed out and not freed
	stuck  []refusedFree // tried again at the next chance, and when the pool closes
	due    []func()      // reclaimed, to be called when the turn is over
	closed bool

	retired sync.WaitGroup // one for each free that the device is not done with
	unsure  atomic.Int64   // see Unsure
}

// refusedFree is a free that the device refused; its bytes stay retired until it is tried again.
type refusedFree struct {
	addr      tier.Addr
	charge    int64 // 0 if the bytes are not retired
	freed     bool  // only the event after the free was refused
	unsure    bool  // the free panicked: the device may have given the address to another since
	reclaimed func()
}

type allocation struct {
	dev          tier.Device
	addr         tier.Addr
	size, charge int64
}

func (m *allocation) Size() int64         { return m.size }
func (m *allocation) Device() tier.Device { return m.dev }
func (m *allocation) Addr() tier.Addr     { return m.addr }

// NewMemory returns a pool over dev. Closing the pool does not close dev.
func NewMemory(dev tier.Device) (*Memory, error) {
	s, err := dev.NewStream()
	if err != nil {
		return nil, fmt.Errorf("devpool: opening the allocation stream: %w", err)
	}
	p := &Memory{dev: dev, stream: s, turn: make(chan struct{}, 1)}
	p.turn <- struct{}{}
	return p, nil
}

// Device returns the device that the pool allocates from.
func (p *Memory) Device() tier.Device { return p.dev }

// OnLost implements tier.Losable for a device that does; no other is ever lost.
func (p *Memory) OnLost(f func(why error)) (cancel func()) {
	if l, ok := tier.As[tier.Losable](p.dev); ok {
		return l.OnLost(f)
	}
	return func() {}
}

// Charge returns what size bytes take on the device.
func (p *Memory) Charge(size int64) int64 { return p.dev.Charge(size) }

// Alloc allocates one contiguous piece; cuts are ignored. When it returns, the memory may be used
// on every stream. If a device has no room, Alloc retries once, after what is retired has come
// back.
func (p *Memory) Alloc(size int64, _ []int64) (tier.Memory, error) {
	charge := p.Charge(size) // not when it is freed: a device may panic
	addr, ready, err := p.alloc(size)
	if errors.Is(err, tier.ErrNoSpace) {
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
	m := &allocation{dev: p.dev, addr: addr, size: size, charge: charge}
	if err := ready.Err(); err != nil {
		m.charge = 0 // its bytes were never drawn
		p.Free(m, func() {})
		return nil, fmt.Errorf("devpool: allocating %d bytes on the device: %w", size, err)
	}
	return m, nil
}

// inTurn calls f with the turn taken, and then what has become due.
func (p *Memory) inTurn(f func()) {
	<-p.turn
	defer func() { // also if the device panics
		due := p.due
		p.due = nil
		p.turn <- struct{}{}
		for _, reclaimed := range due {
			reclaimed()
		}
	}()
	f()
}

// alloc returns an address and the event after which it may be used on every stream.
func (p *Memory) alloc(size int64) (addr tier.Addr, ready tier.Event, err error) {
	p.inTurn(func() { addr, ready, err = p.allocInTurn(size) })
	return addr, ready, err
}

func (p *Memory) allocInTurn(size int64) (tier.Addr, tier.Event, error) {
	if p.closed {
		return 0, nil, tier.ErrClosed
	}
	if err := p.renew(); err != nil {
		return 0, nil, err
	}
	p.retry()
	addr, err := p.dev.Alloc(p.stream, size)
	if err != nil {
		return 0, nil, err
	}
	ready, err := p.record()
	if err != nil {
		if ferr := p.freeOnDevice(addr); ferr != nil {
			p.stuck = append(p.stuck, refusedFree{addr: addr, unsure: errors.Is(ferr, errPanicked), reclaimed: func() {}})
		}
		return 0, nil, fmt.Errorf("devpool: allocating %d bytes on the device: %w", size, err)
	}
	p.live++
	return addr, ready, nil
}

// renew opens another stream in place of one that has failed, which would fail
// everything to come. It is called in turn.
func (p *Memory) renew() error {
	if p.stream.Err() == nil {
		return nil
	}
	s, err := p.dev.NewStream()
	if err != nil {
		return fmt.Errorf("devpool: the allocation stream failed (%w) and no other could be opened: %w", p.stream.Err(), err)
	}
	old := p.stream
	p.stream = s
	_ = old.Close() // the waiters for its work got its error
	return nil
}

// settle returns an event behind everything freed so far.
func (p *Memory) settle() (e tier.Event, ok bool) {
	p.inTurn(func() {
		if p.closed {
			return
		}
		var err error
		e, err = p.record()
		ok = err == nil
	})
	return e, ok
}

// Free gives m back; reclaimed is called when the device is done with it. All
// work that uses m on other streams must be done.
func (p *Memory) Free(m tier.Memory, reclaimed func()) {
	var wait <-chan struct{} // after Close, when no caller would wait for a goroutine
	var last bool
	p.inTurn(func() {
		p.live--
		a := m.(*allocation)
		wait = p.free(refusedFree{addr: a.addr, charge: a.charge, reclaimed: reclaimed})
		last = p.closed && p.live == 0
	})
	if wait != nil {
		<-wait
		reclaimed()
	}
	if last {
		_ = p.finish() // there is no caller to return it to
	}
}

// free puts f on the pool's stream. What the device is done with becomes due;
// for the rest a goroutine waits, or, after Close, the caller must. What the
// device refuses is kept. It is called in turn.
func (p *Memory) free(f refusedFree) (wait <-chan struct{}) {
	done := p.submitFree(&f)
	switch {
	case done == nil:
		p.stuck = append(p.stuck, f)
	case isClosed(done):
		p.due = append(p.due, f.reclaimed)
	case p.closed:
		return done
	default:
		p.retired.Go(func() { // ends with the device's work; Close waits for it
			labels.Free.Set()
			<-done
			f.reclaimed()
		})
	}
	return nil
}

// submitFree returns a channel that is closed at the end of a free, or nil if the device refused
// it.
func (p *Memory) submitFree(f *refusedFree) <-chan struct{} {
	if !f.freed {
		err := p.freeOnDevice(f.addr)
		if errors.Is(err, tier.ErrClosed) { // the device is gone, and its memory with it
			return closedChannel
		}
		if errors.Is(err, errPanicked) {
			f.unsure = true
			p.unsure.Add(f.charge)
		}
		if err != nil {
			return nil
		}
		f.freed = true
	}
	e, err := p.record()
	if errors.Is(err, tier.ErrClosed) {
		return closedChannel
	}
	if err != nil {
		return nil
	}
	return e.Done()
}

// errPanicked: a call of the device has panicked, and the log has it.
var errPanicked = errors.New("devpool: the device panicked")

// freeOnDevice makes a panic of the device, or of its decorators, errPanicked. It is called in
// turn.
func (p *Memory) freeOnDevice(addr tier.Addr) error {
	err := errPanicked
	p.Panics.Do("Device.Free", func() { err = p.dev.Free(p.stream, addr) })
	return err
}

// record makes a panic an error, too.
func (p *Memory) record() (tier.Event, error) {
	var e tier.Event
	err := errPanicked
	p.Panics.Do("Device.Record", func() { e, err = p.dev.Record(p.stream) })
	return e, err
}

// retry puts the frees on the stream again that were refused. Those that panicked are not tried
// again: they might free another allocation's memory. It is called in turn.
func (p *Memory) retry() {
	stuck := p.stuck
	p.stuck = nil
	for _, f := range stuck {
		if f.unsure {
			p.stuck = append(p.stuck, f)
		} else {
			p.free(f)
		}
	}
}

// Unsure returns how many of the retired bytes stay so until the pool closes, because their free
// panicked: nobody knows whether the device has them still.
func (p *Memory) Unsure() int64 { return p.unsure.Load() }

// Retry tries the frees again that the device refused. Alloc does that, too, but waiters for room
// may wait for these bytes, and then nothing is allocated.
func (p *Memory) Retry() {
	p.inTurn(func() {
		if len(p.stuck) > 0 && !p.closed && p.renew() == nil {
			p.retry()
		}
	})
}

// Close waits until everything freed is reclaimed. The pool's stream is closed
// when nothing is handed out any more.
func (p *Memory) Close() error {
	var last, again bool
	p.inTurn(func() {
		if again = p.closed; again {
			return
		}
		p.retry()
		p.closed = true
		last = p.live == 0
	})
	if again {
		return tier.ErrClosed
	}
	p.retired.Wait()
	if last {
		return p.finish()
	}
	return nil
}

// finish closes the stream behind the last free. It reports what the device refuses to take back,
// and the frees that panicked: that is reclaimed as far as the books go. The latter are not tried
// again, because another pool may have got the address since.
func (p *Memory) finish() error {
	p.unsure.Store(0)
	err := errPanicked
	p.Panics.Do("Stream.Close", func() { err = p.stream.Close() })
	if errors.Is(err, tier.ErrClosed) { // with the device
		err = nil
	}
	for _, f := range p.stuck {
		if f.unsure {
			err = errors.Join(err, fmt.Errorf("devpool: the device may have %#x still: its free panicked", f.addr))
		} else {
			err = errors.Join(err, fmt.Errorf("devpool: the device refuses to take %#x back", f.addr))
		}
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
