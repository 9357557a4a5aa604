package main

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/report"
	"github.com/spillway-db/spillway/internal/thread"
	"github.com/spillway-db/spillway/topology"
)

// TestOthers: the share of others is what the allowed processors did less the time of this process. It
// is not known of a moment, and under a quota.
func TestOthers(t *testing.T) {
	top := new(topology.Topology)
	top.CPU.Allowed = []int{0, 2, 5}
	before := processorTimes{
		cpus: map[int]thread.CPUTime{0: {Busy: 1000, Idle: 5000}, 1: {}, 2: {Busy: 100}},
		own:  7 * time.Second,
	}
	var after processorTimes
	for name, c := range map[string]struct {
		zero, two thread.CPUTime
		own       time.Duration
		count     int
		share     float64 // below 0: not known
	}{
		"idle":        {thread.CPUTime{Busy: 1000, Idle: 5200}, thread.CPUTime{Busy: 100, Idle: 200}, 0, 2, 0},
		"all its own": {thread.CPUTime{Busy: 1100, Idle: 5100}, thread.CPUTime{Busy: 300}, 3 * time.Second, 2, 0},
		"62 % of others": {thread.CPUTime{Busy: 1199, Idle: 5001}, thread.CPUTime{Busy: 249, Idle: 50},
			time.Second, 2, 0.62},
		"rounded ticks": {thread.CPUTime{Busy: 1100, Idle: 5100}, thread.CPUTime{Busy: 200}, 3 * time.Second, 2, 0},
		"a moment":      {thread.CPUTime{Busy: 1020, Idle: 5020}, thread.CPUTime{Busy: 120}, 0, 0, -1},
	} {
		after = processorTimes{
			cpus: map[int]thread.CPUTime{0: c.zero, 1: {Busy: 1 << 40}, 2: c.two, 5: {Busy: 1}},
			own:  before.own + c.own,
		}
		got := othersShare(top, before, after)
		switch {
		case c.share < 0:
			if got != nil {
				t.Errorf("%s: %+v", name, got)
			}
		case got == nil || got.Count != c.count || math.Abs(got.OthersShare-c.share) > 0.005:
			t.Errorf("%s: %+v, want %v of %d", name, got, c.share, c.count)
		}
	}
	after.cpus[0] = thread.CPUTime{Busy: 9000, Idle: 9000}
	if othersShare(top, before, after) == nil {
		t.Error("without a quota the share is not known")
	}
	top.Limits.CPUQuota = 1.5
	if othersShare(top, before, after) != nil {
		t.Error("under a quota the share is known")
	}
}

// TestRuns: --runs does the whole work so often, after a warm-up that does not count.
func TestRuns(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	r := succeed(t, append(small, "--runs=3", "--json=-")...)
	var doc report.Run
	decode(t, r.stdout, &doc)
	if len(doc.Runs) != 3 || doc.RunTimes == nil || doc.Admission == nil || doc.Config.Runs != 3 ||
		len(doc.Phases) != 3 {
		t.Fatalf("%+v", doc)
	}
	var seconds []float64
	sum := 0.0
	for _, one := range doc.Runs {
		seconds = append(seconds, one.Seconds)
		sum += one.Seconds
		if one.GiBPerS <= 0 {
			t.Errorf("the rate is %v", one.GiBPerS)
		}
	}
	slices.Sort(seconds)
	if times := doc.RunTimes; times.MinSeconds != seconds[0] || times.MedianSeconds != seconds[1] || times.MaxSeconds != seconds[2] ||
		times.Spread != (seconds[2]-seconds[0])/seconds[1] ||
		doc.WallSeconds < sum {
		t.Errorf("%+v of %v s in %v s", times, seconds, doc.WallSeconds)
	}
	// The warm-up and the three runs are all verified, with a task for each batch.
	if want := 4 * doc.Input.Batches; doc.Verify.Batches != want || doc.Verify.Mismatches != 0 ||
		doc.Admission.Admitted-doc.Admission.Retried != want {
		t.Errorf("verified %+v, admitted %+v, want %d batches", doc.Verify, doc.Admission, want)
	}
}

// TestRunsOnPage: people see each run, the median and the spread; of one run there is no table of runs.
func TestRunsOnPage(t *testing.T) {
	unlessShort(t)
	t.Parallel()
	several := succeed(t, append(small, "--runs=2")...).stdout
	for _, want := range []string{"2 runs after a warm-up: median ", " spread of ", "CPU seconds", "processor time: ", "tasks: ", "99.9 % within"} {
		if !strings.Contains(several, want) {
			t.Errorf("no %q in\n%s", want, several)
		}
	}
	if one := succeed(
		t,
		small...).stdout; strings.Contains(one, "median") ||
		!strings.Contains(one, "processor time: ") {
		t.Errorf("of one run:\n%s", one)
	}
	if lines := succeed(
		t,
		append(small, "--runs=2", "--format=benchfmt")...).stdout; strings.Count(
		lines,
		"BenchmarkRun/whole 1 ",
	) != 2 {
		t.Errorf("not two lines of runs in\n%s", lines)
	}
}

// TestRunsOutOfRange: there is at least one run.
func TestRunsOutOfRange(t *testing.T) {
	r := command(t, t.Context(), append(append([]string{"run"}, small...), "--runs=0")...)
	if r.status != 2 || !strings.Contains(r.stderr, `"0" for "--runs" flag: want a number from 1 to 10000`) {
		t.Errorf("ended with %d: %s", r.status, r.stderr)
	}
}
