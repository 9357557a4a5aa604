package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestStandardInputOfEndedWriter gives a command a named pipe as its standard input, whose writer
// has ended. The command must not open the pipe again, because that waits for another writer.
func TestStandardInputOfEndedWriter(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"t.arrows", "t.csv"} {
		content := readFile(t, writeTable(t, name, 2, 50))
		path := filepath.Join(t.TempDir(), "pipe")
		if err := syscall.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
		written := make(chan error, 1)
		go func() { written <- os.WriteFile(path, []byte(content), 0) }()
		pipe, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer pipe.Close()
		if err := <-written; err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, os.Args[0], "verify", "-")
		cmd.Env = append(os.Environ(), commandChild+"=plain "+t.TempDir())
		cmd.Stdin = pipe
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "verified: all") {
			t.Errorf("%s: %v: %s", name, err, out)
		}
	}
}
