package pace

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
)

// When a large request gives up, the small one behind it is let in.
func TestWindowAfterOneGaveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const mib = 1 << 20
		w := &Window{Request: mib, Depth: 4} // nothing is measured: 1 MiB may be under way
		enter := func(ctx context.Context, n int64) chan error {
			done := make(chan error, 1)
			go func() { done <- w.Enter(ctx, n, true) }()
			synctest.Wait()
			return done
		}
		if err := w.Enter(t.Context(), mib/2, true); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		large := enter(ctx, mib)
		small := enter(t.Context(), mib/4)
		if len(large) > 0 || len(small) > 0 {
			t.Fatal("more than the window was let in")
		}
		cancel()
		synctest.Wait()
		if err := <-large; !errors.Is(err, context.Canceled) {
			t.Errorf("the large one: %v", err)
		}
		if len(small) == 0 {
			t.Error("the small one still waits")
		}
		w.Leave(mib/2, true, true)
		if err := <-small; err != nil {
			t.Error(err)
		}
		w.Leave(mib/4, true, true)
		if w.mu.inside != 0 || w.mu.count != 0 {
			t.Errorf("%d bytes of %d requests are under way at the end", w.mu.inside, w.mu.count)
		}
	})
}

// A waiter whose context ends at the moment in which it is admitted has begun, and must Leave.
func TestWindowAdmitsAtTheSameMoment(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the waiter runs when both have happened
	synctest.Test(t, func(t *testing.T) {
		const mib = 1 << 20
		w := &Window{Request: mib, Depth: 1}
		if err := w.Enter(t.Context(), mib, true); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		entered := make(chan error)
		go func() { entered <- w.Enter(ctx, mib, true) }()
		synctest.Wait()
		cancel()
		w.Leave(mib, true, false)
		if err := <-entered; err != nil || w.UnderWay() != mib {
			t.Errorf("%v, with %d bytes under way", err, w.UnderWay())
		}
		w.Leave(mib, true, false)
	})
}

// Requests begin in the order of arrival: a small one does not pass a large one.
func TestWindowIsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const mib = 1 << 20
		w := &Window{Request: mib, Depth: 4} // nothing is measured: 1 MiB may be under way
		for _, n := range []int64{mib / 2, mib / 4} {
			if err := w.Enter(t.Context(), n, true); err != nil {
				t.Fatal(err)
			}
		}
		var mu sync.Mutex
		var order []int64
		for _, n := range []int64{mib, mib / 4, mib / 8} {
			go func() {
				if err := w.Enter(t.Context(), n, true); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				order = append(order, n)
			}()
			synctest.Wait()
		}
		w.Leave(mib/4, true, false) // makes room for the small ones
		synctest.Wait()
		if len(order) > 0 {
			t.Fatalf("begun: %d", order)
		}
		w.Leave(mib/2, true, false)
		synctest.Wait()
		if !slices.Equal(order, []int64{mib}) {
			t.Fatalf("begun: %d", order)
		}
		w.Leave(mib, true, false)
		synctest.Wait()
		if len(order) != 3 {
			t.Errorf("begun: %d", order)
		}
		w.Leave(mib/4, true, false)
		w.Leave(mib/8, true, false)
	})
}
