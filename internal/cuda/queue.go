package cuda

import "github.com/spillway-db/spillway/internal/lockrank"

// task is what the thread is to run: f, whose caller waits for the reply, or post.
type task struct {
	f     func(*Calls) error
	post  func(*Calls)
	reply *reply
}

type reply struct {
	done     chan struct{} // of capacity 1
	err      error
	panicked any
}

// run runs the task on the thread.
func (t task) run(c *Calls) {
	if t.post != nil {
		t.post(c)
		return
	}
	defer func() {
		t.reply.panicked = recover()
		t.reply.done <- struct{}{}
	}()
	t.reply.err = t.f(c)
}

// queue hands tasks and new marks to the thread. It is a list under a lock and not a channel: the
// thread takes all of it at once, and only a caller that finds it asleep pays for waking it.
type queue struct {
	wake chan struct{} // of capacity 1

	mu struct {
		lockrank.Mutex[lockrank.Device]
		tasks  []task
		marks  []watch
		free   []Event // of marks that are reached
		out    int     // events of marks that are not, or that are in use
		guests int     // calls of Here under way
		asleep bool    // the thread looks at wake
		closed bool
	}
}

// put adds t unless the queue is closed, and returns how many are waiting.
func (q *queue) put(t task) (waiting int, ok bool) {
	q.mu.Lock()
	if q.mu.closed {
		q.mu.Unlock()
		return 0, false
	}
	q.mu.tasks = append(q.mu.tasks, t)
	waiting = len(q.mu.tasks)
	q.unlockAndRouse()
	return waiting, true
}

// watch has the thread look at a mark.
func (q *queue) watch(w watch) {
	q.mu.Lock()
	q.mu.marks = append(q.mu.marks, w)
	q.unlockAndRouse()
}

// unlockAndRouse wakes the thread if it sleeps.
func (q *queue) unlockAndRouse() {
	asleep := q.mu.asleep
	q.mu.asleep = false
	q.mu.Unlock()
	if asleep {
		select {
		case q.wake <- struct{}{}:
		default:
		}
	}
}

// enter lets a guest in unless the queue is closed. A guest keeps the context alive.
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
	q.unlockIfOpen()
}

// unlockIfOpen wakes the thread if it waits for the last guest or event.
func (q *queue) unlockIfOpen() {
	if q.mu.closed {
		q.unlockAndRouse()
		return
	}
	q.mu.Unlock()
}

// event counts an event for a mark, and returns one if one is free.
func (q *queue) event() (Event, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.mu.out++
	n := len(q.mu.free)
	if n == 0 {
		return 0, false
	}
	e := q.mu.free[n-1]
	q.mu.free = q.mu.free[:n-1]
	return e, true
}

// recycle takes an event back; 0 for one that was counted and could not be had.
func (q *queue) recycle(e Event) {
	q.mu.Lock()
	q.mu.out--
	if e != 0 {
		q.mu.free = append(q.mu.free, e)
	}
	q.unlockIfOpen()
}

// close refuses further tasks and guests; false if it does already.
func (q *queue) close() bool {
	q.mu.Lock()
	was := q.mu.closed
	q.mu.closed = true
	q.unlockAndRouse()
	return !was
}

// take exchanges the lists for empty ones. over says that there is and will be nothing more.
func (q *queue) take(tasks []task, marks []watch) (_ []task, _ []watch, over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	tasks, q.mu.tasks = q.mu.tasks, tasks
	marks, q.mu.marks = q.mu.marks, marks
	return tasks, marks, q.mu.closed && len(tasks) == 0 && q.mu.guests == 0 && q.mu.out == 0
}

// doze says that the thread is going to look at wake; not if there is something to do.
func (q *queue) doze() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.mu.tasks)+len(q.mu.marks) > 0 || q.mu.closed && q.mu.guests == 0 && q.mu.out == 0 {
		return false
	}
	q.mu.asleep = true
	return true
}
