package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/testseed"
)

// TestWarnings: a run on a machine that allows no locked memory, with a spill directory in memory,
// goes well, and says what it lacks and what to do: in the document, in the table, and on
// standard error where no table carries it.
func TestWarnings(t *testing.T) {
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &was); err != nil {
		t.Skip("needs the limit of locked memory: ", err)
	}
	// The child has our limit; the capability that lifts it is not the machine's in a name space.
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Max: was.Max}); err != nil {
		t.Skip("needs a limit of locked memory that can be set: ", err)
	}
	defer func() {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &was); err != nil {
			t.Error(err)
		}
	}()
	run := func(args ...string) ran {
		dir := t.TempDir()
		args = append([]string{"run", "--gpu-memory=512KiB", "--host-memory=512KiB", "--disk=" + dir + "/a=3584KiB"}, args...)
		r := inNamespace(t, 0, "mount", dir, args...)
		if r.status != 0 {
			t.Fatalf("ended with %d: %s", r.status, r.stderr)
		}
		return r
	}

	r := run("--json=-")
	var doc report.Run
	if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil {
		t.Fatal(err)
	}
	locked := causes.LockLimit
	if testseed.Raced { // memory of the heap is never locked
		locked = causes.System
	}
	for cause, want := range map[diag.Cause]diag.Warning{
		locked:                  {Space: "host:0", What: "0 of 524288 bytes are locked", Remedy: "ulimit -l", Info: testseed.Raced},
		causes.MemoryFileSystem: {Space: "disk:0", What: "tmpfs", Remedy: "name a directory on a disk"},
	} {
		i := slices.IndexFunc(doc.Warnings, func(w diag.Warning) bool { return w.Cause == cause })
		if i < 0 {
			t.Errorf("no %s in %+v", cause, doc.Warnings)
			continue
		}
		got := doc.Warnings[i]
		if got.Space != want.Space || !strings.Contains(got.What, want.What) || got.Info != want.Info {
			t.Errorf("%+v: want %+v", got, want)
		}
		if got.Info {
			continue
		}
		if !strings.Contains(got.Remedy, want.Remedy) {
			t.Errorf("%+v does not say %q", got, want.Remedy)
		}
		if line := "spillbench: note: " + got.Space + ": " + got.What + " (" + got.Remedy + ")\n"; strings.Count(r.stderr, line) != 1 {
			t.Errorf("%q is not once in %s", line, r.stderr)
		}
	}
	for _, w := range doc.Warnings {
		if w.Remedy == "" && !w.Info {
			t.Errorf("%+v does not say what to do", w)
		}
	}

	r = run()
	for _, want := range []string{"disk:0: volume", "stays in memory (name a directory on a disk)"} {
		if strings.Count(r.stdout, want) != 1 {
			t.Errorf("%q is not once in\n%s", want, r.stdout)
		}
	}
	if r.stderr != "" {
		t.Errorf("the notes are in the table, and on standard error: %s", r.stderr)
	}
}

// TestNoWarningsAreAList: commands that open no engine have an empty list.
func TestNoWarningsAreAList(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"topo", "--json=-"}, {"quota", "--json=-"}} {
		r := succeed(t, args...)
		if !strings.Contains(r.stdout, "\"warnings\": []") {
			t.Errorf("%q: %s", args, r.stdout)
		}
	}
}
