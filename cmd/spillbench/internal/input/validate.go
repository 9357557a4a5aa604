package input

import (
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// maxNesting is the maximum number of levels of a column's type, in all formats. It is the limit of
// arrow-go's IPC readers and writers. A list of integers has two levels.
const maxNesting = 64

// maxMaps is the maximum number of these levels that may be maps. To make the array of a map, arrow-go
// makes the array of its entries twice, so each level of maps doubles the time.
const maxMaps = 10

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
			return wrongf("write it again with fewer levels of structs, lists and maps",
				"has a column that is nested too deep: at most %d levels are read, and %d maps in one another",
				maxNesting, maxMaps)
		}
		if !utf8.ValidString(f.Name) {
			return wrongf(fixText, "has a column with a name that is not UTF-8: %+q", f.Name)
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

// checked returns the next batch of read and checks it: offsets, sizes and indices must stay within
// the buffers, because the IPC readers of arrow-go take these numbers from the file unchecked, and
// text must be UTF-8.
func (s *Source) checked(ctx context.Context) (arrow.RecordBatch, error) {
	rec, err := s.read(ctx)
	if err != nil {
		return nil, err
	}
	for i, column := range rec.Columns() {
		err, name := validate(column), rec.ColumnName(i)
		if err == nil {
			continue
		}
		if !strings.Contains(err.Error(), "not valid utf8") {
			return nil, fmt.Errorf("column %q: %w", name, err)
		}
		left := maxTextSearch
		for row := 0; row < column.Len() && left > 0; row++ {
			if !validText(column, row, &left) {
				return nil, wrongf(fixText, "has text that is not UTF-8 in row %d of column %q",
					s.rows+int64(row)+1, name)
			}
		}
		return nil, wrongf(fixText, "has text that is not UTF-8 in column %q", name) // in no row, or far behind
	}
	s.rows += rec.NumRows()
	return rec, nil
}

// maxTextSearch is how many values are visited to find the row of text that is not UTF-8. Run-end
// encoded and null columns have many more in a few bytes.
const maxTextSearch = 1 << 24

// validText reports whether all text in row i of a is UTF-8. It visits at most left values and
// subtracts those that it has visited.
func validText(a arrow.Array, i int, left *int) bool {
	if *left--; *left < 0 || a.IsNull(i) {
		return true
	}
	switch a := a.(type) {
	case array.StringLike:
		return utf8.ValidString(a.Value(i))
	case *array.Dictionary:
		return validText(a.Dictionary(), a.GetValueIndex(i), left)
	case array.ExtensionArray:
		return validText(a.Storage(), i, left)
	case *array.RunEndEncoded:
		return validText(a.Values(), a.GetPhysicalIndex(i), left)
	case *array.Struct:
		for field := range a.NumField() {
			if !validText(a.Field(field), i, left) {
				return false
			}
		}
	case array.ListLike:
		for start, end := a.ValueOffsets(i); start < end && *left > 0; start++ {
			if !validText(a.ListValues(), int(start), left) {
				return false
			}
		}
	}
	return true
}

// validate checks a and the arrays in it. array.ValidateFull does so too, but refuses the null columns
// and the empty unions that arrow-go's own readers return.
func validate(a arrow.Array) error {
	switch a := a.(type) {
	case array.ExtensionArray:
		return validate(a.Storage())
	case *array.Dictionary:
		if err := validate(a.Dictionary()); err != nil {
			return err
		}
		_, err := array.NewValidatedDictionaryArray(a.DataType().(*arrow.DictionaryType), a.Indices(), a.Dictionary())
		return err
	case array.Validator:
		if a.Len() > 0 {
			if err := a.ValidateFull(); err != nil {
				return err
			}
		}
	}
	for _, child := range a.Data().Children() {
		if err := validate(array.MakeFromData(child)); err != nil {
			return err
		}
	}
	return nil
}
