//go:build invariants

package batch

import (
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestForgotten: a handle and a transit that the garbage collector finds open
// are reported with the stack that took them; ended ones are not.
func TestForgotten(t *testing.T) {
	var (
		mu       sync.Mutex
		messages []string
	)
	old := forgotten
	defer func() { forgotten = old }()
	forgotten = func(m string) {
		mu.Lock()
		defer mu.Unlock()
		messages = append(messages, m)
	}
	gpu := newSpace(t, "gpu:0")
	forget := func(id ID) {
		b, err := New(Options{ID: id, Payload: &form{space: gpu}})
		if err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := b.TryCreateTask(); err != nil {
				t.Fatal(err)
			}
		}
		closed, err := b.TryLock(gpu.ID())
		if err != nil {
			t.Fatal(err)
		}
		if err := closed.Close(); err != nil {
			t.Fatal(err)
		}
		aborted, err := b.TryTransit()
		if err != nil {
			t.Fatal(err)
		}
		if err := aborted.Abort(); err != nil {
			t.Fatal(err)
		}
		if id == 1 {
			_, err = b.TryLock(gpu.ID())
		} else {
			_, err = b.TryTransit()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	forget(1)
	forget(2)
	until(t, "both are reported", func() bool {
		runtime.GC()
		mu.Lock()
		defer mu.Unlock()
		return len(messages) >= 2
	})
	mu.Lock()
	defer mu.Unlock()
	all := strings.Join(messages, "\n")
	if len(messages) != 2 || !strings.Contains(all, "a handle on batch 1") || !strings.Contains(all, "a transit on batch 2") ||
		strings.Count(all, "TestForgotten") < 2 {
		t.Errorf("reported:\n%s", all)
	}
}

// until polls cond, for what only the garbage collector or the scheduler can
// bring about.
func until(t testing.TB, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); runtime.Gosched() {
		if time.Now().After(end) {
			t.Fatalf("gave up waiting until %s", what)
		}
	}
}
