package permit_test

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) {
	before := runtime.NumGoroutine()
	code := m.Run()
	if code == 0 {
		deadline := time.Now().Add(5 * time.Second)
		for runtime.NumGoroutine() > before {
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				stacks = stacks[:runtime.Stack(stacks, true)]
				fmt.Fprintf(os.Stderr, "%d goroutines were left behind:\n%s\n", runtime.NumGoroutine()-before, stacks)
				code = 1
				break
			}
			runtime.Gosched()
		}
	}
	os.Exit(code)
}
