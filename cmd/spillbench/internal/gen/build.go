package gen

import (
	"math/bits"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// step and the multipliers of mix are splitmix64's (Steele, Lea, Flood: Fast
// Splittable Pseudorandom Number Generators, 2014).
const step = 0x9e3779b97f4a7c15

// mix spreads every bit of x over the whole word.
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// below maps a random word to [0, n) without a division.
func below(x uint64, n uint64) uint64 {
	hi, _ := bits.Mul64(x, n)
	return hi
}

// builder makes the columns of one batch: n rows from row first on.
type builder struct {
	seed  uint64
	first uint64
	n     int
}

// sequence returns where the column's random words start for this batch; row i's is
// mix(start + i·step).
func (b *builder) sequence(c column) uint64 {
	return mix(b.seed+mix(uint64(c)+1)) + b.first*step
}

func (b *builder) int64s(c column) arrow.Array {
	values := make([]int64, b.n)
	x := b.sequence(c)
	switch c {
	case orderKey: // ascending, four lines an order on average
		for i := range values {
			values[i] = int64((b.first+uint64(i))/4 + 1)
		}
	case partKey:
		for i := range values {
			values[i] = int64(below(mix(x), 200_000_000) + 1)
			x += step
		}
	default:
		for i := range values {
			values[i] = int64(below(mix(x), 10_000_000) + 1)
			x += step
		}
	}
	return fixed(b, c, values)
}

func (b *builder) int32s(c column) arrow.Array {
	values := make([]int32, b.n)
	for i := range values {
		values[i] = int32((b.first+uint64(i))%4 + 1)
	}
	return fixed(b, c, values)
}

func (b *builder) doubles(c column) arrow.Array {
	values := make([]float64, b.n)
	x := b.sequence(c)
	for i := range values {
		values[i] = float64(mix(x)>>11) / (1 << 53) * 1000
		x += step
	}
	return fixed(b, c, values)
}

// decimals are in hundredths.
func (b *builder) decimals(c column) arrow.Array {
	low, span := uint64(0), uint64(0)
	switch c {
	case quantity:
		low, span = 100, 5_000
	case extendedPrice:
		low, span = 90_000, 10_400_000
	default: // discount, tax
		span = 11
	}
	values := make([]decimal128.Num, b.n)
	x := b.sequence(c)
	for i := range values {
		values[i] = decimal128.New(0, low+below(mix(x), span))
		x += step
	}
	return fixed(b, c, values)
}

// dates spread over seven years from 1992-01-01, day 8035; a line is committed
// and received within a season of its shipping.
func (b *builder) dates(c column) arrow.Array {
	const start, days, season = 8035, 2526, 90
	values := make([]arrow.Date32, b.n)
	ship, x := b.sequence(shipDate), b.sequence(c)
	for i := range values {
		day := start + below(mix(ship), days)
		if c != shipDate {
			day += below(mix(x), season)
		}
		values[i] = arrow.Date32(day)
		ship += step
		x += step
	}
	return fixed(b, c, values)
}

// dictionary picks from dict, which all batches share.
func (b *builder) dictionary(c column, dict arrow.Array) arrow.Array {
	indices := make([]int8, b.n)
	x := b.sequence(c)
	for i := range indices {
		indices[i] = int8(below(mix(x), uint64(dict.Len())))
		x += step
	}
	valid, nulls := b.validity(c)
	data := array.NewDataWithDictionary(coded, b.n,
		[]*memory.Buffer{valid, memory.NewBufferBytes(arrow.GetBytes(indices))}, nulls, 0, dict.Data().(*array.Data))
	defer data.Release()
	return array.NewDictionaryData(data)
}

// words picks from a few strings.
func (b *builder) words(c column, from []string) arrow.Array {
	offsets := make([]int32, b.n+1)
	longest := 0
	for _, w := range from {
		longest = max(longest, len(w))
	}
	values := make([]byte, 0, b.n*longest)
	x := b.sequence(c)
	for i := range b.n {
		values = append(values, from[below(mix(x), uint64(len(from)))]...)
		offsets[i+1] = int32(len(values))
		x += step
	}
	return b.strings(c, offsets, values)
}

// comments are pieces of the text pool: mostly 10 to 43 characters, and one in
// 256 long, to 2 KiB.
func (b *builder) comments(c column, t *text) arrow.Array {
	offsets := make([]int32, b.n+1)
	values := make([]byte, 0, b.n*40)
	length, place := b.sequence(c), b.sequence(commentText)
	absent := b.sequence(c + nulls)
	for i := range b.n {
		if !isNull(mix(absent)) {
			w := mix(length)
			n := 10 + below(w, 34)
			if w&0xff == 0 {
				n = 256 + below(w, 1793)
			}
			at := below(mix(place), uint64(len(t.pool))-n)
			values = append(values, t.pool[at:at+n]...)
		}
		offsets[i+1] = int32(len(values))
		length += step
		place += step
		absent += step
	}
	return b.strings(c, offsets, values)
}

func (b *builder) strings(c column, offsets []int32, values []byte) arrow.Array {
	valid, nulls := b.validity(c)
	data := array.NewData(arrow.BinaryTypes.String, b.n,
		[]*memory.Buffer{valid, memory.NewBufferBytes(arrow.GetBytes(offsets)), memory.NewBufferBytes(values)}, nil, nulls, 0)
	defer data.Release()
	return array.NewStringData(data)
}

// fixed wraps values of a fixed width, and makes those that are null zero.
func fixed[T arrow.FixedWidthType](b *builder, c column, values []T) arrow.Array {
	valid, nulls := b.validity(c)
	if nulls > 0 {
		var zero T
		for i := range values {
			if valid.Buf()[i/8]>>(i%8)&1 == 0 {
				values[i] = zero
			}
		}
	}
	data := array.NewData(columns[c].Type, b.n,
		[]*memory.Buffer{valid, memory.NewBufferBytes(arrow.GetBytes(values))}, nil, nulls, 0)
	defer data.Release()
	return array.MakeFromData(data)
}

// isNull makes about one row in 32 null.
func isNull(word uint64) bool { return word&31 == 0 }

// validity returns the column's bitmap and how many rows are null; no bitmap
// where the column has no nulls.
func (b *builder) validity(c column) (*memory.Buffer, int) {
	if !columns[c].Nullable {
		return nil, 0
	}
	bitmap := make([]byte, (b.n+7)/8)
	x, count := b.sequence(c+nulls), 0
	for i := range b.n {
		if isNull(mix(x)) {
			count++
		} else {
			bitmap[i/8] |= 1 << (i % 8)
		}
		x += step
	}
	return memory.NewBufferBytes(bitmap), count
}
