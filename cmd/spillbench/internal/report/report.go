// Package report holds the results of spillbench: the documents that --json writes, the description of
// the machine in each of them, and the forms in which --format and --html show them.
//
//	Run ── run          Verify ── verify    Bandwidth ── bandwidth    Compare ── compare
//	Quota ── quota      Topo ── topo        Trace ── trace replay, trace compare
//	Inspect ── inspect
//	each with Header: schema, command, Env
//
//	Document ── Print ──▶ lines and tables (table, Markdown, CSV), Go's benchmark format, a page, or
//	                      JSON, which JSONSchema describes ── Read ──▶ Document
//
// Documents are plain values and belong to the caller.
package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"runtime"
	"strings"
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/observe/page"
)

//go:embed schema/spillbench.v1.schema.json
var jsonSchema string

// JSONSchema returns the JSON Schema (draft 2020-12) of all documents. It lists every key of the
// documents and allows no others.
func JSONSchema() string { return jsonSchema }

// Document is the result of a command: Run, Verify, Bandwidth, Compare, Quota, Topo, Trace or Inspect, or
// a Pair.
type Document interface {
	// Stamp sets the arguments of the command line, and when the command began.
	Stamp(args []string, began time.Time)
	header() *Header
	print(p *printer) (verdict string)
}

// measured is a Document with figures for benchstat and a page: Run, Bandwidth or Compare.
type measured interface {
	Document
	benchmarks(add addBenchmark)
	page() page.Run
}

// addBenchmark adds a line of Go's benchmark format: a name such as "Run/phase=load", how often it was
// done, and what was measured, as alternating numbers and units.
type addBenchmark func(name string, times int64, figures ...any)

// Format is a form in which a result is printed.
type Format string

// The formats. CSV has only the tables of a document. BenchFmt and HTML need a Run, a Bandwidth, a
// Compare or a Pair.
const (
	Table    Format = "table"
	JSON     Format = "json"
	CSV      Format = "csv"
	Markdown Format = "markdown"
	BenchFmt Format = "benchfmt"
	HTML     Format = "html"
)

// Formats returns the names of all formats but HTML, the default first.
func Formats() []string {
	return []string{"table", "json", "csv", "markdown", "benchfmt"}
}

// NewHeader returns the header of a command's document that began now, without arguments.
func NewHeader(command string, env Env, warnings []diag.Warning) Header {
	version, _ := build()
	h := Header{
		Schema: Schema, Command: command, Env: env, Warnings: append([]diag.Warning{}, warnings...),
		Version: version, GoVersion: runtime.Version(),
	}
	h.Stamp(nil, time.Now())
	return h
}

// Stamp sets the arguments of the command line, which it copies, and when the command began.
func (h *Header) Stamp(args []string, began time.Time) {
	h.Args, h.Time = append([]string{}, args...), began.UTC().Truncate(time.Millisecond)
}

func (h *Header) header() *Header { return h }

// FailureOf returns why the command of a document failed, or "".
func FailureOf(d Document) string {
	if r, ok := d.(*Run); ok {
		return r.Error
	}
	return ""
}

// NotesOf returns the warnings of a stored document as its command noted them.
func NotesOf(d Document) (notes []string) {
	for _, w := range d.header().Warnings {
		notes = append(notes, w.String())
	}
	if r, ok := d.(*Run); ok && r.Busy() != "" {
		notes = append(notes, r.Busy())
	}
	return notes
}

// Compared returns a single document as it is, and two documents of the same command as a Pair.
func Compared(names []string, documents []Document) (Document, error) {
	a, b := documents[0], documents[len(documents)-1]
	if len(documents) == 1 {
		return a, nil
	}
	if x, y := a.header().Command, b.header().Command; x != y {
		return nil, fmt.Errorf("%s is of %s and %s of %s (give two results of one command)", names[0], x, names[1], y)
	}
	return &Pair{a, b, names}, nil
}

// parts returns the documents of a Pair with their names, or a document without a name.
func parts(d Document) (names []string, all []measured) {
	if p, ok := d.(*Pair); ok {
		return p.Names, []measured{p.Document.(measured), p.B.(measured)}
	}
	return []string{""}, []measured{d.(measured)}
}

// Print writes a document in a format. Lines for people end with the notes, each on a line of its own, and
// the verdict.
func Print(w io.Writer, f Format, d Document, notes []string) error {
	switch f {
	case JSON:
		return writeJSON(w, d)
	case BenchFmt:
		return writeBenchmarks(w, d)
	case HTML:
		return writeHTML(w, d)
	}
	p := &printer{format: f}
	switch d.(type) {
	case *Topo, *Pair:
	default:
		p.line("spillbench %s: %s", d.header().Command, d.header().Env)
	}
	verdict := d.print(p)
	for _, n := range notes {
		p.line("note: %s", n)
	}
	if verdict != "" {
		p.line("%s", verdict)
	}
	_, err := io.WriteString(w, p.text.String())
	return err
}

// numbers matches an indented list of numbers. Strings in JSON contain no line ends.
var numbers = regexp.MustCompile(`\[\n *-?[0-9][-+.eE0-9]*(,\n *-?[0-9][-+.eE0-9]*)*\n *\]`)

// writeJSON writes a document as indented JSON. A list of numbers is on one line.
func writeJSON(w io.Writer, document any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	if err := enc.Encode(document); err != nil {
		return err
	}
	_, err := w.Write(numbers.ReplaceAllFunc(b.Bytes(), func(list []byte) []byte {
		return bytes.Join(bytes.Fields(list), []byte(" "))
	}))
	return err
}

// writeBenchmarks writes figures in Go's benchmark format, which benchstat reads. In the figures of a
// Pair, the key "result" has the name of the document.
func writeBenchmarks(w io.Writer, d Document) error {
	var b bytes.Buffer
	b.WriteString(`Unit GiB/s better=higher
Unit limit-GiB/s better=higher
Unit cpu-ns/op better=lower
`)
	// A stored document may have any text in the places of these words.
	words := func(text, separator string) string {
		return named.Inert(strings.Join(strings.Fields(text), separator))
	}
	names, documents := parts(d)
	for i, d := range documents {
		env := d.header().Env
		for _, p := range page.Pairs(
			"result", names[i], "goos", env.GOOS, "goarch", env.GOARCH,
			"pkg", "github.com/spillway-db/spillway/cmd/spillbench",
			"cpu", env.CPU, "gpu", env.GPU, "filesystem", env.FileSystem, "commit", env.Commit,
		) {
			if value := words(p.Value, " "); value != "" || i > 0 { // an empty value removes that of the first
				fmt.Fprintf(&b, "%s: %s\n", p.Name, value)
			}
		}
		b.WriteString("\n")
		d.benchmarks(func(name string, times int64, figures ...any) {
			fmt.Fprintf(&b, "Benchmark%s %d %s", words(name, "-"), max(1, times), fmt.Sprintln(figures...))
		})
	}
	_, err := w.Write(b.Bytes())
	return err
}

// benchmarks has a line for each phase, one for each edge, and one for each run if there are several.
func (r *Run) benchmarks(add addBenchmark) {
	for _, p := range r.Phases {
		if p.Name == drain {
			add("Run/phase="+drain, 1, 1e9*p.Seconds, "ns/op")
		} else {
			add("Run/phase="+p.Name, 1, 1e9*p.Seconds, "ns/op", Rate(r.Input.Bytes, p.Seconds), "GiB/s")
		}
	}
	add("Run/phase=all", 1, 1e9*r.WallSeconds, "ns/op")
	if len(r.Runs) > 1 {
		for _, one := range r.Runs {
			add("Run/whole", 1, 1e9*one.Seconds, "ns/op", one.GiBPerS, "GiB/s", 1e9*one.CPUSeconds, "cpu-ns/op")
		}
	}
	for _, e := range r.Edges {
		if n := e.Batches; n > 0 {
			add("Run/from="+e.From+"/to="+e.To, n, 1e9*e.Seconds/float64(n), "ns/op", e.GiBPerS, "GiB/s")
		}
	}
}

// benchmarks has a line for each pair of each row.
func (b *Bandwidth) benchmarks(add addBenchmark) {
	for _, r := range b.Rows {
		if r.Error != "" {
			continue
		}
		name := fmt.Sprintf("Bandwidth/from=%s/to=%s/bytes=%d/moves=%d", r.From, r.To, r.Bytes, r.Threads)
		if r.State != "" {
			name += "/state=" + r.State
		}
		if r.BothWays {
			name += "/both-ways"
		}
		for i, rate := range r.Samples.GiBPerS {
			add(name, 1, rate, "GiB/s", r.Samples.LimitGiBPerS[i], "limit-GiB/s")
		}
	}
}

// benchmarks has two lines for each side and round: writing and reading.
func (c *Compare) benchmarks(add addBenchmark) {
	for _, round := range c.Samples {
		for _, s := range sides(c.Peer.Name, round.Ours, round.Peer, round.Warm) {
			name := "Compare/side=" + strings.ReplaceAll(s.Side, ",", "")
			add(name+"/op=write", 1, s.Write, "GiB/s")
			if s.Read != nil {
				add(name+"/op=read", 1, s.Read, "GiB/s")
			}
		}
	}
}
