package report

import (
	"slices"
	"strings"
	"testing"
)

// TestSetRuns: the median of an odd number of runs is one of them, and of an even number the mean of
// the two in the middle.
func TestSetRuns(t *testing.T) {
	for _, c := range []struct {
		seconds []float64
		want    RunTimes
		median  int
	}{
		{nil, RunTimes{}, 0},
		{[]float64{2}, RunTimes{2, 2, 2, 0, 0.5}, 0},
		{[]float64{8, 2, 4}, RunTimes{4, 2, 8, 1.5, 0.25}, 2},
		{[]float64{5, 1, 3, 100}, RunTimes{4, 1, 100, 24.75, 0.25}, 2},
		{[]float64{1, 1}, RunTimes{1, 1, 1, 0, 1}, 0},
		{[]float64{0, 0}, RunTimes{}, 0},
	} {
		r := &Run{Input: Input{Bytes: 1 << 30}}
		var runs []Repetition
		for _, s := range c.seconds {
			runs = append(runs, Repetition{Seconds: s})
		}
		median := r.SetRuns(runs)
		if len(runs) == 0 {
			if r.RunTimes != nil {
				t.Errorf("of no run: %+v", r.RunTimes)
			}
			continue
		}
		if median != c.median || *r.RunTimes != c.want || r.Runs[0].GiBPerS != Rate(1<<30, c.seconds[0]) {
			t.Errorf("%v: %+v and run %d, want %+v and run %d", c.seconds, *r.RunTimes, median, c.want, c.median)
		}
	}
}

// TestBusy: text, notes and page report that other processes used the processors, from a fifth of them
// on. The page does not call such a run good.
func TestBusy(t *testing.T) {
	const want = "other processes used 62 % of 2 processors during the run; its figures are too low"
	r := &Run{Verify: Verification{Checked: true, Batches: 7}, Processors: &Processors{Count: 2, OthersShare: 0.62}}
	if notes := NotesOf(r); len(notes) != 1 || !strings.HasPrefix(notes[0], want) {
		t.Errorf("the notes are %q", notes)
	}
	if p := PageOf(r); p.Level == "good" || !strings.HasPrefix(p.Headline, "The machine was busy: "+want) ||
		strings.Contains(p.Headline, "All is well") || !strings.HasSuffix(p.Headline, "as they were loaded.") {
		t.Errorf("level %v: %s", p.Level, p.Headline)
	}
	for _, quiet := range []*Processors{nil, {Count: 2, OthersShare: 0.19}} {
		r.Processors = quiet
		if busy := r.Busy(); busy != "" || strings.Contains(PageOf(r).Headline, "processors") ||
			slices.ContainsFunc(NotesOf(r), func(s string) bool { return s != "" }) {
			t.Errorf("%+v: %q", quiet, busy)
		}
	}
}
