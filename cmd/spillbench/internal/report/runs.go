package report

import (
	"fmt"
	"slices"
)

// BusyShare is the share of the processors' time that other processes may use before Busy reports that
// a run's figures are too low.
const BusyShare = 0.2

// SetRuns sets the runs of the document's input and their summary. It returns the index of the run with
// the median time. Of an even number of runs it returns the faster one of the two in the middle.
func (r *Run) SetRuns(runs []Repetition) int {
	if len(runs) == 0 {
		return 0
	}
	var seconds []float64
	for i := range runs {
		runs[i].GiBPerS = Rate(r.Input.Bytes, runs[i].Seconds)
		seconds = append(seconds, runs[i].Seconds)
	}
	sorted, last := slices.Sorted(slices.Values(seconds)), len(runs)-1
	lower, upper := sorted[last/2], sorted[len(runs)/2]
	t := RunTimes{MedianSeconds: (lower + upper) / 2, MinSeconds: sorted[0], MaxSeconds: sorted[last]}
	t.MedianGiBPerS = Rate(r.Input.Bytes, t.MedianSeconds)
	if t.MedianSeconds > 0 {
		t.Spread = (t.MaxSeconds - t.MinSeconds) / t.MedianSeconds
	}
	r.Runs, r.RunTimes = runs, &t
	return slices.Index(seconds, lower)
}

// Busy returns a sentence if other processes used so much of the processors that the figures are too
// low. Otherwise it returns "".
func (r *Run) Busy() string {
	p := r.Processors
	if p == nil || p.OthersShare < BusyShare {
		return ""
	}
	return fmt.Sprintf("other processes used %.0f %% of %d processors during the run; its figures are too low "+
		"(end the other work and run again)", 100*p.OthersShare, p.Count)
}

// String describes the admission of tasks.
func (a *Admission) String() string {
	return fmt.Sprintf("tasks: %d admitted, %d of them waited for it, %d tried again; "+
		"half admitted within %s, 99 %% within %s, 99.9 %% within %s, the last after %s",
		a.Admitted, a.Waited, a.Retried, duration(a.P50), duration(a.P99), duration(a.P999), duration(a.Max))
}
