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

// queue hands tasks to the thread. It is a list under a lock and not a channel: the
// thread takes all of it at once, and only who finds it asleep pays for waking it.
type queue struct {
	wake chan struct{} // of capacity 1

	mu struct {
		lockrank.Mutex[lockrank.Device]
		tasks  []task
		asleep bool // the thread looks at wake
		closed bool
	}
}

// put adds t unless the queue is closed; the device's own tasks are taken nevertheless. It
// returns how many are waiting.
func (q *queue) put(t task, own bool) (waiting int, ok bool) {
	q.mu.Lock()
	if q.mu.closed && !own {
		q.mu.Unlock()
		return 0, false
	}
	q.mu.tasks = append(q.mu.tasks, t)
	waiting = len(q.mu.tasks)
	asleep := q.mu.asleep
	q.mu.asleep = false
	q.mu.Unlock()
	if asleep {
		q.rouse()
	}
	return waiting, true
}

func (q *queue) rouse() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// close refuses further tasks; false if it does already.
func (q *queue) close() bool {
	q.mu.Lock()
	was := q.mu.closed
	q.mu.closed, q.mu.asleep = true, false
	q.mu.Unlock()
	q.rouse()
	return !was
}

// take returns all tasks in exchange for an empty list to use for the next, and whether
// the queue is closed.
func (q *queue) take(empty []task) (tasks []task, closed bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	tasks, q.mu.tasks = q.mu.tasks, empty
	return tasks, q.mu.closed
}

// doze says that the thread is going to look at wake; not if there is something to do.
func (q *queue) doze(closing bool) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.mu.tasks) > 0 || q.mu.closed && !closing {
		return false
	}
	q.mu.asleep = true
	return true
}
