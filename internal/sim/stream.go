package sim

import (
	"fmt"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier"
)

// stream is a queue of work and, while there is some, a goroutine that does it.
type stream struct {
	dev *gpu

	mu struct {
		lockrank.Mutex[lockrank.Device]
		queue   []work
		spare   []work // empty: the queue's memory while a worker has the other
		running bool   // the worker is there, and takes what comes
		closed  bool
		err     error // the first failure; kept
	}
}

// work is one thing for a worker to do. Which fields it uses depends on kind.
type work struct {
	kind  OpKind
	index int64
	bytes int64 // for the fault hook and for messages

	dst, src allocated // what Fill, Digest and the single copies work on
	pairs    []pair    // CopyRegions
	peer     *gpu      // CopyPeer: where dst is

	inward, outward int64 // bytes over the modelled links

	value  byte         // Fill
	first  int64        // Digest
	digest *tier.Digest // Digest

	free   *allocation // Free
	record *event      // Record
	wait   tier.Event  // WaitEvent
}

// allocated is a range of an allocation, or of host memory, where a is nil.
type allocated struct {
	a *allocation
	b []byte
}

// pair is one copy of CopyRegions.
type pair struct{ dst, src allocated }

// put appends w to the queue, without limit. Like a device's, the queue belongs to its producer,
// and each piece of work in it was paid for with memory.
func (s *stream) put(w work) error {
	s.mu.Lock()
	if s.mu.closed {
		s.mu.Unlock()
		return fmt.Errorf("sim: the stream is %w", tier.ErrClosed)
	}
	start := s.putLocked(w)
	s.mu.Unlock()
	if start {
		go func() {
			labels.SimGPU.Set()
			s.run()
		}()
	}
	return nil
}

func (s *stream) putLocked(w work) (start bool) {
	s.mu.queue = append(s.mu.queue, w)
	start = !s.mu.running
	s.mu.running = true
	return start
}

// idle reports whether all work put on the stream is done. It stays so until its
// owner puts more there.
func (s *stream) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.mu.running
}

func (s *stream) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.closed
}

// Err implements tier.Stream.
func (s *stream) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.mu.err
}

// fail records the stream's first failure.
func (s *stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.err == nil {
		s.mu.err = err
	}
}

// Close implements tier.Stream.
func (s *stream) Close() error {
	if !s.shut() {
		return tier.ErrClosed
	}
	s.drain()
	s.dev.mu.Lock()
	delete(s.dev.mu.streams, s)
	s.dev.mu.Unlock()
	return nil
}

// Sync implements tier.Stream.
func (s *stream) Sync() error {
	s.drain()
	return s.Err()
}

// shut lets no more work in, and reports whether that is new.
func (s *stream) shut() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.mu.closed
	s.mu.closed = true
	return !before
}

// drain waits until the stream's work is done.
func (s *stream) drain() {
	e := new(event)
	s.mu.Lock()
	if !s.mu.running {
		s.mu.Unlock()
		return
	}
	s.putLocked(work{kind: OpRecord, record: e}) // running, so nothing to start
	s.mu.Unlock()
	<-e.Done()
}

// queueKept is the longest queue whose memory is kept for the next one.
const queueKept = 1024

// run is the worker: it does what is in the queue until there is nothing more.
func (s *stream) run() {
	var batch []work
	for {
		s.mu.Lock()
		if batch != nil {
			s.mu.spare = batch[:0]
		}
		if len(s.mu.queue) == 0 {
			s.mu.running = false
			s.mu.Unlock()
			return
		}
		batch, s.mu.queue, s.mu.spare = s.mu.queue, s.mu.spare, nil
		s.mu.Unlock()
		for i := range batch {
			s.do(&batch[i])
			batch[i] = work{} // lets go of what it points to
		}
		if cap(batch) > queueKept {
			batch = nil
		}
	}
}

// do does one piece of work. After a failure it does only work that gives something back or reports
// something.
func (s *stream) do(w *work) {
	switch w.kind {
	case OpFree:
		s.dev.reclaim(w.free)
		return
	case OpRecord:
		w.record.complete(s.Err())
		return
	case OpWaitEvent:
		<-w.wait.Done()
		if err := w.wait.Err(); err != nil {
			s.fail(fmt.Errorf("sim: the work that the stream waited for failed: %w", err))
		}
		return
	}
	if s.Err() != nil {
		return
	}
	if err := s.move(w); err != nil {
		s.fail(fmt.Errorf("sim: %s of %d bytes failed: %w", w.kind, w.bytes, err))
	}
}

// event is done when complete has been called. Its channel is made at its first use. Most events
// are used only after they are done, and need none.
type event struct {
	done atomic.Pointer[chan struct{}] // &closed once the event is done
	err  error                         // written before done is set to &closed
}

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// Done implements tier.Event.
func (e *event) Done() <-chan struct{} {
	if c := e.done.Load(); c != nil {
		return *c
	}
	c := make(chan struct{})
	if e.done.CompareAndSwap(nil, &c) {
		return c
	}
	return *e.done.Load()
}

// Err implements tier.Event.
func (e *event) Err() error {
	if e.done.Load() != &closed {
		return nil
	}
	return e.err
}

// complete is called once.
func (e *event) complete(err error) {
	e.err = err
	if c := e.done.Swap(&closed); c != nil {
		close(*c)
	}
}
