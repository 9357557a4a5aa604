package input

import (
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"

	"github.com/spillway-db/spillway/internal/testseed"
)

// TestInference: a column has the narrowest type that holds all of its values, wherever in the file
// they stand. An integer that neither int64 nor float64 holds exactly makes the column text.
func TestInference(t *testing.T) {
	us, ns := &arrow.TimestampType{Unit: arrow.Microsecond}, &arrow.TimestampType{Unit: arrow.Nanosecond}
	for _, c := range []struct {
		values string
		want   arrow.DataType
	}{
		{"1 2 -3", arrow.PrimitiveTypes.Int64},
		{"1 2.5", arrow.PrimitiveTypes.Float64},
		{"1 nan 1e300 -Inf", arrow.PrimitiveTypes.Float64},
		{"NULL 7", arrow.PrimitiveTypes.Int64},
		{"null NULL", arrow.BinaryTypes.String},
		{"1 x", arrow.BinaryTypes.String},
		{"true FALSE True", arrow.FixedWidthTypes.Boolean},
		{"true 1", arrow.BinaryTypes.String},
		{"t f", arrow.BinaryTypes.String},
		{"9223372036854775807", arrow.PrimitiveTypes.Int64},
		{"+9223372036854775807", arrow.PrimitiveTypes.Int64},
		{"-9223372036854775808", arrow.PrimitiveTypes.Int64},
		{"99999999999999999999", arrow.BinaryTypes.String}, // a float would lose digits
		{"9223372036854775808", arrow.BinaryTypes.String},
		{"+9223372036854775808", arrow.BinaryTypes.String},
		{"-9223372036854775809", arrow.BinaryTypes.String},
		{"-99999999999999999999", arrow.BinaryTypes.String},
		{"100000000000000000000", arrow.BinaryTypes.String},
		{"1 -9223372036854775809 2", arrow.BinaryTypes.String},
		{"-1 +1 -0", arrow.PrimitiveTypes.Int64},
		{"9007199254740993 1", arrow.PrimitiveTypes.Int64},
		{"9007199254740992 1.5", arrow.PrimitiveTypes.Float64},
		{"9007199254740993 1.5", arrow.BinaryTypes.String},
		{"1.5 -9007199254740993", arrow.BinaryTypes.String},
		{"-9223372036854775808 1.5", arrow.PrimitiveTypes.Float64},
		{"9007199254740992.0", arrow.PrimitiveTypes.Float64},
		{"9007199254740993.0", arrow.BinaryTypes.String},
		{"-9007199254740993.000", arrow.BinaryTypes.String},
		{"-9223372036854775808. 1", arrow.PrimitiveTypes.Float64},
		{"9007199254740993. 1", arrow.BinaryTypes.String},
		{".00000000000000000", arrow.PrimitiveTypes.Float64},
		{"12345678901234567.0e0", arrow.PrimitiveTypes.Float64},
		{"18446744073709551616.0", arrow.PrimitiveTypes.Float64},
		{"0.1234567890123456789 12345678901234567.5", arrow.PrimitiveTypes.Float64},
		{"1e30 -1E-5", arrow.PrimitiveTypes.Float64},
		{"2024-02-29 1999-12-31", arrow.FixedWidthTypes.Date32},
		{"2023-02-29", arrow.BinaryTypes.String},
		{"2024-02-29 2024-02-29T10:11:12", us},
		{"2024-02-29T10:11:12.123456", us},
		{"2024-02-29T10:11:12.123456789 2024-02-29", ns},
		{"2024-02-29T10:11:12Z", &arrow.TimestampType{Unit: arrow.Microsecond, TimeZone: "UTC"}},
		{"2024-02-29T10:11:12.123456789+01:00", &arrow.TimestampType{Unit: arrow.Nanosecond, TimeZone: "UTC"}},
		{"2024-02-29T10:11:12Z 2024-02-29T10:11:12", arrow.BinaryTypes.String},
		{"2024-02-29 12", arrow.BinaryTypes.String},
	} {
		values := strings.Fields(c.values)
		path := write(t, "a.csv", []byte("v\n"+strings.Join(values, "\n")+"\n"))
		recs, s, err := readAll(t, path, Options{})
		if err != nil {
			t.Errorf("%s: %v", c.values, err)
			continue
		}
		if got := s.schema.Field(0).Type; !arrow.TypeEqual(got, c.want) {
			t.Errorf("%s is %s, want %s", c.values, got, c.want)
		}
		for i, v := range values {
			if null := strings.EqualFold(v, "null"); recs[0].Column(0).IsNull(i) != null {
				t.Errorf("%s: row %d null is %v", c.values, i, !null)
			}
		}
	}
}

// TestCSV: separators, quotes, byte order marks, nulls, and batches.
func TestCSV(t *testing.T) {
	for _, c := range []struct{ name, text string }{
		{"comma", "a,b\n1,\"x, y\"\n,\n3,z\n"},
		{"tab", "a\tb\n1\tx, y\n\t\n3\tz\n"},
		{"semicolon", "a;b\n1;x, y\n;\n3;z\n"},
		{"pipe", "a|b\n1|x, y\n|\n3|z"},
		{"crlf and mark", "\xef\xbb\xbfa,b\r\n1,\"x, y\"\r\n,\r\n3,z\r\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			recs, s, err := readAll(t, write(t, "a", []byte(c.text)), Options{RowsPerBatch: 2})
			if err != nil {
				t.Fatal(err)
			}
			if f := s.schema.Fields(); f[0].Name != "a" || f[1].Name != "b" {
				t.Fatalf("header %v", f)
			}
			if got := lengths(recs); len(got) != 2 || got[0] != 2 || got[1] != 1 {
				t.Fatalf("batches of %v rows", got)
			}
			a, b := recs[0].Column(0).(*array.Int64), recs[0].Column(1).(*array.String)
			last := recs[1].Column(1).(*array.String)
			if a.Value(0) != 1 || b.Value(0) != "x, y" || !a.IsNull(1) || !b.IsNull(1) || last.Value(0) != "z" {
				t.Errorf("read %v %v", recs[0], recs[1])
			}
		})
	}
}

// TestLongNumbers: the type of a number with millions of digits is found in one pass over them. With
// arithmetic on all of the digits this test takes hours.
func TestLongNumbers(t *testing.T) {
	threes, zeros := strings.Repeat("3", 16<<20), strings.Repeat("0", 16<<20)
	for _, c := range []struct {
		name, value string
		want        arrow.DataType
	}{
		{"a fraction", "-0." + threes, arrow.PrimitiveTypes.Float64},
		{"a fraction of zeros", "12." + zeros, arrow.PrimitiveTypes.Float64},
		{"an integer, rounded", "9007199254740993." + zeros, arrow.BinaryTypes.String},
		{"leading zeros", "-" + zeros + "9223372036854775808", arrow.PrimitiveTypes.Int64},
		{"leading zeros, rounded", zeros + "9007199254740993.0", arrow.BinaryTypes.String},
		{"too large", threes, arrow.BinaryTypes.String},
	} {
		var col column
		col.add(c.value)
		if got := col.dataType(); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
}

// TestLines: lines end with a line feed, a carriage return or both. A blank line is a row without a
// value in a table of one column, and no row in others. Blank lines before the header are skipped.
func TestLines(t *testing.T) {
	for _, c := range []struct {
		text   string
		header string
		want   string // the values of the first column
	}{
		{"a\n1\n\n3\n", "a", "[1 (null) 3]"},
		{"a\n1\n\n3", "a", "[1 (null) 3]"},
		{"a\n\n\n3\n", "a", "[(null) (null) 3]"},
		{"a\n1\n\n", "a", "[1 (null)]"},
		{"a\n\n", "a", "[(null)]"},
		{"a\n", "a", "[]"},
		{"a", "a", "[]"},
		{"a\nx\n\n\"\"\ny\n\n", "a", "[x (null) (null) y (null)]"},
		{"\"a\nb\"\n1\n\n2\n", "a\nb", "[1 (null) 2]"},
		{"\"a,b\"\n1\n\n2\n", "a,b", "[1 (null) 2]"},
		{"a\n\"x\n\ny\"\n\nz\n", "a", "[x\n\ny (null) z]"},
		{"a\n\"x\"\"\n\ny\"\n\nz\n", "a", "[x\"\n\ny (null) z]"},
		{"a\r\n1\r\n\r\n3\r\n", "a", "[1 (null) 3]"},
		{"a\r1\r\r3\r", "a", "[1 (null) 3]"},
		{"a\r1\r\r3", "a", "[1 (null) 3]"},
		{"a\r1\n\r\n3\r\r\n5\n\r7", "a", "[1 (null) 3 (null) 5 (null) 7]"},
		{"a\r\"x\ry\"\rz\r", "a", "[x\ry z]"},
		{"\n\r\n\ra\n1\n", "a", "[1]"},
		{byteOrderMark + "\n\na\n\n1\n", "a", "[(null) 1]"},
		{"a,b\r1,2\r3,4\r", "a", "[1 3]"},
		{"a;b\r1,5;2\r", "a", "[1,5]"},
		{"\n\na;b\n\n1;2\n\n\n3;4\n\n\n", "a", "[1 3]"},
		{"a,b\n1,2\n,\n\r3,4", "a", "[1 (null) 3]"},
		{"a\n" + strings.Repeat("\n", 200000) + "1\n", "a", ""},
		{"a\r" + strings.Repeat("1\r", 200000), "a", ""},
	} {
		recs, s, err := readAll(t, write(t, "f.csv", []byte(c.text)), Options{})
		if err != nil {
			t.Errorf("%.60q: %v", c.text, err)
			continue
		}
		if name := s.schema.Field(0).Name; name != c.header {
			t.Errorf("%.60q has the column %q, want %q", c.text, name, c.header)
		}
		values := []string{}
		for _, rec := range recs {
			for i := range int(rec.NumRows()) {
				values = append(values, rec.Column(0).ValueStr(i))
			}
		}
		if c.want == "" {
			if rows := strings.Count(c.text, "\n") + strings.Count(c.text, "\r") - 1; len(values) != rows {
				t.Errorf("%.60q has %d rows, want %d", c.text, len(values), rows)
			}
		} else if got := fmt.Sprint(values); got != c.want {
			t.Errorf("%.60q has %q, want %q", c.text, got, c.want)
		}
		release(recs)
	}
}

// TestRandomCSV: of random tables, with random line ends and blank lines, each row that was written
// is read, with the values that it had. Integers keep all of their digits, whichever type the
// column gets.
func TestRandomCSV(t *testing.T) {
	for seed := range testseed.Each(t, 60) {
		rng := rand.New(rand.NewPCG(seed, 0))
		columns, rows := 1+rng.IntN(3), rng.IntN(60)
		text := []byte(strings.Join([]string{"a", "b", "c"}[:columns], ","))
		end := func() {
			ends := []string{"\r", "\r\n", "\n"}
			if text[len(text)-1] == '\r' { // a blank row: with "\n" both line ends would be one
				ends = ends[:2]
			}
			text = append(text, ends[rng.IntN(len(ends))]...)
			for columns > 1 && rng.IntN(5) == 0 { // blank lines, which are no rows
				text = append(text, "\n\r"...)
			}
		}
		end()
		kinds := make([]int, columns)
		for i := range kinds {
			kinds[i] = rng.IntN(5)
		}
		var want [][]string
		for range rows {
			row := make([]string, columns)
			for i := range row {
				row[i] = randomValue(rng, kinds[i])
				if i > 0 {
					text = append(text, ',')
				}
				if quoted := strings.ReplaceAll(row[i], `"`, `""`); strings.ContainsAny(row[i], "\",\r\n") {
					text = append(text, `"`+quoted+`"`...)
				} else {
					text = append(text, row[i]...)
				}
			}
			want = append(want, row)
			end()
		}
		recs, _, err := readAll(t, write(t, "f.csv", text), Options{RowsPerBatch: int64(rng.IntN(8))})
		if err != nil {
			t.Errorf("seed %d: %v of %q", seed, err, text)
			continue
		}
		row := 0
		for _, rec := range recs {
			for i := range int(rec.NumRows()) {
				for c := range columns {
					if row >= len(want) {
						break
					}
					if got := rec.Column(c); !sameCSV(want[row][c], got, i) {
						t.Errorf("seed %d: row %d of column %d is %s, a %s; want %q", seed, row, c, got.ValueStr(i),
							got.DataType(), want[row][c])
					}
				}
				row++
			}
		}
		if row != len(want) {
			t.Errorf("seed %d: %d rows of %d in %q", seed, row, len(want), text)
		}
		release(recs)
	}
}

// randomValue returns a value of one of five kinds: small and large integers, numbers, text,
// anything.
func randomValue(rng *rand.Rand, kind int) string {
	if rng.IntN(6) == 0 {
		return ""
	}
	if kind == 4 {
		kind = rng.IntN(4)
	}
	sign := []string{"", "-", "+"}[rng.IntN(3)]
	switch kind {
	case 0:
		return sign + strconv.Itoa(rng.IntN(1000))
	case 1:
		digits := strconv.FormatUint(rng.Uint64()>>rng.IntN(20), 10)
		if rng.IntN(4) == 0 { // near the limits of the types
			limit := []uint64{1 << 53, 1<<63 - 1, math.MaxUint64 - 2}[rng.IntN(3)]
			digits = strconv.FormatUint(limit+uint64(rng.IntN(3)), 10)
		}
		return sign + digits
	case 2:
		return sign + strconv.FormatFloat(rng.ExpFloat64(), 'g', 1+rng.IntN(8), 64)
	}
	word := make([]byte, rng.IntN(8))
	for i := range word {
		word[i] = "ab,;\"\n\r "[rng.IntN(8)]
	}
	return string(word)
}

// sameCSV reports whether row i of a has the value that the text stands for. Integers must have the
// same digits; other numbers may be rounded as float64 does.
func sameCSV(text string, a arrow.Array, i int) bool {
	if text == "" || a.IsNull(i) {
		return text == "" && a.IsNull(i)
	}
	switch a := a.(type) {
	case *array.Int64:
		n, ok := new(big.Int).SetString(text, 10)
		return ok && n.IsInt64() && n.Int64() == a.Value(i)
	case *array.Float64:
		if n, ok := new(big.Int).SetString(text, 10); ok {
			got, accuracy := new(big.Float).SetFloat64(a.Value(i)).Int(nil)
			return accuracy == big.Exact && got.Cmp(n) == 0
		}
		f, err := strconv.ParseFloat(text, 64)
		return err == nil && f == a.Value(i)
	case *array.String:
		return a.Value(i) == strings.ReplaceAll(text, "\r\n", "\n") // which encoding/csv does in quotes
	}
	return false
}

// TestBadCSV: a broken line is named by its number.
func TestBadCSV(t *testing.T) {
	path := write(t, "a.csv", []byte("a,b\n1,2\n1,2,3\n"))
	_, err := Open(t.Context(), path, Options{})
	checkError(t, err, path, "line 3")
	path = write(t, "b.csv", []byte("a,b\n1,\"2\n"))
	_, err = Open(t.Context(), path, Options{})
	checkError(t, err, path, "quote")
	recs, s, err := readAll(t, write(t, "c.csv", []byte("only,a,header\n")), Options{})
	if err != nil || len(recs) != 0 || s.schema.NumFields() != 3 {
		t.Errorf("a header alone: %d batches, %v", len(recs), err)
	}
}
