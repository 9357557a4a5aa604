package main

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/testseed"
)

// TestInterruptedOnASlowDisk: on a disk of 2 MiB/s a command that is interrupted gives all
// back within a second, wherever it is. The second is of a bubble's clock, which only
// waiting moves on: what the machine is doing besides is not measured.
func TestInterruptedOnASlowDisk(t *testing.T) {
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
