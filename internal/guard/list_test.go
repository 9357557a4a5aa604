package guard_test

import (
	"io"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spillway-db/spillway/internal/guard"
)

// TestList: all functions are called in their order, also beside one that panics, until each is removed. A
// function may change the list.
func TestList(t *testing.T) {
	var l guard.List[int]
	l.Panics.Logger = slog.New(slog.NewTextHandler(io.Discard, nil))
	var called []int
	call := func() []int {
		called = nil
		l.Call("a test", 10)
		return called
	}
	if got := call(); len(got) != 0 {
		t.Errorf("the zero value calls %v", got)
	}
	var cancels [4]func()
	for i := range cancels {
		cancels[i] = l.Add(func(n int) {
			called = append(called, n+i)
			if i == 2 {
				panic("a test")
			}
		})
	}
	if got := call(); !slices.Equal(got, []int{10, 11, 12, 13}) {
		t.Errorf("called were %v", got)
	}
	cancels[1]()
	cancels[1]() // changes nothing
	if got := call(); !slices.Equal(got, []int{10, 12, 13}) {
		t.Errorf("called were %v", got)
	}
	l.Add(func(int) { cancels[3](); called = append(called, 9) })
	if got := call(); !slices.Equal(got, []int{10, 12, 13, 9}) {
		t.Errorf("called were %v", got)
	}
	if got := call(); !slices.Equal(got, []int{10, 12, 9}) {
		t.Errorf("called were %v", got)
	}
}

func TestListConcurrently(t *testing.T) {
	var l guard.List[int]
	var calls atomic.Int64
	cancel := l.Add(func(n int) { calls.Add(int64(n)) })
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 100 {
				cancel := l.Add(func(int) {})
				l.Call("a test", 1)
				cancel()
			}
		})
	}
	all.Wait()
	if n := calls.Load(); n != 800 {
		t.Errorf("the first was called %d times, want 800", n)
	}
	cancel()
	if l.Call("a test", 1); calls.Load() != 800 {
		t.Error("a function was called after its cancel")
	}
}
