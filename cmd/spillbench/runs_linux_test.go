package main

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// TestRunsRefuseAPipe: a pipe can be read once, and several runs read their input again.
func TestRunsRefuseAPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	r := command(t, t.Context(), append(append([]string{"run", pipe}, small...), "--runs=2")...)
	if r.status != 2 || !strings.Contains(r.stderr, "is a pipe, and this command reads its input more than once") {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
}
