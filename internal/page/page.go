// Package page makes reports of engines as one HTML page.
//
//	Run (plain values) ─┬─▶ advise: what to change ─┐
//	Run ────────────────┴─▶ differ: what differs ───┼──▶ Write: a file    Serve: a live page
//	timeline.Timeline ─────▶ plots ─────────────────┘
//
// A page has all that it needs in itself: style, script, and data as JSON. It makes no request, except
// for that a live page asks its own address for new data. All texts are escaped by html/template. The
// page's policy allows its own script and style alone, so that a text that came through could do
// nothing. Plots are drawn by uPlot (folder uplot); all tables are there without a script, too.
package page

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/internal/timeline"
)

// Points and Numbers bound the timeline of a page, for Recorder.Snapshot: a page of two runs is 2 MB at
// most. A number takes 11 bytes or so.
const (
	Points  = 400
	Numbers = 50_000
)

// mostAdvice is how much advice a page has. What comes later matters less.
const mostAdvice = 6

// Report is what a page shows: one run, or two that are compared.
type Report struct {
	Title string
	Runs  []Run
	Live  bool // the page asks for new data each second
}

// Run is what one run did. Sizes are in bytes. What is empty is not shown.
type Run struct {
	Name     string // in comparisons, such as a file's
	Command  string // the command line
	Began    time.Time
	Headline string // the verdict in words
	Level    Level
	Facts    []Pair // the figures that matter most
	Seconds  float64
	Follows  bool // the data is as large as the memories make it

	Timeline *timeline.Timeline
	Spaces   []Space
	Edges    []Edge
	Work     []Work
	Tasks    []Task
	Waits    Waits
	Phases   []Phase
	Settings []Setting
	Machine  []Pair
	Warnings []Warning

	Figures []Figure // of a measurement
	Bars    []Bars   // the same as pictures
}

// Level says how good a verdict is.
type Level string

// The levels.
const (
	Good Level = "good"
	Warn Level = "warn"
	Bad  Level = "bad"
)

// Pair is a name and a value.
type Pair struct{ Name, Value string }

// Setting is one of the configuration, with the flag and the field of Config that set it.
type Setting struct{ Name, Value, Flag, Field string }

// Warning is what the machine refused.
type Warning struct {
	What, Remedy string
	Info         bool
}

// Space is one space's books.
type Space struct {
	ID, Backend         string
	Capacity, Peak, End int64
	Now                 bool // End is what is used now, and not a leak
}

// Edge is what was moved between two spaces. Seconds is the sum over moves, which overlap.
type Edge struct {
	From, To                      string
	Batches, Bytes                int64
	Copies, Unmoved               int64
	Ahead, AheadUsed, AheadInVain int64
	Seconds                       float64
	P50, P99, Longest             float64 // seconds
	ByReason                      map[string]int64
	Limit                         float64 // GiB/s of the machine without the engine; 0: not measured
	LimitOf                       string  // what that is
}

// Work is what was moved for an operator.
type Work struct {
	Plan, Operator   string
	Port             int
	Down, Up, Unread int64
}

// Task is how long a task waited for room.
type Task struct {
	Name           string
	Waits          int64
	Total, Longest float64 // seconds
	Waiting        int64   // that are not over
	SoFar          float64 // how long these have taken, added up
}

// Waits are the waits for room, in seconds.
type Waits struct {
	Count         int64
	P50, P99, Max float64
	Waiting       int64 // that are not over
	Oldest        float64
}

// Phase is a part of a run.
type Phase struct {
	Name    string
	Seconds float64
	Bytes   int64 // that went through; 0: says nothing
}

// Figure is one of a measurement. More of it is better. Noise is the part of it that two equal
// measurements may differ by.
type Figure struct {
	Name  string
	Value float64
	Unit  string
	Noise float64
}

// Bars is a picture of figures beside each other.
type Bars struct {
	Title, Unit string
	Groups      []Group
}

// Group is some bars under one name.
type Group struct {
	Name string
	Bars []Bar
}

// Bar is one of them.
type Bar struct {
	Name  string
	Value float64
	Other bool // the limit, or the other side
}

//go:embed page.html
var htmlText string

//go:embed page.css
var ownStyle string

//go:embed page.js
var ownScript string

//go:embed uplot/uPlot.min.css
var plotStyle string

//go:embed uplot/uPlot.iife.min.js
var plotScript string

// fixed is what all pages have.
var fixed = sync.OnceValue(func() (f struct {
	page          *template.Template
	Style         template.CSS
	Script        template.JS
	policy, Inner string
}) {
	f.Style, f.Script = template.CSS(plotStyle+"\n"+ownStyle), template.JS(plotScript+"\n"+ownScript)
	hash := func(text string) string {
		sum := sha256.Sum256([]byte(text))
		return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	f.Inner = "default-src 'none'; script-src " + hash(string(f.Script)) + "; style-src " + hash(string(f.Style)) +
		"; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
	f.policy = f.Inner + "; frame-ancestors 'none'" // which has a meaning in a header only
	f.page = template.Must(template.New("page").Funcs(template.FuncMap{
		"bytes": size.Approx, "rate": rate, "took": took, "share": share, "reasons": reasons, "percent": percent, "count": count,
		"letter": letter, "when": when, "operator": operator, "width": width, "best": best, "sumBytes": sumBytes, "speed": speed, "add": func(a, b int) int { return a + b },
	}).Parse(htmlText))
	return f
})

// view is what the template gets.
type view struct {
	*Report
	Style  template.CSS
	Script template.JS
	Policy string
	Data   template.JS // for the script element that is no script
	Two    bool
	Advice []Advice
	Differ []Difference
}

// data is what the page's script gets.
type data struct {
	Live bool      `json:"live"`
	Runs []dataRun `json:"runs"`
}

type dataRun struct {
	Name     string             `json:"name"`
	Timeline *timeline.Timeline `json:"timeline"`
	Limits   map[string]float64 `json:"limits"` // of edges, bytes a second
}

func (r *Report) data() data {
	d := data{Live: r.Live}
	for _, run := range r.Runs {
		one := dataRun{Name: run.Name, Timeline: complete(run.Timeline), Limits: map[string]float64{}}
		for _, e := range run.Edges {
			if e.Limit > 0 {
				one.Limits[e.From+" → "+e.To] = e.Limit * gib
			}
		}
		d.Runs = append(d.Runs, one)
	}
	return d
}

// complete returns a timeline that has each list, and in each series a value for each interval: what
// another program wrote may lack some, and a script cannot go through null.
func complete(t *timeline.Timeline) *timeline.Timeline {
	if t == nil {
		return nil
	}
	c, n := *t, len(t.Waits.Ended)
	c.Spaces, c.Edges, c.Causes = append([]timeline.Space{}, t.Spaces...), append([]timeline.Edge{}, t.Edges...), append([]timeline.Cause{}, t.Causes...)
	c.Phases, c.Notes = append([]timeline.Phase{}, t.Phases...), append([]timeline.Note{}, t.Notes...)
	c.Waits = timeline.Waits{Ended: filled(t.Waits.Ended, n), Total: filled(t.Waits.Total, n), Longest: filled(t.Waits.Longest, n)}
	c.Tasks = timeline.Tasks{Running: filled(t.Tasks.Running, n), Ended: filled(t.Tasks.Ended, n), Failed: filled(t.Tasks.Failed, n)}
	for i := range c.Spaces {
		s := &c.Spaces[i]
		s.Used, s.Reserved, s.Copies, s.Foreign = filled(s.Used, n), filled(s.Reserved, n), filled(s.Copies, n), filled(s.Foreign, n)
	}
	for i := range c.Edges {
		c.Edges[i].Bytes = filled(c.Edges[i].Bytes, n)
	}
	for i := range c.Causes {
		c.Causes[i].Moves, c.Causes[i].Bytes = filled(c.Causes[i].Moves, n), filled(c.Causes[i].Bytes, n)
	}
	return &c
}

// filled is a series, or n zeros.
func filled[T int64 | float64](series []T, n int) []T {
	if len(series) == 0 {
		return make([]T, n)
	}
	return series
}

const gib = 1 << 30

func (r *Report) view() (view, error) {
	text, err := json.Marshal(r.data()) // which escapes <, > and &
	v := view{Report: r, Style: fixed().Style, Script: fixed().Script, Policy: fixed().Inner, Data: template.JS(text), Two: len(r.Runs) == 2}
	if v.Two {
		v.Differ = differ(&r.Runs[0], &r.Runs[1])
	}
	for i := range r.Runs {
		found := advise(&r.Runs[i])
		for _, a := range found[:min(len(found), mostAdvice/len(r.Runs))] {
			if v.Two {
				a.What = letter(i) + ": " + a.What
			}
			v.Advice = append(v.Advice, a)
		}
	}
	return v, err
}

// Write writes the page.
func Write(w io.Writer, r *Report) error {
	v, err := r.view()
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := fixed().page.Execute(&b, v); err != nil {
		return err
	}
	_, err = w.Write(b.Bytes())
	return err
}

// body writes what a live page is changed to: its data and its main part.
func (r *Report) body() ([]byte, error) {
	v, err := r.view()
	if err != nil {
		return nil, err
	}
	var main strings.Builder
	if err := fixed().page.ExecuteTemplate(&main, "main", v); err != nil {
		return nil, err
	}
	return json.Marshal(struct {
		Data data   `json:"data"`
		Main string `json:"main"`
	}{r.data(), main.String()})
}

// rate is what a number of bytes is in a time, in GiB/s.
func rate(bytes int64, seconds float64) float64 {
	if seconds <= 0 {
		return 0
	}
	return float64(bytes) / gib / seconds
}

// speed writes a rate in GiB/s for people.
func speed(v float64) string {
	switch {
	case v <= 0:
		return "–"
	case v < 0.1:
		return fmt.Sprintf("%.1f MiB/s", v*1024)
	case v < 10:
		return fmt.Sprintf("%.2f GiB/s", v)
	}
	return fmt.Sprintf("%.1f GiB/s", v)
}

// took writes seconds for people, with three digits or so.
func took(seconds float64) string {
	switch {
	case seconds <= 0:
		return "–"
	case seconds < 1e-3:
		return fmt.Sprintf("%.0f µs", seconds*1e6)
	case seconds < 1:
		return fmt.Sprintf("%.3g ms", seconds*1e3)
	case seconds < 100:
		return fmt.Sprintf("%.3g s", seconds)
	}
	d := time.Duration(seconds * 1e9).Round(time.Second)
	return strings.TrimSuffix(d.String(), "0s")
}

func percent(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }

// share is a part of a whole in percent.
func share(part, whole int64) string {
	if whole <= 0 {
		return "–"
	}
	return percent(float64(part) / float64(whole))
}

func count(n int64) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0 && text[i-1] != '-'; i -= 3 {
		text = text[:i] + "\u202f" + text[i:]
	}
	return text
}

// letter names the first and the second of two runs.
func letter(i int) string { return string(rune('A' + i)) }

func when(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02 15:04:05 UTC")
}

func operator(w Work) string {
	if w.Operator == "" {
		return "–"
	}
	return fmt.Sprintf("%s:%d", w.Operator, w.Port)
}

// best is the largest bar of a picture.
func best(b Bars) (most float64) {
	for _, g := range b.Groups {
		for _, one := range g.Bars {
			most = max(most, one.Value)
		}
	}
	return most
}

// width is that of a bar, as a percentage.
func width(value, most float64) string {
	if most <= 0 {
		return "0%"
	}
	return fmt.Sprintf("%.1f%%", 100*value/most)
}

func sumBytes(by map[string]int64) (all int64) {
	for _, n := range by {
		all += n
	}
	return all
}

// reasons writes the bytes by reason, the most first.
func reasons(by map[string]int64) string {
	var parts []string
	for _, n := range sorted(by) {
		parts = append(parts, cmp.Or(n, "?")+" "+size.Approx(by[n]))
	}
	return strings.Join(parts, ", ")
}
