// Package page makes reports of engines as one HTML page.
//
//	Run ──▶ advise: what to change ────┐
//	Run ──▶ Differ: what differs ──────┼──▶ Write: a file
//	timeline.Timeline ──▶ plots ───────┘    Serve: a live page
//
// A page contains everything that it needs: style, script, and data as JSON. The only requests are those
// of a live page, which asks its own address for new data. Package html/template escapes all texts, and
// the page's policy allows only its own script and style, so that a text that came through would have
// no effect. uPlot (folder uplot) draws the plots; the tables need no script.
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
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/observe/timeline"
)

// Points and Numbers bound the timeline of a page, for Recorder.Snapshot: a page of two runs is 2 MB at
// most. A number takes 11 bytes or so.
const (
	Points  = 400
	Numbers = 50_000
)

// maxAdvice is the maximum number of recommendations on a page, the most important first.
const maxAdvice = 6

// Report is the content of a page: one run, or two that are compared.
type Report struct {
	Title string
	Runs  []Run
	Live  bool // the page asks for new data each second
}

// Run is what one run did. Sizes are in bytes and times in seconds. The page leaves out empty parts.
//
// Types with JSON keys are also parts of the documents of spillbench: the keys belong to the schema
// spillway.spillbench/v1, so they are neither renamed nor removed.
type Run struct {
	Name     string // in comparisons, such as a file's
	Command  string // the command line
	Began    time.Time
	Headline string // the verdict in words
	Level    Level
	Failed   bool   // it has an error in place of a result
	Held     []Held // when it failed
	Facts    []Pair // the figures that matter most
	Seconds  float64
	Follows  bool // the data is as large as the memories make it
	Input    Input
	Verify   Verification

	Timeline *timeline.Timeline
	Spaces   []Space
	Edges    []Edge
	Work     []Work
	Tasks    []Task
	Waits    Waits
	Phases   []Phase
	Settings []Setting
	Machine  []Pair
	Warnings []diag.Warning
	Figures  []Figure // of a measurement
}

// Level is how good a verdict is.
type Level string

// The levels.
const (
	Good Level = "good"
	Warn Level = "warn"
	Bad  Level = "bad"
)

// Pair is a name and a value.
type Pair struct{ Name, Value string }

// Pairs makes pairs of alternating names and values.
func Pairs(namesAndValues ...any) (all []Pair) {
	for p := range slices.Chunk(namesAndValues, 2) {
		all = append(all, Pair{fmt.Sprint(p[0]), fmt.Sprint(p[1])})
	}
	return all
}

// Input is the data that was loaded. It is empty for runs that load none.
type Input struct {
	Sources []string `json:"sources"`
	Rows    int64    `json:"rows"`
	Batches int64    `json:"batches"`
	Bytes   int64    `json:"bytes"` // as laid out for the tiers
}

// Names joins the first few of the sources.
func (i Input) Names() string {
	if more := len(i.Sources) - 3; more > 0 {
		return fmt.Sprintf("%s and %d more", strings.Join(i.Sources[:3], ", "), more)
	}
	return strings.Join(i.Sources, ", ")
}

// Verification counts the batches that were compared, over all passes, and those that differed.
type Verification struct {
	Checked    bool  `json:"checked"`
	Batches    int64 `json:"batches"`
	Mismatches int64 `json:"mismatches"`
	Corrupt    int64 `json:"corrupt,omitempty"` // of Mismatches: the engine found the corruption and refused the batch
}

// Wrong describes the mismatches, of which there is at least one.
func (v Verification) Wrong() string {
	of, others := fmt.Sprintf("%s of %s batches ", count(v.Mismatches), count(v.Batches)), v.Mismatches-v.Corrupt
	const refused, changed = "found corrupt when read, and refused", "came back with other bytes than were loaded"
	was := word(v.Corrupt == 1, "was ", "were ")
	switch {
	case v.Corrupt <= 0:
		return of + changed
	case others <= 0:
		return of + was + refused
	}
	return of + "were wrong: " + count(v.Corrupt) + " " + was + refused + ", and " + count(others) + " " + changed
}

// Setting is one of the configuration, with the flag and the field of Config that set it.
type Setting struct {
	Name, Value, Flag, Field string
	// Same is compared instead of Value if Value has more than was set: the machine's free space, or
	// how often a fault hit.
	Same string
	// Says begins a sentence that the value ends, such as "the disk was slowed to". The value Off means
	// the contrary.
	Says string
}

// Off is the value of a setting that does nothing.
const Off = "off"

// Space is one memory or spill directory.
type Space struct {
	ID            string `json:"id"`
	Backend       string `json:"backend"`
	CapacityBytes int64  `json:"capacity_bytes"`
	PeakBytes     int64  `json:"peak_bytes"`
	EndBytes      int64  `json:"end_bytes"` // in use: now on a live page, else after everything was closed

	// Bytes that went through the file system of a spill directory, after compression; 0: not known.
	WrittenBytes int64 `json:"written_bytes,omitempty"`
	ReadBytes    int64 `json:"read_bytes,omitempty"`
}

// Edge counts the moves from one space to another. Moves overlap, so Seconds, the sum over moves, may
// exceed the wall time, and the rate is that of one move at a time.
type Edge struct {
	From    string `json:"from"`
	To      string `json:"to"`
	Batches int64  `json:"batches"`
	Bytes   int64  `json:"bytes"`
	Copies  int64  `json:"copies"`        // batches that already had a valid copy in To
	Unmoved int64  `json:"unmoved_bytes"` // of those batches; not counted in Bytes
	// Ahead counts bytes that were moved before they were needed, or copied to a disk. AheadUsed of
	// them were used afterwards, and AheadInVain never.
	Ahead       int64 `json:"ahead_bytes"`
	AheadUsed   int64 `json:"ahead_used_bytes"`
	AheadInVain int64 `json:"ahead_in_vain_bytes"`

	Seconds  float64          `json:"seconds"`
	GiBPerS  float64          `json:"gib_per_s"`
	ByReason map[string]int64 `json:"by_reason"` // bytes

	// Durations of moves that moved bytes; percentiles are at most 1/16 too high.
	P50     float64 `json:"p50_seconds,omitempty"`
	P99     float64 `json:"p99_seconds,omitempty"`
	Longest float64 `json:"longest_seconds,omitempty"`

	Limit   float64 `json:"-"` // GiB/s of the machine without the engine; 0: not measured
	LimitOf string  `json:"-"` // what was measured, such as "memmove"
}

// Work counts the moves for the batches of an operator.
type Work struct {
	Plan      string `json:"plan"`
	Operator  string `json:"operator"`
	Port      int    `json:"port"`
	DownBytes int64  `json:"down_bytes"`
	UpBytes   int64  `json:"up_bytes"`
	Unread    int64  `json:"unread_bytes"` // moved down and dropped unused, before the end dropped everything
}

// Task sums up the waits for room of the tasks of a name.
type Task struct {
	Name    string  `json:"name"`
	Waits   int64   `json:"waits"`
	Total   float64 `json:"total_seconds"` // waits may overlap
	Longest float64 `json:"longest_seconds"`

	Waiting int64   `json:"-"` // waits that last
	SoFar   float64 `json:"-"` // the sum of these in seconds
}

// Waits are the waits for room, in seconds.
type Waits struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50"`
	P99   float64 `json:"p99"`
	P999  float64 `json:"p999,omitempty"` // of 99.9 %
	Max   float64 `json:"max"`

	Waiting int64   `json:"-"` // waits that last
	Oldest  float64 `json:"-"` // of these
}

// Phase is a part of a run.
type Phase struct {
	Name    string  `json:"name"`
	Seconds float64 `json:"seconds"`
	Bytes   int64   `json:"-"` // of the input; 0: not known
}

// Held is the use of a space when a run failed, and by whom.
type Held struct {
	Space     string `json:"space"`
	Used      int64  `json:"used_bytes"`
	Available int64  `json:"available_bytes"`
	Text      string `json:"text"` // for people, from Engine.Holders
}

// Figure is one of a measurement; a larger one is better. Noise is the part of it by which two equal
// measurements may differ. Figures with the same Title are pictures in one section of the page.
type Figure struct {
	Title, Name string
	Text        string // more about it, with figures
	Value       float64
	Unit        string
	Noise       float64

	// Of a figure that has a limit: its share of it, in words such as "of the limit", and the limit in
	// the same unit, in words such as "The machine's own speed of writing to disk:0".
	Share, ShareNoise float64
	ShareOf           string
	Limit             float64
	LimitOf           string

	Bars []Bar
}

// title is the whole name of a figure, for comparisons.
func (f Figure) title() string { return strings.Trim(f.Title+", "+f.Name, ", ") }

// Bar is a part of the picture of a figure.
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

// assets are the parts that all pages have.
type assets struct {
	page   *template.Template
	header string // the policy in the header of an answer
	Policy string // the policy in the page
	Style  template.CSS
	Script template.JS
}

var fixed = sync.OnceValue(func() *assets {
	f := &assets{Style: template.CSS(plotStyle + "\n" + ownStyle), Script: template.JS(plotScript + "\n" + ownScript)}
	hash := func(text string) string {
		sum := sha256.Sum256([]byte(text))
		return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
	}
	f.Policy = "default-src 'none'; script-src " + hash(string(f.Script)) + "; style-src " + hash(string(f.Style)) +
		"; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'"
	f.header = f.Policy + "; frame-ancestors 'none'" // which has a meaning only in a header
	f.page = template.Must(template.New("page").Funcs(template.FuncMap{
		"bytes": size.Approx, "rate": rate, "took": took, "share": share, "reasons": reasons, "count": count,
		"letter": letter, "operator": operator, "pictures": pictures, "width": width, "speed": speed,
		"figure": figure, "few": few, "more": more,
	}).Parse(htmlText))
	return f
})

// view is the value that the template is executed with.
type view struct {
	*Report
	*assets
	Data   template.JS // for the script element that is no script
	Two    bool
	Advice []Advice
	Differ []Difference
}

// data is the input of the page's script.
type data struct {
	Live bool      `json:"live"`
	Runs []dataRun `json:"runs"`
}

type dataRun struct {
	Name     string             `json:"name"`
	Timeline *timeline.Timeline `json:"timeline"`
	Limits   map[string]float64 `json:"limits"` // of edges, bytes a second
	Peaks    map[string]int64   `json:"peaks"`  // of spaces, bytes
}

func (r *Report) data() data {
	d := data{Live: r.Live}
	for _, run := range r.Runs {
		one := dataRun{Name: run.Name, Limits: map[string]float64{}, Peaks: map[string]int64{}}
		if run.Timeline != nil {
			t := *run.Timeline
			t.Notes = nil // they are in a table
			complete(reflect.ValueOf(&t).Elem(), len(t.Waits.Ended))
			one.Timeline = &t
		}
		for _, e := range first(run.Edges) {
			if e.Limit > 0 {
				one.Limits[e.From+" → "+e.To] = e.Limit * gib
			}
		}
		for _, s := range first(run.Spaces) {
			one.Peaks[s.ID] = s.PeakBytes
		}
		d.Runs = append(d.Runs, one)
	}
	return d
}

// complete changes a copy of a timeline for the page's script: it cuts lists to the number of rows
// that a page shows, and gives each series that a document from elsewhere lacks n zeros.
func complete(v reflect.Value, n int) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() { // not the fields of a time
				complete(v.Field(i), n)
			}
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() != reflect.Struct {
			if v.Len() == 0 {
				v.Set(reflect.MakeSlice(v.Type(), n, n))
			}
			return
		}
		rows := reflect.MakeSlice(v.Type(), min(v.Len(), maxRows), maxRows)
		reflect.Copy(rows, v)
		for i := range rows.Len() {
			complete(rows.Index(i), n)
		}
		v.Set(rows)
	}
}

// maxRows bounds tables and plots: nobody reads more, and a browser can open the page of any file. A
// machine with eight GPUs has fewer edges.
const maxRows = 250

// first returns the first elements of a list, as many as a page shows.
func first[T any](list []T) []T { return list[:min(len(list), maxRows)] }

// few is first for the template, with any list.
func few(list any) any {
	if v := reflect.ValueOf(list); v.Len() > maxRows {
		return v.Slice(0, maxRows).Interface()
	}
	return list
}

// more returns the number of elements that few leaves out.
func more(list any) int64 { return int64(max(0, reflect.ValueOf(list).Len()-maxRows)) }

const gib = 1 << 30

// render executes a template, "page" or "main", for the report.
func (r *Report) render(name string) ([]byte, error) {
	text, err := json.Marshal(r.data()) // which escapes <, > and &
	if err != nil {
		return nil, err
	}
	v := view{Report: r, assets: fixed(), Data: template.JS(text), Two: len(r.Runs) == 2}
	if v.Two {
		v.Differ = Differ(&r.Runs[0], &r.Runs[1])
	}
	for i := range r.Runs {
		found := advise(&r.Runs[i])
		for _, a := range found[:min(len(found), maxAdvice/len(r.Runs))] {
			if v.Two {
				a.What = letter(i) + ": " + a.What
			}
			v.Advice = append(v.Advice, a)
		}
	}
	var b bytes.Buffer
	err = v.page.ExecuteTemplate(&b, name, v)
	return b.Bytes(), err
}

// Write writes the page.
func Write(w io.Writer, r *Report) error {
	text, err := r.render("page")
	if err == nil {
		_, err = w.Write(text)
	}
	return err
}

// update returns the new data and main part of a live page, as JSON.
func (r *Report) update() ([]byte, error) {
	main, err := r.render("main")
	if err != nil {
		return nil, err
	}
	return json.Marshal(map[string]any{"data": r.data(), "main": string(main)})
}

// rate returns GiB/s, or 0 if no time passed.
func rate(bytes int64, seconds float64) float64 {
	if seconds <= 0 {
		return 0
	}
	return float64(bytes) / gib / seconds
}

// speed writes a rate in GiB/s with its unit.
func speed(v float64) string { return inUnit(inRates, v) }

// took writes seconds with their unit.
func took(v float64) string { return inUnit(inTimes, v) }

func inUnit(scale []unit, v float64) string {
	if v <= 0 {
		return "–"
	}
	text, _ := alike(scale, v, v)
	return text
}

// figure writes a number with about three digits and no exponent, so that the lengths of the numbers in
// a column show their sizes.
func figure(v float64) string {
	for decimals, from := range []float64{99.95, 9.995, 0.9995, 0.01} {
		if v >= from {
			return strconv.FormatFloat(v, 'f', decimals, 64)
		}
	}
	return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(v, 'f', 4, 64), "0"), ".")
}

func percent(part float64) string { return fmt.Sprintf("%.0f %%", 100*part) }

// share writes a part of a whole in percent.
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

func operator(w Work) string {
	if w.Operator == "" {
		return "–"
	}
	return fmt.Sprintf("%s:%d", w.Operator, w.Port)
}

// pictures returns lists of the figures with the same title.
func pictures(all []Figure) (lists [][]Figure) {
	at := make(map[string]int)
	for _, f := range all {
		i, ok := at[f.Title]
		if !ok {
			i, lists = len(lists), append(lists, nil)
			at[f.Title] = i
		}
		lists[i] = append(lists[i], f)
	}
	return lists
}

// width returns the length of a bar beside the others of its section, as a percentage.
func width(value float64, of []Figure) string {
	longest := 0.0
	for _, f := range of {
		for _, bar := range f.Bars {
			longest = max(longest, bar.Value)
		}
	}
	if longest == 0 {
		return "0%"
	}
	return fmt.Sprintf("%.1f%%", 100*value/longest)
}

// reasons writes the bytes by reason, the largest first.
func reasons(by map[string]int64) string {
	const maxReasons = 12
	names := slices.SortedFunc(maps.Keys(by), func(a, b string) int {
		return cmp.Or(cmp.Compare(by[b], by[a]), cmp.Compare(a, b))
	})
	var parts []string
	for _, n := range names {
		if by[n] != 0 {
			parts = append(parts, cmp.Or(n, "?")+" "+size.Approx(by[n]))
		}
	}
	if left := len(parts) - maxReasons; left > 0 {
		parts = append(parts[:maxReasons], count(int64(left))+" more")
	}
	return strings.Join(parts, ", ")
}
