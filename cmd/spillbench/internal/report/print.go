package report

import (
	"cmp"
	"fmt"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/observe/page"
	"github.com/spillway-db/spillway/topology"
)

// print shows the differences between A and B in words.
func (d *Pair) print(p *printer) string {
	p.line("spillbench report: A is %s, B is %s, both of %s", d.Names[0], d.Names[1], d.header().Command)
	a, b := PageOf(d.Document), PageOf(d.B)
	all := page.Differ(&a, &b)
	if len(all) == 0 {
		p.line("nothing differs by more than two equal runs do")
		if p.format == CSV {
			p.block("about,b_is,text", true)
		}
	}
	p.table(all, "about", "B is=b_is", "what differs=text")
	return ""
}

// printer collects the output for a document: lines for people, and tables. It escapes names, so that
// none of them breaks a line, controls a terminal or becomes HTML in Markdown.
type printer struct {
	format Format
	text   strings.Builder
	apart  bool // an empty line follows the last block
}

// block adds text. An empty line separates it from the one before if either stands apart.
func (p *printer) block(text string, apart bool) {
	if p.text.Len() > 0 && (apart || p.apart) {
		p.text.WriteString("\n")
	}
	p.text.WriteString(text + "\n")
	p.apart = apart
}

// literal escapes the characters that begin HTML or code in Markdown. Unlike a backslash, an entity doesn't depend on
// the character before it.
var literal = strings.NewReplacer("&", "&amp;", "<", "&lt;", "`", "&#96;")

func (p *printer) inert(text string) string {
	text = named.Inert(text)
	if p.format == Markdown {
		return literal.Replace(text)
	}
	return text
}

// line adds a line for people. In Markdown an empty line separates it from the next, because Markdown
// joins adjacent lines.
func (p *printer) line(format string, args ...any) {
	if p.format != CSV {
		p.block(p.inert(fmt.Sprintf(format, args...)), p.format == Markdown)
	}
}

// table adds a table with a row for each struct of a list, unless the list is empty. A column is
// "heading=key=field": its heading for people, its name in CSV, and the JSON key of the struct's field.
// A missing part equals the part before it. CSV has all columns; the other formats leave out columns
// without a heading and columns without values.
func (p *printer) table(list any, columns ...string) {
	rows := reflect.ValueOf(list)
	if rows.Len() == 0 {
		return
	}
	t, cells := table.NewWriter(), make([]table.Row, rows.Len())
	var head table.Row
	var configs []table.ColumnConfig
	for _, column := range columns {
		heading, key, _ := strings.Cut(column, "=")
		key, name, _ := strings.Cut(cmp.Or(key, heading), "=")
		if p.format == CSV {
			heading = key
		} else if heading == "" {
			continue
		}
		align := text.AlignLeft
		for i := range cells {
			value := fieldOf(rows.Index(i), cmp.Or(name, key))
			switch value.(type) {
			case int, int64, float64:
				align = text.AlignRight
			}
			cells[i] = append(cells[i], p.inert(p.cell(key, value)))
		}
		head = append(head, p.inert(heading))
		configs = append(configs, table.ColumnConfig{Number: len(head), Align: align, AlignHeader: align})
	}
	t.AppendHeader(head)
	t.AppendRows(cells)
	t.SetColumnConfigs(configs)
	if p.format != CSV {
		t.SuppressEmptyColumns()
	}
	t.SetStyle(table.Style{Box: table.BoxStyle{PaddingLeft: "  "}})
	t.SuppressTrailingSpaces()
	render := map[Format]func() string{Table: t.Render, Markdown: t.RenderMarkdown, CSV: t.RenderCSV}
	if text := render[p.format](); text != "" {
		p.block(text, true)
	}
}

// fieldOf returns the field of a struct that has a JSON key, or the value in a map whose field has the
// beginning of the key, as by_reason_demand. It returns nil if there is none.
func fieldOf(row reflect.Value, key string) any {
	for _, f := range reflect.VisibleFields(row.Type()) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		value := row.FieldByIndex(f.Index)
		if name == key {
			return value.Interface()
		}
		if reason, ok := strings.CutPrefix(key, name+"_"); ok && value.Kind() == reflect.Map {
			return value.Interface().(map[string]int64)[reason]
		}
	}
	return nil
}

// Keys of values that are printed for people in a form of their own: bytes with a unit, nothing for 0
// or false, and three digits after the decimal point instead of two.
var (
	keyOfBytes  = regexp.MustCompile(`bytes$|bytes_per_s$|^by_reason_|^quota$|^live$|^peak$`)
	keyOfSparse = regexp.MustCompile(
		`^by_reason_|^(unmoved|ahead|physical)_|gain$|^(both_ways|inconclusive|ratio|lost)$`)
	keyOfPrecise = regexp.MustCompile(`seconds$|^noise$|^cv$`)
)

// cell formats a value. CSV has it in full and in the unit of the JSON; the other formats are for people.
func (p *printer) cell(key string, value any) string {
	forPeople := p.format != CSV
	if value == nil || value == topology.Unknown ||
		forPeople && keyOfSparse.MatchString(key) && reflect.ValueOf(value).IsZero() {
		return ""
	}
	var texts []string
	switch v := value.(type) {
	case time.Time:
		return v.Format(time.RFC3339)
	case []topology.Mount:
		for _, m := range v {
			texts = append(texts, m.Point)
		}
		return strings.Join(texts, " ")
	case []int64:
		for _, n := range v {
			texts = append(texts, size.Format(n))
		}
		return strings.Join(texts, ", ")
	case float64:
		digits := -1
		if forPeople {
			digits = map[bool]int{false: 2, true: 3}[keyOfPrecise.MatchString(key)]
		}
		return strconv.FormatFloat(v, 'f', digits, 64)
	case bool:
		if forPeople {
			return yes(v)
		}
	case int64:
		if forPeople && keyOfBytes.MatchString(key) {
			return size.Approx(v)
		}
	}
	return fmt.Sprint(value)
}
