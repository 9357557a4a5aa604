package spillway

import (
	"context"
	"errors"
	"testing"
)

// TestTasksAheadEnd: whatever ends a task, it neither waits nor works any more, so that nothing is
// prefetched for it, or because of it.
func TestTasksAheadEnd(t *testing.T) {
	e, err := Open(t.Context(), Config{
		GPUs:  []GPUConfig{{Backend: Sim, Memory: Bytes(1 << 20)}},
		Hosts: []HostConfig{{Memory: Bytes(1 << 20), Node: -1}},
		Disks: []DiskConfig{},
	})
	if err != nil {
		t.Fatal(err)
	}
	refused := errors.New("refused")
	for name, work := range map[string]func() error{
		"done":   func() error { return nil },
		"failed": func() error { return refused },
		"panic":  func() error { panic(refused) },
	} {
		func() {
			defer func() { _ = recover() }() // of the panic that RunTask passes on
			err := e.RunTask(t.Context(), Task{Operator: name, Output: None, Overhead: None},
				func(context.Context, *Grant, []*Handle) error {
					if e.ahead.working != 1 || len(e.ahead.waiting) != 0 {
						t.Errorf("%s: %d tasks work, %d wait", name, e.ahead.working, len(e.ahead.waiting))
					}
					return work()
				})
			if (err == nil) != (name == "done") {
				t.Errorf("%s: %v", name, err)
			}
		}()
		if e.ahead.working != 0 || len(e.ahead.waiting) != 0 {
			t.Errorf("%s: %d tasks work, %d wait", name, e.ahead.working, len(e.ahead.waiting))
		}
	}
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}
