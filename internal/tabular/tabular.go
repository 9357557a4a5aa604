// Package tabular aligns tables of text for people.
package tabular

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Rows are the lines of a table, in cells. The first line has the names of the columns; ">" before one
// has its cells end at the same place.
type Rows [][]string

// Add adds a line, with the cells as fmt.Print prints them.
func (r *Rows) Add(cells ...any) {
	line := make([]string, len(cells))
	for i, c := range cells {
		line[i] = fmt.Sprint(c)
	}
	*r = append(*r, line)
}

// Write writes the lines with their columns aligned, each behind indent. All lines have as many cells
// as the first.
func (r Rows) Write(b *strings.Builder, indent string) {
	widths, right := make([]int, len(r[0])), make([]bool, len(r[0]))
	for i, name := range r[0] {
		r[0][i], right[i] = strings.CutPrefix(name, ">")
	}
	for _, cells := range r {
		for i, cell := range cells {
			widths[i] = max(widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, cells := range r {
		line := indent
		for i, cell := range cells {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(cell))
			if right[i] {
				cell = pad + cell
			} else {
				cell += pad
			}
			line += cell + "  "
		}
		b.WriteString(strings.TrimRight(line, " ") + "\n")
	}
}
