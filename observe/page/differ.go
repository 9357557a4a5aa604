package page

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/spillway-db/spillway/internal/size"
)

// Difference is one between two runs, in words.
type Difference struct {
	About string // one of abouts
	Text  string
	Worse bool // in the second run
	Plain bool // neither better nor worse
}

// abouts is the order of differences: what makes a comparison doubtful, the outcome, its reasons.
var abouts = []string{"failure", "verification", "data", "noise", "time", "configuration", "phases", "limits", "moves", "results", "waits", "machine"}

// What is nearer than this is said to be the same: runs vary by a tenth.
const (
	sameData  = 0.03 // with more or less data, times cannot be compared
	sameRate  = 0.15
	sameTime  = 0.10
	sameLimit = 0.5  // of a limit that a few transfers were measured for
	leastLag  = 0.02 // seconds
	leastBusy = 0.05 // seconds that an edge must have moved for, or its rate is chance
)

// Differ says in what b differs from a. Where nothing differs that could be the reason, nothing is
// called better or worse.
func Differ(a, b *Run) (all []Difference) {
	if a.Failed || b.Failed { // its time is how long it took to fail, and its data what it came to
		all = slices.Concat(differInFailure(a, b), differInVerification(a, b), differInSettings(a, b), differInMachine(a, b))
		for _, d := range slices.Concat(differInEdges(a, b), differInFigures(a, b), differInWaits(a, b)) {
			d.Plain = true
			all = append(all, d)
		}
		return ordered(all)
	}
	verified := differInVerification(a, b)
	reasons := slices.Concat(differInInput(a, b), differInSettings(a, b), differInMachine(a, b))
	outcome := slices.Concat(differInTime(a, b), differInPhases(a, b), differInEdges(a, b), differInFigures(a, b), differInWaits(a, b))
	if a.Verified.Mismatches > 0 || b.Verified.Mismatches > 0 { // who is wrong is not better for being fast
		for i := range outcome {
			outcome[i].Plain = true
		}
		return ordered(slices.Concat(verified, reasons, outcome))
	}
	expected := func(d Difference) bool { return d.About == "time" && d.Plain } // both took as long
	if len(reasons) == 0 && slices.ContainsFunc(outcome, func(d Difference) bool { return !expected(d) }) {
		for i := range outcome {
			outcome[i].Plain = true
		}
		reasons = []Difference{{About: "noise", Plain: true, Text: "Nothing that you set differs: what follows may be noise. Repeat each run."}}
	}
	return ordered(slices.Concat(verified, reasons, outcome))
}

// differInFailure says which of the runs failed: at least one has.
func differInFailure(a, b *Run) []Difference {
	switch {
	case a.Failed && b.Failed:
		return []Difference{{About: "failure", Plain: true, Text: "Both runs failed, so their times are not compared."}}
	case b.Failed:
		return []Difference{{About: "failure", Worse: true, Text: "B failed, and A did not, so their times are not compared."}}
	}
	return []Difference{{About: "failure", Text: "A failed, and B did not, so their times are not compared."}}
}

func ordered(all []Difference) []Difference {
	slices.SortStableFunc(all, func(a, b Difference) int {
		return cmp.Compare(slices.Index(abouts, a.About), slices.Index(abouts, b.About))
	})
	return all
}

// otherData reports whether the runs had so much more or less data that their times say nothing.
func otherData(a, b *Run) bool {
	return a.Input.Bytes > 0 && b.Input.Bytes > 0 && !near(float64(a.Input.Bytes), float64(b.Input.Bytes), sameData)
}

func differInVerification(a, b *Run) []Difference {
	x, y := a.Verified, b.Verified
	d := Difference{About: "verification"}
	switch {
	case x.Mismatches > 0 && y.Mismatches > 0:
		d.Worse, d.Text = true, fmt.Sprintf("Both were wrong: in A %s, in B %s.", x.Wrong(), y.Wrong())
	case y.Mismatches > 0:
		d.Worse, d.Text = true, "B was wrong: "+y.Wrong()+"."
	case x.Mismatches > 0:
		d.Text = "A was wrong: " + x.Wrong() + "."
	case x.Checked != y.Checked:
		d.Plain, d.Text = true, "B was checked, A was not."
		if x.Checked {
			d.Text = "B was not checked, A was."
		}
	default:
		return nil
	}
	return []Difference{d}
}

func differInInput(a, b *Run) (all []Difference) {
	x, y := a.Input, b.Input
	if x == y || x == (Input{}) || y == (Input{}) {
		return nil
	}
	was, is := sizes(x.Bytes, y.Bytes)
	text := fmt.Sprintf("B had %s of %s, A %s", is, cmp.Or(y.Sources, "data"), was)
	if x.Sources != y.Sources {
		text += " of " + cmp.Or(x.Sources, "data")
	}
	if x.Batches != y.Batches {
		text += fmt.Sprintf("; in %s batches and not %s", count(y.Batches), count(x.Batches))
	} else if x.Rows != y.Rows {
		text += fmt.Sprintf("; %s rows and not %s", count(y.Rows), count(x.Rows))
	}
	return []Difference{{About: "data", Plain: true, Text: text + "."}}
}

func differInTime(a, b *Run) []Difference {
	if a.Seconds <= 0 || b.Seconds <= 0 || len(a.Figures)+len(b.Figures) > 0 {
		return nil
	}
	d := Difference{About: "time"}
	was, is := tooks(a.Seconds, b.Seconds)
	slower := b.Seconds / a.Seconds
	if otherData(a, b) {
		x, y := rate(a.Input.Bytes, a.Seconds), rate(b.Input.Bytes, b.Seconds)
		was, is = speeds(x, y)
		slower = x / y
		switch {
		case near(x, y, sameTime):
			d.Plain, d.Text = true, fmt.Sprintf("Both went through their data about as fast: A at %s, B at %s.", was, is)
		case slower > 1:
			d.Worse, d.Text = true, fmt.Sprintf("B went through its data at %s instead of %s: %s slower.", is, was, times(slower))
		default:
			d.Text = fmt.Sprintf("B went through its data at %s instead of %s: %s as fast.", is, was, times(1/slower))
		}
		return []Difference{d}
	}
	switch {
	case near(a.Seconds, b.Seconds, sameTime):
		d.Plain, d.Text = true, fmt.Sprintf("Both took about as long: A %s, B %s.", was, is)
	case slower > 1:
		d.Worse, d.Text = true, fmt.Sprintf("B took %s instead of %s: %s as long as A.", is, was, times(slower))
	default:
		d.Text = fmt.Sprintf("B took %s instead of %s: it is %s as fast as A.", is, was, times(1/slower))
	}
	return []Difference{d}
}

func differInSettings(a, b *Run) (all []Difference) {
	for _, s := range first(b.Settings) {
		i := slices.IndexFunc(a.Settings, func(o Setting) bool { return o.Name == s.Name })
		if i < 0 {
			continue
		}
		o := a.Settings[i]
		if cmp.Or(s.Same, s.Value) == cmp.Or(o.Same, o.Value) {
			continue
		}
		text := fmt.Sprintf("%s: %s in B, %s in A", s.Name, cmp.Or(s.Value, "none"), cmp.Or(o.Value, "none"))
		if s.Says != "" {
			switch {
			case s.Value == Off:
				text = fmt.Sprintf("%s %s in A, not in B", s.Says, o.Value)
			case o.Value == Off:
				text = fmt.Sprintf("%s %s in B, not in A", s.Says, s.Value)
			default:
				text = fmt.Sprintf("%s %s in B, %s in A", s.Says, s.Value, o.Value)
			}
		}
		if s.Flag != "" {
			text += " (" + s.Flag + ")"
		}
		all = append(all, Difference{About: "configuration", Text: text + ".", Plain: true})
	}
	return all
}

func differInMachine(a, b *Run) (all []Difference) {
	for _, p := range first(b.Machine) {
		for _, q := range first(a.Machine) {
			if p.Name == q.Name && p.Value != q.Value {
				all = append(all, Difference{About: "machine", Plain: true, Text: fmt.Sprintf("%s: %s in B, %s in A.", p.Name, cmp.Or(p.Value, "not known"), cmp.Or(q.Value, "not known"))})
			}
		}
	}
	return all
}

func differInPhases(a, b *Run) (all []Difference) {
	if otherData(a, b) {
		return differInRatesOfPhases(a, b)
	}
	lag, name := 0.0, ""
	for _, p := range first(b.Phases) {
		i := slices.IndexFunc(a.Phases, func(o Phase) bool { return o.Name == p.Name })
		if i < 0 {
			continue
		}
		was, is := a.Phases[i].Seconds, p.Seconds
		if d := is - was; math.Abs(d) > math.Abs(lag) {
			lag, name = d, p.Name
		}
		if near(was, is, sameTime) || math.Abs(is-was) < leastLag {
			continue
		}
		before, now := tooks(was, is)
		d := Difference{About: "phases", Worse: is > was, Text: fmt.Sprintf("Phase %s took %s instead of %s, %s as fast.", p.Name, now, before, times(was/is))}
		if is > was {
			d.Text = fmt.Sprintf("Phase %s took %s instead of %s, %s as long.", p.Name, now, before, times(is/was))
		}
		all = append(all, d)
	}
	if len(all) > 1 {
		word := "longer"
		if lag < 0 {
			word = "shorter"
		}
		all = slices.Insert(all, 0, Difference{About: "phases", Worse: lag > 0, Text: fmt.Sprintf("Most of the difference is in phase %s: %s %s.", name, took(math.Abs(lag)), word)})
	}
	return all
}

// differInRatesOfPhases is for runs of unlike data.
func differInRatesOfPhases(a, b *Run) (all []Difference) {
	for _, p := range first(b.Phases) {
		i := slices.IndexFunc(a.Phases, func(o Phase) bool { return o.Name == p.Name })
		if i < 0 {
			continue
		}
		x, y := rate(a.Phases[i].Bytes, a.Phases[i].Seconds), rate(p.Bytes, p.Seconds)
		if x > 0 && y > 0 && !near(x, y, sameRate) {
			was, is := speeds(x, y)
			all = append(all, Difference{About: "phases", Plain: true, Text: fmt.Sprintf("Phase %s went through the data at %s instead of %s.", p.Name, is, was)})
		}
	}
	return all
}

func differInEdges(a, b *Run) (all []Difference) {
	other := otherData(a, b)
	matters := func(moved int64) func(Edge) bool {
		return func(e Edge) bool { return e.Bytes > 0 && float64(e.Bytes) >= worthwhile*float64(moved) }
	}
	inA, inB := matters(a.moved()), matters(b.moved())
	named := func(e Edge) string { return e.From + " → " + e.To }
	old := make(map[string]Edge, len(a.Edges))
	for _, o := range a.Edges {
		old[named(o)] = o
	}
	limits := make(map[string]bool) // what was said of them
	for _, e := range b.Edges {
		name := named(e)
		o, both := old[name]
		delete(old, name)
		if both && o.Limit > 0 && e.Limit > 0 && isDisk(e.To) && !limits[e.To] && !near(o.Limit, e.Limit, sameLimit) {
			limits[e.To] = true
			was, is := speeds(o.Limit, e.Limit)
			all = append(all, Difference{About: "limits", Plain: true, Text: fmt.Sprintf("The disk's own speed of writing to %s was %s: %s instead of %s.", e.To, lower(o.Limit, e.Limit), is, was)})
		}
		if !inA(o) && !inB(e) {
			continue
		}
		if !both || o.Bytes == 0 {
			all = append(all, Difference{About: "moves", Plain: true, Text: fmt.Sprintf("%s was used by B alone, for %s.", name, size.Approx(e.Bytes))})
			continue
		}
		x, y := rate(o.Bytes, o.Seconds), rate(e.Bytes, e.Seconds)
		if x > 0 && y > 0 && !near(x, y, sameRate) && min(o.Seconds, e.Seconds) >= leastBusy {
			was, is := speeds(x, y)
			d := Difference{About: "moves", Plain: other, Worse: y < x, Text: fmt.Sprintf("%s got %s faster: a move ran at %s instead of %s.", name, times(y/x), is, was)}
			if d.Worse {
				d.Text = fmt.Sprintf("%s got %s slower: a move ran at %s instead of %s.", name, times(x/y), is, was)
			}
			all = append(all, d)
		}
		if !other && !near(float64(o.Bytes), float64(e.Bytes), 0.25) {
			was, is := sizes(o.Bytes, e.Bytes)
			all = append(all, Difference{About: "moves", Plain: true, Text: fmt.Sprintf("%s moved %s instead of %s.", name, is, was)})
		}
	}
	for _, o := range a.Edges {
		if _, alone := old[named(o)]; alone && inA(o) {
			all = append(all, Difference{About: "moves", Plain: true, Text: fmt.Sprintf("%s was used by A alone, for %s.", named(o), size.Approx(o.Bytes))})
		}
	}
	return all
}

// lower says how a speed is beside the one that it was.
func lower(was, is float64) string {
	if is < was {
		return times(was/is) + " lower"
	}
	return times(is/was) + " higher"
}

// differInFigures compares what was measured. What has a limit is compared by its share of it: the
// limit is the machine's, which may have become slower as a whole. Limits have sentences of their own.
func differInFigures(a, b *Run) (all []Difference) {
	old := make(map[string]Figure, len(a.Figures))
	for _, o := range a.Figures {
		old[o.Name] = o
	}
	same, shares := 0, 0
	ratios, noise := make(map[string][]float64), make(map[string]float64)
	var limits []string
	for _, f := range b.Figures {
		o, both := old[f.Name]
		if !both || f.Value <= 0 || o.Value <= 0 {
			continue // not measured: nothing is so many times as fast
		}
		if f.Limit > 0 && o.Limit > 0 && f.LimitOf == o.LimitOf {
			if ratios[f.LimitOf] == nil {
				limits = append(limits, f.LimitOf)
			}
			ratios[f.LimitOf] = append(ratios[f.LimitOf], f.Limit/o.Limit)
			noise[f.LimitOf] = max(noise[f.LimitOf], sameTime, f.ShareNoise, o.ShareNoise)
		}
		was, is := measured(o.Value, f.Value, f.Unit)
		if f.Share > 0 && o.Share > 0 {
			varied := max(f.ShareNoise, o.ShareNoise)
			if near(o.Share, f.Share, max(sameTime, varied)) {
				shares++
				continue
			}
			text := fmt.Sprintf("%s: %s %s instead of %s, at %s instead of %s", f.Name, percent(f.Share), f.ShareOf, percent(o.Share), is, was)
			if varied > 0 {
				text += fmt.Sprintf(" (noise %s)", percent(varied))
			}
			all = append(all, Difference{About: "results", Worse: f.Share < o.Share, Text: text + "."})
			continue
		}
		if near(o.Value, f.Value, max(sameTime, f.Noise, o.Noise)) {
			same++
			continue
		}
		word, ratio := "faster", f.Value/o.Value
		if f.Value < o.Value {
			word, ratio = "slower", o.Value/f.Value
		}
		all = append(all, Difference{About: "results", Worse: f.Value < o.Value, Text: fmt.Sprintf("%s: %s %s, %s instead of %s.", f.Name, times(ratio), word, is, was)})
	}
	for _, of := range limits {
		list := ratios[of]
		slices.Sort(list)
		mid := list[len(list)/2]
		if near(1, mid, noise[of]) {
			continue
		}
		text := fmt.Sprintf("%s was %s", of, lower(1, mid))
		if len(list) > 1 {
			text += fmt.Sprintf(", the median of %d rows", len(list))
		}
		all = append(all, Difference{About: "limits", Plain: true, Text: text + "."})
	}
	if same+shares > 0 && len(all) > 0 {
		text := fmt.Sprintf("%d other figures differ by no more than noise.", same+shares)
		if same == 0 {
			text = fmt.Sprintf("In %d rows the share of the limit differs by no more than noise.", shares)
		}
		all = append(all, Difference{About: "results", Plain: true, Text: text})
	}
	return all
}

func differInWaits(a, b *Run) (all []Difference) {
	plain := otherData(a, b)
	was, is := a.waiting(), b.waiting()
	if a.Waits.Count+b.Waits.Count > 0 && math.Abs(is-was) >= 0.1 && !near(was, is, 0.25) {
		all = append(all, Difference{About: "waits", Plain: plain, Worse: is > was, Text: fmt.Sprintf("%.1f requests waited for room at once, on average, instead of %.1f.", is, was)})
	}
	if a.Waits.P99 > 0 && b.Waits.P99 > 0 && !near(a.Waits.P99, b.Waits.P99, 0.25) {
		before, now := tooks(a.Waits.P99, b.Waits.P99)
		d := Difference{About: "waits", Plain: plain, Worse: b.Waits.P99 > a.Waits.P99}
		word := "shorter"
		if d.Worse {
			word = "longer"
		}
		d.Text = fmt.Sprintf("Waits for room got %s: 99 %% ended within %s instead of %s (%s waits instead of %s).", word, now, before, count(b.Waits.Count), count(a.Waits.Count))
		all = append(all, d)
	}
	return all
}

// near reports whether two values differ by no more than a part of the larger one.
func near(a, b, part float64) bool { return math.Abs(a-b) <= part*max(math.Abs(a), math.Abs(b)) }

func times(v float64) string {
	if v < 10 {
		return fmt.Sprintf("%.1f times", v)
	}
	return fmt.Sprintf("%.0f times", v)
}

// unit is one of a scale: how much it is, and how much a value has at least that is written in it.
type unit struct {
	name     string
	of, from float64
}

// Scales, the largest unit first.
var (
	inRates = []unit{{"GiB/s", 1, 1}, {"MiB/s", 1.0 / 1024, 0}}
	inTimes = []unit{{"h", 3600, 7200}, {"min", 60, 120}, {"s", 1, 1}, {"ms", 1e-3, 1e-3}, {"µs", 1e-6, 0}}
	inSizes = []unit{{"TiB", 1 << 40, 1 << 40}, {"GiB", 1 << 30, 1 << 30}, {"MiB", 1 << 20, 1 << 20}, {"KiB", 1 << 10, 1 << 10}, {"B", 1, 0}}
)

// alike writes two values in one unit, that of the larger one, so that they can be compared at a glance.
func alike(scale []unit, a, b float64) (string, string) {
	i := slices.IndexFunc(scale, func(u unit) bool { return max(a, b) >= u.from })
	u := scale[max(0, i)]
	return figure(a/u.of) + " " + u.name, figure(b/u.of) + " " + u.name
}

func speeds(a, b float64) (string, string) { return alike(inRates, a, b) }

func tooks(a, b float64) (string, string) { return alike(inTimes, a, b) }

func sizes(a, b int64) (string, string) {
	x, y := alike(inSizes, float64(a), float64(b))
	if x == y && a != b {
		return size.Apart(a, b)
	}
	return x, y
}

// measured writes two figures in their unit.
func measured(a, b float64, of string) (string, string) {
	if of == "GiB/s" {
		return speeds(a, b)
	}
	return figure(a) + " " + of, figure(b) + " " + of
}
