package test

import (
	"bytes"
	exec "runtime/trace"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/test/busyengine"
)

// An execution trace (runtime/trace) shows the engine's tasks, and its waits and moves as regions.
func TestExecutionTrace(t *testing.T) {
	var recorded bytes.Buffer
	if err := exec.Start(&recorded); err != nil {
		t.Skipf("another trace is recorded: %v", err)
	}
	eng := busyengine.Open(t, nil)
	err := busyengine.Work(t.Context(), eng, testseed.One(t), 80)
	exec.Stop()
	if err != nil {
		t.Error(err)
	}
	closeEngine(t, eng)
	for _, name := range []string{"spillway task sort", "spillway wait for gpu:0", "spillway gpu:0 to host:0"} {
		if !strings.Contains(recorded.String(), name) {
			t.Errorf("the trace of %d bytes has no %q", recorded.Len(), name)
		}
	}
}
