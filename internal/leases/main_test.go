//go:build linux || darwin

package leases_test

import (
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"
)

// childEnv makes the test binary a process that has a lease; see childMain.
const childEnv = "SPILLWAY_QUOTA_TEST_CHILD"

// TestMain fails when a test leaves a goroutine behind.
func TestMain(m *testing.M) {
	if mode := os.Getenv(childEnv); mode != "" {
		os.Exit(childMain(mode))
	}
	before := runtime.NumGoroutine()
	code := m.Run()
	if code == 0 {
		deadline := time.Now().Add(5 * time.Second)
		for runtime.NumGoroutine() > before {
			if time.Now().After(deadline) {
				stacks := make([]byte, 1<<20)
				fmt.Fprintf(os.Stderr, "%d goroutines were left behind:\n%s\n", runtime.NumGoroutine()-before,
					stacks[:runtime.Stack(stacks, true)])
				code = 1
				break
			}
			runtime.Gosched()
		}
	}
	os.Exit(code)
}
