package input

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// checked returns rec if its rows, offsets, sizes and indices stay within its buffers. Otherwise it
// releases rec and returns an error: arrow-go's readers take these numbers from the file as they are.
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
	if err := holdsRows(a.Data()); err != nil {
		return err
	}
	// arrow-go's check refuses an empty union without buffers, which is valid.
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

// holdsRows checks that bitmaps and buffers of values of one width are as long as the rows need.
func holdsRows(d arrow.ArrayData) error {
	buffers := d.Buffers()
	if _, isUnion := d.DataType().(arrow.UnionType); isUnion {
		buffers = buffers[1:] // without the validity that unions no longer have
	}
	rows := int64(d.Offset()) + int64(d.Len())
	for i, b := range d.DataType().Layout().Buffers {
		if i >= len(buffers) || buffers[i] == nil {
			continue
		}
		bits := int64(8 * b.ByteWidth)
		switch {
		case b.Kind == arrow.KindBitmap:
			bits = 1
		case b.Kind != arrow.KindFixedWidth || bits == 0:
			continue
		}
		if n := int64(buffers[i].Len()); rows > 8*n/bits {
			return fmt.Errorf("buffer %d of %s has %d bytes, which is too few for %d rows", i, d.DataType(), n, rows)
		}
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
