package tier_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

func TestBufferReleasedTwice(t *testing.T) {
	p := &fakePool{}
	s := newSpace(t, 1000, p)
	b := draw(t, s, 100)
	ok(t, b.Release())
	again := func() error { return b.Release() }
	if invariantsBuild {
		msg := fmt.Sprint(mustPanic(t, func() { _ = again() }))
		if !strings.Contains(msg, "TestBufferReleasedTwice") {
			t.Errorf("the panic does not say where the buffer was taken: %s", msg)
		}
	} else if err := again(); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("the second release returned %v", err)
	}
	if p.frees != 1 {
		t.Errorf("the memory was freed %d times", p.frees)
	}
	usage(t, s, "after two releases", 0, 0, 0)
}

func TestBufferLeases(t *testing.T) {
	p := &fakePool{}
	s := newSpace(t, 1000, p)
	b := draw(t, s, 100)
	leased := func(want int) {
		t.Helper()
		if got := b.Leased(); got != want {
			t.Errorf("%d leases are said to be open, want %d", got, want)
		}
	}
	leased(0)
	first, second := b.Lease(), b.Lease()
	leased(2)
	first()
	first() // once is enough
	leased(1)
	ok(t, b.Release())
	leased(1)
	usage(t, s, "released with a lease open", 128, 0, 0)
	if b.Memory() != fakeMemory(100) {
		t.Error("the memory is gone while a lease is open")
	}
	third := b.Lease() // by the holder of the second
	second()
	leased(1)
	usage(t, s, "with one lease left", 128, 0, 0)
	third()
	leased(0)
	usage(t, s, "after the last lease", 0, 0, 0)
	third()
	if p.frees != 1 {
		t.Errorf("the memory was freed %d times", p.frees)
	}
	mustPanic(t, func() { b.Lease() })
	leased(0)
	if invariantsBuild {
		mustPanic(t, func() { b.Memory() })
		mustPanic(t, func() { _ = b.Release() })
	} else if err := b.Release(); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("a release after the end: %v", err)
	}
}

// TestOnUnleased: the function is called when the last lease ends while the owner has the buffer.
func TestOnUnleased(t *testing.T) {
	b := draw(t, newSpace(t, 1000, &fakePool{}), 100)
	calls := 0
	b.OnUnleased(func() { calls++ })
	(*tier.Buffer)(nil).OnUnleased(func() {})
	first, second := b.Lease(), b.Lease()
	if first(); calls != 0 {
		t.Error("it is called with a lease open")
	}
	if second(); calls != 1 {
		t.Errorf("%d calls, want 1", calls)
	}
	b.OnUnleased(nil)
	b.Lease()()
	b.OnUnleased(func() { calls++ })
	last := b.Lease()
	ok(t, b.Release())
	if last(); calls != 1 {
		t.Errorf("%d calls after the end and the release, want 1", calls)
	}
}

// TestBufferConcurrent: the last holder frees the memory, once, and no other does.
func TestBufferConcurrent(t *testing.T) {
	for range 300 {
		p := &fakePool{}
		s := newSpace(t, 1000, p)
		b := draw(t, s, 100)
		var wg sync.WaitGroup
		for range 4 {
			end := b.Lease()
			wg.Go(func() {
				more := b.Lease()
				end()
				if b.Memory() == nil {
					t.Error("the memory is gone while a lease is open")
				}
				more()
				more()
			})
		}
		wg.Go(func() {
			if err := b.Release(); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		if p.frees != 1 || b.Leased() != 0 {
			t.Fatalf("the memory was freed %d times; %d leases", p.frees, b.Leased())
		}
		usage(t, s, "in the end", 0, 0, 0)
	}
}

// TestBufferReleasedByMany: of several releases one is the release.
func TestBufferReleasedByMany(t *testing.T) {
	if invariantsBuild {
		t.Skip("needs a build without -tags invariants, where a second release is no panic")
	}
	for range 300 {
		p := &fakePool{}
		b := draw(t, newSpace(t, 1000, p), 100)
		errs := make([]error, 4)
		var wg sync.WaitGroup
		for i := range errs {
			wg.Go(func() { errs[i] = b.Release() })
		}
		wg.Wait()
		released := 0
		for _, err := range errs {
			if err == nil {
				released++
			} else if !errors.Is(err, tier.ErrReleased) {
				t.Errorf("a release returned %v", err)
			}
		}
		if released != 1 || p.frees != 1 {
			t.Fatalf("%d releases passed, the memory was freed %d times", released, p.frees)
		}
	}
}
