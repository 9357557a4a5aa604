package gen

import (
	"math/bits"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/decimal128"
	"github.com/apache/arrow-go/v18/arrow/memory"
)

// The numbers of sequences of random words. Each column has a sequence with the number of the column;
// these constants name further sequences, and columns whose sequence others use.
const (
	shipDate    = 10
	comment     = 16
	commentText = 17 // the position of a comment in the pool
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
	{"l_orderkey", integer, false, rows(orderKey), nil},
	{"l_partkey", integer, false, rows(key(200_000_000)), nil},
	{"l_suppkey", integer, true, rows(key(10_000_000)), nil},
	{"l_linenumber", arrow.PrimitiveTypes.Int32, false, rows(lineNumber), nil},
	{"l_quantity", price, false, rows(hundredths(100, 5_000)), nil},
	{"l_extendedprice", price, false, rows(hundredths(90_000, 10_400_000)), nil},
	{"l_discount", price, false, rows(hundredths(0, 11)), nil},
	{"l_tax", price, true, rows(hundredths(0, 11)), nil},
	{"l_returnflag", coded, false, rows(code(3)), []string{"A", "N", "R"}},
	{"l_linestatus", text, false, rows(oneOf("F", "O")), nil},
	shipDate: {"l_shipdate", day, false, rows(shipped), nil},
	{"l_commitdate", day, false, rows(afterShipping), nil},
	{"l_receiptdate", day, true, rows(afterShipping), nil},
	{"l_shipinstruct", text, false,
		rows(oneOf("COLLECT COD", "DELIVER IN PERSON", "NONE", "TAKE BACK RETURN")), nil},
	{"l_shipmode", coded, true, rows(code(7)), []string{"AIR", "FOB", "MAIL", "RAIL", "REG AIR", "SHIP", "TRUCK"}},
	{"l_weight", arrow.PrimitiveTypes.Float64, true, rows(weight), nil},
	comment: {"l_comment", text, true, rows(piece), nil},
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

// commentPool returns a text. Comments are substrings of it, as in TPC-H's dbgen. Its 1 MiB stays in
// the processor's cache and is large enough that few rows have equal comments.
func commentPool(seed uint64) string {
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
	return string(pool)
}

// step and the multipliers of mix are splitmix64's (Steele, Lea, Flood: Fast
// Splittable Pseudorandom Number Generators, 2014).
const step = 0x9e3779b97f4a7c15

// mix returns a hash of x: each bit of the result depends on all bits of x.
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

// builder has the arguments for one column of a batch: n rows, beginning with row first.
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

// rows makes a column of values, or of codes of the column's words. About one row in 32 of a nullable
// column is null.
func rows[T any](value func(b *builder, row, word uint64) T) func(*builder) arrow.Array {
	return func(b *builder) arrow.Array {
		storage := b.dataType
		if b.words != nil {
			storage = coded.IndexType
		}
		values := array.NewBuilder(memory.DefaultAllocator, storage)
		defer values.Release()
		values.Reserve(b.n)
		to := values.(interface{ Append(T) })
		for row := b.first; row < b.first+uint64(b.n); row++ {
			if b.nullable && b.word(b.number+nulls, row)&31 == 0 {
				values.AppendNull()
			} else {
				to.Append(value(b, row, b.word(b.number, row)))
			}
		}
		made := values.NewArray()
		if b.words == nil {
			return made
		}
		defer made.Release()
		return array.NewDictionaryArray(coded, made, b.table.dictionaries[b.number])
	}
}

// orderKey ascends. An order has four lines.
func orderKey(_ *builder, row, _ uint64) int64 { return int64(row/4 + 1) }

func lineNumber(_ *builder, row, _ uint64) int32 { return int32(row%4 + 1) }

func key(n uint64) func(*builder, uint64, uint64) int64 {
	return func(_ *builder, _, word uint64) int64 { return int64(below(word, n) + 1) }
}

func code(n uint64) func(*builder, uint64, uint64) int8 {
	return func(_ *builder, _, word uint64) int8 { return int8(below(word, n)) }
}

func weight(_ *builder, _, word uint64) float64 { return float64(word>>11) / (1 << 53) * 1000 }

// hundredths returns span different decimals, of which low is the smallest.
func hundredths(low, span uint64) func(*builder, uint64, uint64) decimal128.Num {
	return func(_ *builder, _, word uint64) decimal128.Num { return decimal128.New(0, low+below(word, span)) }
}

// shipped returns a day in the seven years from 1992-01-01, day 8035.
func shipped(_ *builder, _, word uint64) arrow.Date32 { return arrow.Date32(8035 + below(word, 2526)) }

// afterShipping returns a day at most 89 days after the row's shipping date.
func afterShipping(b *builder, row, word uint64) arrow.Date32 {
	return shipped(b, row, b.word(shipDate, row)) + arrow.Date32(below(word, 90))
}

func oneOf(words ...string) func(*builder, uint64, uint64) string {
	return func(_ *builder, _, word uint64) string { return words[below(word, uint64(len(words)))] }
}

// piece returns 10 to 43 characters, and in one row of 256 up to 2 KiB.
func piece(b *builder, row, word uint64) string {
	pool, n := b.table.pool, 10+below(word, 34)
	if word&0xff == 0 {
		n = 256 + below(word, 1793)
	}
	at := below(b.word(commentText, row), uint64(len(pool))-n)
	return pool[at : at+n]
}
