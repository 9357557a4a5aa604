package equal

import (
	"bytes"
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/encoded"
)

// rowPair compares rows of two arrays of one type. It reads them through arrow-go's accessors and
// shares no code with the packages that lay out and open records.
type rowPair struct {
	a, b side

	// values compares two rows that are not null and returns nil if they are equal.
	values func(i, j int) *difference

	// equalRun returns how many rows, from row i of a and row j of b on and at most n, are equal if
	// those two are. It returns 1 if it knows no more. A null column takes no bytes and a run takes
	// one value, whatever their lengths are, so these are compared in one step. Values of one width
	// are compared many at a time.
	equalRun func(i, j, n int) int
}

// side is one of the two arrays.
type side struct {
	array arrow.Array
	null  func(i int) bool
}

// compareRange compares n rows, from row i of a and row j of b on. It returns the first difference
// and its distance from the start, or nil.
func (p *rowPair) compareRange(i, j, n int) (d *difference, at int) {
	for at < n {
		if d := p.compare(i+at, j+at); d != nil {
			return d, at
		}
		at += p.equalRun(i+at, j+at, n-at)
	}
	return nil, 0
}

// oneRow is an equalRun for values that take bytes.
func oneRow(_, _, _ int) int { return 1 }

// allRows is an equalRun for values that take no bytes: all are equal if two are.
func allRows(_, _, n int) int { return n }

// noNulls reports whether neither array has a null of its own.
func (p *rowPair) noNulls() bool { return p.a.array.NullN() == 0 && p.b.array.NullN() == 0 }

// show formats the value of row i for an error message.
func (s side) show(i int) (text string) {
	defer func() {
		if recover() != nil { // some types cannot format all of their values
			text = "a value that cannot be printed"
		}
	}()
	if s.null(i) {
		return "null"
	}
	return s.array.ValueStr(i)
}

// compare compares row i of a with row j of b.
func (p *rowPair) compare(i, j int) *difference {
	x, y := p.a.null(i), p.b.null(j)
	switch {
	case x && y:
		return nil
	case x != y:
		return p.differ(i, j)
	}
	return p.values(i, j)
}

func (p *rowPair) differ(i, j int) *difference {
	return &difference{a: p.a.show(i), b: p.b.show(j)}
}

// when sets values to a comparison that reports only whether two values are equal.
func (p *rowPair) when(equal func(i, j int) bool) *rowPair {
	p.values = func(i, j int) *difference {
		if equal(i, j) {
			return nil
		}
		return p.differ(i, j)
	}
	return p
}

func rowPairOf(a, b arrow.Array) *rowPair {
	p := &rowPair{a: side{a, a.IsNull}, b: side{b, b.IsNull}, equalRun: oneRow}
	switch x := a.(type) {
	case *array.Null:
		null := func(int) bool { return true } // IsNull of arrow-go returns false
		p.a.null, p.b.null, p.equalRun = null, null, allRows
		return p
	case *array.Boolean:
		y := b.(*array.Boolean)
		return p.when(func(i, j int) bool { return x.Value(i) == y.Value(j) })
	case *array.Struct:
		return structPair(p, x, b.(*array.Struct))
	case *array.Dictionary:
		return dictionaryPair(p, x, b.(*array.Dictionary))
	case *array.RunEndEncoded:
		return runsPair(p, x, b.(*array.RunEndEncoded))
	case array.Union:
		return unionPair(p, x, b.(array.Union))
	case array.ExtensionArray:
		return rowPairOf(x.Storage(), b.(array.ExtensionArray).Storage())
	case array.ListLike:
		return listPair(p, x, b.(array.ListLike))
	case interface{ Value(int) string }:
		y := b.(interface{ Value(int) string })
		return p.when(func(i, j int) bool { return x.Value(i) == y.Value(j) })
	case interface{ Value(int) []byte }:
		y := b.(interface{ Value(int) []byte })
		if t, ok := a.DataType().(*arrow.FixedSizeBinaryType); ok && t.ByteWidth == 0 && p.noNulls() {
			p.equalRun = allRows
		}
		return p.when(func(i, j int) bool { return bytes.Equal(x.Value(i), y.Value(j)) })
	}
	t, ok := a.DataType().(arrow.FixedWidthDataType)
	if !ok {
		panic(fmt.Sprintf("values of type %s cannot be compared", a.DataType()))
	}
	return fixedPair(p, a.Data(), b.Data(), t.Bytes())
}

// fixedPair compares numbers, and other values of w bytes, by their bits.
func fixedPair(p *rowPair, a, b arrow.ArrayData, w int) *rowPair {
	rows := func(d arrow.ArrayData, i, n int) []byte { return d.Buffers()[1].Bytes()[(d.Offset()+i)*w:][:n*w] }
	if p.noNulls() {
		p.equalRun = func(i, j, n int) int {
			if n = min(n, 128); bytes.Equal(rows(a, i, n), rows(b, j, n)) {
				return n
			}
			return 1
		}
	}
	p.values = func(i, j int) *difference {
		v, u := rows(a, i, 1), rows(b, j, 1)
		if bytes.Equal(v, u) {
			return nil
		}
		d := p.differ(i, j)
		if d.a == d.b { // for example, two NaNs
			d.a, d.b = fmt.Sprintf("%s (%x)", d.a, v), fmt.Sprintf("%s (%x)", d.b, u)
		}
		return d
	}
	return p
}

func structPair(p *rowPair, a, b *array.Struct) *rowPair {
	fields := make([]*rowPair, a.NumField())
	for i := range fields {
		fields[i] = rowPairOf(a.Field(i), b.Field(i))
	}
	if p.noNulls() {
		p.equalRun = func(i, j, n int) int {
			for _, f := range fields {
				n = f.equalRun(i, j, n)
			}
			return n
		}
	}
	t := a.DataType().(*arrow.StructType)
	p.values = func(i, j int) *difference {
		for k, f := range fields {
			if d := f.compare(i, j); d != nil {
				d.path = "." + t.Field(k).Name + d.path
				return d
			}
		}
		return nil
	}
	return p
}

func listPair(p *rowPair, a, b array.ListLike) *rowPair {
	items := rowPairOf(a.ListValues(), b.ListValues())
	if t, ok := a.DataType().(*arrow.FixedSizeListType); ok && t.Len() > 0 && p.noNulls() {
		p.equalRun = func(i, j, n int) int {
			from, _ := a.ValueOffsets(i)
			from2, _ := b.ValueOffsets(j)
			return max(1, items.equalRun(int(from), int(from2), n*int(t.Len()))/int(t.Len()))
		}
	}
	p.values = func(i, j int) *difference {
		from, to := a.ValueOffsets(i)
		from2, to2 := b.ValueOffsets(j)
		if to-from != to2-from2 {
			return &difference{a: fmt.Sprintf("%d items", to-from), b: fmt.Sprintf("%d items", to2-from2)}
		}
		d, k := items.compareRange(int(from), int(from2), int(to-from))
		if d != nil {
			d.path = fmt.Sprintf("[%d]%s", k, d.path)
		}
		return d
	}
	return p
}

func dictionaryPair(p *rowPair, a, b *array.Dictionary) *rowPair {
	if a.Len() == 0 || b.Len() == 0 {
		return p // there may be no dictionary
	}
	entries := rowPairOf(a.Dictionary(), b.Dictionary())
	null := func(d *array.Dictionary, entry side) func(int) bool {
		return func(i int) bool { return d.IsNull(i) || entry.null(d.GetValueIndex(i)) }
	}
	p.a.null, p.b.null = null(a, entries.a), null(b, entries.b)
	p.values = func(i, j int) *difference {
		return entries.values(a.GetValueIndex(i), b.GetValueIndex(j))
	}
	return p
}

func runsPair(p *rowPair, a, b *array.RunEndEncoded) *rowPair {
	values := rowPairOf(a.Values(), b.Values())
	p.a.null = func(i int) bool { return values.a.null(a.GetPhysicalIndex(i)) }
	p.b.null = func(i int) bool { return values.b.null(b.GetPhysicalIndex(i)) }
	p.values = func(i, j int) *difference {
		return values.values(a.GetPhysicalIndex(i), b.GetPhysicalIndex(j))
	}
	if a.Len() > 0 && b.Len() > 0 {
		left, left2 := rowsLeft(a), rowsLeft(b)
		p.equalRun = func(i, j, n int) int { return min(n, left(i), left2(j)) }
	}
	return p
}

// rowsLeft returns a function that returns how many rows of a run are left from row i on.
func rowsLeft(a *array.RunEndEncoded) func(i int) int {
	end, offset := encoded.GetRunEnds(a.Data().Children()[0]), a.Data().Offset()
	return func(i int) int { return int(end(int64(a.GetPhysicalIndex(i)))) - offset - i }
}

func unionPair(p *rowPair, a, b array.Union) *rowPair {
	fields := make([]*rowPair, a.NumFields())
	for i := range fields {
		fields[i] = rowPairOf(a.Field(i), b.Field(i))
	}
	names := a.UnionType().Fields()
	at := func(u array.Union, i int) int {
		if d, ok := u.(*array.DenseUnion); ok {
			return int(d.ValueOffset(i))
		}
		return i
	}
	// Only children have nulls.
	valid := func(int) bool { return false }
	p.a.null, p.b.null = valid, valid
	p.values = func(i, j int) *difference {
		if a.TypeCode(i) != b.TypeCode(j) {
			return &difference{
				a: fmt.Sprintf("the type code %d", a.TypeCode(i)), b: fmt.Sprintf("the type code %d", b.TypeCode(j)),
			}
		}
		k := a.ChildID(i)
		if d := fields[k].compare(at(a, i), at(b, j)); d != nil {
			d.path = "." + names[k].Name + d.path
			return d
		}
		return nil
	}
	return p
}
