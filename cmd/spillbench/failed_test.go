package main

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/tier"
)

// noRoom makes a run fail: its disk is full soon.
func noRoom(t *testing.T) []string {
	return []string{soon, "--gpu-memory=1MiB", "--host-memory=1MiB", "--codec=none", "--disk=" + t.TempDir() + "=1MiB"}
}

// TestFailedRunIsReported: a run that fails leaves its page and its JSON, with the error and who holds
// the memories. Both can be read again, and beside a run that went well the page says which failed.
func TestFailedRunIsReported(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	r := command(t, t.Context(), append(noRoom(t), "--json="+in("bad.json"), "--html="+in("bad.html"))...)
	if r.status != 3 || r.stdout != "" || strings.Count(r.stderr, "\n") != 1 {
		t.Fatalf("ended with %d: %q, %q", r.status, r.stdout, r.stderr)
	}
	var doc report.Run
	decode(t, readFile(t, in("bad.json")), &doc)
	if "spillbench: "+doc.Error+"\n" != r.stderr {
		t.Errorf("the error is %q, and was printed as %q", doc.Error, r.stderr)
	}
	if doc.Timeline == nil || len(doc.Timeline.Spaces) != 3 || doc.Input.Batches == 0 || doc.Input.Bytes == 0 ||
		len(doc.Phases) != 1 ||
		len(doc.Args) == 0 {
		t.Errorf("timeline %v, input %+v, phases %+v, arguments %q", doc.Timeline, doc.Input, doc.Phases, doc.Args)
	}
	if len(doc.Held) != 3 || doc.Held[0].Used == 0 ||
		!strings.Contains(doc.Held[0].Text, `of plan "spillbench", operator load:0`) {
		t.Errorf("held is %+v", doc.Held)
	}
	succeed(t, append(slices.Clone(small), "--json="+in("good.json"), "-q")...)
	for _, c := range []struct {
		args []string
		want []string
	}{
		{nil, []string{`class="verdict bad"`, "The run failed: a generated table", "Who held the memories when the run failed", "operator load:0"}},
		{[]string{"bad.json"}, []string{`class="verdict bad"`, "The run failed: a generated table", "operator load:0"}},
		{[]string{"good.json", "bad.json"}, []string{"B failed, and A did not"}},
		{[]string{"bad.json", "good.json"}, []string{"A failed, and B did not"}},
		{[]string{"bad.json", "bad.json"}, []string{"Both runs failed"}},
	} {
		text := ""
		if c.args == nil {
			text = readFile(t, in("bad.html"))
		} else {
			args := []string{"report", "--html=-"}
			for _, name := range c.args {
				args = append(args, in(name))
			}
			text = succeed(t, args...).stdout
		}
		for _, want := range c.want {
			if !strings.Contains(text, want) {
				t.Errorf("%q: the page does not say %q", c.args, want)
			}
		}
		if len(c.args) == 2 && strings.Contains(text, "as long as A") {
			t.Errorf("%q: the time of a run that failed is compared", c.args)
		}
		if len(c.args) < 2 &&
			(!strings.Contains(text, "all memory above it") || strings.Contains(text, "move batches down sooner") || strings.Contains(text, "do more at once")) {
			t.Errorf("%q: the page has no advice on the failure, or some on the speed of a run that failed", c.args)
		}
	}
}

// TestFailedRunPrinted: what report prints of a run that failed says so, and has no figures for benchstat.
func TestFailedRunPrinted(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	file := filepath.Join(t.TempDir(), "bad.json")
	line := strings.TrimPrefix(
		command(t, t.Context(), append(noRoom(t), "-q", "--json="+file)...).stderr,
		"spillbench: ",
	)
	for format, want := range map[string]struct {
		status         int
		stdout, stderr string // ends
	}{
		"table":    {0, "\nFAILED: " + line, ""},
		"markdown": {0, "FAILED: " + line, ""},
		"csv":      {0, "", "bad.json is of a run that failed: " + line},
		"benchfmt": {2, "", "nothing to compare: " + line},
	} {
		r := command(t, t.Context(), "report", file, "--format="+format)
		if r.status != want.status || !strings.HasSuffix(strings.TrimSpace(r.stdout), strings.TrimSpace(want.stdout)) ||
			!strings.HasSuffix(r.stderr, want.stderr) {
			t.Errorf("%s ended with %d: %q, %q", format, r.status, r.stdout, r.stderr)
		}
		if format == "table" && !strings.Contains(r.stdout, `in host:0 `) {
			t.Errorf("who held the memories is not in %q", r.stdout)
		}
	}
	forged := writeFile(t, "forged.json", strings.Replace(readFile(t, file), `"error": "`, `"error": "\u001b[31m`, 1))
	if r := command(
		t,
		t.Context(),
		"report",
		forged,
		"--format=csv",
	); r.status != 0 ||
		!strings.Contains(r.stderr, ` failed: \x1b[31m`) {
		t.Errorf("what a terminal acts on is told as %q", r.stderr)
	}
}

// TestFailedRunPrintsJSON where that was asked for, and nothing else of a run that failed.
func TestFailedRunPrintsJSON(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	for _, format := range report.Formats() {
		r := command(t, t.Context(), append(noRoom(t), "--format="+format)...)
		if r.status != 3 {
			t.Errorf("%s: ended with %d: %s", format, r.status, r.stderr)
		}
		if format != string(report.JSON) {
			if r.stdout != "" {
				t.Errorf("%s: printed %q", format, r.stdout)
			}
			continue
		}
		var doc report.Run
		if decode(t, r.stdout, &doc); doc.Error == "" {
			t.Error("no error")
		}
	}
}

// TestFailedFaultIsReported: the hits of a fault are told, also if it was not survived.
func TestFailedFaultIsReported(t *testing.T) {
	t.Parallel()
	r := command(t, t.Context(), append(slices.Clone(small), "--fault=op=read,kind=eio", "--json=-", "-q")...)
	var doc report.Run
	if decode(
		t,
		r.stdout,
		&doc,
	); r.status != 1 || !strings.Contains(doc.Error, "--fault op=read,kind=eio") ||
		doc.Config.Faults[0].Hits == 0 {
		t.Errorf("ended with %d: %q, %+v", r.status, doc.Error, doc.Config.Faults)
	}
}

// TestWrongUseIsNotReported: what never began leaves nothing.
func TestWrongUseIsNotReported(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	r := command(
		t,
		t.Context(),
		"run",
		filepath.Join(dir, "missing.csv"),
		"--json="+filepath.Join(dir, "r.json"),
		"--html="+filepath.Join(dir, "r.html"),
	)
	if left, err := os.ReadDir(dir); r.status != 2 || err != nil || len(left) > 0 {
		t.Errorf("ended with %d, and left %v (%v)", r.status, left, err)
	}
}

// TestStandstillIsNoted: long before a run ends because nothing moves, it says so, and why.
func TestStandstillIsNoted(t *testing.T) {
	t.Parallel()
	for _, quiet := range []bool{false, true} {
		f := runFlags{output: outputFlags{figures: true}}
		fs := pflag.NewFlagSet("run", pflag.ContinueOnError)
		f.register(fs)
		f.stallAfter = 20 * time.Millisecond
		if err := fs.Parse(append(noRoom(t), "--stall-timeout=2s")); err != nil {
			t.Fatal(err)
		}
		f.output.quiet = quiet
		var stdout, stderr bytes.Buffer
		cmd := new(cobra.Command)
		cmd.SetContext(t.Context())
		cmd.SetOut(&stdout)
		cmd.SetErr(&stderr)
		if err := f.run(cmd, nil); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("ended with %v", err)
		}
		note := "spillbench: note: nothing moves: disk:0 "
		if got := stderr.String(); quiet && got != "" ||
			!quiet &&
				(!strings.HasPrefix(got, note) || !strings.HasSuffix(got, "; the run ends after 2s of that, or twice as long (--stall-timeout)\n") || strings.Count(got, "\n") != 1) {
			t.Errorf("quiet %v: %q", quiet, got)
		}
	}
}

// TestStall: it is said once, after the time in which nothing moved, and not while a batch moves.
func TestStall(t *testing.T) {
	gpu, disk := tier.ID{Kind: tier.GPU}, tier.ID{Kind: tier.Disk}
	stuck := func() spillway.Event { return spillway.Event{Kind: events.Stuck, To: gpu, Bytes: 100, At: time.Now()} }
	begun := func() spillway.Event {
		return spillway.Event{Kind: events.MoveBegun, Batch: 7, From: gpu, To: disk, At: time.Now()}
	}
	ended := func(err error) spillway.Event {
		return spillway.Event{Kind: events.MoveEnded, Batch: 7, From: gpu, To: disk, At: time.Now(), Err: err}
	}
	for name, c := range map[string]struct {
		does func(s *stall)
		told int
	}{
		"nothing waits": {func(*stall) { time.Sleep(time.Minute) }, 0},
		"stuck":         {func(s *stall) { s.event(stuck()); time.Sleep(3 * stallAfter) }, 1},
		"stuck for a moment": {func(s *stall) {
			s.event(stuck())
			time.Sleep(stallAfter / 2)
			s.event(ended(nil))
			time.Sleep(time.Minute)
		}, 0},
		"a slow move": {func(s *stall) { s.event(begun()); s.event(stuck()); time.Sleep(time.Minute) }, 0},
		"a move that failed": {func(s *stall) {
			s.event(begun())
			s.event(stuck())
			s.event(ended(errors.New("x")))
			time.Sleep(time.Minute)
		}, 1},
		"what says nothing": {func(s *stall) { s.event(spillway.Event{Kind: events.WaitBegun}); time.Sleep(time.Minute) }, 0},
		"stuck once more":   {func(s *stall) { s.event(stuck()); s.event(ended(nil)); s.event(stuck()); time.Sleep(time.Minute) }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				told := 0
				s := &stall{moving: make(map[uint64]bool), last: time.Now()}
				stop := s.watch(stallAfter, nil, func(string) { told++ })
				c.does(s)
				stop()
				stop()
				if told != c.told {
					t.Errorf("told %d times, want %d", told, c.told)
				}
			})
		})
	}
}

// TestPassesAreCounted: the progress says which of how many passes it is, and else what the phase is.
func TestPassesAreCounted(t *testing.T) {
	for phase, want := range map[string]string{"pass-3": "pass 3 of 10", "load": "load", "drain": "drain"} {
		if got := passOf(phase, 10); got != want {
			t.Errorf("%s: %q, want %q", phase, got, want)
		}
	}
}
