package page

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/observe/timeline"
)

// ran is a run like that of spillbench: of what it was set to, what went through, and what it did.
func ran() Run {
	return Run{
		Seconds: 10,
		Input:   Input{Sources: []string{"a generated table (seed 1)"}, Rows: 1000, Batches: 97, Bytes: 400 << 20},
		Verify:  Verification{Checked: true, Batches: 97},
		Phases:  []Phase{{"load", 6, 400 << 20}, {"pass-1", 4, 400 << 20}, {"drain", 0.001, 0}},
		Edges: []Edge{
			{From: "gpu:0", To: "host:0", Bytes: 300 << 20, Seconds: 0.3},
			{From: "host:0", To: "disk:0", Bytes: 200 << 20, Seconds: 2, Limit: 1.5},
			{From: "host:0", To: "gpu:0", Bytes: 200 << 20, Seconds: 0.01}, // too short to be more than chance
			{From: "disk:0", To: "gpu:0", Bytes: 1 << 20, Seconds: 0.5},    // too little
		},
		Waits:    Waits{Count: 100, P99: 0.1},
		Timeline: &timeline.Timeline{Seconds: 10, Waits: timeline.Waits{Total: []float64{10}}},
		Settings: []Setting{
			{Name: "seed", Value: "1", Flag: "--seed"}, {Name: "faults", Value: "x (3 hits)", Same: "x"},
			{Name: "spill directories", Value: "/tmp (21.4 GiB)", Same: "/tmp", Flag: "--disk"}, {Name: "disk slowed to", Says: "the disk was slowed to", Value: Off, Flag: "--disk-throttle"},
		},
		Machine: []Pair{{"commit", "abc"}},
	}
}

// slower is what a run may be on a busy machine.
func slower() Run {
	b := ran()
	b.Seconds *= 2
	for i := range b.Phases {
		b.Phases[i].Seconds *= 2
	}
	for i := range b.Edges {
		b.Edges[i].Seconds *= 3
		b.Edges[i].Limit /= 3
	}
	b.Waits.P99 = 0.3
	b.Timeline = &timeline.Timeline{Seconds: 10, Waits: timeline.Waits{Total: []float64{30}}}
	return b
}

func texts(all []Difference) string {
	var b strings.Builder
	for _, d := range all {
		fmt.Fprintf(&b, "%s %s: %s\n", d.About, cmp.Or(d.Is, "plain"), d.Text)
	}
	return b.String()
}

// TestDifferInNoise: where nothing was set to be other, nothing is called better or worse, whatever
// happened, and the first line says why. What was free on the disk and how often a fault hit is not set.
func TestDifferInNoise(t *testing.T) {
	a, b := ran(), slower()
	b.Settings[1].Value, b.Settings[2].Value = "x (4 hits)", "/tmp (21.5 GiB)"
	all := Differ(&a, &b)
	if len(all) < 5 || all[0].Text != "Nothing that you set differs: what follows may be noise. Repeat each run." {
		t.Fatal(texts(all))
	}
	if slices.ContainsFunc(all, func(d Difference) bool { return d.Is != "" || d.About == "configuration" }) {
		t.Error(texts(all))
	}
	b.Settings[0].Value = "2"
	all = Differ(&a, &b)
	if text := texts(all); strings.Contains(text, "noise") || !strings.Contains(text, "time worse: ") || !strings.Contains(text, "moves worse: host:0 → disk:0 got 3.0 times slower: a move ran at 33.3 MiB/s instead of 100 MiB/s.") {
		t.Error(text)
	}
	b = ran()
	if text := texts(Differ(&a, &b)); text != "time plain: Both took about as long: A 10.0 s, B 10.0 s.\n" {
		t.Errorf("of two equal runs: %s", text)
	}
}

// TestDifferOfLittle: the rate of an edge that moved little, or for a moment, is never told.
func TestDifferOfLittle(t *testing.T) {
	a, b := ran(), slower()
	b.Settings[0].Value = "2"
	b.Edges = append(b.Edges, Edge{From: "gpu:0", To: "disk:0", Bytes: 1 << 10, Seconds: 1})
	if text := texts(Differ(&a, &b)); strings.Contains(text, "host:0 → gpu:0") || strings.Contains(text, "disk:0 → gpu:0") || strings.Contains(text, "gpu:0 → disk:0") {
		t.Error(text)
	}
}

// TestDifferInData: other data comes before all else, and then times are not compared: rates are.
func TestDifferInData(t *testing.T) {
	a, b := ran(), ran()
	b.Input = Input{Sources: []string{"x.parquet"}, Rows: 5000, Batches: 270, Bytes: 1126 << 20}
	b.Seconds, b.Phases[0] = 30, Phase{"load", 26, 1126 << 20}
	b.Edges[0].Bytes, b.Waits.P99 = 900<<20, 1
	all := Differ(&a, &b)
	if len(all) == 0 || all[0].Text != "B had 1.10 GiB of x.parquet, A 0.391 GiB of a generated table (seed 1); in 270 batches and not 97." {
		t.Fatal(texts(all))
	}
	text := texts(all)
	if !strings.Contains(text, "Both went through their data about as fast: A at 40.0 MiB/s, B at 37.5 MiB/s.") || strings.Contains(text, " as long") || strings.Contains(text, "moved") {
		t.Error(text)
	}
	if slices.ContainsFunc(all, func(d Difference) bool { return d.Is != "" }) {
		t.Error(text)
	}
	b.Seconds = 60
	if text := texts(Differ(&a, &b)); !strings.Contains(text, "time worse: B went through its data at 18.8 MiB/s instead of 40.0 MiB/s: 2.1 times slower.") {
		t.Error(text)
	}
	b = ran()
	b.Input.Sources = []string{"y.parquet"} // of the same size: times can be compared
	b.Seconds = 20
	if text := texts(Differ(&a, &b)); !strings.Contains(text, "time worse: B took 20.0 s instead of 10.0 s: 2.0 times as long as A.") || strings.Contains(text, "noise") {
		t.Error(text)
	}
}

// TestDifferInVerification: wrong data is said before anything else, and is never noise.
func TestDifferInVerification(t *testing.T) {
	a, b := ran(), ran()
	b.Verify.Mismatches = 5
	refused, both := ran(), ran()
	refused.Seconds, refused.Verify.Mismatches, refused.Verify.Corrupt = 2, 1, 1
	both.Verify.Mismatches, both.Verify.Corrupt = 3, 1
	for _, c := range []struct {
		a, b *Run
		want string
	}{
		{&a, &b, "verification worse: B was wrong: 5 of 97 batches came back with other bytes than were loaded.\n"},
		{&b, &a, "verification better: A was wrong: 5 of 97 batches came back with other bytes than were loaded.\n"},
		{&b, &b, "verification worse: Both were wrong: in A 5 of 97 batches came back with other bytes than were loaded, in B 5 of 97 batches came back with other bytes than were loaded.\n"},
		{&a, &refused, "verification worse: B was wrong: 1 of 97 batches was found corrupt when read, and refused.\ntime plain: B took 2.00 s instead of 10.0 s"},
		{&refused, &a, "verification better: A was wrong: 1 of 97 batches was found corrupt when read, and refused.\ntime plain: B took 10.0 s instead of 2.00 s"},
		{&a, &both, "verification worse: B was wrong: 3 of 97 batches were wrong: 1 was found corrupt when read, and refused, and 2 came back with other bytes than were loaded.\n"},
		{&a, &Run{}, "verification plain: B was not checked, A was.\n"},
	} {
		if text := texts(Differ(c.a, c.b)); !strings.HasPrefix(text, c.want) {
			t.Errorf("%s, want %s", text, c.want)
		}
	}
}

// TestDifferInSettings: settings and the machine are told in sentences that can be read.
func TestDifferInSettings(t *testing.T) {
	a, b := ran(), ran()
	b.Settings[3].Value, b.Machine[0].Value = "100.0 MiB/s", ""
	const same = "time plain: Both took about as long: A 10.0 s, B 10.0 s.\n"
	for _, c := range []struct {
		a, b *Run
		want string
	}{
		{&a, &b, same + "configuration plain: the disk was slowed to 100.0 MiB/s in B, not in A (--disk-throttle).\nmachine plain: commit: not known in B, abc in A.\n"},
		{&b, &a, same + "configuration plain: the disk was slowed to 100.0 MiB/s in A, not in B (--disk-throttle).\nmachine plain: commit: abc in B, not known in A.\n"},
	} {
		if text := texts(Differ(c.a, c.b)); text != c.want {
			t.Errorf("%s, want %s", text, c.want)
		}
	}
}

// TestDifferInLimits: what has a limit is compared by its share of it, so that a slower machine is not
// taken for a slower engine; how the limits moved is said once for each.
func TestDifferInLimits(t *testing.T) {
	row := func(name string, share, limit float64) Figure {
		return Figure{Name: name, Value: share * limit, Unit: "GiB/s", Share: share, ShareNoise: 0.03, ShareOf: "of the limit", Limit: limit, LimitOf: "The machine's own speed of writing to disk:0"}
	}
	a := &Run{Figures: []Figure{row("x", 0.9, 2), row("y", 0.9, 2), row("z", 0.9, 2), row("w", 0.9, 2)}}
	b := &Run{Figures: []Figure{row("x", 0.9, 1), row("y", 0.5, 1), row("z", 0.95, 1.1), row("w", 0.9, 1)}}
	b.Settings, a.Settings = []Setting{{Name: "pairs", Value: "2"}}, []Setting{{Name: "pairs", Value: "1"}}
	const want = `configuration plain: pairs: 2 in B, 1 in A.
limits plain: The machine's own speed of writing to disk:0 was 2.0 times lower, the median of 4 rows.
results worse: y: 50 % of the limit instead of 90 %, at 0.500 GiB/s instead of 1.80 GiB/s (noise 3 %).
results plain: In 3 rows the share of the limit differs by no more than noise.
`
	if text := texts(Differ(a, b)); text != want {
		t.Errorf("%s, want %s", text, want)
	}
}

// TestOneUnit: two values in a sentence have one unit, and no exponent.
func TestOneUnit(t *testing.T) {
	for _, c := range []struct{ got, want [2]string }{
		{pairOf(alike(inRates, 0.15, 100.7/1024)), [2]string{"154 MiB/s", "101 MiB/s"}},
		{pairOf(alike(inRates, 5.57, 0.05)), [2]string{"5.57 GiB/s", "0.050 GiB/s"}},
		{pairOf(alike(inRates, 0, 1e-6)), [2]string{"0 MiB/s", "0.001 MiB/s"}},
		{pairOf(alike(inTimes, 0.9, 1.25)), [2]string{"0.900 s", "1.25 s"}},
		{pairOf(alike(inTimes, 90, 300)), [2]string{"1.50 min", "5.00 min"}},
		{pairOf(alike(inTimes, 1e9, 2)), [2]string{"277778 h", "0.0006 h"}},
		{pairOf(sizes(1<<30, 512<<20)), [2]string{"1.00 GiB", "0.500 GiB"}},
		{pairOf(sizes(1<<30, 1<<30+1)), [2]string{"1073741824 B", "1073741825 B"}},
		{pairOf(sizes(0, 0)), [2]string{"0 B", "0 B"}},
	} {
		if c.got != c.want {
			t.Errorf("%q, want %q", c.got, c.want)
		}
	}
}

func pairOf(a, b string) [2]string { return [2]string{a, b} }

// TestPageIsBounded: a document that somebody made up has no page that a browser cannot open.
func TestPageIsBounded(t *testing.T) {
	const many = 20_000
	var r Run
	line := &timeline.Timeline{Seconds: 1, IntervalSeconds: 1, Waits: timeline.Waits{Ended: []int64{1}}}
	for i := range many {
		id := fmt.Sprint("disk:", i)
		r.Spaces = append(r.Spaces, Space{ID: id})
		r.Edges = append(r.Edges, Edge{From: "gpu:0", To: id, Bytes: 1 << 20, Seconds: 1, Limit: 1, ByReason: map[string]int64{"work": 1}})
		r.Work, r.Tasks, r.Phases = append(r.Work, Work{Plan: id}), append(r.Tasks, Task{Name: id}), append(r.Phases, Phase{Name: id})
		r.Settings, r.Machine = append(r.Settings, Setting{Name: id}), append(r.Machine, Pair{Name: id})
		r.Warnings = append(r.Warnings, diag.Warning{What: id})
		bars := []Bar{{Name: id, Value: 1}}
		r.Figures = append(r.Figures, Figure{Name: id, Value: float64(1 + i%7), Unit: "GiB/s", Bars: bars})
		line.Spaces, line.Edges = append(line.Spaces, timeline.Space{ID: id}), append(line.Edges, timeline.Edge{From: "gpu:0", To: id})
		line.Causes, line.Phases, line.Notes = append(line.Causes, timeline.Cause{Name: id}), append(line.Phases, timeline.Phase{Name: id}), append(line.Notes, timeline.Note{Kind: id})
	}
	r.Timeline = line
	r.Edges[0].ByReason = map[string]int64{}
	for i := range many {
		r.Edges[0].ByReason[fmt.Sprint(i)] = 1
	}
	other := r
	other.Figures = nil
	for i := range many {
		other.Figures = append(other.Figures, Figure{Name: fmt.Sprint("disk:", i), Value: 100, Unit: "GiB/s"})
	}
	var b bytes.Buffer
	if err := Write(&b, &Report{Title: "many", Runs: []Run{r, other}}); err != nil {
		t.Fatal(err)
	}
	if b.Len() > 3_000_000 {
		t.Errorf("the page has %d bytes", b.Len())
	}
	if n := strings.Count(b.String(), "and "+count(many-maxRows)+" more</p>"); n < 2*9 {
		t.Errorf("%d tables say that there is more", n)
	}
}

// TestRawLimitIsSaid where there is one.
func TestRawLimitIsSaid(t *testing.T) {
	for limit, want := range map[float64]bool{0: false, 2: true} {
		r := ran()
		for i := range r.Edges {
			r.Edges[i].Limit = limit
		}
		var b bytes.Buffer
		if err := Write(&b, &Report{Runs: []Run{r}}); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(b.String(), "The raw limit is what the machine does without the engine") != want {
			t.Errorf("with a limit of %v it is not %v", limit, want)
		}
	}
}

// TestTasks: what waited of no task alone is no row: the section on waits has it.
func TestTasks(t *testing.T) {
	for want, tasks := range map[string][]Task{"": {{Waits: 3}}, "(of no task)": {{Waits: 3}, {Name: "t"}}} {
		r := ran()
		r.Tasks = tasks
		var b bytes.Buffer
		if err := Write(&b, &Report{Runs: []Run{r}}); err != nil {
			t.Fatal(err)
		}
		if has := strings.Contains(b.String(), "of no task"); has != (want != "") {
			t.Errorf("%+v: %v", tasks, has)
		}
	}
}

// TestNumbersOfBars have as many digits as those of a comparison.
func TestNumbersOfBars(t *testing.T) {
	var b bytes.Buffer
	f := Figure{Title: "t", Unit: "GiB/s", Bars: []Bar{{Value: 1}, {Value: 12345}}}
	if err := Write(&b, &Report{Runs: []Run{{Figures: []Figure{f}}}}); err != nil {
		t.Fatal(err)
	}
	if text := b.String(); !strings.Contains(text, "<b>1.00 <small>GiB/s") || !strings.Contains(text, "<b>12345 <small>GiB/s") {
		t.Error("the bars have other numbers")
	}
}
