package sim

import (
	"fmt"

	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/sumcopy"
	"github.com/spillway-db/spillway/tier"
)

// stream is a queue of work and, while there is some, a goroutine that does it.
type stream struct {
	dev  *gpu
	todo []work // the worker's; its memory and the queue's take turns

	mu struct {
		lockrank.Mutex[lockrank.Device]
		queue   []work
		running bool // the worker is there, and takes what comes
		closed  bool
		err     error // the first failure; kept
	}
}

// work is one thing for a worker to do. Which fields it uses depends on kind.
type work struct {
	kind  OpKind
	index int64
	bytes int64 // for the fault hook and for messages

	uses   []*allocation // which must be there when it runs
	copies []sumcopy.Copy
	peer   *gpu // where destinations are

	inward, outward int64 // bytes over the modelled links

	memory []byte       // of Fill and Digest
	value  byte         // Fill
	first  int64        // Digest
	digest *tier.Digest // Digest

	free   *allocation // Free
	record *event      // Record
	wait   tier.Event  // WaitEvent
}

// put appends w to the queue, without limit. Like a device's, the queue belongs to its producer,
// and each piece of work in it was paid for with memory.
func (s *stream) put(w work) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mu.closed {
		return fmt.Errorf("sim: the stream is %w", tier.ErrClosed)
	}
	s.mu.queue = append(s.mu.queue, w)
	if !s.mu.running {
		s.mu.running = true
		go func() {
			labels.SimGPU.Set()
			s.run()
		}()
	}
	return nil
}

// record returns an event that is done when the work so far is. It is done already if there is no
// worker.
func (s *stream) record() (*event, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case !s.mu.running:
		return &event{closed, s.mu.err}, nil
	case s.mu.closed:
		return nil, fmt.Errorf("sim: the stream is %w", tier.ErrClosed)
	}
	e := &event{done: make(chan struct{})}
	s.mu.queue = append(s.mu.queue, work{kind: OpRecord, record: e})
	return e, nil
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
	s.mu.Lock()
	if !s.mu.running {
		s.mu.Unlock()
		return
	}
	e := &event{done: make(chan struct{})}
	s.mu.queue = append(s.mu.queue, work{kind: OpRecord, record: e}) // also of a closed stream
	s.mu.Unlock()
	<-e.done
}

// run is the worker: it does what is in the queue until there is nothing more.
func (s *stream) run() {
	for {
		s.mu.Lock()
		s.todo, s.mu.queue = s.mu.queue, s.todo[:0]
		if len(s.todo) == 0 {
			s.mu.running = false
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		for i := range s.todo {
			s.do(&s.todo[i])
			s.todo[i] = work{} // lets go of what it points to
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
		w.record.err = s.Err()
		close(w.record.done)
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

// event is done when the worker has come to it.
type event struct {
	done chan struct{}
	err  error // written before done is closed
}

var closed = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

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
