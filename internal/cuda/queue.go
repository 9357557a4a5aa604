package cuda

import "github.com/spillway-db/spillway/internal/lockrank"

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

// watch makes the thread look at a mark.
func (q *queue) watch(m *Mark) {
	q.mu.Lock()
	q.mu.marks = append(q.mu.marks, m)
	q.unlockAndWake()
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
