package gen

import (
	"math/bits"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// The sequences of random words that other columns, or no column, are made from. A column's own
// sequence has the number of the column.
const (
	shipDate    = 10
	comment     = 16
	commentText = 17 // where in the pool a comment begins
	nulls       = 18 // added to a column's number for the sequence that decides which rows are null
)

var (
	integer = arrow.PrimitiveTypes.Int64
	price   = &arrow.Decimal128Type{Precision: 15, Scale: 2}
	day     = arrow.FixedWidthTypes.Date32
	text    = arrow.BinaryTypes.String
	coded   = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: text}
)

// column describes a column of the table.
type column struct {
	name     string
	dataType arrow.DataType
	nullable bool
	make     func(*builder) arrow.Array
	words    []string // the dictionary of a coded column
}

// columns are the columns of the table, with the words of TPC-H's clause 4.2.2.13.
var columns = []column{
	{"l_orderkey", integer, false, numbers(orderKey), nil},
	{"l_partkey", integer, false, numbers(key(200_000_000)), nil},
	{"l_suppkey", integer, true, numbers(key(10_000_000)), nil},
	{"l_linenumber", arrow.PrimitiveTypes.Int32, false, numbers(lineNumber), nil},
	{"l_quantity", price, false, numbers(hundredths(100, 5_000)), nil},
	{"l_extendedprice", price, false, numbers(hundredths(90_000, 10_400_000)), nil},
	{"l_discount", price, false, numbers(hundredths(0, 11)), nil},
	{"l_tax", price, true, numbers(hundredths(0, 11)), nil},
	{"l_returnflag", coded, false, numbers(code(3)), []string{"A", "N", "R"}},
	{"l_linestatus", text, false, strs(1, oneOf("F", "O")), nil},
	shipDate: {"l_shipdate", day, false, numbers(shipped), nil},
	{"l_commitdate", day, false, numbers(afterShipping), nil},
	{"l_receiptdate", day, true, numbers(afterShipping), nil},
	{"l_shipinstruct", text, false,
		strs(17, oneOf("COLLECT COD", "DELIVER IN PERSON", "NONE", "TAKE BACK RETURN")), nil},
	{"l_shipmode", coded, true, numbers(code(7)), []string{"AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK"}},
	{"l_weight", arrow.PrimitiveTypes.Float64, true, numbers(weight), nil},
	comment: {"l_comment", text, true, strs(40, piece), nil},
}

var schema = newSchema()

func newSchema() *arrow.Schema {
	var fields []arrow.Field
	for _, c := range columns {
		fields = append(fields, arrow.Field{Name: c.name, Type: c.dataType, Nullable: c.nullable})
	}
	return arrow.NewSchema(fields, nil)
}

// vocabulary has the words of comments.
const vocabulary = `accounts across according after against along asymptotes beans blithely bold
	carefully courts daringly deposits detect dependencies ducks escapades even excuses
	express final fluffily foxes furiously grouches haggle ideas instructions ironic
	nag packages pending pinto platelets quickly quietly regular requests ruthlessly
	silent sleep slyly special theodolites unusual warhorses warthogs waters wake`

// commentPool returns the text that comments are cut from, as TPC-H's dbgen does it. 1 MiB stays in
// the cache, and no row repeats another's by plan.
func commentPool(seed uint64) []byte {
	const size = 1 << 20
	words := strings.Fields(vocabulary)
	pool := make([]byte, 0, size+64)
	for x := mix(seed ^ step); len(pool) < size; x += step {
		w := mix(x)
		pool = append(pool, words[below(w, uint64(len(words)))]...)
		if w&15 == 0 {
			pool = append(pool, '.')
		}
		pool = append(pool, ' ')
	}
	return pool
}

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

// builder makes one column of a batch: n rows from row first on.
type builder struct {
	column
	table  *Table
	number uint64 // of the column
	first  uint64
	n      int
}

// word returns the random word of a row in a sequence.
func (b *builder) word(sequence, row uint64) uint64 {
	return mix(mix(b.table.cfg.Seed+mix(sequence+1)) + row*step)
}

// validity returns the column's bitmap, in which about one row in 32 is null, and how many are. It
// returns no bitmap for a column without nulls.
func (b *builder) validity() (bitmap []byte, count int) {
	if !b.nullable {
		return nil, 0
	}
	bitmap = make([]byte, (b.n+7)/8)
	for i := range b.n {
		if b.word(b.number+nulls, b.first+uint64(i))&31 == 0 {
			count++
		} else {
			bitmap[i/8] |= 1 << (i % 8)
		}
	}
	return bitmap, count
}

// array returns the column with the given buffers.
func (b *builder) array(nulls int, buffers ...[]byte) arrow.Array {
	var all []*memory.Buffer
	for i, content := range buffers {
		if i == 0 && content == nil {
			all = append(all, nil) // no bitmap
			continue
		}
		all = append(all, memory.NewBufferBytes(content))
	}
	data := array.NewData(b.dataType, b.n, all, nil, nulls, 0)
	if dictionary := b.table.dictionaries[b.number]; dictionary != nil {
		data.SetDictionary(dictionary)
	}
	defer data.Release()
	return array.MakeFromData(data)
}

// numbers makes a column of values of one width. Values that are null are 0.
func numbers[T arrow.FixedWidthType](value func(b *builder, row, word uint64) T) func(*builder) arrow.Array {
	return func(b *builder) arrow.Array {
		values := make([]T, b.n)
		valid, nulls := b.validity()
		for i := range values {
			if row := b.first + uint64(i); valid == nil || valid[i/8]>>(i%8)&1 == 1 {
				values[i] = value(b, row, b.word(b.number, row))
			}
		}
		return b.array(nulls, valid, arrow.GetBytes(values))
	}
}

// strs makes a column of strings, of at most or about so many bytes each.
func strs(bytes int, value func(b *builder, row, word uint64) []byte) func(*builder) arrow.Array {
	return func(b *builder) arrow.Array {
		offsets, values := make([]int32, b.n+1), make([]byte, 0, b.n*bytes)
		valid, nulls := b.validity()
		for i := range b.n {
			if row := b.first + uint64(i); valid == nil || valid[i/8]>>(i%8)&1 == 1 {
				values = append(values, value(b, row, b.word(b.number, row))...)
			}
			offsets[i+1] = int32(len(values))
		}
		return b.array(nulls, valid, arrow.GetBytes(offsets), values)
	}
}

// orderKey ascends, with four lines an order.
func orderKey(_ *builder, row, _ uint64) int64 { return int64(row/4 + 1) }

func lineNumber(_ *builder, row, _ uint64) int32 { return int32(row%4 + 1) }

func key(n uint64) func(*builder, uint64, uint64) int64 {
	return func(_ *builder, _, word uint64) int64 { return int64(below(word, n) + 1) }
}

func code(n uint64) func(*builder, uint64, uint64) int8 {
	return func(_ *builder, _, word uint64) int8 { return int8(below(word, n)) }
}

func weight(_ *builder, _, word uint64) float64 { return float64(word>>11) / (1 << 53) * 1000 }

// hundredths are span decimals from low on.
func hundredths(low, span uint64) func(*builder, uint64, uint64) decimal128.Num {
	return func(_ *builder, _, word uint64) decimal128.Num { return decimal128.New(0, low+below(word, span)) }
}

// shipped spreads over seven years from 1992-01-01, day 8035.
func shipped(_ *builder, _, word uint64) arrow.Date32 { return arrow.Date32(8035 + below(word, 2526)) }

// afterShipping is within a season of the row's date of shipping.
func afterShipping(b *builder, row, word uint64) arrow.Date32 {
	return shipped(b, row, b.word(shipDate, row)) + arrow.Date32(below(word, 90))
}

func oneOf(words ...string) func(*builder, uint64, uint64) []byte {
	all := make([][]byte, len(words))
	for i, w := range words {
		all[i] = []byte(w)
	}
	return func(_ *builder, _, word uint64) []byte { return all[below(word, uint64(len(all)))] }
}

// piece is of 10 to 43 characters, and in one row of 256 of up to 2 KiB.
func piece(b *builder, row, word uint64) []byte {
	pool, n := b.table.pool, 10+below(word, 34)
	if word&0xff == 0 {
		n = 256 + below(word, 1793)
	}
	at := below(b.word(commentText, row), uint64(len(pool))-n)
	return pool[at : at+n]
}
