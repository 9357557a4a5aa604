package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/fail"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/monitor"
)

// TestTrace: a run that is recorded is replayed, and compared by all policies.
func TestTrace(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "run.trace")
	var stdout, stderr strings.Builder
	try := func(args ...string) (status int) {
		stdout.Reset()
		stderr.Reset()
		return Main(t.Context(), args, &stdout, &stderr)
	}
	if status := try("trace", "record", file, "--gpu", "sim", "--gpu-memory", "2MiB", "--host-memory", "2MiB",
		"--disk", t.TempDir(), "--quiet"); status != fail.Fine {
		t.Fatal(status, stderr.String())
	}
	if status := try("trace", "replay", file); status != fail.Fine || !strings.Contains(stdout.String(), "recorded:") || !strings.Contains(stdout.String(), "for work") {
		t.Errorf("%d: %s\n%s", status, &stdout, &stderr)
	}
	var doc report.Trace
	if status := try("trace", "replay", file, "--policy", "lru", "--gpu-memory", "1GiB", "--bandwidth", "disk:0-gpu:0=1GiB", "--json", "-"); status != fail.Fine {
		t.Fatal(status, stderr.String())
	}
	decode(t, stdout.String(), &doc)
	if of := doc.Traces[0]; doc.Command != "trace replay" || of.File != file || of.Events == 0 || of.CutOff || of.Recorded.Policy != "cost-aware" || of.Recorded.Bytes == 0 ||
		of.Replays[0].Policy != "lru" || of.Replays[0].Bytes != 0 || of.Replays[0].Found != of.Replays[0].Accesses {
		t.Errorf("%+v", doc)
	}
	if status := try("trace", "compare", file, file, "--json", "-"); status != fail.Fine {
		t.Fatal(status, stderr.String())
	}
	decode(t, stdout.String(), &doc)
	if len(doc.Traces) != 2 || len(doc.Traces[1].Replays) != len(monitor.Names()) {
		t.Errorf("%+v", doc)
	}
	if status := try("trace", "replay", file, "--disk-memory", "1MiB"); status != fail.Fine || !strings.Contains(stdout.String(), "cannot go on") {
		t.Errorf("%d: %s\n%s", status, &stdout, &stderr)
	}
	whole := file + "2"
	if status := try("trace", "record", whole, "--gpu", "sim", "--gpu-memory", "2MiB", "--host-memory", "2MiB",
		"--disk", t.TempDir(), "--quiet"); status != fail.Fine {
		t.Fatal(status, stderr.String())
	}
	if status := try("trace", "replay", whole, "--gpu-memory", "64KiB"); status != fail.Fine || !strings.Contains(stdout.String(), "never fits in") {
		t.Errorf("%d: %s\n%s", status, &stdout, &stderr)
	}
	if err := os.WriteFile(file, []byte("no trace"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{}, {"replay"}, {"replay", file}, {"replay", file + "x"}, {"record"}, {"compare"}, {"record", file, "--passes", "-1"}, {"record", filepath.Join(file, "x")}, {"sideways"},
		{"record", file}, {"replay", whole, "--gpu-memory", "4KiB", "--host-memory", "4KiB"}, {"replay", whole, "--bandwidth", "disk:9-gpu:0=1GiB"},
		{"replay", file, "--policy", "none"}, {"replay", file, "--gpu-memory", "10%"}, {"replay", file, "--bandwidth", "disk:0=1GiB"}, {"replay", file, "--bandwidth", "disk:0-gpu:0=fast"},
	} {
		if status := try(append([]string{"trace"}, args...)...); status != fail.Usage || strings.Count(stderr.String(), "\n") != 1 {
			t.Errorf("%q: %d: %s", args, status, &stderr)
		}
	}
	if data, err := os.ReadFile(file); string(data) != "no trace" {
		t.Errorf("record has written over %q, %v", data, err)
	}
}

// TestRecordInterrupted: a recording that is interrupted leaves a trace up to then, which can be
// replayed, and nothing else. One that is interrupted before the engine is open leaves the file as it
// was. The time is of a bubble's clock.
func TestRecordInterrupted(t *testing.T) {
	t.Parallel()
	table, dir := writeTable(t, "t.arrow", 8, 25_000), t.TempDir()
	file, none := filepath.Join(dir, "run.trace"), filepath.Join(dir, "none.trace")
	record := func(ctx context.Context, file string) {
		t.Helper()
		r := command(t, ctx, "trace", "record", file, "--input", table, "--repeat=4", "--gpu=sim",
			"--gpu-memory=4MiB", "--host-memory=4MiB", "--disk-throttle=2MiB", "--quiet")
		if r.status != 130 || r.stdout != "" || r.stderr != "spillbench: interrupted; everything was given back\n" {
			t.Errorf("ended with %d: %q, %q", r.status, r.stdout, r.stderr)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		record(ctx, file)
	})
	var doc report.Trace
	decode(t, succeed(t, "trace", "replay", file, "--json=-").stdout, &doc)
	if of := doc.Traces[0]; of.Events == 0 || of.CutOff || of.Recorded.Bytes == 0 {
		t.Errorf("%+v", of)
	}
	was := readFile(t, file)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	record(ctx, file)
	record(ctx, none)
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || readFile(t, file) != was {
		t.Errorf("left %v (%v); the first trace has %d bytes and had %d", left, err, len(readFile(t, file)), len(was))
	}
}
