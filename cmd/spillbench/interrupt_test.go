package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// deafChild makes this test program a command that does not hear its context.
const deafChild = "SPILLBENCH_TEST_DEAF"

// beDeaf never ends.
func beDeaf(context.Context) int {
	fmt.Println("ready")
	select {}
}

// TestSignalEndsDeafCommand: what cannot be cut short does not keep the process.
func TestSignalEndsDeafCommand(t *testing.T) {
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only so that a failure ends
		defer cancel()
		child := exec.CommandContext(ctx, os.Args[0])
		child.Env = append(os.Environ(), deafChild+"=1")
		var stderr strings.Builder
		child.Stderr = &stderr
		stdout, err := child.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
			t.Errorf("the child says %q, %v", line, err)
		}
		if err := child.Process.Signal(sig); err != nil {
			t.Error(err)
		}
		err = child.Wait()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 130 || stderr.String() != "spillbench: interrupted\n" {
			t.Errorf("%v: %v: %q", sig, err, stderr.String())
		}
	}
}

// TestInterruptibleReturns: what ends by itself ends as it would.
func TestInterruptibleReturns(t *testing.T) {
	if status := interruptible(func(context.Context) int { return 7 }); status != 7 {
		t.Errorf("ended with %d", status)
	}
	// Cancelled, and done before its time is up: its own status, and this process goes on.
	status := interruptible(func(ctx context.Context) int {
		if err := syscall.Kill(os.Getpid(), syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		<-ctx.Done()
		return 8
	})
	if status != 8 {
		t.Errorf("ended with %d", status)
	}
}
