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
	About string // "failure", "time", "phases", "moves", "waits", "limits", "results", "configuration", "machine"
	Text  string
	Worse bool // in the second run
	Plain bool // neither better nor worse
}

// What is nearer than this is said to be the same: runs vary by a tenth.
const (
	sameRate = 0.15
	sameTime = 0.10
	leastLag = 0.02 // seconds
)

// Differ says in what b differs from a, the outcome first, and then what may be the reason.
func Differ(a, b *Run) (all []Difference) {
	add := func(about string, worse bool, format string, args ...any) {
		all = append(all, Difference{About: about, Text: fmt.Sprintf(format, args...), Worse: worse})
	}
	failed := a.Failed || b.Failed // a time is then how long it took to fail
	switch {
	case a.Failed && b.Failed:
		all = append(all, Difference{About: "failure", Plain: true, Text: "Both runs failed, so their times are not compared."})
	case b.Failed:
		add("failure", true, "B failed, and A did not, so their times are not compared.")
	case a.Failed:
		add("failure", false, "A failed, and B did not, so their times are not compared.")
	}
	if !failed && a.Seconds > 0 && b.Seconds > 0 && len(a.Figures)+len(b.Figures) == 0 {
		switch {
		case near(a.Seconds, b.Seconds, sameTime):
			all = append(all, Difference{About: "time", Plain: true, Text: fmt.Sprintf("Both took about as long: A %s, B %s.", took(a.Seconds), took(b.Seconds))})
		case b.Seconds > a.Seconds:
			add("time", true, "B took %s instead of %s: %s as long as A.", took(b.Seconds), took(a.Seconds), times(b.Seconds/a.Seconds))
		default:
			add("time", false, "B took %s instead of %s: it is %s as fast as A.", took(b.Seconds), took(a.Seconds), times(a.Seconds/b.Seconds))
		}
	}
	all = append(all, differInSettings(a, b)...)
	if !failed {
		all = append(all, differInPhases(a, b)...)
	}
	all = append(all, differInEdges(a, b)...)
	all = append(all, differInFigures(a, b)...)
	all = append(all, differInWaits(a, b)...)
	for _, p := range b.Machine {
		for _, q := range a.Machine {
			if p.Name == q.Name && p.Value != q.Value {
				all = append(all, Difference{About: "machine", Plain: true, Text: fmt.Sprintf("%s: %s, and not %s.", p.Name, cmp.Or(p.Value, "not known"), cmp.Or(q.Value, "not known"))})
			}
		}
	}
	order := []string{"failure", "time", "configuration", "phases", "limits", "moves", "results", "waits", "machine"}
	slices.SortStableFunc(all, func(a, b Difference) int {
		return cmp.Compare(slices.Index(order, a.About), slices.Index(order, b.About))
	})
	return all
}

func differInSettings(a, b *Run) (all []Difference) {
	for _, s := range b.Settings {
		i := slices.IndexFunc(a.Settings, func(o Setting) bool { return o.Name == s.Name })
		if i < 0 || a.Settings[i].Value == s.Value {
			continue
		}
		text := fmt.Sprintf("%s: %s in B, %s in A", s.Name, cmp.Or(s.Value, "none"), cmp.Or(a.Settings[i].Value, "none"))
		if s.Flag != "" {
			text += " (" + s.Flag + ")"
		}
		all = append(all, Difference{About: "configuration", Text: text + ".", Plain: true})
	}
	return all
}

func differInPhases(a, b *Run) (all []Difference) {
	lag, name := 0.0, ""
	for _, p := range b.Phases {
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
		d := Difference{About: "phases", Worse: is > was, Text: fmt.Sprintf("Phase %s took %s instead of %s, %s as fast.", p.Name, took(is), took(was), times(was/is))}
		if is > was {
			d.Text = fmt.Sprintf("Phase %s took %s instead of %s, %s as long.", p.Name, took(is), took(was), times(is/was))
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

func differInEdges(a, b *Run) (all []Difference) {
	for _, e := range b.Edges {
		i := slices.IndexFunc(a.Edges, func(o Edge) bool { return o.From == e.From && o.To == e.To })
		name := e.From + " → " + e.To
		if i < 0 {
			if e.Bytes > 0 {
				all = append(all, Difference{About: "moves", Plain: true, Text: fmt.Sprintf("%s was used by B alone, for %s.", name, size.Approx(e.Bytes))})
			}
			continue
		}
		o := a.Edges[i]
		was, is := rate(o.Bytes, o.Seconds), rate(e.Bytes, e.Seconds)
		switch {
		case was <= 0 || is <= 0 || near(was, is, sameRate):
		case is < was:
			all = append(all, Difference{About: "moves", Worse: true, Text: fmt.Sprintf("%s got %s slower: a move ran at %s instead of %s.", name, times(was/is), speed(is), speed(was))})
		default:
			all = append(all, Difference{About: "moves", Text: fmt.Sprintf("%s got %s faster: a move ran at %s instead of %s.", name, times(is/was), speed(is), speed(was))})
		}
		if !near(float64(o.Bytes), float64(e.Bytes), 0.25) {
			all = append(all, Difference{About: "moves", Plain: true, Text: fmt.Sprintf("%s moved %s instead of %s.", name, size.Approx(e.Bytes), size.Approx(o.Bytes))})
		}
		if o.Limit > 0 && e.Limit > 0 && isDisk(e.To) && !near(o.Limit, e.Limit, 0.5) {
			all = append(all, Difference{
				About: "limits", Worse: e.Limit < o.Limit,
				Text: fmt.Sprintf("The raw limit of writing to %s was %s instead of %s.", e.To, speed(e.Limit), speed(o.Limit)),
			})
		}
	}
	for _, o := range a.Edges {
		if !slices.ContainsFunc(b.Edges, func(e Edge) bool { return o.From == e.From && o.To == e.To }) && o.Bytes > 0 {
			all = append(all, Difference{About: "moves", Plain: true, Text: fmt.Sprintf("%s → %s was used by A alone, for %s.", o.From, o.To, size.Approx(o.Bytes))})
		}
	}
	// What says the same of two edges is said once.
	var once []Difference
	for _, d := range all {
		if !slices.Contains(once, d) {
			once = append(once, d)
		}
	}
	return once
}

func differInFigures(a, b *Run) (all []Difference) {
	same := 0
	for _, f := range b.Figures {
		i := slices.IndexFunc(a.Figures, func(o Figure) bool { return o.Name == f.Name })
		if i < 0 {
			continue
		}
		o := a.Figures[i]
		if f.Value <= 0 || o.Value <= 0 {
			continue // not measured: nothing is so many times as fast
		}
		if near(o.Value, f.Value, max(sameTime, f.Noise, o.Noise)) {
			same++
			continue
		}
		word, ratio := "faster", f.Value/o.Value
		if f.Value < o.Value {
			word, ratio = "slower", o.Value/f.Value
		}
		all = append(all, Difference{About: "results", Worse: f.Value < o.Value, Text: fmt.Sprintf("%s: %s %s, %.3g instead of %.3g %s.", f.Name, times(ratio), word, f.Value, o.Value, f.Unit)})
	}
	if same > 0 {
		all = append(all, Difference{About: "results", Plain: true, Text: fmt.Sprintf("%d other figures differ by no more than noise.", same)})
	}
	return all
}

func differInWaits(a, b *Run) (all []Difference) {
	was, is := a.waiting(), b.waiting()
	if a.Waits.Count+b.Waits.Count > 0 && math.Abs(is-was) >= 0.1 && !near(was, is, 0.25) {
		all = append(all, Difference{About: "waits", Worse: is > was, Text: fmt.Sprintf("%.1f requests waited for room at once, on average, instead of %.1f.", is, was)})
	}
	if a.Waits.P99 > 0 && b.Waits.P99 > 0 && !near(a.Waits.P99, b.Waits.P99, 0.25) {
		d := Difference{About: "waits", Worse: b.Waits.P99 > a.Waits.P99}
		d.Text = fmt.Sprintf("Waits for room got shorter: 99 %% ended within %s instead of %s (%s waits instead of %s).", took(b.Waits.P99), took(a.Waits.P99), count(b.Waits.Count), count(a.Waits.Count))
		if d.Worse {
			d.Text = fmt.Sprintf("Waits for room got longer: 99 %% ended within %s instead of %s (%s waits instead of %s).", took(b.Waits.P99), took(a.Waits.P99), count(b.Waits.Count), count(a.Waits.Count))
		}
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
