package pace

import (
	"context"
	"errors"
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
