package page

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"math"
	"reflect"
	"slices"

	"github.com/spillway-db/spillway/internal/size"
)

// Difference is one difference between two runs, A and B, as a sentence.
type Difference struct {
	About string `json:"about"` // one of abouts
	Is    string `json:"b_is"`  // "better", "worse", or empty for neither
	Text  string `json:"text"`
}

// abouts is the order of differences: doubts about the comparison, the outcome, its reasons.
var abouts = []string{
	"failure", "verification", "data", "noise", "time", "configuration", "phases", "limits", "moves", "results",
	"waits", "machine",
}

// Two values that differ by less than these parts count as equal: runs vary by a tenth.
const (
	sameData  = 0.03 // with more or less data, times cannot be compared
	sameRate  = 0.15
	sameTime  = 0.10
	sameMoves = 0.25 // bytes of an edge, and waits
	sameLimit = 0.5  // of a limit that was measured with a few transfers
	minLag    = 0.02 // seconds
	minBusy   = 0.05 // seconds; the rate of an edge with shorter moves is chance
)

// differences collects differences.
type differences struct {
	all     []Difference
	neutral bool // nothing is better or worse
}

// plain adds a difference that is neither better nor worse.
func (d *differences) plain(about, format string, args ...any) {
	d.all = append(d.all, Difference{About: about, Text: fmt.Sprintf(format, args...)})
}

// judged adds a difference that is worse or better.
func (d *differences) judged(worse bool, about, format string, args ...any) {
	d.plain(about, format, args...)
	if !d.neutral {
		d.all[len(d.all)-1].Is = word(worse, "worse", "better")
	}
}

// Differ returns how b differs from a. Nothing is better or worse if a run failed or was wrong, or if
// no difference between the runs could be the reason.
func Differ(a, b *Run) []Difference {
	var doubts, reasons, outcome differences
	doubts.failure(a, b)
	doubts.verification(a, b)
	reasons.input(a, b)
	reasons.settings(a, b)
	reasons.machine(a, b)
	outcome.time(a, b)
	outcome.phases(a, b)
	outcome.figures(a, b)
	outcome.neutral = otherData(a, b)
	outcome.edges(a, b)
	outcome.waits(a, b)

	compared := true
	matters := func(d Difference) bool { return d.About != "time" || d.Is != "" }
	switch {
	case a.Failed || b.Failed: // its time is the time until it failed, and its data the part that it had read
		compared = false
		about := func(d Difference) bool { return slices.Contains([]string{"data", "time", "phases"}, d.About) }
		reasons.all, outcome.all = slices.DeleteFunc(reasons.all, about), slices.DeleteFunc(outcome.all, about)
	case a.Verify.Mismatches > 0 || b.Verify.Mismatches > 0:
		compared = false
	case len(reasons.all) == 0 && slices.ContainsFunc(outcome.all, matters):
		compared = false
		reasons.plain("noise", "Nothing that you set differs: what follows may be noise. Repeat each run.")
	}
	for i := range outcome.all {
		if !compared {
			outcome.all[i].Is = ""
		}
	}
	all := slices.Concat(doubts.all, reasons.all, outcome.all)
	slices.SortStableFunc(all, func(a, b Difference) int {
		return cmp.Compare(slices.Index(abouts, a.About), slices.Index(abouts, b.About))
	})
	return all
}

func (d *differences) failure(a, b *Run) {
	switch {
	case a.Failed && b.Failed:
		d.plain("failure", "Both runs failed, so their times are not compared.")
	case a.Failed != b.Failed:
		d.judged(b.Failed, "failure", "%s failed, and %s did not, so their times are not compared.",
			word(b.Failed, "B", "A"), word(b.Failed, "A", "B"))
	}
}

// otherData reports whether one run had so much more data that their times cannot be compared.
func otherData(a, b *Run) bool {
	return a.Input.Bytes > 0 && b.Input.Bytes > 0 && !near(float64(a.Input.Bytes), float64(b.Input.Bytes), sameData)
}

func (d *differences) verification(a, b *Run) {
	x, y := a.Verify, b.Verify
	switch {
	case x.Mismatches > 0 && y.Mismatches > 0:
		d.judged(true, "verification", "Both were wrong: in A %s, in B %s.", x.Wrong(), y.Wrong())
	case y.Mismatches > 0:
		d.judged(true, "verification", "B was wrong: %s.", y.Wrong())
	case x.Mismatches > 0:
		d.judged(false, "verification", "A was wrong: %s.", x.Wrong())
	case x.Checked != y.Checked:
		d.plain("verification", "%s", word(x.Checked, "B was not checked, A was.", "B was checked, A was not."))
	}
}

func (d *differences) input(a, b *Run) {
	x, y := a.Input, b.Input
	if reflect.DeepEqual(x, y) || reflect.ValueOf(x).IsZero() || reflect.ValueOf(y).IsZero() {
		return
	}
	was, is := sizes(x.Bytes, y.Bytes)
	text := fmt.Sprintf("B had %s of %s, A %s", is, cmp.Or(y.Names(), "data"), was)
	if x.Names() != y.Names() {
		text += " of " + cmp.Or(x.Names(), "data")
	}
	if x.Batches != y.Batches {
		text += fmt.Sprintf("; in %s batches and not %s", count(y.Batches), count(x.Batches))
	} else if x.Rows != y.Rows {
		text += fmt.Sprintf("; %s rows and not %s", count(y.Rows), count(x.Rows))
	}
	d.plain("data", "%s.", text)
}

func (d *differences) time(a, b *Run) {
	if a.Seconds <= 0 || b.Seconds <= 0 || len(a.Figures)+len(b.Figures) > 0 {
		return
	}
	x, y := a.Seconds, b.Seconds
	was, is := alike(inTimes, x, y)
	same := "Both took about as long: A %s, B %s."
	worse, better := "B took %s instead of %s: %s as long as A.", "B took %s instead of %s: it is %s as fast as A."
	if otherData(a, b) {
		rateA, rateB := rate(a.Input.Bytes, x), rate(b.Input.Bytes, y)
		was, is = alike(inRates, rateA, rateB)
		x, y = 1/rateA, 1/rateB
		same = "Both went through their data about as fast: A at %s, B at %s."
		worse = "B went through its data at %s instead of %s: %s slower."
		better = "B went through its data at %s instead of %s: %s as fast."
	}
	if near(x, y, sameTime) {
		d.plain("time", same, was, is)
	} else {
		d.judged(y > x, "time", word(y > x, worse, better), is, was, times(x, y))
	}
}

// both yields the elements of a and b with the same name, in the order of b.
func both[T any](a, b []T, name func(T) string) iter.Seq2[T, T] {
	return func(yield func(T, T) bool) {
		for _, y := range first(b) {
			i := slices.IndexFunc(a, func(x T) bool { return name(x) == name(y) })
			if i >= 0 && !yield(a[i], y) {
				return
			}
		}
	}
}

func (d *differences) settings(a, b *Run) {
	for o, s := range both(a.Settings, b.Settings, func(s Setting) string { return s.Name }) {
		if cmp.Or(s.Same, s.Value) == cmp.Or(o.Same, o.Value) {
			continue
		}
		text := fmt.Sprintf("%s %s in B, %s in A",
			cmp.Or(s.Says, s.Name+":"), cmp.Or(s.Value, "none"), cmp.Or(o.Value, "none"))
		if s.Says != "" && s.Value == Off {
			text = s.Says + " " + o.Value + " in A, not in B"
		} else if s.Says != "" && o.Value == Off {
			text = s.Says + " " + s.Value + " in B, not in A"
		}
		if s.Flag != "" {
			text += " (" + s.Flag + ")"
		}
		d.plain("configuration", "%s.", text)
	}
}

func (d *differences) machine(a, b *Run) {
	for q, p := range both(a.Machine, b.Machine, func(p Pair) string { return p.Name }) {
		if p.Value != q.Value {
			d.plain("machine", "%s: %s in B, %s in A.",
				p.Name, cmp.Or(p.Value, "not known"), cmp.Or(q.Value, "not known"))
		}
	}
}

func (d *differences) phases(a, b *Run) {
	begin, lag, name := len(d.all), 0.0, ""
	for o, p := range both(a.Phases, b.Phases, func(p Phase) string { return p.Name }) {
		if otherData(a, b) {
			x, y := rate(o.Bytes, o.Seconds), rate(p.Bytes, p.Seconds)
			if x > 0 && y > 0 && !near(x, y, sameRate) {
				was, is := alike(inRates, x, y)
				d.plain("phases", "Phase %s went through the data at %s instead of %s.", p.Name, is, was)
			}
			continue
		}
		more := p.Seconds - o.Seconds
		if math.Abs(more) > math.Abs(lag) {
			lag, name = more, p.Name
		}
		if !near(o.Seconds, p.Seconds, sameTime) && math.Abs(more) >= minLag {
			was, is := alike(inTimes, o.Seconds, p.Seconds)
			d.judged(more > 0, "phases", "Phase %s took %s instead of %s, %s as %s.",
				p.Name, is, was, times(o.Seconds, p.Seconds), word(more > 0, "long", "fast"))
		}
	}
	if len(d.all) > begin+1 && name != "" {
		d.judged(lag > 0, "phases", "Most of the difference is in phase %s: %s %s.",
			name, took(math.Abs(lag)), word(lag > 0, "longer", "shorter"))
		last := len(d.all) - 1
		d.all = slices.Insert(d.all[:last], begin, d.all[last])
	}
}

func (d *differences) edges(a, b *Run) {
	seen := make(map[string]bool)
	matters := func(e Edge, of *Run) bool {
		return e.Bytes > 0 && float64(e.Bytes) >= worthwhile*float64(of.total())
	}
	for _, edge := range slices.Concat(first(b.Edges), first(a.Edges)) {
		name := edge.From + " → " + edge.To
		if seen[name] {
			continue
		}
		seen[name] = true
		find := func(r *Run) (found Edge) {
			for _, e := range r.Edges {
				if e.From == edge.From && e.To == edge.To {
					found = e
				}
			}
			return found
		}
		o, e := find(a), find(b)
		if o.Limit > 0 && e.Limit > 0 && isDisk(e.To) && !seen[e.To] && !near(o.Limit, e.Limit, sameLimit) {
			seen[e.To] = true // one sentence for the limit of a disk
			was, is := alike(inRates, o.Limit, e.Limit)
			d.plain("limits", "The disk's own speed of writing to %s was %s: %s instead of %s.",
				e.To, lower(o.Limit, e.Limit), is, was)
		}
		switch {
		case !matters(o, a) && !matters(e, b):
			continue
		case o.Bytes == 0:
			d.plain("moves", "%s was used by B alone, for %s.", name, size.Approx(e.Bytes))
			continue
		case e.To == "":
			d.plain("moves", "%s was used by A alone, for %s.", name, size.Approx(o.Bytes))
			continue
		}
		x, y := rate(o.Bytes, o.Seconds), rate(e.Bytes, e.Seconds)
		if x > 0 && y > 0 && !near(x, y, sameRate) && min(o.Seconds, e.Seconds) >= minBusy {
			was, is := alike(inRates, x, y)
			d.judged(y < x, "moves", "%s got %s %s: a move ran at %s instead of %s.",
				name, times(x, y), word(y < x, "slower", "faster"), is, was)
		}
		if !otherData(a, b) && !near(float64(o.Bytes), float64(e.Bytes), sameMoves) {
			was, is := sizes(o.Bytes, e.Bytes)
			d.plain("moves", "%s moved %s instead of %s.", name, is, was)
		}
	}
}

func word(is bool, yes, no string) string {
	if is {
		return yes
	}
	return no
}

// lower compares two speeds in words.
func lower(was, is float64) string {
	return times(was, is) + " " + word(is < was, "lower", "higher")
}

// figures compares measurements. A figure with a limit is compared by its share of the limit,
// because the whole machine may have become slower. Limits have sentences of their own.
func (d *differences) figures(a, b *Run) {
	type limit struct {
		ratios []float64
		noise  float64
	}
	begin, limits := len(d.all), make(map[string]limit)
	same, shares := 0, 0
	for o, f := range both(a.Figures, b.Figures, Figure.title) {
		if f.Value <= 0 || o.Value <= 0 {
			continue // not measured
		}
		varied := max(f.ShareNoise, o.ShareNoise)
		if f.Limit > 0 && o.Limit > 0 && f.LimitOf == o.LimitOf {
			l := limits[f.LimitOf]
			limits[f.LimitOf] = limit{append(l.ratios, f.Limit/o.Limit), max(l.noise, sameTime, varied)}
		}
		was, is := figure(o.Value)+" "+f.Unit, figure(f.Value)+" "+f.Unit
		if f.Unit == "GiB/s" {
			was, is = alike(inRates, o.Value, f.Value)
		}
		switch compared := f.Share > 0 && o.Share > 0; {
		case compared && near(o.Share, f.Share, max(sameTime, varied)):
			shares++
		case compared:
			text := fmt.Sprintf("%s: %s %s instead of %s, at %s instead of %s",
				f.title(), percent(f.Share), f.ShareOf, percent(o.Share), is, was)
			if varied > 0 {
				text += fmt.Sprintf(" (noise %s)", percent(varied))
			}
			d.judged(f.Share < o.Share, "results", "%s.", text)
		case near(o.Value, f.Value, max(sameTime, f.Noise, o.Noise)):
			same++
		default:
			slower := f.Value < o.Value
			d.judged(slower, "results", "%s: %s %s, %s instead of %s.",
				f.title(), times(o.Value, f.Value), word(slower, "slower", "faster"), is, was)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(limits)) {
		l := limits[name]
		slices.Sort(l.ratios)
		median := l.ratios[len(l.ratios)/2]
		if near(1, median, l.noise) {
			continue
		}
		text := name + " was " + lower(1, median)
		if len(l.ratios) > 1 {
			text += fmt.Sprintf(", the median of %d rows", len(l.ratios))
		}
		d.plain("limits", "%s.", text)
	}
	switch {
	case len(d.all) == begin:
	case same > 0:
		d.plain("results", "%d other figures differ by no more than noise.", same+shares)
	case shares > 0:
		d.plain("results", "In %d rows the share of the limit differs by no more than noise.", shares)
	}
}

func (d *differences) waits(a, b *Run) {
	x, y := a.waiting(), b.waiting()
	if a.Waits.Count+b.Waits.Count > 0 && math.Abs(y-x) >= 0.1 && !near(x, y, sameMoves) {
		d.judged(y > x, "waits",
			"%.1f requests waited for room at once, on average, instead of %.1f.", y, x)
	}
	if x, y := a.Waits.P99, b.Waits.P99; x > 0 && y > 0 && !near(x, y, sameMoves) {
		was, is := alike(inTimes, x, y)
		d.judged(y > x, "waits",
			"Waits for room got %s: 99 %% ended within %s instead of %s (%s waits instead of %s).",
			word(y > x, "longer", "shorter"), is, was, count(b.Waits.Count), count(a.Waits.Count))
	}
}

// near reports whether two values differ by no more than a part of the larger one.
func near(a, b, part float64) bool { return math.Abs(a-b) <= part*max(math.Abs(a), math.Abs(b)) }

// times returns how many times as large the larger one of two values is.
func times(a, b float64) string {
	v := max(a/b, b/a)
	if v < 10 {
		return fmt.Sprintf("%.1f times", v)
	}
	return fmt.Sprintf("%.0f times", v)
}

// unit is a unit of a scale: its size, and the smallest value that is written in it.
type unit struct {
	name      string
	size, min float64
}

// Scales, the largest unit first.
var (
	inRates = []unit{{"GiB/s", 1, 1}, {"MiB/s", 1.0 / 1024, 0}}
	inTimes = []unit{{"h", 3600, 7200}, {"min", 60, 120}, {"s", 1, 1}, {"ms", 1e-3, 1e-3}, {"µs", 1e-6, 0}}
	inSizes = []unit{
		{"TiB", 1 << 40, 1 << 40}, {"GiB", 1 << 30, 1 << 30}, {"MiB", 1 << 20, 1 << 20}, {"KiB", 1 << 10, 1 << 10},
		{"B", 1, 0},
	}
)

// alike writes two values in one unit, that of the larger one, so that they are easy to compare.
func alike(scale []unit, a, b float64) (string, string) {
	u := scale[max(0, slices.IndexFunc(scale, func(u unit) bool { return max(a, b) >= u.min }))]
	return figure(a/u.size) + " " + u.name, figure(b/u.size) + " " + u.name
}

func sizes(a, b int64) (string, string) {
	x, y := alike(inSizes, float64(a), float64(b))
	if x == y && a != b {
		return size.Apart(a, b)
	}
	return x, y
}
