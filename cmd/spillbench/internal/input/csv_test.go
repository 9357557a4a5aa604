package input

import (
	"strings"
	"testing"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// TestInference: a column has the narrowest type that holds all of its values,
// wherever in the file they stand.
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
		{"99999999999999999999", arrow.BinaryTypes.String}, // a float would lose digits
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
		if got := s.Schema().Field(0).Type; !arrow.TypeEqual(got, c.want) {
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
			if f := s.Schema().Fields(); f[0].Name != "a" || f[1].Name != "b" {
				t.Fatalf("header %v", f)
			}
			if got := lengths(recs); len(got) != 2 || got[0] != 2 || got[1] != 1 {
				t.Fatalf("batches of %v rows", got)
			}
			a, b := recs[0].Column(0).(*array.Int64), recs[0].Column(1).(*array.String)
			if a.Value(0) != 1 || b.Value(0) != "x, y" || !a.IsNull(1) || !b.IsNull(1) || recs[1].Column(1).(*array.String).Value(0) != "z" {
				t.Errorf("read %v %v", recs[0], recs[1])
			}
		})
	}
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
	if err != nil || len(recs) != 0 || s.Schema().NumFields() != 3 {
		t.Errorf("a header alone: %d batches, %v", len(recs), err)
	}
}
