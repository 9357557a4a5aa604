package devpool_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

func newStreamPool(t testing.TB, d tier.Device, size int) *devpool.Streams {
	t.Helper()
	p, err := devpool.NewStreams(d, size)
	ok(t, err)
	t.Cleanup(func() {
		if err := p.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("closing the stream pool: %v", err)
		}
	})
	return p
}

func borrow(t testing.TB, p *devpool.Streams) tier.Stream {
	t.Helper()
	s, err := p.Borrow(context.Background())
	ok(t, err)
	return s
}

// spoil makes work on s fail.
func spoil(t testing.TB, d tier.Device, f *faults, s tier.Stream) {
	t.Helper()
	a, err := d.Alloc(s, 1)
	ok(t, err)
	f.next(sim.OpFill, 1)
	ok(t, d.Fill(s, a, 0, 1))
	ok(t, d.Free(s, a))
	if err := s.Sync(); !errors.Is(err, errFault) {
		t.Fatalf("the stream's work was to fail: %v", err)
	}
}

func TestStreamPoolLends(t *testing.T) {
	d := openDevice(t, sim.Config{Memory: 1 << 20})
	p := newStreamPool(t, d, 2)
	if p.Device != tier.Device(d) {
		t.Error("the pool is of another device")
	}
	a, b := borrow(t, p), borrow(t, p)
	if a == b {
		t.Fatal("one stream is lent twice")
	}
	p.Return(a)
	if again := borrow(t, p); again != a {
		t.Error("the stream that came back is not the next to be lent")
	}
	p.Return(a)
	mustPanic(t, func() { p.Return(a) })
	other, err := d.NewStream()
	ok(t, err)
	mustPanic(t, func() { p.Return(other) })
	p.Return(b)
	if _, err := devpool.NewStreams(d, 0); err == nil {
		t.Error("a pool of no streams")
	}
}

func TestStreamPoolWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		p, err := devpool.NewStreams(d, 1)
		ok(t, err)
		s := borrow(t, p)
		cause := errors.New("no longer wanted")
		ctx, cancel := context.WithCancelCause(t.Context())
		given := make(chan error, 1)
		go func() { _, err := p.Borrow(ctx); given <- err }()
		synctest.Wait()
		var order []int
		var wg sync.WaitGroup
		for i := range 5 {
			wg.Go(func() {
				s, err := p.Borrow(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				order = append(order, i)
				p.Return(s)
			})
			synctest.Wait()
		}
		cancel(cause)
		if err := <-given; err != cause {
			t.Errorf("a borrower whose context ended: %v; want its cause", err)
		}
		if len(order) != 0 {
			t.Errorf("%v were served with no stream to be had", order)
		}
		p.Return(s)
		wg.Wait()
		for i, who := range order {
			if who != i {
				t.Errorf("borrowers were served in the order %v", order)
				break
			}
		}
		for range 20 { // one is free: no need to look at the context
			s, err := p.Borrow(ctx)
			if err != nil {
				t.Fatalf("Borrow of a free stream: %v", err)
			}
			p.Return(s)
		}
		borrow(t, p)
		if err := p.Close(); err == nil {
			t.Error("Close with a stream lent out says nothing")
		}
		ok(t, d.Close())
	})
}

func TestStreamPoolClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, err := sim.New(sim.Config{Memory: 1 << 20})
		ok(t, err)
		p, err := devpool.NewStreams(d, 2)
		ok(t, err)
		a, b := borrow(t, p), borrow(t, p)
		p.Return(b)
		b = borrow(t, p)
		waiting := make(chan error, 2)
		for range 2 {
			go func() { _, err := p.Borrow(t.Context()); waiting <- err }()
		}
		synctest.Wait()
		if err := p.Close(); err == nil || errors.Is(err, tier.ErrClosed) {
			t.Errorf("Close with two streams lent out: %v", err)
		}
		for range 2 {
			if err := <-waiting; !errors.Is(err, tier.ErrClosed) {
				t.Errorf("who waited was told %v; want ErrClosed", err)
			}
		}
		if _, err := p.Borrow(t.Context()); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("Borrow after Close: %v", err)
		}
		if err := p.Close(); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("the second Close: %v", err)
		}
		p.Return(a)
		p.Return(b)
		for _, s := range []tier.Stream{a, b} {
			if err := s.Close(); !errors.Is(err, tier.ErrClosed) {
				t.Errorf("a stream that was returned after Close was not closed: %v", err)
			}
		}
		ok(t, d.Close())
	})
}

// TestStreamPoolReplacesFailedStreams: a failure stays with the borrower who had
// it.
func TestStreamPoolReplacesFailedStreams(t *testing.T) {
	d, f := faultyDevice(t, 1<<20)
	p := newStreamPool(t, d, 1)
	bad := borrow(t, p)
	spoil(t, d, f, bad)
	p.Return(bad)
	good := borrow(t, p)
	if good == bad || good.Err() != nil {
		t.Errorf("the failed stream is lent again: %v", good.Err())
	}
	if err := bad.Close(); !errors.Is(err, tier.ErrClosed) {
		t.Errorf("the failed stream was not closed: %v", err)
	}
	// Nothing can be opened in its place now; later it can.
	spoil(t, d, f, good)
	p.Return(good)
	f.next(sim.OpNewStream, 1)
	if _, err := p.Borrow(t.Context()); !errors.Is(err, errFault) {
		t.Errorf("with no stream and none to be opened: %v", err)
	}
	p.Return(borrow(t, p))
	f.next(sim.OpNewStream, 1)
	if _, err := devpool.NewStreams(d, 2); !errors.Is(err, errFault) {
		t.Errorf("opening a pool of streams: %v", err)
	}
}

// TestStreamPoolTellsWaiters: those who wait get the stream that is opened for a
// failed one, or hear why there is none.
func TestStreamPoolTellsWaiters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &faults{}
		d, err := sim.NewFaulty(sim.Config{Memory: 1 << 20}, f.ask)
		ok(t, err)
		p, err := devpool.NewStreams(d, 1)
		ok(t, err)
		for _, opens := range []bool{true, false} {
			s := borrow(t, p)
			spoil(t, d, f, s)
			type result struct {
				s   tier.Stream
				err error
			}
			got := make(chan result, 1)
			go func() { s, err := p.Borrow(t.Context()); got <- result{s, err} }()
			synctest.Wait()
			if !opens {
				f.next(sim.OpNewStream, 1)
			}
			p.Return(s)
			r := <-got
			if opens {
				ok(t, r.err)
				p.Return(r.s)
			} else if !errors.Is(r.err, errFault) {
				t.Errorf("who waited was told %v", r.err)
			}
		}
		p.Return(borrow(t, p))
		ok(t, p.Close())
		ok(t, d.Close())
	})
}

// TestStreamPoolConcurrent: no stream is ever with two borrowers, whatever
// fails or ends.
func TestStreamPoolConcurrent(t *testing.T) {
	seed := testseed.One(t)
	d, f := faultyDevice(t, 1<<20)
	p := newStreamPool(t, d, 3)
	var users sync.Map // tier.Stream → *atomic.Int32
	var wg sync.WaitGroup
	for g := range uint64(6) {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(seed, g))
			for range rounds(300) {
				ctx, cancel := context.WithCancel(context.Background())
				if r.IntN(10) == 0 {
					cancel()
				}
				s, err := p.Borrow(ctx)
				cancel()
				if err != nil {
					if !errors.Is(err, context.Canceled) {
						t.Error(err)
					}
					continue
				}
				n, _ := users.LoadOrStore(s, new(atomic.Int32))
				if n.(*atomic.Int32).Add(1) != 1 {
					t.Error("a stream has two borrowers")
				}
				if s.Err() != nil {
					t.Errorf("a failed stream was lent: %v", s.Err())
				}
				a, err := d.Alloc(s, 1)
				if err != nil {
					t.Error(err)
				} else {
					if r.IntN(8) == 0 {
						f.next(sim.OpFill, 1)
					}
					if err := errors.Join(d.Fill(s, a, 1, 1), d.Free(s, a)); err != nil {
						t.Error(err)
					}
				}
				_ = s.Sync() // fails now and then, as it should
				n.(*atomic.Int32).Add(-1)
				p.Return(s)
			}
		})
	}
	wg.Wait()
}
