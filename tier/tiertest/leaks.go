package tiertest

import (
	"bytes"
	"runtime"
	"strings"
	"testing"
	"time"
)

// leakPatience is how long NoLeaks waits for goroutines to end after a test. It waits that long
// only if one leaks.
var leakPatience = 5 * time.Second

// NoLeaks fails the test if goroutines leak: those that run this module's code after the test and
// its later cleanups have ended, and that did not exist when NoLeaks was called. Call it first, and
// not in tests that run in parallel with others.
func NoLeaks(t testing.TB) {
	t.Setenv("SPILLWAY_TEST_ALONE", "") // it panics in a test that runs in parallel with others
	t.Helper()
	before := make(map[string]bool)
	for id := range goroutines() {
		before[id] = true
	}
	t.Cleanup(func() {
		var left []string
		for deadline := time.Now().Add(leakPatience); ; time.Sleep(time.Millisecond) {
			left = left[:0]
			for id, stack := range goroutines() {
				if !before[id] {
					left = append(left, stack)
				}
			}
			if len(left) == 0 {
				return
			}
			if time.Now().After(deadline) {
				break
			}
		}
		t.Errorf("%d goroutines outlive the test:\n\n%s", len(left), strings.Join(left, "\n\n"))
	})
}

// module occurs in the stack of every goroutine that runs this module's code or was started by it.
const module = "github.com/spillway-db/spillway"

// goroutines returns the stacks, by goroutine number, of all goroutines of this module except the
// caller's.
func goroutines() map[string]string {
	buf := make([]byte, 1<<16)
	for {
		n := runtime.Stack(buf, true)
		if n < len(buf) {
			buf = buf[:n]
			break
		}
		buf = make([]byte, 2*len(buf))
	}
	out := make(map[string]string)
	for i, g := range bytes.Split(buf, []byte("\n\n")) {
		stack := string(g)
		if i == 0 || !strings.Contains(stack, module) { // the first is the caller
			continue
		}
		if strings.Contains(stack, "testing.tRunner") || strings.Contains(stack, "testing.(*T).Run") {
			continue // package testing waits for tests
		}
		id, _, _ := strings.Cut(strings.TrimPrefix(stack, "goroutine "), " ")
		out[id] = stack
	}
	return out
}
