package report

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
)

// Format is how a result is printed.
type Format string

// The formats. Those for people have all of a Page; CSV has its tables alone. JSON is the document
// itself and BenchFmt its figures: neither is made from a Page.
const (
	Table    Format = "table"
	JSON     Format = "json"
	CSV      Format = "csv"
	Markdown Format = "markdown"
	BenchFmt Format = "benchfmt"
)

// Formats returns the names of all formats, the default first.
func Formats() []string {
	return []string{string(Table), string(JSON), string(CSV), string(Markdown), string(BenchFmt)}
}

// Page is what a document shows: lines of text, and tables between them. The zero value is empty.
type Page struct{ parts []part }

// part is a line or a sheet.
type part struct {
	line  string
	sheet *sheet
	only  audience
}

// audience says for whom something is.
type audience int

const (
	everybody  audience = iota
	people              // table and Markdown
	readers             // the table format alone
	programs            // CSV
	notReaders          // Markdown and CSV
)

// sees reports whether a format shows it.
func (a audience) sees(f Format) bool {
	switch a {
	case people:
		return f != CSV
	case readers:
		return f == Table
	case programs:
		return f == CSV
	case notReaders:
		return f != Table
	}
	return true
}

// sheet is a table. Its columns have a name for people, and a key for programs, which is that of the
// JSON document where that has one.
type sheet struct {
	columns []column
	rows    [][]any // strings, bools, ints, and the cells below; nil is empty
}

type column struct {
	head, key string
	only      audience
}

// add adds a row; missing cells are empty.
func (s *sheet) add(cells ...any) {
	s.rows = append(s.rows, append(cells, make([]any, len(s.columns)-len(cells))...))
}

// linef adds a line for people. An empty one parts what is around it. It stays one line, whatever the
// names in it are.
func (p *Page) linef(format string, args ...any) {
	p.parts = append(p.parts, part{line: named.Inert(fmt.Sprintf(format, args...)), only: people})
}

// notes adds a line for each.
func (p *Page) notes(notes []string) {
	for _, n := range notes {
		p.linef("note: %s", n)
	}
}

func (p *Page) table(s *sheet) { p.parts = append(p.parts, part{sheet: s}) }

// Cells that are for people what String returns, and for programs a number.
type (
	approx int64 // bytes, as "1.5 MiB"
	exact  int64 // bytes, as "64KiB"
	// decimal is a number with so many digits behind the point for people, and all for programs.
	decimal struct {
		value  float64
		digits int
	}
	// worded is a text that programs have another word for.
	worded struct{ text, key string }
)

func (n approx) String() string  { return size.Approx(int64(n)) }
func (n exact) String() string   { return size.Format(int64(n)) }
func (d decimal) String() string { return strconv.FormatFloat(d.value, 'f', d.digits, 64) }

func two(v float64) decimal   { return decimal{v, 2} }
func three(v float64) decimal { return decimal{v, 3} }

// render is what a format shows of a cell.
func render(cell any, f Format) string {
	switch c := cell.(type) {
	case nil:
		return ""
	case worded:
		if f == CSV {
			return c.key
		}
		return c.text
	case time.Time:
		if f == CSV {
			return c.Format(time.RFC3339)
		}
		return c.Format(time.DateTime)
	case approx:
		if f == CSV {
			return strconv.FormatInt(int64(c), 10)
		}
	case some:
		if f == CSV {
			return strconv.FormatInt(int64(c), 10)
		}
	case exact:
		if f == CSV {
			return strconv.FormatInt(int64(c), 10)
		}
	case decimal:
		if f == CSV {
			return strconv.FormatFloat(c.value, 'f', -1, 64)
		}
	}
	return fmt.Sprint(cell)
}

// literal escapes what Markdown takes for the begin of HTML or of code. Entities do not depend on what
// is before them, as a backslash would.
var literal = strings.NewReplacer("&", "&amp;", "<", "&lt;", "`", "&#96;")

// inert is what a format shows of a cell's text. A table escapes the lines between its columns itself.
func inert(text string, f Format) string {
	text = named.Inert(text)
	if f == Markdown {
		return literal.Replace(text)
	}
	return text
}

// isNumber reports whether a cell is aligned to the right.
func isNumber(cell any) bool {
	switch cell.(type) {
	case approx, exact, some, decimal, int, int64:
		return true
	}
	return false
}

// Write writes the page for people, or its tables as CSV: each has a line with its columns' keys, and
// there is an empty line between two of them.
func (p *Page) Write(w io.Writer, f Format) error {
	var b strings.Builder
	for _, part := range p.parts {
		if !part.only.sees(f) {
			continue
		}
		if f != Table && b.Len() > 0 && (part.sheet != nil || f == Markdown && part.line != "") {
			b.WriteString("\n") // Markdown would join lines, and take a table for text
		}
		switch {
		case part.sheet != nil:
			b.WriteString(part.sheet.render(f) + "\n")
		case f == Markdown && part.line != "":
			b.WriteString(literal.Replace(part.line) + "\n")
		case f != Markdown:
			b.WriteString(part.line + "\n")
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func (s *sheet) render(f Format) string {
	t := table.NewWriter()
	var head table.Row
	var shown []int
	var configs []table.ColumnConfig
	for i, c := range s.columns {
		if !c.only.sees(f) {
			continue
		}
		shown = append(shown, i)
		if f == CSV {
			head = append(head, inert(c.key, f))
		} else {
			head = append(head, inert(c.head, f))
		}
		align := text.AlignLeft
		for _, r := range s.rows {
			if isNumber(r[i]) {
				align = text.AlignRight
			}
		}
		configs = append(configs, table.ColumnConfig{Number: len(shown), Align: align, AlignHeader: align})
	}
	t.AppendHeader(head)
	for _, r := range s.rows {
		var row table.Row
		for _, i := range shown {
			row = append(row, inert(render(r[i], f), f))
		}
		t.AppendRow(row)
	}
	t.SetColumnConfigs(configs)
	switch f {
	case CSV:
		return t.RenderCSV()
	case Markdown:
		return t.RenderMarkdown()
	}
	t.SetStyle(table.Style{Box: table.BoxStyle{PaddingLeft: "  "}})
	t.SuppressTrailingSpaces()
	return t.Render()
}
