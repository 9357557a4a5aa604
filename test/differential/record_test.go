//go:build !invariants

package differential

import (
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/arrowgen"
)

// marker is in a column of every table, so that a search of files shows whether they are encrypted.
const marker = "a text that encryption hides"

// table makes the records of one repository: all have the same schema.
type table struct {
	types []arrow.DataType
	// words is the dictionary that the records share; nil if they have none.
	words arrow.Array
}

// tables returns n tables. Those of successive seeds go through all types of arrowgen.Types.
func tables(seed uint64, n, columns int) (all []table) {
	types := arrowgen.Types()
	next := int(seed) * n * columns
	for i := range n {
		var t table
		for range columns {
			t.types = append(t.types, types[next%len(types)])
			next++
		}
		if i%2 == 0 {
			t.words = dictionary(seed*10+uint64(i), 700)
		}
		all = append(all, t)
	}
	return all
}

// persistable reports whether an Arrow IPC file could hold values of a type: batches of others
// cannot persist.
func persistable(t arrow.DataType) bool {
	return !arrowgen.Within(t, func(t arrow.DataType) bool {
		return t.ID() == arrow.EXTENSION || t.ID() == arrow.DICTIONARY
	})
}

// dictionary returns n words; it is large enough to be shared by the batches that use it.
func dictionary(seed uint64, n int) arrow.Array {
	rng := rand.New(rand.NewPCG(seed, 3))
	b := array.NewStringBuilder(memory.DefaultAllocator)
	defer b.Release()
	for i := range n {
		b.Append(fmt.Sprintf("%d %s", i, strings.Repeat(string(rune('a'+rng.IntN(26))), 5+rng.IntN(20))))
	}
	return b.NewArray()
}

// record makes a record of t, of which it may return a slice.
func (t table) record(rng *rand.Rand, rows int) arrow.RecordBatch {
	g := arrowgen.New(rng.Uint64())
	texts := array.NewStringBuilder(memory.DefaultAllocator)
	defer texts.Release()
	for i := range rows {
		texts.Append(fmt.Sprintf("%s %d", marker, i))
	}
	fields := []arrow.Field{{Name: "text", Type: arrow.BinaryTypes.String}}
	columns := []arrow.Array{texts.NewArray()}
	for i, dt := range t.types {
		meta := arrow.NewMetadata([]string{"number"}, []string{fmt.Sprint(i)})
		fields = append(fields, arrow.Field{Name: fmt.Sprintf("c%d", i), Type: dt, Nullable: true, Metadata: meta})
		columns = append(columns, g.Array(dt, rows))
	}
	if t.words != nil {
		dt := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int16, ValueType: arrow.BinaryTypes.String}
		codes := array.NewInt16Builder(memory.DefaultAllocator)
		defer codes.Release()
		for range rows {
			codes.Append(int16(rng.IntN(t.words.Len())))
		}
		indices := codes.NewArray()
		defer indices.Release()
		fields = append(fields, arrow.Field{Name: "word", Type: dt})
		columns = append(columns, array.NewDictionaryArray(dt, indices, t.words))
	}
	rec := array.NewRecordBatch(arrow.NewSchema(fields, nil), columns, int64(rows))
	for _, c := range columns {
		c.Release()
	}
	if rows > 10 && rng.IntN(4) == 0 {
		defer rec.Release()
		from := rng.IntN(rows / 2)
		return rec.NewSlice(int64(from), int64(from+1+rng.IntN(rows-from)))
	}
	return rec
}

// digest returns a digest of what a record says: its schema with metadata, and every value as
// arrow-go prints it. It does not depend on how the values lie in memory.
func digest(rec arrow.RecordBatch) string {
	h := xxh3.New()
	fmt.Fprintf(h, "%d rows\n%s\n", rec.NumRows(), rec.Schema())
	for i, col := range rec.Columns() {
		values, ok := arrowgen.Values(col)
		if !ok {
			return fmt.Sprintf("column %d cannot be printed", i)
		}
		fmt.Fprintf(h, "column %d: %d\n", i, len(values))
		for row, v := range values {
			fmt.Fprintf(h, "%t %d %s\n", col.IsNull(row), len(v), v)
		}
	}
	sum := h.Sum128().Bytes()
	return fmt.Sprintf("%d×%d %s", rec.NumRows(), rec.NumCols(), hex.EncodeToString(sum[:8]))
}
