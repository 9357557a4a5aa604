package cuda

import (
	"errors"
	"fmt"
	"slices"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// stream is a stream of the GPU's. The device's lock guards the fields that change.
type stream struct {
	dev     *gpu
	handle  cuda.Stream
	adopted bool // the handle is the program's
	// turn holds a token while a goroutine records: the owner of the stream, or a reaper. Two at
	// once could take what is due in one order and record in the other. Then the event behind which
	// nothing is due could be the first to be done.
	turn chan struct{}
	last *cuda.Mark // the last one recorded, by either

	closed bool
	queued int          // pieces of work put there since paced, or a little later
	paced  tier.Event   // the last event that makeRoom has recorded; nil if there is none
	err    error        // the first failure that is known
	busy   bool         // work that takes time was put on it since the last event
	open   int          // events that are not reached yet
	due    due          // since the last event
	deps   []tier.Event // what events to come depend on besides the GPU's own work

	scratch tier.Addr // granule bytes of the device's; 0 without

	word   []byte          // pinned, 4 bytes: how many events of others have happened for which the GPU waits; nil without
	waits  uint32          // how many it waits for
	waited <-chan struct{} // closed when the last of them has happened
}

// due is what the host has to do when the GPU has come to a point of a stream.
type due struct {
	frees []*allocation // to take back
	spent [][]byte      // pinned memory that copies to the device are done with
	outs  []out         // bytes that have arrived in pinned memory
	sums  []sum         // digests that have
	bytes int64         // of pinned memory in all this
}

// out is pinned memory whose bytes belong elsewhere.
type out struct{ dst, from []byte }

func (d *due) empty() bool { return len(d.frees)+len(d.spent)+len(d.outs)+len(d.sums) == 0 }

// before puts what was due earlier before d.
func (d *due) before(earlier due) {
	d.frees = append(earlier.frees, d.frees...)
	d.spent = append(earlier.spent, d.spent...)
	d.outs = append(earlier.outs, d.outs...)
	d.sums = append(earlier.sums, d.sums...)
	d.bytes += earlier.bytes
}

// NewStream implements tier.Device.
func (d *gpu) NewStream() (tier.Stream, error) {
	if !d.gate.Enter() {
		return nil, tier.ErrClosed
	}
	defer d.gate.Leave()
	s := &stream{dev: d, turn: make(chan struct{}, 1)}
	if err := d.dev.Here(func(c *cuda.Calls) (err error) { s.handle, err = c.NewStream(); return err }); err != nil {
		d.suspect(err)
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mu.streams[s] = struct{}{}
	return s, nil
}

// mostQueued is about how many pieces of work wait on a stream at most. A driver that has no room
// for more has its callers wait, also those with work for other streams. An H100 has room for some
// 2,000 (driver 580).
const mostQueued = 1024

// makeRoom counts pieces of work that are about to be put on the stream. It waits while too many
// are there. So nobody waits in the driver.
func (s *stream) makeRoom(pieces int) {
	d := s.dev
	d.mu.Lock()
	s.queued += pieces
	full := s.queued >= mostQueued/2
	if full {
		s.queued = 0
	}
	d.mu.Unlock()
	if !full {
		return
	}
	e, err := s.record()
	if err != nil {
		return // it is tried again with the next half
	}
	d.mu.Lock()
	before := s.paced
	s.paced = e
	d.mu.Unlock()
	if before != nil {
		<-before.Done()
	}
}

func (s *stream) isClosed() bool {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	return s.closed
}

// Err implements tier.Stream.
func (s *stream) Err() error {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	return s.err
}

// fail records the stream's first failure.
func (s *stream) fail(err error) {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	if s.err == nil {
		s.err = err
	}
}

// Sync implements tier.Stream.
func (s *stream) Sync() error {
	if !s.dev.gate.Enter() {
		return s.Err()
	}
	defer s.dev.gate.Leave()
	if s.isClosed() {
		return s.Err()
	}
	return s.sync()
}

// sync waits for the work put on the stream so far, by an event if one can be had.
func (s *stream) sync() error {
	e, err := s.record()
	if err != nil {
		e = s.settle()
	}
	<-e.Done()
	return s.Err()
}

// Close implements tier.Stream.
func (s *stream) Close() error {
	if !s.dev.gate.Enter() {
		return tier.ErrClosed
	}
	defer s.dev.gate.Leave()
	if !s.shut() {
		return tier.ErrClosed
	}
	return s.end()
}

// shut lets no more work in, and reports whether that is new.
func (s *stream) shut() bool {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	if s.closed {
		return false
	}
	s.closed = true
	return true
}

// end waits for the work and gives the stream up. Err returns the result of the work.
func (s *stream) end() error {
	_ = s.sync()
	s.turn <- struct{}{}
	s.caughtUp() // also where there was no event to be had any more
	<-s.turn
	if s.scratch != 0 {
		_ = s.dev.source.unscratch(s, s.scratch) // refused, it goes with the context
	}
	var err error
	if !s.adopted {
		err = s.dev.dev.Surely(func(c *cuda.Calls) error { return c.DestroyStream(s.handle) })
	}
	s.dev.mu.Lock()
	delete(s.dev.mu.streams, s)
	word, waited, failed := s.word, s.waited, s.err != nil
	s.word = nil
	s.dev.mu.Unlock()
	if waited != nil {
		<-waited // if the stream has failed the word may still be written
	}
	if word != nil {
		s.dev.bounce.putWord(word)
	}
	if failed {
		return nil // a driver returns it again, at any call
	}
	return err
}

// event is a point in a stream's work.
type event struct {
	s    *stream
	mark *cuda.Mark    // nil if the work is done
	tail chan struct{} // if there is more to wait for than the GPU; else nil
	err  error         // to be read when tail is closed
}

// Done implements tier.Event.
func (e *event) Done() <-chan struct{} {
	if e.tail != nil {
		return e.tail
	}
	return e.mark.Done()
}

// Err implements tier.Event.
func (e *event) Err() error {
	if e.tail == nil {
		return e.mark.Err()
	}
	select {
	case <-e.tail:
		return e.err
	default:
		return nil
	}
}

// Record implements tier.Device.
func (d *gpu) Record(ts tier.Stream) (tier.Event, error) {
	s, err := d.own(ts)
	if err != nil {
		return nil, err
	}
	defer d.gate.Leave()
	return s.record()
}

// record returns an event behind the work so far, which does what is due. Whatever the
// host has to wait for, or to do that may take long, is left to a goroutine.
func (s *stream) record() (tier.Event, error) {
	s.turn <- struct{}{} // held by others for some calls of the driver at most
	defer func() { <-s.turn }()
	return s.recordInTurn()
}

// recordForOthers is record for a goroutine that does not own the stream. It does nothing if the
// stream is closed, or if another goroutine is recording.
func (s *stream) recordForOthers() {
	select {
	case s.turn <- struct{}{}:
	default:
		return
	}
	defer func() { <-s.turn }()
	if !s.isClosed() { // a closer records afterwards, and so gives it up after this
		_, _ = s.recordInTurn() // refused, it is tried again
	}
}

func (s *stream) recordInTurn() (tier.Event, error) {
	e := &event{s: s}
	w := s.take(e, false)
	then := func(err error) error { return s.reached(w, err, e.tail == nil) }
	var result error // if the GPU is there already
	err := s.dev.dev.Here(func(c *cuda.Calls) (err error) {
		if w.light && e.tail == nil {
			e.mark, result, err = c.MarkSoon(s.handle, then)
		} else {
			e.mark, err = c.Mark(s.handle, then)
		}
		return err
	})
	if s.dev.refused(err) { // there is nothing that the work could still do, and no event to be had any more
		s.giveUp(e, w, err)
		return e, nil
	}
	if err != nil {
		s.restore(e, w)
		return nil, err
	}
	if e.mark == nil {
		e.tail, e.err = past, result
		return e, nil
	}
	s.last = e.mark
	if e.tail != nil {
		s.dev.waits.Go(func() { // ends with the events that the stream waits for; the device's Close waits for it
			labels.GPU.Set()
			<-e.mark.Done()
			e.finish(e.mark.Err(), w)
		})
	}
	return e, nil
}

// past is the channel of events that were reached before the first query.
var past = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

// giveUp makes e the event of work that was lost with the context.
func (s *stream) giveUp(e *event, w *pending, err error) {
	if e.tail == nil {
		e.tail = make(chan struct{})
	}
	err = s.reached(w, err, true)
	if len(w.deps) == 0 {
		e.finish(err, w)
		return
	}
	s.dev.waits.Go(func() { // ends with the events that the stream waits for
		labels.GPU.Set()
		e.finish(err, w)
	})
}

// settle waits until the work on the stream is done, in place of an event that the driver refuses.
func (s *stream) settle() tier.Event {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	e := &event{s: s}
	w := s.take(e, true)
	// Not on the device's thread: what the stream waits for may need that.
	err := again(func() error { return s.dev.dev.Here(func(c *cuda.Calls) error { return c.SyncStream(s.handle) }) })
	s.caughtUp()
	e.finish(s.reached(w, err, false), w)
	return e
}

// caughtUp waits until the device has done what was due at the events before: it looks at them when
// it gets to it, which may be some time after the work. It is called in turn.
func (s *stream) caughtUp() {
	if s.last != nil {
		<-s.last.Done()
	}
}

// again calls f, which waits for the end of work, up to three times. Memory is reused after that,
// so a refusal must not be taken for the end. A failure of the work is returned each time.
func again(f func() error) (err error) {
	for range 3 {
		if err = f(); err == nil {
			break
		}
	}
	return err
}

// pending is what an event completes besides the GPU's work.
type pending struct {
	due
	failed error        // of the stream, known when the event was recorded
	light  bool         // no work before it takes time
	deps   []tier.Event // to be waited for
}

// take makes e stand for what is due and for what has to be waited for. If that is not for the GPU
// alone, or if always is set, e gets a tail, and events to come wait for it.
func (s *stream) take(e *event, always bool) *pending {
	s.dev.mu.Lock()
	deps := s.deps // others only add to it as long as this has the turn
	s.dev.mu.Unlock()
	undone, failed := missing(deps)
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	if s.err == nil {
		s.err = failed
	}
	w := &pending{due: s.due, light: !s.busy && s.open == 0, failed: s.err, deps: append(undone, s.deps[len(deps):]...)}
	s.due, s.busy, s.deps = due{}, false, w.deps
	s.open++
	if always || len(w.deps) > 0 || len(w.outs) > 0 {
		e.tail = make(chan struct{})
		s.deps = []tier.Event{e}
	}
	return w
}

// missing returns which of the events are not done, and the first failure of the others. It calls
// what may be other backends' code, and so without a lock.
func missing(deps []tier.Event) (undone []tier.Event, failed error) {
	for _, d := range deps {
		switch done, err := over(d); {
		case !done:
			undone = append(undone, d)
		case failed == nil:
			failed = err
		}
	}
	return undone, failed
}

// restore takes back what take did, for an event that could not be had.
func (s *stream) restore(e *event, w *pending) {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	s.due.before(w.due)
	s.busy = true
	s.open--
	if e.tail != nil {
		i := slices.Index(s.deps, tier.Event(e)) // others may have come behind it
		s.deps = slices.Concat(s.deps[:i], w.deps, s.deps[i+1:])
	}
}

// over reports whether e is done, and if so, what that means for a stream that waited for it.
func over(e tier.Event) (bool, error) {
	select {
	case <-e.Done():
		return true, dependent(e.Err())
	default:
		return false, nil
	}
}

func dependent(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("cuda: the work that the stream waited for failed: %w", err)
}

// reached does what can be done at once when the GPU has come to an event, and returns the result
// of the work before it. A final result is recorded in the stream.
func (s *stream) reached(w *pending, err error, final bool) error {
	s.dev.suspect(err)
	for _, a := range w.frees {
		s.dev.source.reclaimed(a)
	}
	for _, b := range w.spent {
		s.dev.bounce.put(b)
	}
	for _, x := range w.sums {
		if err == nil {
			x.deliver()
		}
		s.dev.bounce.put(x.from)
	}
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	for _, a := range w.frees {
		s.dev.mu.retired -= a.charge
	}
	s.open--
	if w.failed != nil {
		err = w.failed
	}
	if final && err != nil && s.err == nil {
		s.err = err
	}
	return err
}

// finish waits for what is left to wait for, copies bytes to their destination if nothing failed,
// and reports the end.
func (e *event) finish(err error, w *pending) {
	for _, d := range w.deps {
		<-d.Done()
		failed := d.Err()
		if own, ok := d.(*event); !ok || own.s != e.s {
			failed = dependent(failed)
		}
		if err == nil {
			err = failed
		}
	}
	for _, o := range w.outs {
		if err == nil {
			copy(o.dst, o.from)
		}
		e.s.dev.bounce.put(o.from)
	}
	if err != nil {
		e.s.fail(err)
	}
	e.err = err
	close(e.tail)
}

// WaitEvent implements tier.Device. For another backend's event the GPU waits until a word of host
// memory is written, if it can do that; while such an event is not done, the
// stream and the device cannot be closed.
func (d *gpu) WaitEvent(ts tier.Stream, e tier.Event) error {
	s, err := d.own(ts)
	if err != nil {
		return err
	}
	defer d.gate.Leave()
	if e == nil {
		return errors.New("cuda: no event to wait for")
	}
	done, failed := over(e)
	switch {
	case failed != nil:
		s.fail(failed)
		return nil
	case done:
		return nil
	}
	if x, ok := e.(*event); ok && x.mark != nil && d.driver.lib.Same(x.s.dev.driver.lib) {
		err = d.dev.Here(func(c *cuda.Calls) error { return c.WaitMark(s.handle, x.mark) })
	} else {
		err = s.waitForeign(e)
	}
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	s.deps, s.busy = append(s.deps, e), true
	return nil
}

// waitForeign makes the GPU wait until a goroutine has seen e and all events before it, and writes
// that to the stream's word.
func (s *stream) waitForeign(e tier.Event) error {
	d := s.dev
	if !d.driver.lib.HasValues() {
		return fmt.Errorf(
			"cuda: the driver cannot make a stream wait for an event of another backend: %w",
			tier.ErrNotSupported,
		)
	}
	if s.word == nil { // the stream is the caller's alone
		word, err := d.bounce.word()
		if err != nil {
			return err
		}
		cuda.StoreWord(cuda.AddressOf(word), 0)
		d.mu.Lock()
		s.word = word
		d.mu.Unlock()
	}
	at, n := cuda.AddressOf(s.word), s.waits+1
	err := d.dev.Here(func(c *cuda.Calls) error {
		p, err := c.HostDevicePtr(at)
		if err != nil {
			return err
		}
		return c.WaitValue(s.handle, p, n)
	})
	if errors.Is(err, cuda.ErrNotSupported) {
		return fmt.Errorf(
			"cuda: the GPU cannot wait for an event of another backend: %w: %w",
			tier.ErrNotSupported,
			err,
		)
	}
	if err != nil {
		return err
	}
	before, now := s.waited, make(chan struct{})
	s.waits, s.waited = n, now
	d.waits.Go(func() { // ends with the event; the device's Close waits for it
		labels.GPU.Set()
		if before != nil {
			<-before
		}
		<-e.Done()
		cuda.StoreWord(at, n)
		close(now)
	})
	return nil
}
