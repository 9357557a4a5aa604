package devpool_test

import (
	"context"
	"errors"
	"runtime"
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

// TestStreamPoolIsNotReplacedTwice: one stream is opened for one that failed, also if somebody else
// does so meanwhile.
func TestStreamPoolIsNotReplacedTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		o := &opener{Device: d}
		var p *devpool.Streams
		var second tier.Stream
		given := make(chan tier.Stream, 1)
		o.failed = func() {
			second = borrow(t, p)
			go func() { given <- borrow(t, p) }()
			synctest.Wait()
		}
		p, err = devpool.NewStreams(o, 1)
		ok(t, err)
		p.Return(borrow(t, p))
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
	s := borrow(t, p)
	p.Return(borrow(t, p)) // the first, which has failed: another is missing now
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

// TestStreamPoolServesWhoGivesUp: who is served at the very moment in which the context ends has
// the stream, and who is refused then is told why.
func TestStreamPoolServesWhoGivesUp(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // who waits wakes when both have happened
	synctest.Test(t, func(t *testing.T) {
		d, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		for _, closes := range []bool{false, true} {
			p, err := devpool.NewStreams(d, 1)
			ok(t, err)
			s := borrow(t, p)
			ctx, cancel := context.WithCancel(t.Context())
			var got tier.Stream
			gone := make(chan error)
			go func() {
				var err error
				got, err = p.Borrow(ctx)
				gone <- err
			}()
			synctest.Wait()
			cancel()
			if closes {
				if err := p.Close(); err == nil {
					t.Error("Close with a stream lent out says nothing")
				}
			}
			p.Return(s)
			err = <-gone
			if closes {
				if !errors.Is(err, tier.ErrClosed) {
					t.Errorf("who was refused got %v", err)
				}
				continue
			}
			if got != s || err != nil {
				t.Errorf("who was served got %v, %v", got, err)
			}
			p.Return(s)
			ok(t, p.Close())
		}
		ok(t, d.Close())
	})
}

// TestStreamPoolKeepsThoseWhoMayBeServed: who waits while a stream cannot be replaced waits for the
// others.
func TestStreamPoolKeepsThoseWhoMayBeServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &faults{}
		d, err := sim.NewFaulty(sim.Config{Memory: 1 << 20}, f.ask)
		ok(t, err)
		p, err := devpool.NewStreams(d, 2)
		ok(t, err)
		bad, good := borrow(t, p), borrow(t, p)
		spoil(t, d, f, bad)
		served := make(chan error, 1)
		var got tier.Stream
		go func() { s, err := p.Borrow(t.Context()); got = s; served <- err }()
		synctest.Wait()
		f.next(sim.OpNewStream, 1)
		p.Return(bad)
		synctest.Wait()
		select {
		case err := <-served:
			t.Fatalf("who waits was told %v, with a stream still to come back", err)
		default:
		}
		p.Return(good)
		if err := <-served; err != nil || got != good {
			t.Errorf("it was given another stream, and %v", err)
		}
		p.Return(good)
		ok(t, p.Close())
		ok(t, d.Close())
	})
}

// A borrower that cannot open the stream that is missing waits for another one.
func TestStreamPoolWaitsIfItCannotOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &faults{}
		d, err := sim.NewFaulty(sim.Config{Memory: 1 << 20}, f.ask)
		ok(t, err)
		p, err := devpool.NewStreams(d, 2)
		ok(t, err)
		bad, good := borrow(t, p), borrow(t, p)
		spoil(t, d, f, bad)
		p.Return(bad)
		f.next(sim.OpNewStream, 1)
		got := make(chan tier.Stream, 1)
		go func() { got <- borrow(t, p) }()
		synctest.Wait()
		p.Return(good)
		if s := <-got; s != good {
			t.Error("it was given another stream")
		}
		p.Return(borrow(t, p)) // which can be opened now
		p.Return(good)
		ok(t, p.Close())
		ok(t, d.Close())
	})
}

// A device that panics has opened no stream: who borrows is told, and the next one gets one.
func TestStreamPoolOfADeviceThatPanics(t *testing.T) {
	o := &opener{Device: openDevice(t, sim.Config{Memory: 1 << 20}), failed: func() {}}
	p := newStreamPool(t, o, 1)
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
