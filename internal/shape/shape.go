// Package shape lists the parts of the arrays of each Arrow type: their buffers in the order of the
// columnar format, the kind of value of each, and their children. All code that walks arrays,
// images or C structs uses this table. So a new type is one row of it, unless one of its buffers
// has a new Role.
//
// arrow-go's DataType.Layout does not distinguish offsets from values, or starts from sizes, and
// allocates; the tests compare the two.
package shape

import (
	"github.com/apache/arrow-go/v18/arrow"
)

// Role is what a buffer has for each value of its array.
type Role uint8

const (
	Validity Role = iota // a bit: 0 for a null
	Bits                 // a bit
	Values               // Width bytes; of a dictionary array the index
	Offsets              // Width bytes, and one more at the end: where the value begins in Data, or in the child
	Data                 // the bytes between two of the offsets before it
	Views                // Width bytes, which refer to the data buffers behind
	Starts               // Width bytes: where the list begins in the child
	Sizes                // Width bytes: how many values of the child the list has
	Codes                // Width bytes: which child has the value
	Places               // Width bytes: where that child has it
)

// Buffer is one buffer of an array.
type Buffer struct {
	Role  Role
	Width int64 // bytes; 0 for bits and for Data. As wrong as the type's own.
}

// Bytes returns which bytes of the buffer n rows have, from the row at on: for bits, the bytes in
// which they lie. The rows of Data are its bytes.
func (b Buffer) Bytes(at, n int64) (off, size int64) {
	switch b.Role {
	case Validity, Bits:
		return at / 8, (at%8 + n + 7) / 8
	case Offsets:
		return at * b.Width, (n + 1) * b.Width
	case Data:
		return at, n
	}
	return at * b.Width, n * b.Width
}

// Rows is which values of its children an array shows.
type Rows uint8

const (
	Same    Rows = iota // its own rows
	Times               // Size for each row
	Between             // those from the first to the last of the Offsets
	Shown               // those that Starts and Sizes, or Codes and Places, refer to
	Runs                // the run ends and the values of its runs
)

// Shape is what the arrays of a type consist of.
type Shape struct {
	Type    arrow.DataType // below all extensions
	Null    bool           // all values are null
	Buffers []Buffer       // shared: not to be changed
	Views   bool           // as many data buffers as the array likes follow
	Rows    Rows           // of the children
	Size    int64          // of fixed-size lists
	Values  arrow.DataType // of the dictionary; nil without one

	HasValidity bool // the first buffer is a Validity; without one no value is null by itself
	NumChildren int
	fields      []arrow.Field // of a union or a record
}

// Storage returns the type below all extensions.
func Storage(dt arrow.DataType) arrow.DataType {
	for {
		e, ok := dt.(arrow.ExtensionType)
		if !ok {
			return dt
		}
		dt = e.StorageType()
	}
}

// The buffers of the types, by the width of their values or offsets.
var (
	valid      = []Buffer{{Validity, 0}}
	bits       = []Buffer{{Validity, 0}, {Bits, 0}}
	views      = []Buffer{{Validity, 0}, {Views, int64(arrow.ViewHeaderSizeBytes)}}
	binary     = each(func(w int64) []Buffer { return []Buffer{{Validity, 0}, {Offsets, w}, {Data, 0}} })
	lists      = each(func(w int64) []Buffer { return []Buffer{{Validity, 0}, {Offsets, w}} })
	listViews  = each(func(w int64) []Buffer { return []Buffer{{Validity, 0}, {Starts, w}, {Sizes, w}} })
	fixed      = each(func(w int64) []Buffer { return []Buffer{{Validity, 0}, {Values, w}} })
	denseUnion = []Buffer{{Codes, 1}, {Places, 4}}
)

// each makes the buffers for each width that is common.
func each(make func(width int64) []Buffer) (all [33][]Buffer) {
	for w := range all {
		all[w] = make(int64(w))
	}
	return all
}

// Of returns the shape of a type; false if there is none for it.
func Of(dt arrow.DataType) (s Shape, ok bool) {
	if s.Type = Storage(dt); s.Type == nil {
		return s, false
	}
	w := 4 // bytes of an offset
	switch s.Type.ID() {
	case arrow.LARGE_STRING, arrow.LARGE_BINARY, arrow.LARGE_LIST, arrow.LARGE_LIST_VIEW:
		w = 8
	}
	values := s.Type
	switch t := s.Type.(type) {
	case *arrow.NullType:
		s.Null = true
		return s, true
	case *arrow.BooleanType:
		s.Buffers = bits
	case arrow.BinaryViewDataType:
		s.Buffers, s.Views = views, true
	case arrow.BinaryDataType:
		s.Buffers = binary[w]
	case *arrow.ListType, *arrow.LargeListType, *arrow.MapType:
		s.Buffers, s.Rows, s.NumChildren = lists[w], Between, 1
	case *arrow.ListViewType, *arrow.LargeListViewType:
		s.Buffers, s.Rows, s.NumChildren = listViews[w], Shown, 1
	case *arrow.FixedSizeListType:
		s.Buffers, s.Rows, s.Size, s.NumChildren = valid, Times, int64(t.Len()), 1
	case *arrow.StructType:
		s.Buffers, s.NumChildren = valid, t.NumFields()
	case *arrow.SparseUnionType:
		s.Buffers, s.fields, s.NumChildren = denseUnion[:1], t.Fields(), t.NumFields()
		return s, true
	case *arrow.DenseUnionType:
		s.Buffers, s.Rows, s.fields, s.NumChildren = denseUnion, Shown, t.Fields(), t.NumFields()
		return s, true
	case *arrow.RunEndEncodedType:
		s.Rows, s.NumChildren = Runs, 2
		return s, true
	case *arrow.DictionaryType:
		values, s.Values = t.IndexType, t.ValueType
	}
	s.HasValidity = true
	if s.Buffers == nil {
		t, ok := values.(arrow.FixedWidthDataType)
		if !ok {
			return s, false
		}
		if w := t.Bytes(); w >= 0 && w < len(fixed) {
			s.Buffers = fixed[w]
		} else {
			s.Buffers = []Buffer{{Validity, 0}, {Values, int64(w)}}
		}
	}
	return s, true
}

// Record returns the shape of a record as an array: a struct of its columns.
func Record(schema *arrow.Schema) Shape {
	return Shape{Buffers: valid, HasValidity: true, fields: schema.Fields(), NumChildren: schema.NumFields()}
}

// Child returns the type of the i-th child, and its name in messages.
func (s *Shape) Child(i int) (name string, dt arrow.DataType) {
	switch t := s.Type.(type) {
	case *arrow.StructType:
		return t.Field(i).Name, t.Field(i).Type
	case arrow.ListLikeType:
		return "[]", t.Elem()
	case *arrow.RunEndEncodedType:
		if i == 0 {
			return "run_ends", t.RunEnds()
		}
		return "values", t.Encoded()
	}
	return s.fields[i].Name, s.fields[i].Type
}
