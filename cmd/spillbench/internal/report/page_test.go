package report

import (
	"strings"
	"testing"
	"time"
)

// TestPageFormats: what each format shows of a page: numbers are to the right for people, and whole
// for programs.
func TestPageFormats(t *testing.T) {
	p := new(Page)
	p.linef("title: %d", 1)
	p.linef("")
	s := &sheet{columns: []column{{head: "name", key: "id"}, {head: "size", key: "bytes"}, {head: "batch", key: "batch"}, {head: "GiB/s", key: "rate"}, {head: "M/s", key: "ops"}, {head: "unmoved", key: "unmoved"}, {head: "since", key: "began"}, {only: people}, {key: "more", only: programs}}}
	began := time.Date(2026, 11, 25, 12, 30, 0, 0, time.UTC)
	s.add(worded{"  a", "a"}, approx(3<<19), exact(64<<10), two(1.256), two(2), some(0), began, "says", true)
	s.add("b,\"c\"|", approx(12<<20), exact(4<<20), two(10), two(31.4159), some(1<<20))
	p.table(s)
	p.linef("")
	p.table(&sheet{columns: []column{{head: "n", key: "n"}}, rows: [][]any{{7}}})
	p.notes([]string{"a note"})
	p.parts = append(p.parts, part{line: "for readers", only: readers})
	for format, want := range map[Format]string{
		Table: `title: 1

  name        size  batch  GiB/s    M/s  unmoved  since
    a      1.5 MiB  64KiB   1.26   2.00           2026-11-25 12:30:00  says
  b,"c"|  12.0 MiB   4MiB  10.00  31.42  1.0 MiB

  n
  7
note: a note
for readers
`,
		Markdown: `title: 1

| name | size | batch | GiB/s | M/s | unmoved | since |  |
|:--- | ---:| ---:| ---:| ---:| ---:|:--- |:--- |
|   a | 1.5 MiB | 64KiB | 1.26 | 2.00 |  | 2026-11-25 12:30:00 | says |
| b,"c"\| | 12.0 MiB | 4MiB | 10.00 | 31.42 | 1.0 MiB |  |  |

| n |
| ---:|
| 7 |

note: a note
`,
		CSV: `id,bytes,batch,rate,ops,unmoved,began,more
a,1572864,65536,1.256,2,0,2026-11-25T12:30:00Z,true
"b,""c""|",12582912,4194304,10,31.4159,1048576,,

n
7
`,
	} {
		var b strings.Builder
		if err := p.Write(&b, format); err != nil {
			t.Fatal(err)
		}
		if b.String() != want {
			t.Errorf("%s:\n%s\nwant\n%s", format, &b, want)
		}
	}
}

// TestPageIsInert: whatever names are, nothing in them reaches a terminal as a command, forges a line or
// leaves HTML in Markdown.
func TestPageIsInert(t *testing.T) {
	p := new(Page)
	p.linef("of %s", "x\ny|`z<b>\x1b[31m&\u202e")
	p.notes([]string{"a\r\u2028b"})
	s := &sheet{columns: []column{{head: "\x1b<", key: "a\n"}, {head: "b", key: "b"}}}
	s.add("c\n\td|`<e>\x1b[31m&\xff", worded{"\u202e", "\r"})
	p.table(s)
	for format, want := range map[Format]string{
		Table:    "of x\\ny|`z<b>\\x1b[31m&\\u202e\nnote: a\\r\\u2028b\n  \\x1b<                     b\n  c\\n\\td|`<e>\\x1b[31m&\\xff  \\u202e\n",
		Markdown: "of x\\ny|&#96;z&lt;b>\\x1b[31m&amp;\\u202e\n\nnote: a\\r\\u2028b\n\n| \\x1b&lt; | b |\n|:--- |:--- |\n| c\\n\\td\\|&#96;&lt;e>\\x1b[31m&amp;\\xff | \\u202e |\n",
		CSV:      "a\\n,b\nc\\n\\td|`<e>\\x1b[31m&\\xff,\\r\n",
	} {
		var b strings.Builder
		if err := p.Write(&b, format); err != nil {
			t.Fatal(err)
		}
		if b.String() != want {
			t.Errorf("%s:\n%q\nwant\n%q", format, b.String(), want)
		}
	}
}
