package cuda

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/internal/labels"
	"github.com/spillway-db/spillway/tier"
)

// stream is a stream of the GPU's, made by the device (NewStream) or by a program (AdoptStream).
//
// A stream is open until its Close, or that of the device, sets closed. From then on it takes no
// work. The closer waits for the work that is there and destroys the handle, unless the handle is
// the program's.
//
// A stream has failed once err is set: because its work failed, or work of another stream for which
// it waited, or because the context was lost. No copies are put on it then. Frees, events and Close
// work as before, so that memory comes back.
//
// due collects the host's work that must follow the GPU's work so far. The next event does it.
type stream struct {
	dev     *gpu
	handle  cuda.Stream
	adopted bool // the handle is the program's
	closed  atomic.Bool
	// turn holds a token while a goroutine records: the owner of the stream, or a reaper. Two at
	// once could take what is due in one order and record in the other. Then the event behind which
	// nothing is due could be the first to be done.
	turn chan struct{}
	last *cuda.Mark // the last one recorded, by either

	// The owner of the stream alone uses these.
	queued int        // pieces of work put there since paced, or a little later
	paced  tier.Event // the last event that makeRoom has recorded; nil if there is none
	// The GPU waits for waits events of others. word is pinned memory that counts those that have
	// happened, nil without; waited is closed when the last of them has.
	word   []byte
	waits  uint32
	waited <-chan struct{}

	// The device's mutex guards these.
	err  error        // the first failure that is known
	busy bool         // work that takes time was put on it since the last event
	open int          // events that are not reached yet
	due  due          // since the last event
	deps []tier.Event // what events to come depend on besides the GPU's own work
}

// due is what the host has to do when the GPU has come to a point of a stream.
type due struct {
	frees []*devpool.Allocation // to take back
	spent [][]byte              // pinned memory that copies to the device are done with
	outs  []out                 // bytes that have arrived in pinned memory
	bytes int64                 // of pinned memory in all this
}

// out is pinned memory whose bytes belong elsewhere.
type out struct{ dst, from []byte }

// add adds what is due later.
func (d *due) add(later due) {
	d.frees = append(d.frees, later.frees...)
	d.spent = append(d.spent, later.spent...)
	d.outs = append(d.outs, later.outs...)
	d.bytes += later.bytes
}

// chunks returns the pinned memory of work that is not done.
func (d *due) chunks() [][]byte {
	chunks := d.spent
	for _, o := range d.outs {
		chunks = append(chunks, o.from)
	}
	return chunks
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

// maxQueued is about how many pieces of work wait on a stream at most. A driver that has no room
// for more has its callers wait, also those with work for other streams. An H100 has room for some
// 2,000 (driver 580).
const maxQueued = 1024

// makeRoom counts pieces of work that are about to be put on the stream. It waits while too many
// are there. So nobody waits in the driver.
func (s *stream) makeRoom(pieces int) {
	if s.queued += pieces; s.queued < maxQueued/2 {
		return
	}
	s.queued = 0
	e, err := s.record()
	if err != nil {
		return // it is tried again with the next half
	}
	before := s.paced
	s.paced = e
	if before != nil {
		<-before.Done()
	}
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
	if s.closed.Load() {
		return s.Err()
	}
	return s.sync()
}

// sync waits for the work put on the stream so far, by an event if the driver does not refuse one.
func (s *stream) sync() error {
	if e, err := s.record(); err == nil {
		<-e.Done()
		return s.Err()
	}
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	e := &event{s: s}
	w := s.take(e, true)
	// Not on the device's thread: what the stream waits for may need that.
	err := again(func() error { return s.dev.dev.Here(func(c *cuda.Calls) error { return c.SyncStream(s.handle) }) })
	s.catchUp()
	e.finish(s.reached(w, err, false), w)
	return s.Err()
}

// catchUp waits until the device has done what was due at the events before: it looks at them when
// it gets to it, which may be some time after the work. It is called in turn.
func (s *stream) catchUp() {
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

// Close implements tier.Stream.
func (s *stream) Close() error {
	if !s.dev.gate.Enter() {
		return tier.ErrClosed
	}
	defer s.dev.gate.Leave()
	if s.closed.Swap(true) {
		return tier.ErrClosed
	}
	return s.end()
}

// end waits for the work and gives the stream up. Err returns the result of the work.
func (s *stream) end() error {
	d := s.dev
	_ = s.sync()
	s.turn <- struct{}{}
	s.catchUp() // also where there was no event to be had any more
	<-s.turn
	var err error
	if !s.adopted {
		err = d.dev.Surely(func(c *cuda.Calls) error { return c.DestroyStream(s.handle) })
	}
	d.mu.Lock()
	delete(d.mu.streams, s)
	failed := s.err != nil
	d.mu.Unlock()
	if s.word != nil {
		if s.waited != nil {
			<-s.waited // if the stream has failed the word may still be written
		}
		d.bounce.count(1)
		d.bounce.put(s.word)
	}
	if failed {
		return nil // a driver returns it again, at any call
	}
	return err
}

// event is a point in a stream's work. It has one of three forms.
//
// With a mark and no tail, nothing but the GPU's work is waited for: when that is done the device's
// thread calls reached, and then closes the mark's channel.
//
// With both, there is more to wait for: events of other streams, or bytes that have arrived in pinned
// memory and belong elsewhere. A goroutine waits for the mark and calls finish, which closes tail.
//
// Without a mark the work is done, or is lost with the context. tail is closed then, or is closed by
// finish.
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

// record returns an event behind the work so far, which does what is due.
func (s *stream) record() (tier.Event, error) {
	s.turn <- struct{}{} // held by others for some calls of the driver at most
	defer func() { <-s.turn }()
	return s.recordInTurn()
}

// recordInTurn is record for a caller that has the turn. Whatever the host has to wait for, or to do
// that may take long, is left to a goroutine.
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
	switch {
	case s.dev.refused(err): // there is nothing that the work could still do, and no event to be had any more
		result = s.reached(w, err, true)
	case err != nil:
		s.restore(e, w)
		return nil, err
	}
	if e.mark != nil {
		s.last = e.mark
	}
	switch {
	case e.tail != nil:
		s.dev.waits.Go(func() { // ends with the events that the stream waits for; the device's Close waits for it
			labels.GPU.Set()
			if e.mark != nil {
				<-e.mark.Done()
				result = e.mark.Err()
			}
			e.finish(result, w)
		})
	case e.mark == nil:
		e.tail, e.err = past, result
	}
	return e, nil
}

// past is the channel of events that were reached before the first query.
var past = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

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
	w := &pending{}
	var failed error
	for _, dep := range deps { // without a lock: this may call other backends' code
		if done, err := over(dep); !done {
			w.deps = append(w.deps, dep)
		} else if failed == nil {
			failed = err
		}
	}
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	if s.err == nil {
		s.err = failed
	}
	w.due, w.light, w.failed = s.due, !s.busy && s.open == 0, s.err
	w.deps = append(w.deps, s.deps[len(deps):]...)
	s.due, s.busy, s.deps = due{}, false, w.deps
	s.open++
	if always || len(w.deps) > 0 || len(w.outs) > 0 {
		e.tail = make(chan struct{})
		s.deps = []tier.Event{e}
	}
	return w
}

// restore takes back what take did, for an event that could not be had.
func (s *stream) restore(e *event, w *pending) {
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	w.due.add(s.due)
	s.due, s.busy = w.due, true
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
	d := s.dev
	d.suspect(err)
	d.bounce.put(w.spent...)
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range w.frees {
		d.mu.retired -= a.Charge
		if d.source.pool == 0 {
			d.source.line.Free(int64(a.Addr)-int64(d.source.base), a.Charge)
		}
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
	d, n := s.dev, s.waits+1
	if s.word == nil {
		word, err := d.bounce.get(4)
		if err != nil {
			return err
		}
		d.bounce.count(-1) // it stays until the stream ends
		s.word = word
		cuda.StoreWord(extent.Address(word), 0)
	}
	at := extent.Address(s.word)
	err := d.dev.Here(func(c *cuda.Calls) error {
		p, err := c.HostDevicePtr(at)
		if err != nil {
			return err
		}
		return c.WaitValue(s.handle, p, n)
	})
	if errors.Is(err, cuda.ErrNotSupported) {
		return fmt.Errorf("cuda: the GPU cannot wait for an event of another backend: %w: %w",
			tier.ErrNotSupported, err)
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
