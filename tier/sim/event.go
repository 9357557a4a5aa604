package sim

import "sync/atomic"

// event is done when complete has been called. Its channel is made when somebody
// asks for it, which most do not: they ask when it is done.
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
