package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
)

// deafChild makes this test program a command that does not hear its context; as underNohup one that
// ends at once, with 0 if it would not hear SIGHUP.
const (
	deafChild  = "SPILLBENCH_TEST_DEAF"
	underNohup = "nohup"
)

func deafCommand(how string) int {
	if how != underNohup {
		return interruptible(beDeaf)
	}
	signal.Ignore(syscall.SIGHUP)
	return interruptible(func(context.Context) int {
		if signal.Ignored(syscall.SIGHUP) {
			return 0
		}
		return 1
	})
}

// beDeaf never ends.
func beDeaf(context.Context) int {
	fmt.Println("ready")
	select {}
}

// TestSignalEndsDeafCommand: what cannot be cut short does not keep the process.
func TestSignalEndsDeafCommand(t *testing.T) {
	t.Parallel()
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			if signal.Ignored(sig) {
				t.Skipf("needs to hear %v: start the tests without nohup", sig)
			}
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
				t.Errorf("%v: %q", err, stderr.String())
			}
		})
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

// TestHangupStaysIgnored: what nohup started goes on when its terminal closes. To ignore a signal cannot
// be undone in a process, so a child does it.
func TestHangupStaysIgnored(t *testing.T) {
	t.Parallel()
	child := exec.CommandContext(t.Context(), os.Args[0])
	child.Env = append(os.Environ(), deafChild+"="+underNohup)
	if out, err := child.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

// TestInterruptedOnASlowDisk: on a disk of 2 MiB/s a command that is interrupted gives all
// back within a second, wherever it is. The second is of a bubble's clock, which only
// waiting moves on: what the machine is doing besides is not measured.
func TestInterruptedOnASlowDisk(t *testing.T) {
	t.Parallel()
	table := writeTable(t, "t.arrow", 8, 100_000)
	turn := int(testseed.One(t) % 3) // of the moments, where not all are tried
	for name, args := range map[string][]string{
		"run":       {"run", "--input", table, "--repeat=4", "--gpu-memory=16MiB", "--host-memory=16MiB"},
		"verify":    {"verify", table, "--gpu-memory=16MiB", "--host-memory=16MiB"},
		"bandwidth": {"bandwidth", "--sizes=4MiB", "--gpu-memory=16MiB", "--host-memory=16MiB"},
		"compare":   {"compare", "--peer=arrow-ipc", "--input", table, "--repeat=4", "--host-memory=32MiB"},
	} {
		for i, after := range []time.Duration{100 * time.Millisecond, time.Second, 4 * time.Second} {
			if testing.Short() && i != turn {
				continue
			}
			t.Run(name+" after "+after.String(), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ctx, cancel := context.WithCancel(t.Context())
					var at time.Time
					interrupt := time.AfterFunc(after, func() { at = time.Now(); cancel() })
					defer interrupt.Stop()
					begin := time.Now()
					r := command(t, ctx, append(args, "--gpu=sim", "--disk-throttle=2MiB", "--quiet")...)
					if at.IsZero() {
						t.Fatalf("ended with %d after %v, before it was interrupted: %s", r.status, time.Since(begin), r.stderr)
					}
					if took := time.Since(at); took > time.Second {
						t.Errorf("took %v to end", took)
					}
					if r.status != 130 || r.stderr != "spillbench: interrupted; everything was given back\n" {
						t.Errorf("ended with %d: %q", r.status, r.stderr)
					}
				})
			})
		}
	}
}
