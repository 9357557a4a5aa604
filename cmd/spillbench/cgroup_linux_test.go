package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/topology"
)

// inCgroup runs spillbench in a process of its own, in a cgroup that may have so many bytes
// of memory.
func inCgroup(t *testing.T, bytes int64, args ...string) ran {
	t.Helper()
	top, err := topology.Discover(t.Context(), topology.Options{})
	if err != nil {
		t.Fatal(err)
	}
	limit := map[int]string{1: "memory.limit_in_bytes", 2: "memory.max"}[top.Limits.CgroupVersion]
	dir, err := os.MkdirTemp(top.Limits.Cgroup, "spillbench-test-")
	if err != nil || limit == "" {
		t.Skip("needs leave to make a memory cgroup below the process's own: ", err)
	}
	t.Cleanup(func() {
		if err := os.Remove(dir); err != nil {
			t.Error(err)
		}
	})
	for name, text := range map[string]string{limit: strconv.FormatInt(bytes, 10), "memory.swap.max": "0"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0); err != nil && name == limit {
			t.Skip("needs leave to limit a cgroup's memory: ", err)
		}
	}
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), commandChild+"=cgroup "+dir, "TMPDIR="+t.TempDir(), "GOMEMLIMIT=off", "GOGC=100")
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if cmd.ProcessState.Sys().(syscall.WaitStatus).Signaled() {
		t.Errorf("%q in %d MiB: %v", args, bytes>>20, err)
	}
	r := ran{status: cmd.ProcessState.ExitCode(), stdout: stdout.String(), stderr: stderr.String()}
	if r.status == unmountable {
		t.Skip("needs leave to put a process into a memory cgroup: ", r.stderr)
	}
	return r
}

// joinCgroup puts this process into a cgroup.
func joinCgroup(dir string) error {
	return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(fmt.Sprint(os.Getpid())), 0)
}

// TestMemoryOfContainers: in a memory cgroup a command does its work, or says in one line
// why it cannot. The kernel never ends it.
func TestMemoryOfContainers(t *testing.T) {
	t.Parallel()
	if testseed.Raced {
		t.Skip("needs a build without the race detector, which takes many times the memory")
	}
	// Batches of some 12 MiB. What is put is more than what the cgroup leaves beside the spaces: a
	// batch that stayed on the heap would end the process.
	one, table := writeTable(t, "1.parquet", 1, 300_000), writeTable(t, "t.parquet", 2, 300_000)
	tight := []string{"--gpu-memory=32MiB", "--host-memory=32MiB"}
	for name, c := range map[string]struct {
		mib    int64
		args   []string
		status int
		says   []string
	}{
		"the defaults":                 {256, []string{"run", "--input", table, "--repeat=7"}, 0, nil},
		"a generated table":            {112, []string{"run", "--gpu-memory=16MiB", "--host-memory=16MiB"}, 0, nil},
		"a large share for the spaces": {240, []string{"run", "--input", table, "--repeat=8", "--gpu-memory=80MiB", "--host-memory=80MiB"}, 0, nil},
		"many workers":                 {256, []string{"run", "--input", table, "--repeat=6", "--workers=32", "--partitions=32"}, 0, nil},
		"encrypted":                    {192, append([]string{"run", "--input", table, "--repeat=6", "--encrypt"}, tight...), 0, nil},
		"verified":                     {256, []string{"verify", one, "--gpu-memory=64MiB", "--host-memory=64MiB"}, 0, nil},
		"as much as there is": {512, []string{"run", "--gpu-memory=256MiB", "--host-memory=256MiB"}, 3,
			[]string{"may have 512.0 MiB of memory", "spillbench-test-", "512.0 MiB together", "give --gpu-memory and --host-memory 432.0 MiB together at most"}},
		"batches that are too large": {160, append([]string{"run", "--input", writeTable(t, "large.parquet", 1, 1_500_000), "--rows-per-batch=1500000"}, tight...), 3,
			[]string{"large.parquet", "of the process's memory at once", "smaller with --rows-per-batch"}},
	} {
		t.Run(name, func(t *testing.T) {
			if testing.Short() && c.status == 0 && !strings.Contains(name, "the") {
				t.Skip("needs a run without -short")
			}
			t.Parallel()
			r := inCgroup(t, c.mib<<20, append(c.args, "--quiet")...)
			if r.status != c.status || strings.Count(r.stderr, "\n") != min(1, c.status) {
				t.Errorf("ended with %d, want %d: %s", r.status, c.status, r.stderr)
			}
			for _, want := range c.says {
				if !strings.Contains(r.stderr, want) {
					t.Errorf("%q does not say %q", r.stderr, want)
				}
			}
		})
	}
}
