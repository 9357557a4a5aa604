package report

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/leases"
	"github.com/spillway-db/spillway/topology"
)

// printed is the text of what print adds in a format.
func printed(f Format, print func(p *printer)) string {
	p := &printer{format: f}
	print(p)
	return p.text.String()
}

// row has a value of each type that tables know.
type row struct {
	ID      string           `json:"id"`
	Bytes   int64            `json:"size_bytes"`
	Rate    float64          `json:"gib_per_s"`
	Seconds float64          `json:"seconds"`
	Unmoved int64            `json:"unmoved_bytes"`
	Began   time.Time        `json:"began"`
	Count   int              `json:"count"`
	Node    int              `json:"node"`
	Any     any              `json:"any"`
	By      map[string]int64 `json:"by_reason"`
}

// TestTables: numbers are to the right and in a unit for people, and whole for programs. People don't
// see empty columns, nor those without a heading.
func TestTables(t *testing.T) {
	began := time.Date(2026, 11, 25, 12, 30, 0, 0, time.UTC)
	rows := []row{
		{ID: "a", Bytes: 3 << 19, Rate: 1.256, Seconds: 2, Began: began, Count: 7, Node: topology.Unknown},
		{
			ID:      `b,"c"|`,
			Bytes:   12 << 20,
			Rate:    10,
			Seconds: 0.0004,
			Unmoved: 1 << 20,
			Began:   began,
			Node:    1,
			By:      map[string]int64{"work": 1 << 10},
		},
	}
	for format, want := range map[Format]string{
		Table: `title: 1

  name        size  GiB/s  seconds  unmoved  since                 count  node  for work
  a        1.5 MiB   1.26    2.000           2026-11-25T12:30:00Z      7
  b,"c"|  12.0 MiB  10.00    0.000  1.0 MiB  2026-11-25T12:30:00Z      0     1   1.0 KiB

  name
  a
  b,"c"|

a line
another
`,
		Markdown: `title: 1

| name | size | GiB/s | seconds | unmoved | since | count | node | for work |
|:--- | ---:| ---:| ---:| ---:|:--- | ---:| ---:| ---:|
| a | 1.5 MiB | 1.26 | 2.000 |  | 2026-11-25T12:30:00Z | 7 |  |  |
| b,"c"\| | 12.0 MiB | 10.00 | 0.000 | 1.0 MiB | 2026-11-25T12:30:00Z | 0 | 1 | 1.0 KiB |

| name |
|:--- |
| a |
| b,"c"\| |

a line

another
`,
		CSV: `key,size_bytes,gib_per_s,seconds,unmoved_bytes,began,count,node,any,by_reason_work,seconds
a,1572864,1.256,2,0,2026-11-25T12:30:00Z,7,,,0,2
"b,""c""|",12582912,10,0.0004,1048576,2026-11-25T12:30:00Z,0,1,,1024,0.0004

name
a
"b,""c""|"
`,
	} {
		got := printed(format, func(p *printer) {
			p.line("title: %d", 1)
			p.table(rows, "name=key=id", "size=size_bytes", "GiB/s=gib_per_s", "seconds", "unmoved=unmoved_bytes",
				"since=began", "count", "node", "any", "for work=by_reason_work", "=seconds")
			p.table([]row{}, "id")
			p.table(rows, "name=name=id")
			p.line("a line")
			p.line("another")
		})
		if got != want {
			t.Errorf("%s:\n%s\nwant\n%s", format, got, want)
		}
	}
}

// TestPrintIsInert: whatever names are, nothing in them reaches a terminal as a command, forges a line
// or a column, or leaves HTML in Markdown.
func TestPrintIsInert(t *testing.T) {
	rows := []row{{ID: "c\n\td|`<e>\x1b[31m&\xff", Any: "\u202e", By: map[string]int64{"x=y": 1}}}
	for format, want := range map[Format]string{
		Table:    "of x\\ny|`z<b>\\x1b[31m&\\u202e\n\n  \\x1b<                     any     for x\n  c\\n\\td|`<e>\\x1b[31m&\\xff  \\u202e      1\n",
		Markdown: "of x\\ny|&#96;z&lt;b>\\x1b[31m&amp;\\u202e\n\n| \\x1b&lt; | any | for x |\n|:--- |:--- | ---:|\n| c\\n\\td\\|&#96;&lt;e>\\x1b[31m&amp;\\xff | \\u202e | 1 |\n",
		CSV:      "a\\n,any,y\nc\\n\\td|`<e>\\x1b[31m&\\xff,\\u202e,1\n",
	} {
		got := printed(format, func(p *printer) {
			p.line("of %s", "x\ny|`z<b>\x1b[31m&\u202e")
			p.table(rows, "\x1b<=a\n=id", "any", "for x=y=by_reason_x=y")
		})
		if got != want {
			t.Errorf("%s:\n%q\nwant\n%q", format, got, want)
		}
	}
}

// fill sets all that a value holds to something other than zero, with lists of one element.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(1, 0)))
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i))
			}
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		if v.Type() == reflect.TypeFor[map[string]int64]() {
			v.Set(reflect.ValueOf(map[string]int64{"demand": 1}))
		}
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64:
		v.SetInt(1)
	case reflect.Uint64:
		v.SetUint(1)
	case reflect.Float64:
		v.SetFloat(1)
	}
}

// TestColumns: each column of each document has a key that its rows have.
func TestColumns(t *testing.T) {
	for command, doc := range map[string]Document{
		"run": &Run{}, "verify": &Verify{}, "bandwidth": &Bandwidth{}, "compare": &Compare{}, "quota": &Quota{}, "topo": &Topo{}, "trace": &Trace{},
	} {
		fill(reflect.ValueOf(doc).Elem())
		switch d := doc.(type) {
		case *Quota:
			d.Holders = []leases.Holder{{Device: "x", Group: "x"}}
		case *Topo:
			d.Paths = topology.Matrix{Devices: []string{"a", "b"}, Paths: [][]topology.Path{{"", "x"}, {"x", ""}}}
		case *Trace:
			d.Traces[0].Replays[0].Error = ""
		}
		var b strings.Builder
		if err := Print(&b, CSV, doc, nil); err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(b.String()) {
			cells := strings.Split(strings.TrimSpace(line), ",")
			empty := 0
			for _, c := range cells {
				if c == "" {
					empty++
				}
			}
			// A phase "all" has no rate, laying out no speed of reading, and a trace that is not stuck no error.
			if line != "\n" && empty > 0 && !strings.HasPrefix(line, "all,") &&
				!strings.HasPrefix(line, `"spillway, laid out"`) &&
				!(command == "trace" && cells[len(cells)-1] == "") {
				t.Errorf("%s: an empty cell in %q of\n%s", command, line, &b)
			}
		}
	}
}

// TestVerdictOfVerify: the last line says whether all files are sound.
func TestVerdictOfVerify(t *testing.T) {
	for want, files := range map[string][]File{
		"verified: all 5 batches": {{Batches: 2}, {Batches: 3}},
		"FAILED":                  {{Batches: 2}, {Batches: 3, Mismatches: 1}},
		"FAILED: the last":        {{Error: "cannot be read"}},
		"nothing was verified":    {{}},
	} {
		var b strings.Builder
		if err := Print(&b, Table, &Verify{Files: files}, []string{"a note"}); err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(b.String()), "\n")
		if n := len(lines); !strings.HasPrefix(lines[n-1], want) || lines[n-2] != "note: a note" {
			t.Errorf("%v: the last lines are %q, want %q", files, lines[n-2:], want)
		}
	}
}

// TestOlderWaits: documents of older programs have no 99.9th percentile.
func TestOlderWaits(t *testing.T) {
	var r Run
	r.Waits.Count, r.Waits.P50, r.Waits.P99, r.Waits.Max = 3, 1, 2, 4
	print := func(p *printer) { r.print(p) }
	if text := printed(Table, print); !strings.Contains(text, "99 % within 2s, the longest 4s\n") {
		t.Errorf("without it:\n%s", text)
	}
	r.Waits.P999 = 3
	if text := printed(Table, print); !strings.Contains(text, "99 % within 2s, 99.9 % within 3s, the longest 4s\n") {
		t.Errorf("with it:\n%s", text)
	}
}

// TestBandwidthColumns: scripts may read columns by position, so new ones come last.
func TestBandwidthColumns(t *testing.T) {
	want := "from,to,bytes,threads,state,gib_per_s,limit_gib_per_s,efficiency,noise,cv,limit_of,inconclusive," +
		"both_ways,gain,limit_gain,error\n"
	b := Bandwidth{Rows: make([]BandwidthRow, 1)}
	if text := printed(CSV, func(p *printer) { b.print(p) }); !strings.HasPrefix(text, want) {
		t.Errorf("%s", text)
	}
	for _, s := range b.page().Settings {
		if s.Flag == "--rows-per-batch" {
			t.Errorf("the page has %+v, which bandwidth has no flag for", s)
		}
	}
}

// TestTraceWithoutEnd prints that the end of a trace is missing, and nothing about whole traces.
func TestTraceWithoutEnd(t *testing.T) {
	doc := Trace{Traces: []Replayed{{File: "whole", Events: 2}, {File: "part", Events: 1, CutOff: true}}}
	text := printed(Table, func(p *printer) { doc.print(p) })
	if !strings.Contains(text, "whole: 2 events\n") || !strings.Contains(text, "part: 1 events; the end is missing\n") {
		t.Errorf("%s", text)
	}
}
