package input

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// checked returns rec if its offsets, sizes and indices stay within its
// buffers, and otherwise releases it and says what is wrong. The IPC readers of
// arrow-go take these numbers from the file as they are.
func checked(rec arrow.RecordBatch) (arrow.RecordBatch, error) {
	for i, col := range rec.Columns() {
		if err := guard(func() error { return validate(col) }); err != nil {
			defer rec.Release()
			return nil, fmt.Errorf("column %q: %w", rec.ColumnName(i), err)
		}
	}
	return rec, nil
}

func validate(a arrow.Array) error {
	// An empty union may come without its buffers, which arrow-go's check does
	// not expect.
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
