package devpool_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
)

// opener is a device that knows the streams that it has opened, and does something before one more.
// If failed is set, work on the first fails, and failed is called when that one is closed.
type opener struct {
	tier.Device
	opened []tier.Stream
	before func() error
	failed func()
}

func (o *opener) NewStream() (tier.Stream, error) {
	if o.before != nil {
		if err := o.before(); err != nil {
			return nil, err
		}
	}
	s, err := o.Device.NewStream()
	if err != nil {
		return nil, err
	}
	o.opened = append(o.opened, s)
	if o.failed != nil && len(o.opened) == 1 {
		return &failing{s, o.failed}, nil
	}
	return s, nil
}

// closed fails unless all streams that were opened are closed.
func (o *opener) closed(t *testing.T) {
	t.Helper()
	for i, s := range o.opened {
		if err := s.Close(); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("stream %d of %d was not closed: %v", i, len(o.opened), err)
		}
	}
}

// failing is a stream on which work has failed; it does something when it is closed.
type failing struct {
	tier.Stream
	closing func()
}

func (s *failing) Err() error { return errFault }

func (s *failing) Close() error {
	s.closing()
	return s.Stream.Close()
}

// TestStreamPoolReplacesAfterClosing: another stream is opened when the one that failed is closed,
// and once.
func TestStreamPoolReplacesAfterClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		o := &opener{Device: d}
		var p *devpool.Streams
		given := make(chan tier.Stream)
		o.failed = func() {
			for range 2 {
				go func() { given <- borrow(t, p) }()
			}
			synctest.Wait()
			if len(o.opened) != 1 {
				t.Errorf("%d streams are open for a pool of one", len(o.opened))
			}
		}
		p, err = devpool.NewStreams(o, 1)
		ok(t, err)
		p.Return(borrow(t, p))
		second := <-given
		p.Return(second)
		if third := <-given; third != second || len(o.opened) != 2 {
			t.Errorf("%d streams were opened for a pool of one", len(o.opened))
		}
		p.Return(second)
		ok(t, p.Close())
		o.closed(t)
		ok(t, d.Close())
	})
}

// TestStreamPoolThatCannotBeOpened: the streams that were opened before the one that fails are
// closed.
func TestStreamPoolThatCannotBeOpened(t *testing.T) {
	o := &opener{Device: openDevice(t, sim.Config{Memory: 1 << 20})}
	o.before = func() error {
		if len(o.opened) == 2 {
			return errFault
		}
		return nil
	}
	if _, err := devpool.NewStreams(o, 3); !errors.Is(err, errFault) || len(o.opened) != 2 {
		t.Errorf("%v, with %d streams opened", err, len(o.opened))
	}
	o.closed(t)
}

// TestStreamPoolClosedWhileItOpens: a stream that is opened for a pool that is closed meanwhile is
// closed, too.
func TestStreamPoolClosedWhileItOpens(t *testing.T) {
	o := &opener{Device: openDevice(t, sim.Config{Memory: 1 << 20}), failed: func() {}}
	p, err := devpool.NewStreams(o, 2)
	ok(t, err)
	first, s := borrow(t, p), borrow(t, p)
	p.Return(first) // it has failed: another is missing now
	var lent error
	o.before = func() error { lent = p.Close(); return nil }
	if _, err := p.Borrow(t.Context()); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("borrowing from a pool that is closed meanwhile: %v", err)
	}
	if lent == nil {
		t.Error("Close with a stream lent out says nothing")
	}
	p.Return(s)
	if len(o.opened) != 3 {
		t.Errorf("%d streams were opened", len(o.opened))
	}
	o.closed(t)
}

// TestStreamPoolAtTheEndOfAWait: a borrower whose context ends before a stream comes back gets the
// cause, and the stream is there for the next.
func TestStreamPoolAtTheEndOfAWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		p, err := devpool.NewStreams(d, 1)
		ok(t, err)
		s := borrow(t, p)
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := make(chan error)
		go func() {
			_, err := p.Borrow(ctx)
			gone <- err
		}()
		synctest.Wait()
		cancel(errFault)
		p.Return(s)
		if err := <-gone; err != errFault {
			t.Errorf("a borrower whose context ended got %v", err)
		}
		if again := borrow(t, p); again != s {
			t.Error("the stream that came back is not the next to be lent")
		}
		p.Return(s)
		ok(t, p.Close())
		ok(t, d.Close())
	})
}

// TestStreamPoolThatCannotReplace: a stream that cannot be opened is an error of the borrower that
// needs it. The place stays, and other streams are lent.
func TestStreamPoolThatCannotReplace(t *testing.T) {
	d, f := faultyDevice(t, 1<<20)
	p := newStreamPool(t, d, 2)
	bad, good := borrow(t, p), borrow(t, p)
	spoil(t, d, f, bad)
	p.Return(bad)
	f.next(sim.OpNewStream, 1)
	if _, err := p.Borrow(t.Context()); !errors.Is(err, errFault) {
		t.Errorf("with no stream to be opened: %v", err)
	}
	third := borrow(t, p) // which can be opened now
	p.Return(good)
	if s := borrow(t, p); s != good {
		t.Error("the other stream is not lent")
	}
	p.Return(third)
	p.Return(good)
}

// A device that panics has opened no stream: who borrows is told, and the next one gets one.
func TestStreamPoolOfADeviceThatPanics(t *testing.T) {
	o := &opener{Device: openDevice(t, sim.Config{Memory: 1 << 20}), failed: func() {}}
	p := newStreamPool(t, devpool.Guarded(o), 1)
	p.Return(borrow(t, p)) // it has failed, and nobody waits for another
	o.before = func() error { panic(errFault) }
	for range 3 {
		if _, err := p.Borrow(t.Context()); !errors.Is(err, errFault) {
			t.Errorf("borrowing: %v", err)
		}
	}
	o.before = nil
	p.Return(borrow(t, p))
}
