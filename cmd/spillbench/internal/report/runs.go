package report

import (
	"fmt"
	"slices"
)

// Repetition is one of the runs that --runs asks for, or the only one.
type Repetition struct {
	Seconds    float64 `json:"seconds"`               // of loading, all passes and dropping
	GiBPerS    float64 `json:"gib_per_s"`             // of the input, in these seconds
	CPUSeconds float64 `json:"cpu_seconds,omitempty"` // of this process, user and system; missing where it is not known
}

// RunTimes sums up the seconds of all runs but the warm-up.
type RunTimes struct {
	MedianSeconds float64 `json:"median_seconds"`
	MinSeconds    float64 `json:"min_seconds"`
	MaxSeconds    float64 `json:"max_seconds"`
	Spread        float64 `json:"spread"` // the difference of the two, as a share of the median
	MedianGiBPerS float64 `json:"median_gib_per_s"`
}

// Processors is what the processors did that the command may use, while it ran. It is missing where
// that is not known: not on Linux, or in a cgroup with a CPU quota.
type Processors struct {
	Count       int     `json:"count"`
	OthersShare float64 `json:"others_share"` // of their time, used by other processes and virtual machines
}

// Admission is how the tasks were admitted that drop the batches at the end; see Engine.RunTask. Times are in seconds.
type Admission struct {
	Admitted int64   `json:"admitted"` // tasks, each attempt counts
	Waited   int64   `json:"waited"`   // of them, those that waited for more than a millisecond
	Retried  int64   `json:"retried"`  // attempts that ran out of memory and were followed by another
	P50      float64 `json:"p50"`      // of the waits of all that were admitted
	P99      float64 `json:"p99"`
	P999     float64 `json:"p999"`
	Max      float64 `json:"max"`
}

// BusyShare is the share of the processors' time, used by other processes, above which a run's figures
// are called too low.
const BusyShare = 0.2

// SetRuns sets the runs, all of them of the document's input, and sums them up. It returns the number
// of the run whose time is the median, or the lower of the two in the middle.
func (r *Run) SetRuns(runs []Repetition) (median int) {
	if len(runs) == 0 {
		return 0
	}
	for i := range runs {
		runs[i].GiBPerS = Rate(r.Input.Bytes, runs[i].Seconds)
	}
	order := make([]int, len(runs))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		if runs[a].Seconds < runs[b].Seconds {
			return -1
		}
		return 1
	})
	n := len(runs)
	low, high := order[(n-1)/2], order[n/2]
	t := RunTimes{MinSeconds: runs[order[0]].Seconds, MaxSeconds: runs[order[n-1]].Seconds}
	t.MedianSeconds = (runs[low].Seconds + runs[high].Seconds) / 2
	t.MedianGiBPerS = Rate(r.Input.Bytes, t.MedianSeconds)
	if t.MedianSeconds > 0 {
		t.Spread = (t.MaxSeconds - t.MinSeconds) / t.MedianSeconds
	}
	r.Runs, r.RunTimes = runs, &t
	return low
}

// Busy returns a sentence if other processes used so much of the processors that the figures are too
// low, and else an empty text.
func (r *Run) Busy() string {
	p := r.Processors
	if p == nil || p.OthersShare < BusyShare {
		return ""
	}
	return fmt.Sprintf("other processes used %.0f %% of %d processors during the run; its figures are too low "+
		"(end the other work and run again)", 100*p.OthersShare, p.Count)
}

// showRuns shows each run, if there are several.
func (r *Run) showRuns(p *Page) {
	if len(r.Runs) < 2 {
		return
	}
	p.linef("")
	s := &sheet{columns: []column{
		{head: "run", key: "run"}, {head: "seconds", key: "seconds"}, {head: "GiB/s", key: "gib_per_s"},
		{head: "CPU seconds", key: "cpu_seconds"},
	}}
	for i, one := range r.Runs {
		s.add(i+1, three(one.Seconds), three(one.GiBPerS), three(one.CPUSeconds))
	}
	p.table(s)
	t := r.RunTimes
	p.linef("%d runs after a warm-up: median %.3f s (%.3f GiB/s), %.3f s to %.3f s, a spread of %.1f %%",
		len(r.Runs), t.MedianSeconds, t.MedianGiBPerS, t.MinSeconds, t.MaxSeconds, 100*t.Spread)
	p.linef("the phases are those of the median run; all else is of all runs, with the warm-up")
}

// line describes the admission of tasks.
func (a *Admission) line() string {
	return fmt.Sprintf("tasks: %d admitted, %d of them waited for it, %d tried again; "+
		"half admitted within %s, 99 %% within %s, 99.9 %% within %s, the last after %s",
		a.Admitted, a.Waited, a.Retried, duration(a.P50), duration(a.P99), duration(a.P999), duration(a.Max))
}
