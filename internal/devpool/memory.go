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

// Memory is the tier.Pool of a GPU space: it allocates from a tier.Device, and counts what was freed
// as reclaimed when the device is done with it.
//
// A free that the device refuses is kept, with its bytes retired. It is tried again at the next
// allocation, by Retry, and when the pool closes. A free that panicked is not: the device may
// still have the memory or not, and the address may be another allocation's by now. Its bytes
// stay retired until the pool closes, see Unsure.
type Memory struct {
	Panics guard.Log // of frees, which have no caller to return them to; Logger may be set before the first call

	dev tier.Device

	// turn holds one token. The goroutine that has taken it owns the fields below, and with them
	// the pool's stream, which carries only allocations and frees. It is a channel because a ranked
	// mutex must not be held while the device is called: a wrapper of the device may log there, or
	// fail on purpose.
	turn   chan struct{}
	stream tier.Stream
	live   int           // handed out and not freed
	stuck  []refusedFree // tried again at the next chance
	due    []func()      // reclaimed, to be called when the turn is over
	closed bool

	retired sync.WaitGroup // one for each free that the device is not done with
	unsure  atomic.Int64   // see Unsure
}

// refusedFree is a free, which the device may have refused.
type refusedFree struct {
	addr      tier.Addr
	charge    int64 // 0 if the bytes are not retired
	freed     bool  // only the event after the free was refused
	unsure    bool  // the free panicked
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

// NewMemory returns a pool over dev, whose methods must not panic; see Guarded. Closing the pool
// does not close dev.
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

// endTurn ends a turn, and calls what has become due.
func (p *Memory) endTurn() {
	due := p.due
	p.due = nil
	p.turn <- struct{}{}
	for _, reclaimed := range due {
		reclaimed()
	}
}

// Alloc allocates one contiguous piece; cuts are ignored. When it returns, the memory may be used
// on every stream. If a device has no room, Alloc retries once, after what is retired has come
// back.
func (p *Memory) Alloc(size int64, _ []int64) (tier.Memory, error) {
	m := &allocation{dev: p.dev, size: size, charge: p.dev.Charge(size)}
	var ready tier.Event // after which the memory may be used on every stream
	var err error
	<-p.turn
	inTurn := true
	defer func() {
		if inTurn { // a stream panicked
			p.endTurn()
		}
	}()
	if p.closed {
		err = tier.ErrClosed
	} else if len(p.stuck) > 0 || p.stream.Err() != nil {
		err = p.retry()
	}
	if err == nil {
		m.addr, err = p.dev.Alloc(p.stream, size)
	}
	if errors.Is(err, tier.ErrNoSpace) {
		if freed, refused := p.dev.Record(p.stream); refused == nil {
			<-freed.Done() // frees only: what they wait for was done before
			p.dev.Reap()
			m.addr, err = p.dev.Alloc(p.stream, size)
		}
	}
	if err == nil {
		if ready, err = p.dev.Record(p.stream); err == nil {
			p.live++
		} else {
			p.free(refusedFree{addr: m.addr, reclaimed: func() {}})
			err = fmt.Errorf("devpool: allocating %d bytes on the device: %w", size, err)
		}
	}
	inTurn = false
	p.endTurn()
	if err != nil {
		return nil, err
	}
	<-ready.Done()
	if err := ready.Err(); err != nil {
		m.charge = 0 // its bytes were never drawn
		p.Free(m, func() {})
		return nil, fmt.Errorf("devpool: allocating %d bytes on the device: %w", size, err)
	}
	return m, nil
}

// Free gives m back; reclaimed is called when the device is done with it. All work that uses m on
// other streams must be done.
func (p *Memory) Free(m tier.Memory, reclaimed func()) {
	a := m.(*allocation)
	<-p.turn
	p.live--
	wait := p.free(refusedFree{addr: a.addr, charge: a.charge, reclaimed: reclaimed})
	last := p.closed && p.live == 0
	p.endTurn()
	if wait != nil {
		<-wait
		reclaimed()
	}
	if last {
		_ = p.finish() // there is no caller to return it to
	}
}

// free puts f on the pool's stream. Memory that the device is done with becomes due; for the rest a
// goroutine waits, or, after Close, the caller must. Frees that the device refuses are kept. It is
// called in turn.
func (p *Memory) free(f refusedFree) (wait <-chan struct{}) {
	var done tier.Event
	var err error
	if !f.freed {
		err = p.dev.Free(p.stream, f.addr)
		f.freed = err == nil
	}
	if f.freed {
		done, err = p.dev.Record(p.stream)
	}
	if panicked, ok := errors.AsType[*guard.PanicError](err); ok {
		p.Panics.Write(panicked)
		if f.unsure = !f.freed; f.unsure {
			p.unsure.Add(f.charge)
		}
	}
	switch {
	case errors.Is(err, tier.ErrClosed): // the device is gone, and its memory with it
		p.due = append(p.due, f.reclaimed)
		return nil
	case err != nil:
		p.stuck = append(p.stuck, f)
		return nil
	}
	select {
	case <-done.Done():
		p.due = append(p.due, f.reclaimed)
		return nil
	default:
	}
	if p.closed { // when no caller would wait for a goroutine
		return done.Done()
	}
	p.retired.Go(func() { // ends with the device's work; Close waits for it
		labels.Free.Set()
		<-done.Done()
		f.reclaimed()
	})
	return nil
}

// retry opens another stream in place of one that has failed, which would fail everything to come.
// Then it puts the frees on the stream again that were refused, also if there is no other stream.
// It is called in turn.
func (p *Memory) retry() (err error) {
	if failed := p.stream.Err(); failed != nil {
		if s, refused := p.dev.NewStream(); refused != nil {
			err = fmt.Errorf("devpool: the allocation stream failed (%w) and no other could be opened: %w",
				failed, refused)
		} else {
			_ = closeStream(p.stream) // the waiters for its work got its error
			p.stream = s
		}
	}
	stuck := p.stuck
	p.stuck = nil
	for _, f := range stuck {
		if f.unsure {
			p.stuck = append(p.stuck, f)
		} else {
			p.free(f)
		}
	}
	return err
}

// Unsure returns how many of the retired bytes stay so until the pool closes, because their free
// panicked, so that the device may still have them or not.
func (p *Memory) Unsure() int64 { return p.unsure.Load() }

// Retry tries the frees again that the device refused. Alloc does that, too, but waiters for room
// may wait for these bytes, and then nothing is allocated.
func (p *Memory) Retry() {
	<-p.turn
	defer p.endTurn()
	if len(p.stuck) > 0 && !p.closed {
		_ = p.retry() // it is tried again
	}
}

// Close waits until everything freed is reclaimed. The pool's stream is closed when nothing is
// handed out any more.
func (p *Memory) Close() error {
	<-p.turn
	if p.closed {
		p.endTurn()
		return tier.ErrClosed
	}
	_ = p.retry() // finish reports what is stuck
	p.closed = true
	last := p.live == 0
	p.endTurn()
	p.retired.Wait()
	if last {
		return p.finish()
	}
	return nil
}

// finish closes the stream behind the last free. It reports what the device refuses to take back,
// and the frees that panicked: that is reclaimed as far as the books go.
func (p *Memory) finish() error {
	p.unsure.Store(0)
	err := closeStream(p.stream)
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
