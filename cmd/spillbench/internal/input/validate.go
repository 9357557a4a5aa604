package input

import (
	"context"
	"fmt"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// maxNesting is the most levels of types that a column may have, in each format. It is the limit of
// arrow-go's IPC readers and writers. A list of integers has two levels.
const maxNesting = 64

// maxMaps is the most maps of them. To make the array of a map, arrow-go makes that of its entries
// twice, so each map in a map doubles the time.
const maxMaps = 10

// errNested returns the error of a file with a column of more levels.
func errNested() error {
	return &Error{
		Err: fmt.Errorf("has a column that is nested too deep: at most %d levels are read, and %d maps in one another",
			maxNesting, maxMaps),
		Fix: "write it again with fewer levels of structs, lists and maps",
	}
}

const fixText = "convert its text to UTF-8 first, for example with iconv"

// checkFields returns an error if one of the fields is nested too deep or has a name that is not
// UTF-8. The fields are in so many levels of other types, and in so many maps.
func checkFields(fields []arrow.Field, levels, maps int) error {
	for _, f := range fields {
		t, inner := storage(f.Type), maps
		if t.ID() == arrow.MAP {
			inner++
		}
		if levels >= maxNesting || inner > maxMaps {
			return errNested()
		}
		if !utf8.ValidString(f.Name) {
			return &Error{Err: fmt.Errorf("has a column with a name that is not UTF-8: %+q", f.Name), Fix: fixText}
		}
		if nested, ok := t.(arrow.NestedType); ok {
			if err := checkFields(nested.Fields(), levels+1, inner); err != nil {
				return err
			}
		}
	}
	return nil
}

// storage returns the type of the values of a dictionary or of an extension, and else t.
func storage(t arrow.DataType) arrow.DataType {
	switch t := t.(type) {
	case *arrow.DictionaryType:
		return storage(t.ValueType)
	case arrow.ExtensionType:
		return storage(t.StorageType())
	}
	return t
}

// checker checks the batches of a decoder: offsets, sizes and indices must stay within the buffers,
// because the IPC readers of arrow-go take these numbers from the file unchecked, and text must be
// UTF-8.
type checker struct {
	decoder
	rows int64 // in the batches so far
}

func (c *checker) next(ctx context.Context) (arrow.RecordBatch, error) {
	rec, err := c.decoder.next(ctx)
	if err != nil {
		return nil, err
	}
	for i, col := range rec.Columns() {
		if err := guard(func() error { return c.check(rec.ColumnName(i), col) }); err != nil {
			rec.Release()
			return nil, err
		}
	}
	c.rows += rec.NumRows()
	return rec, nil
}

func (c *checker) check(name string, col arrow.Array) error {
	err := validate(col)
	if err == nil {
		return nil
	}
	if !mentions(err, "not valid utf8") {
		return fmt.Errorf("column %q: %w", name, err)
	}
	for i := range col.Len() {
		if !validText(col, i) {
			err := fmt.Errorf("has text that is not UTF-8 in row %d of column %q", c.rows+int64(i)+1, name)
			return &Error{Err: err, Fix: fixText}
		}
	}
	return &Error{Err: fmt.Errorf("has text that is not UTF-8 in column %q", name), Fix: fixText} // in no row
}

// validText reports whether all text in row i of a is UTF-8.
func validText(a arrow.Array, i int) bool {
	if a.IsNull(i) {
		return true
	}
	switch a := a.(type) {
	case array.StringLike:
		return utf8.ValidString(a.Value(i))
	case *array.Dictionary:
		return validText(a.Dictionary(), a.GetValueIndex(i))
	case array.ExtensionArray:
		return validText(a.Storage(), i)
	case *array.RunEndEncoded:
		return validText(a.Values(), a.GetPhysicalIndex(i))
	case *array.Struct:
		for field := range a.NumField() {
			if !validText(a.Field(field), i) {
				return false
			}
		}
	case array.ListLike:
		for start, end := a.ValueOffsets(i); start < end; start++ {
			if !validText(a.ListValues(), int(start)) {
				return false
			}
		}
	}
	return true
}

func validate(a arrow.Array) error {
	// An empty union may come without buffers, and arrow-go's check needs them.
	_, isUnion := a.(array.Union)
	if v, ok := a.(interface{ ValidateFull() error }); ok && !(isUnion && a.Len() == 0) {
		if err := v.ValidateFull(); err != nil {
			return err
		}
	}
	switch a := a.(type) {
	case *array.Dictionary:
		if err := validate(a.Dictionary()); err != nil {
			return err
		}
		return validateIndices(a)
	case array.ExtensionArray:
		return validate(a.Storage())
	case *array.RunEndEncoded:
		return validate(a.Values())
	case array.Union:
		for i := range a.NumFields() {
			if err := validate(a.Field(i)); err != nil {
				return err
			}
		}
	case *array.Struct:
		for i := range a.NumField() {
			if err := validate(a.Field(i)); err != nil {
				return err
			}
		}
	case array.ListLike:
		return validate(a.ListValues())
	}
	return nil
}

func validateIndices(d *array.Dictionary) error {
	size := d.Dictionary().Len()
	for i := range d.Len() {
		if d.IsNull(i) {
			continue
		}
		if v := d.GetValueIndex(i); v < 0 || v >= size {
			return fmt.Errorf("row %d has the dictionary index %d of %d", i, v, size)
		}
	}
	return nil
}
