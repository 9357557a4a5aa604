package host

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// hostBuffer draws a buffer of size bytes from a space of its own.
func hostBuffer(t testing.TB, size int64, cuts ...int64) *tier.Buffer {
	t.Helper()
	a, err := NewArena(Config{Capacity: extent.RoundUp(size, tier.Page), Node: -1})
	if err != nil {
		t.Fatal(err)
	}
	space, err := tier.NewSpace(tier.SpaceConfig{
		ID: tier.ID{Kind: tier.Host}, Capacity: a.Stats().Capacity, Pool: a, Node: -1, Backend: "host",
		Marks: tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.5},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if u := space.State().Usage; u.Used() != 0 {
			t.Errorf("in the end the space has %+v", u)
		}
		if err := space.Close(); err != nil {
			t.Error(err)
		}
	})
	b, err := space.DrawNew(size, cuts...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustBorrow(t testing.TB, s *Staging) []byte {
	t.Helper()
	c, err := s.Borrow(context.Background(), true)
	if err != nil {
		t.Fatal(err)
	}
	if int64(len(c)) != s.Chunk() || int64(cap(c)) != s.Chunk() {
		t.Fatalf("a chunk of %d bytes with room for %d, want %d", len(c), cap(c), s.Chunk())
	}
	return c
}

func TestStagingLendsEachChunkOnce(t *testing.T) {
	s := NewStaging(hostBuffer(t, 5*tier.Page+100), 2*tier.Page)
	if s.count != 2 || s.Chunk() != 2*tier.Page {
		t.Fatalf("%d chunks of %d bytes", s.count, s.Chunk())
	}
	a, b := mustBorrow(t, s), mustBorrow(t, s)
	a[0], b[0] = 1, 2
	if a[0] != 1 {
		t.Error("the same chunk was lent twice")
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("enough")
	cancel(why)
	if _, err := s.Borrow(ctx, true); !errors.Is(err, why) {
		t.Errorf("Borrow with an ended context: %v", err)
	}
	s.Return(a[:10])
	if c, err := s.Borrow(ctx, true); err != nil || &c[0] != &a[0] || len(c) != 2*tier.Page {
		t.Errorf("a chunk that is here is lent whatever the context says: %v", err)
	}
	s.Return(a)
	s.Return(b)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestStagingServesWaitersAndWakesThemAtClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewStaging(hostBuffer(t, tier.Page), tier.Page)
		c := mustBorrow(t, s)
		type result struct {
			c   []byte
			err error
		}
		got := make(chan result, 2)
		for range 2 {
			go func() {
				c, err := s.Borrow(context.Background(), true)
				got <- result{c, err}
			}()
		}
		synctest.Wait()
		if len(got) != 0 {
			t.Fatal("a borrower did not wait")
		}
		s.Return(c)
		r := <-got
		if r.err != nil || &r.c[0] != &c[0] {
			t.Fatalf("the waiter got %v", r.err)
		}
		synctest.Wait()
		if err := s.Close(); err == nil || !strings.Contains(err.Error(), "1 of 1") {
			t.Errorf("Close with a chunk out: %v", err)
		}
		if r := <-got; !errors.Is(r.err, tier.ErrClosed) {
			t.Errorf("the other waiter got %v", r.err)
		}
		if s.buf.Leased() != 0 || s.buf.Space().State().Used() == 0 {
			t.Error("the buffer went before its last chunk")
		}
		s.Return(r.c)
		if s.buf.Space().State().Used() != 0 {
			t.Error("the last chunk did not release the buffer")
		}
		if _, err := s.Borrow(context.Background(), true); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("Borrow after Close: %v", err)
		}
		if err := s.Close(); !errors.Is(err, tier.ErrClosed) {
			t.Errorf("a second Close: %v", err)
		}
	})
}

// A waiter whose context ends at the moment in which a chunk is returned, or in which the staging is
// closed, gets the chunk or an error, and no chunk is lost.
func TestStagingAtTheSameMoment(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the waiter runs when both have happened
	synctest.Test(t, func(t *testing.T) {
		s := NewStaging(hostBuffer(t, tier.Page), tier.Page)
		c := mustBorrow(t, s)
		for _, closes := range []bool{false, true} {
			ctx, cancel := context.WithCancel(t.Context())
			var got []byte
			gone := make(chan error)
			go func() {
				var err error
				got, err = s.Borrow(ctx, true)
				gone <- err
			}()
			synctest.Wait()
			cancel()
			if closes {
				if err := s.Close(); err == nil {
					t.Error("Close with a chunk out returns no error")
				}
			} else {
				s.Return(c)
			}
			err := <-gone
			switch {
			case errors.Is(err, context.Canceled) || closes && errors.Is(err, tier.ErrClosed):
				if got != nil {
					t.Errorf("a chunk and %v", err)
				}
			case err != nil || closes || &got[0] != &c[0]:
				t.Errorf("neither the chunk nor an error of the wait: %v", err)
			default:
				s.Return(got)
			}
			if !closes && &mustBorrow(t, s)[0] != &c[0] {
				t.Error("another chunk")
			}
		}
		s.Return(c)
	})
}

func TestStagingConcurrent(t *testing.T) {
	tiertest.NoLeaks(t)
	s := NewStaging(hostBuffer(t, 3*tier.Page), tier.Page)
	var wg sync.WaitGroup
	for g := range byte(8) {
		wg.Go(func() {
			for i := range 200 {
				ctx, cancel := context.WithCancel(context.Background())
				if (i+int(g))%3 == 0 {
					go cancel()
				}
				c, err := s.Borrow(ctx, true)
				cancel()
				if err != nil {
					if !errors.Is(err, context.Canceled) {
						t.Error(err)
						return
					}
					continue
				}
				c[0] = g // the race detector sees two owners
				if c[0] != g {
					t.Error("two owners of a chunk")
				}
				s.Return(c)
			}
		})
	}
	wg.Wait()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

func TestStagingMisusePanics(t *testing.T) {
	s := NewStaging(hostBuffer(t, 2*tier.Page), tier.Page)
	c := mustBorrow(t, s)
	s.Return(c)
	short := hostBuffer(t, tier.Page)
	defer short.Release()
	for name, f := range map[string]func(){
		"chunk of 0":           func() { NewStaging(short, 0) },
		"chunk not of pages":   func() { NewStaging(short, 100) },
		"no chunk":             func() { NewStaging(short, 2*tier.Page) },
		"no buffer":            func() { NewStaging(nil, tier.Page) },
		"returned twice":       func() { s.Return(c) },
		"never borrowed":       func() { s.Return(make([]byte, tier.Page)) },
		"not from its start":   func() { s.Return(c[1:]) },
		"nothing was returned": func() { s.Return(nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f()
		}()
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}
