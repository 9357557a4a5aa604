package equal

import (
	"bytes"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/encoded"
)

// compare compares n rows of two arrays of one type, from row i of a and row j of b on. It returns
// the first difference and its distance from the start, or nil.
//
// Types that have no validity of their own, or whose rows may be null through another array, are
// compared here: the rest of the rows is divided into sequences without nulls, which compareValid
// compares at once. A null column takes no bytes and a run takes one value, whatever their lengths
// are, so these are compared in one step, also within structs and fixed-size lists. Otherwise a
// file of a few bytes could keep it busy for years.
func compare(a, b arrow.Array, i, j, n int) (d *difference, at int) {
	switch x := a.(type) {
	case *array.Null:
		return nil, 0
	case array.ExtensionArray:
		return compare(x.Storage(), b.(array.ExtensionArray).Storage(), i, j, n)
	case *array.RunEndEncoded:
		y := b.(*array.RunEndEncoded)
		for at < n {
			// A step goes to the next end of a run, of either array: up to there both have one
			// value.
			p, q := x.GetPhysicalIndex(i+at), y.GetPhysicalIndex(j+at)
			if d, _ := compare(x.Values(), y.Values(), p, q, 1); d != nil {
				return d, at
			}
			at = min(n, rowOfEnd(x, p)-i, rowOfEnd(y, q)-j)
		}
		return nil, 0
	case *array.Dictionary:
		y := b.(*array.Dictionary)
		// Indices may differ, and so may the dictionaries. Only the values that they refer to
		// count, row by row.
		for at := range n {
			null := isNull(x, i+at)
			if null != isNull(y, j+at) {
				return differ(a, b, i+at, j+at), at
			}
			if null {
				continue
			}
			p, q := x.GetValueIndex(i+at), y.GetValueIndex(j+at)
			if d, _ := compare(x.Dictionary(), y.Dictionary(), p, q, 1); d != nil {
				return d, at
			}
		}
		return nil, 0
	case array.Union: // only children have nulls
		y := b.(array.Union)
		for at := range n {
			p, q := i+at, j+at
			// The type code counts even if both children have the same value: it is a part of a
			// union's value. A sparse union has the row's value at the row, a dense one at the
			// row's offset.
			if s, t := x.TypeCode(p), y.TypeCode(q); s != t {
				return &difference{a: fmt.Sprintf("the type code %d", s), b: fmt.Sprintf("the type code %d", t)}, at
			}
			k := x.ChildID(p)
			if s, ok := a.(*array.DenseUnion); ok {
				p, q = int(s.ValueOffset(p)), int(b.(*array.DenseUnion).ValueOffset(q))
			}
			if d, _ := compare(x.Field(k), y.Field(k), p, q, 1); d != nil {
				d.path = "." + x.UnionType().Fields()[k].Name + d.path
				return d, at
			}
		}
		return nil, 0
	}
	// Without nulls all rows are one sequence, and no bit is looked at.
	noNulls := a.NullN() == 0 && b.NullN() == 0
	for at < n {
		// Each turn of the loop skips a null, or compares a sequence of rows that are valid in both
		// arrays.
		null := a.IsNull(i + at)
		if null != b.IsNull(j+at) {
			return differ(a, b, i+at, j+at), at
		}
		if null {
			at++
			continue
		}
		end := n // of rows without nulls
		if !noNulls {
			for end = at + 1; end < n && a.IsValid(i+end) && b.IsValid(j+end); end++ {
			}
		}
		if d, row := compareValid(a, b, i+at, j+at, end-at); d != nil {
			return d, at + row
		}
		at = end
	}
	return nil, 0
}

// compareValid is compare for rows without nulls, of types that have a validity of their own. Lists
// and structs go on with compare for their children, which may have nulls again.
func compareValid(a, b arrow.Array, i, j, n int) (d *difference, at int) {
	var same func(at int) bool
	switch x := a.(type) {
	case *array.Boolean:
		y := b.(*array.Boolean)
		same = func(at int) bool { return x.Value(i+at) == y.Value(j+at) }
	case *array.Struct:
		y, fields := b.(*array.Struct), a.DataType().(*arrow.StructType).Fields()
		at = n // later fields may differ in an earlier row
		// The first row that differs in any field is wanted, so each field is only compared up to
		// the row found so far.
		for k, f := range fields {
			if dk, row := compare(x.Field(k), y.Field(k), i, j, at); dk != nil {
				dk.path = "." + f.Name + dk.path
				d, at = dk, row
			}
		}
		return d, at
	case array.ListLike:
		y := b.(array.ListLike)
		if t, ok := a.DataType().(*arrow.FixedSizeListType); ok && t.Len() > 0 {
			// All items of the rows follow each other, so they are compared in one call.
			size := int(t.Len())
			from, _ := x.ValueOffsets(i)
			from2, _ := y.ValueOffsets(j)
			d, item := compare(x.ListValues(), y.ListValues(), int(from), int(from2), n*size)
			if d != nil {
				d.path = fmt.Sprintf("[%d]%s", item%size, d.path)
			}
			return d, item / size
		} else if ok {
			return nil, 0
		}
		// Lists of other kinds have any length and order, so each row is compared by itself.
		for at := range n {
			from, to := x.ValueOffsets(i + at)
			from2, to2 := y.ValueOffsets(j + at)
			if to-from != to2-from2 {
				return &difference{a: fmt.Sprintf("%d items", to-from), b: fmt.Sprintf("%d items", to2-from2)}, at
			}
			d, item := compare(x.ListValues(), y.ListValues(), int(from), int(from2), int(to-from))
			if d != nil {
				d.path = fmt.Sprintf("[%d]%s", item, d.path)
				return d, at
			}
		}
		return nil, 0
	case interface{ Value(int) string }:
		// Strings of all layouts, with 32-bit and 64-bit offsets and views, have the same accessor; so
		// have binaries below. Their offsets and buffers may differ.
		y := b.(interface{ Value(int) string })
		same = func(at int) bool { return x.Value(i+at) == y.Value(j+at) }
	case interface{ Value(int) []byte }:
		y := b.(interface{ Value(int) []byte })
		// Values without bytes are equal, however many there are.
		if t, ok := a.DataType().(*arrow.FixedSizeBinaryType); ok && t.ByteWidth == 0 {
			return nil, 0
		}
		same = func(at int) bool { return bytes.Equal(x.Value(i+at), y.Value(j+at)) }
	}
	if same != nil {
		for at := range n {
			if !same(at) {
				return differ(a, b, i+at, j+at), at
			}
		}
		return nil, 0
	}
	// Numbers, and other values of one width, are compared by their bits: first all at once, and
	// only if they differ one by one. The offset of a slice is in rows, and the buffer is that of
	// the whole array.
	t, ok := a.DataType().(arrow.FixedWidthDataType)
	if !ok {
		panic(fmt.Sprintf("values of type %s cannot be compared", a.DataType()))
	}
	w := t.Bytes()
	p := a.Data().Buffers()[1].Bytes()[(a.Data().Offset()+i)*w:][:n*w]
	q := b.Data().Buffers()[1].Bytes()[(b.Data().Offset()+j)*w:][:n*w]
	if bytes.Equal(p, q) {
		return nil, 0
	}
	// The loop ends, because the whole differs.
	for bytes.Equal(p[:w], q[:w]) {
		p, q = p[w:], q[w:]
		at++
	}
	d = differ(a, b, i+at, j+at)
	if d.a == d.b { // for example, two NaNs
		d.a, d.b = fmt.Sprintf("%s (%x)", d.a, p[:w]), fmt.Sprintf("%s (%x)", d.b, q[:w])
	}
	return d, at
}

// rowOfEnd returns the row, counted from the array's own first one, at which the run with number p
// ends. Run ends count from the beginning of the whole array.
func rowOfEnd(a *array.RunEndEncoded, p int) int {
	return int(encoded.GetRunEnds(a.Data().Children()[0])(int64(p))) - a.Data().Offset()
}

// isNull reports whether row i is a null, also if it refers to a value that is null, through a
// dictionary or a run. arrow-go's IsNull looks at the array's own validity only.
func isNull(a arrow.Array, i int) bool {
	switch a := a.(type) {
	case *array.Null:
		return true
	case array.ExtensionArray:
		return isNull(a.Storage(), i)
	case *array.RunEndEncoded:
		return isNull(a.Values(), a.GetPhysicalIndex(i))
	case *array.Dictionary:
		return a.IsNull(i) || isNull(a.Dictionary(), a.GetValueIndex(i))
	case array.Union:
		return false
	}
	return a.IsNull(i)
}

// differ returns the difference of two values that were found to differ, as texts. Different values
// may have the same text; see the end of compareValid.
func differ(a, b arrow.Array, i, j int) *difference {
	return &difference{a: show(a, i), b: show(b, j)}
}

// show formats the value of row i for an error message. It never panics.
func show(a arrow.Array, i int) (text string) {
	defer func() {
		if recover() != nil { // some types cannot format all of their values
			text = "a value that cannot be printed"
		}
	}()
	if isNull(a, i) {
		return "null"
	}
	return a.ValueStr(i)
}
