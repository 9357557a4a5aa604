package sim

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/tier"
)

// OpKind is a kind of operation of a device, for the fault hook. Its text is for messages. One copy
// between host and device has a kind of its own.
type OpKind string

// The operations, in the order of the methods of tier.Device.
const (
	OpAlloc        OpKind = "alloc"
	OpFree         OpKind = "free"
	OpCopyToDevice OpKind = "copy to device"
	OpCopyToHost   OpKind = "copy to host"
	OpCopyPeer     OpKind = "copy to peer"
	OpCopyRegions  OpKind = "copy regions"
	OpFill         OpKind = "fill"
	OpNewStream    OpKind = "new stream"
	OpRecord       OpKind = "record"
	OpWaitEvent    OpKind = "wait event"
)

// Stage is when the fault hook is called.
type Stage uint8

const (
	// Submit: the call is being made; its arguments are right. An error refuses it.
	Submit Stage = iota
	// Run: the stream's worker has come to the work. An error fails it, and with it
	// the stream. Only copies and Fill have this stage.
	Run
)

// Op is an operation that the fault hook is called for.
type Op struct {
	Kind  OpKind
	Stage Stage
	Index int64 // number of the operation on this device, from 0; the same in both stages
	Bytes int64 // how many bytes it is about; 0 for operations without
}

// stream is a queue of work and, while there is some, a goroutine that does it: the worker. put
// starts the worker with the first piece of work, and the worker ends when the queue is empty, both
// under the device's mutex: so work in the queue always has a worker.
//
// A stream that has failed, err, stays so. Its worker still frees memory, records events and waits
// for those of others, and leaves out the rest. A closed stream takes no work; its closer waits for
// the worker.
type stream struct {
	dev    *gpu
	todo   []work      // the worker's; its memory and the queue's take turns
	closed atomic.Bool // no work comes in

	// The mutex of the device guards the rest. The worker alone changes err.
	queue   []work
	running bool  // the worker is there, and takes what comes
	err     error // the first failure; kept
}

// work is one thing for a worker to do. Which fields it uses depends on kind.
type work struct {
	kind  OpKind
	index int64
	bytes int64 // for the fault hook and for messages

	uses   []*devpool.Allocation // which must be there when it runs
	copies []sumcopy.Copy
	peer   *gpu // where destinations are; nil if that is this device

	inward, outward int64 // bytes over the modelled links

	memory []byte // of Fill
	value  byte   // Fill

	free   *devpool.Allocation // Free
	record *event              // Record
	wait   tier.Event          // WaitEvent
}

// errFreed is how work fails whose memory was given back on another stream before the work ran.
var errFreed = errors.New("memory that it uses was freed on another stream and is gone")

// CopyPeer implements tier.Device. Simulated devices reach each other, also through devices that
// wrap one and have a method Unwrap() tier.Device.
func (d *gpu) CopyPeer(s tier.Stream, dst tier.Addr, dstDevice tier.Device, src tier.Addr, size int64) error {
	peer, ok := tier.As[*gpu](dstDevice)
	switch {
	case !ok:
		return fmt.Errorf("sim: a copy to a device of type %T: %w", dstDevice, tier.ErrNotSupported)
	case peer == d:
		return d.CopyRegions(s, []tier.Region{{Dst: dst, Src: src, Size: size}})
	}
	w := work{kind: OpCopyPeer, bytes: size, outward: size, peer: peer}
	to, err := peer.find(&w, dst, size)
	if err != nil {
		return fmt.Errorf("sim: %s: %w", w.kind, err)
	}
	from, err := d.find(&w, src, size)
	if err != nil {
		return fmt.Errorf("sim: %s: %w", w.kind, err)
	}
	w.copies = []sumcopy.Copy{{Dst: to, Src: from}}
	return d.put(s, w)
}

// CopyRegions implements tier.Device.
func (d *gpu) CopyRegions(s tier.Stream, regions []tier.Region) error {
	w := work{kind: OpCopyRegions, copies: make([]sumcopy.Copy, 0, len(regions))}
	if len(regions) == 1 && regions[0].HostSrc != nil {
		w.kind = OpCopyToDevice
	} else if len(regions) == 1 && regions[0].HostDst != nil {
		w.kind = OpCopyToHost
	}
	for i, r := range regions {
		n, err := devpool.RegionSize(r)
		c := sumcopy.Copy{Dst: r.HostDst, Src: r.HostSrc}
		if err == nil && c.Dst == nil {
			c.Dst, err = d.find(&w, r.Dst, n)
		}
		if err == nil && c.Src == nil {
			c.Src, err = d.find(&w, r.Src, n)
		}
		if err != nil {
			return fmt.Errorf("sim: %s: copy %d of %d: %w", w.kind, i, len(regions), err)
		}
		if r.HostSrc != nil {
			w.inward += n
		}
		if r.HostDst != nil {
			w.outward += n
		}
		w.bytes += n
		w.copies = append(w.copies, c)
	}
	return d.put(s, w)
}

// Fill implements tier.Device.
func (d *gpu) Fill(ts tier.Stream, dst tier.Addr, value byte, size int64) (err error) {
	w := work{kind: OpFill, bytes: size, value: value}
	if w.memory, err = d.find(&w, dst, size); err != nil {
		return err
	}
	return d.put(ts, w)
}

// Record implements tier.Device.
func (d *gpu) Record(ts tier.Stream) (tier.Event, error) {
	s, _, err := d.begin(ts, OpRecord, 0)
	if err != nil {
		return nil, err
	}
	return s.mark(), nil
}

// WaitEvent implements tier.Device. e may be any event, also another backend's. While it is not
// done, the stream and the device cannot be closed.
func (d *gpu) WaitEvent(ts tier.Stream, e tier.Event) error {
	if e == nil {
		return errors.New("sim: no event to wait for")
	}
	return d.put(ts, work{kind: OpWaitEvent, wait: e})
}

// put asks the fault hook about w and appends it to the queue, without limit. Like a device's, the
// queue belongs to its producer, and each piece of work in it was paid for with memory. Work that
// has nothing to do is left out.
func (d *gpu) put(ts tier.Stream, w work) error {
	s, index, err := d.begin(ts, w.kind, w.bytes)
	if err != nil {
		return err
	}
	w.index = index
	switch {
	case w.wait != nil:
		select {
		case <-w.wait.Done():
			if w.wait.Err() == nil {
				return nil
			}
		default:
		}
	case w.bytes == 0:
		return nil
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if s.closed.Load() { // if it is not yet, the closer finds the work in the queue
		return fmt.Errorf("sim: the stream is %w", tier.ErrClosed)
	}
	s.queue = append(s.queue, w)
	if !s.running {
		s.running = true
		go func() {
			labels.SimGPU.Set()
			s.run()
		}()
	}
	return nil
}

// mark returns an event that is done when the work so far is: at once if there is no worker.
func (s *stream) mark() *event {
	e := &event{done: make(chan struct{})}
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	if s.running {
		s.queue = append(s.queue, work{kind: OpRecord, record: e})
	} else {
		e.err = s.err
		close(e.done)
	}
	return e
}

// Err implements tier.Stream.
func (s *stream) Err() error {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	return s.err
}

// Sync implements tier.Stream.
func (s *stream) Sync() error {
	<-s.mark().done
	return s.Err()
}

// Close implements tier.Stream.
func (s *stream) Close() error {
	if s.closed.Swap(true) {
		return tier.ErrClosed
	}
	<-s.mark().done
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	delete(s.dev.mu.streams, s)
	return nil
}

// run is the worker: it does what is in the queue until there is nothing more. After a failure it
// does only work that gives something back or reports something.
func (s *stream) run() {
	d := s.dev
	for {
		d.mu.Lock()
		s.todo, s.queue = s.queue, s.todo[:0]
		running := len(s.todo) > 0
		s.running = running
		d.mu.Unlock()
		if !running { // todo is the next worker's
			return
		}
		for i := range s.todo {
			w := &s.todo[i]
			var err error
			switch {
			case w.kind == OpFree:
				d.reclaim(w.free)
			case w.kind == OpRecord:
				w.record.err = s.err
				close(w.record.done)
			case w.kind == OpWaitEvent:
				<-w.wait.Done()
				if err = w.wait.Err(); err != nil {
					err = fmt.Errorf("sim: the work that the stream waited for failed: %w", err)
				}
			case s.err == nil:
				if err = d.do(w); err != nil {
					err = fmt.Errorf("sim: %s of %d bytes failed: %w", w.kind, w.bytes, err)
				}
			}
			if err != nil && s.err == nil {
				d.mu.Lock()
				s.err = err
				d.mu.Unlock()
			}
			*w = work{} // lets go of what it points to
		}
	}
}

// do moves the bytes of w, or fills them.
func (d *gpu) do(w *work) error {
	if d.faults != nil {
		if err := d.faults(Op{Kind: w.kind, Stage: Run, Index: w.index, Bytes: w.bytes}); err != nil {
			return err
		}
	}
	for _, a := range w.uses {
		if a.Gone.Load() {
			return errFreed
		}
	}
	if w.peer != nil {
		if !w.peer.guests.Enter() {
			return fmt.Errorf("the peer is %w", tier.ErrClosed)
		}
		defer w.peer.guests.Leave()
	}
	var arrival time.Time
	if d.cfg.Latency > 0 || d.cfg.BytesPerSecondToDevice > 0 || d.cfg.BytesPerSecondFromDevice > 0 {
		arrival = d.book(&d.mu.toDevice, d.cfg.BytesPerSecondToDevice, w.inward)
		if out := d.book(&d.mu.fromDevice, d.cfg.BytesPerSecondFromDevice, w.outward); out.After(arrival) {
			arrival = out
		}
	}
	if w.kind == OpFill {
		fill(w.memory, w.value)
	} else {
		sumcopy.Gather(w.copies)
	}
	if !arrival.IsZero() {
		time.Sleep(time.Until(arrival))
	}
	return nil
}

// fill sets b to value, which is 0 in all but tests.
func fill(b []byte, value byte) {
	if clear(b); value != 0 && len(b) > 0 {
		b[0] = value
		for n := 1; n < len(b); n *= 2 {
			copy(b[n:], b[:n])
		}
	}
}

// book takes one direction between host and device, which all streams share, for n bytes, and returns
// when they have arrived; the zero time if there is nothing to transfer. Transfers follow each other
// at the direction's rate, and each is done a latency after its last byte has passed. free is when
// the last transfer so far has passed.
func (d *gpu) book(free *time.Time, bytesPerSecond, n int64) time.Time {
	if n == 0 {
		return time.Time{}
	}
	now := time.Now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if free.Before(now) {
		*free = now
	}
	if bytesPerSecond > 0 {
		*free = free.Add(time.Duration(float64(n) / float64(bytesPerSecond) * float64(time.Second)))
	}
	return free.Add(d.cfg.Latency)
}

// event is done when the worker has come to it.
type event struct {
	done chan struct{}
	err  error // written before done is closed
}

// Done implements tier.Event.
func (e *event) Done() <-chan struct{} { return e.done }

// Err implements tier.Event.
func (e *event) Err() error {
	select {
	case <-e.done:
		return e.err
	default:
		return nil
	}
}
