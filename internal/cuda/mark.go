package cuda

import (
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/internal/thread"
)

// Mark is a point in a stream's work.
type Mark struct {
	done  chan struct{}
	err   error
	dev   *Device
	s     Stream
	event Event
	then  func(error) error // may be nil
	since time.Time         // when the thread was given it
	// The users of the event: the thread that watches it, and goroutines that make a stream wait
	// for it. The last user returns it for reuse.
	users atomic.Int32
}

// Done is closed when the work before the mark is done or has failed.
func (m *Mark) Done() <-chan struct{} { return m.done }

// Err is nil until Done is closed. Then it is the failure of that work, if it failed.
func (m *Mark) Err() error {
	select {
	case <-m.done:
		return m.err
	default:
		return nil
	}
}

// hold keeps the event from being used for another mark; false if it is no longer this one's.
func (m *Mark) hold() bool {
	for {
		n := m.users.Load()
		if n == 0 {
			return false
		}
		if m.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

// drop ends a hold.
func (m *Mark) drop() {
	if m.users.Add(-1) == 0 {
		m.dev.queue.recycle(m.event)
	}
}

// Mark returns a mark behind the work on s so far. If then is not nil, it is called between the work
// and Done, with the result of the work, and its result is the mark's Err. It runs on the device's
// thread, must be brief, and must not wait for the device. Streams that wait for the mark do not
// wait for it.
func (c *Calls) Mark(s Stream, then func(err error) error) (*Mark, error) {
	e, err := c.recorded(s)
	if err != nil {
		return nil, err
	}
	return c.watched(s, e, then), nil
}

// recorded returns an event behind the work on s so far.
func (c *Calls) recorded(s Stream) (e Event, err error) {
	if e = c.dev.queue.event(); e == 0 {
		e, err = c.NewEvent()
	}
	if err == nil {
		err = c.Record(e, s)
	}
	if err != nil {
		c.dev.queue.recycle(e)
	}
	return e, err
}

// watched makes a mark of an event of s, for the thread to look at.
func (c *Calls) watched(s Stream, e Event, then func(error) error) *Mark {
	m := &Mark{done: make(chan struct{}), dev: c.dev, s: s, event: e, then: then, since: time.Now()}
	m.users.Store(1)
	q := &c.dev.queue
	q.mu.Lock()
	q.mu.marks = append(q.mu.marks, m)
	q.unlockAndWake()
	return m
}

// markSoonFor is how long MarkSoon looks: what an idle stream takes to come to an event, several
// times over, and less than it takes to wake a thread that would look instead.
const markSoonFor = 15 * time.Microsecond

// MarkSoon is Mark for a stream on which there is next to no work. It looks for a moment
// itself; if the mark is reached by then it calls then here, and returns no mark but what then
// does.
func (c *Calls) MarkSoon(s Stream, then func(err error) error) (m *Mark, result, err error) {
	e, err := c.recorded(s)
	if err != nil {
		return nil, nil, err
	}
	for began := time.Now(); ; {
		done, err := c.reachedOrLost(e)
		if done || err != nil {
			c.dev.queue.recycle(e)
			return nil, then(err), nil
		}
		if time.Since(began) > markSoonFor {
			return c.watched(s, e, then), nil, nil
		}
	}
}

// WaitMark makes work put on s, a stream of this device, wait for m, which may be another device's.
// If m is reached there is nothing to wait for; its Err is the failure of the work before it.
func (c *Calls) WaitMark(s Stream, m *Mark) error {
	if !m.hold() {
		return nil
	}
	defer m.drop()
	return c.WaitEvent(s, m.event)
}

// watched are the marks of a stream that are not reached yet, in the order in which they will be. So
// only the first need be looked at.
type watched struct {
	s     Stream
	marks []*Mark
}

// poll queries the events, ends the marks of those that have happened, and reports whether one has.
func (d *Device) poll() (reached bool) {
	for i := range d.watches {
		marks := d.watches[i].marks
		for len(marks) > 0 {
			m := marks[0]
			done, err := d.calls.reachedOrLost(m.event)
			if !done && err == nil {
				break
			}
			if m.err = err; m.then != nil {
				m.err = m.then(err)
				m.then = nil // and what it holds
			}
			close(m.done)
			d.woken = d.woken || time.Since(m.since) > thread.LookFor
			m.drop()
			marks[0] = nil
			marks, reached = marks[1:], true
		}
		d.watches[i].marks = marks
	}
	d.watches = slices.DeleteFunc(d.watches, func(w watched) bool { return len(w.marks) == 0 })
	return reached
}

// timesAsked is how often the driver must report that the work before an event has failed.
const timesAsked = 3

// reachedOrLost is EventDone for a decision to reuse the work's memory. Failed work returns an
// error each time. A single error may be a query that was refused while the work goes on. All
// threads are refused while one of the process records a graph, as programs do that share the
// context.
func (c *Calls) reachedOrLost(e Event) (done bool, err error) {
	for range timesAsked {
		if done, err = c.EventDone(e); err == nil {
			return done, nil
		}
		if errors.Is(err, ErrStreamCaptureUnsupported) {
			return false, nil
		}
	}
	return false, err
}

// queue hands new marks to the device's thread, and counts what needs the context. It is a list
// under a lock and not a channel: the thread takes all of it at once, and only a caller that finds
// it asleep pays for waking it.
type queue struct {
	wake chan struct{} // of capacity 1

	mu struct {
		lockrank.Mutex[lockrank.Device]
		marks  []*Mark
		free   []Event // of marks that are reached
		out    int     // events of marks that are not, or that are in use
		guests int     // calls of Here under way
		asleep bool    // the thread waits for wake
		closed bool
	}
}

// unlockAndWake wakes the thread if it sleeps and may have something to do: there are new marks, or
// the queue is closed and it may be the last guest or event that has gone.
func (q *queue) unlockAndWake() {
	wake := q.mu.asleep && (q.mu.closed || len(q.mu.marks) > 0)
	if wake {
		q.mu.asleep = false
	}
	q.mu.Unlock()
	if wake {
		select {
		case q.wake <- struct{}{}:
		default:
		}
	}
}

// enter lets a guest in unless the queue is closed. A guest keeps the context alive until exit.
func (q *queue) enter() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.mu.closed {
		return false
	}
	q.mu.guests++
	return true
}

func (q *queue) exit() {
	q.mu.Lock()
	q.mu.guests--
	q.unlockAndWake()
}

// event counts an event for a mark, and returns one if one is free; else 0.
func (q *queue) event() (e Event) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.out++
	if n := len(q.mu.free); n > 0 {
		e, q.mu.free = q.mu.free[n-1], q.mu.free[:n-1]
	}
	return e
}

// recycle takes an event back; 0 for one that was counted and could not be had.
func (q *queue) recycle(e Event) {
	q.mu.Lock()
	q.mu.out--
	if e != 0 {
		q.mu.free = append(q.mu.free, e)
	}
	q.unlockAndWake()
}

// close refuses further guests. It returns false if it has done so before.
func (q *queue) close() bool {
	q.mu.Lock()
	was := q.mu.closed
	q.mu.closed = true
	q.unlockAndWake()
	return !was
}

// take exchanges the list of new marks for an empty one. With over, there is and will be nothing
// more to do. With asleep, the thread is going to wait for wake; that is not set if there is
// something to do.
func (q *queue) take(marks []*Mark, sleep bool) (_ []*Mark, over, asleep bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	marks, q.mu.marks = q.mu.marks, marks
	over = q.mu.closed && q.mu.guests == 0 && q.mu.out == 0
	q.mu.asleep = sleep && !over && len(marks) == 0
	return marks, over, q.mu.asleep
}
