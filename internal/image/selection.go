package image

import (
	"errors"
	"fmt"
	"slices"

	"github.com/apache/arrow-go/v18/arrow"
)

// Selection is the columns and the rows of a batch that a program wants to read. The zero value is
// the whole batch.
type Selection struct {
	// Columns are names of the schema's columns, in the order of the record that is made. A name
	// that two columns of the schema have is an error; use Fields.
	Columns []string
	// Fields are indices of the schema's columns, in the order of the record that is made. Only one
	// of Columns and Fields may be set.
	//
	// If both are nil all columns are wanted. If one is empty and not nil none is: the record has
	// rows and no columns.
	Fields []int
	// From is the first row that is wanted, and To the first row after those that are. A To of 0
	// means the end of the batch. If From equals To, or the end, the record has no rows, and
	// nothing is read.
	From, To int64
}

// ErrSelection matches every *SelectionError, whatever is wrong with the selection.
var ErrSelection = errors.New("invalid selection")

// SelectionError reports that a Selection contradicts itself or asks for what a batch does not
// have.
type SelectionError struct {
	Column   string // the name in Selection.Columns that is wrong, or ""
	Field    int    // the index in Selection.Fields that is wrong, or -1
	Columns  int    // that the batch has
	From, To int64  // the rows that are wanted
	Rows     int64  // that the batch has
	Problem  string
}

func (e *SelectionError) Error() string {
	what := "convert: selecting from a batch"
	switch {
	case e.Column != "":
		what = fmt.Sprintf("convert: selecting the column %q", e.Column)
	case e.Field >= 0:
		what = fmt.Sprintf("convert: selecting column %d", e.Field)
	}
	return fmt.Sprintf("%s, rows %d to %d, of %d columns and %d rows: %s",
		what, e.From, e.To, e.Columns, e.Rows, e.Problem)
}

// Is matches ErrSelection.
func (e *SelectionError) Is(target error) bool { return target == ErrSelection }

// Columns is a Selection applied to one schema and number of rows. All its numbers are in range.
type Columns struct {
	Schema   *arrow.Schema // of the chosen columns; metadata and byte order are the batch's
	Fields   []int         // for each chosen column: its index in the batch's schema, each once
	From, To int64         // rows
}

// Of applies the selection to a batch of rows rows. It returns a *SelectionError if the batch does
// not have what is wanted, or if a column is given twice. The byte order and metadata of the chosen
// schema are the batch's.
func (s Selection) Of(schema *arrow.Schema, rows int64) (*Columns, error) {
	wrong := func(column string, field int, format string, args ...any) error {
		return &SelectionError{
			Column: column, Field: field, Columns: schema.NumFields(),
			From: s.From, To: s.To, Rows: rows, Problem: fmt.Sprintf(format, args...),
		}
	}
	// First the rows.
	c := &Columns{From: s.From, To: s.To}
	if s.To == 0 {
		c.To = rows
	}
	switch {
	case s.From < 0 || s.To < 0:
		return nil, wrong("", -1, "a row is negative")
	case c.To > rows || c.From > rows:
		return nil, wrong("", -1, "the rows end before")
	case c.From > c.To:
		return nil, wrong("", -1, "the first row is behind the last")
	case s.Columns != nil && s.Fields != nil:
		return nil, wrong("", -1, "both names and places of columns are given")
	case s.Columns == nil && s.Fields == nil:
		c.Schema = schema
		for i := range schema.NumFields() {
			c.Fields = append(c.Fields, i)
		}
		return c, nil
	}
	// Then the columns, by number or by name. Each may be chosen once: a record with a column twice
	// would have its buffers twice.
	c.Fields = slices.Clone(s.Fields)
	for _, name := range s.Columns {
		at := schema.FieldIndices(name)
		switch {
		case len(at) == 0:
			return nil, wrong(name, -1, "there is no column %q", name)
		case len(at) > 1:
			return nil, wrong(name, -1, "columns %v have that name: give the place of the one that is wanted", at)
		}
		c.Fields = append(c.Fields, at[0])
	}
	fields, taken := make([]arrow.Field, len(c.Fields)), make(map[int]bool)
	for i, at := range c.Fields {
		switch {
		case at < 0 || at >= schema.NumFields():
			return nil, wrong("", max(at, -1), "there is no column %d", at)
		case taken[at] && s.Columns != nil:
			return nil, wrong(s.Columns[i], -1, "it is given twice")
		case taken[at]:
			return nil, wrong("", at, "it is given twice")
		}
		fields[i], taken[at] = schema.Field(at), true
	}
	meta := schema.Metadata()
	c.Schema = arrow.NewSchemaWithEndian(fields, &meta, schema.Endianness())
	return c, nil
}
