package input

import (
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/csv"
)

// candidates are the types of columns, narrowest first. A column gets the first that holds all of its
// values, and text if there is none.
var candidates = []arrow.DataType{
	arrow.PrimitiveTypes.Int64, arrow.PrimitiveTypes.Float64, arrow.FixedWidthTypes.Boolean,
	arrow.FixedWidthTypes.Date32,
	&arrow.TimestampType{Unit: arrow.Microsecond}, &arrow.TimestampType{Unit: arrow.Nanosecond},
	arrow.FixedWidthTypes.Timestamp_us, arrow.FixedWidthTypes.Timestamp_ns, // with a zone
}

// column has the candidates that hold all values of a column so far. It is nil before the first value
// that is not null.
type column []arrow.DataType

// add removes the candidates that cannot hold v.
func (c *column) add(v string) {
	if slices.Contains(csv.DefaultNullValues, v) {
		return
	}
	if *c == nil {
		*c = slices.Clone(candidates)
	}
	*c = slices.DeleteFunc(*c, func(t arrow.DataType) bool { return !holds(t, v) })
}

func (c column) dataType() arrow.DataType {
	if len(c) == 0 {
		return arrow.BinaryTypes.String
	}
	return c[0]
}

// holds reports whether a value can be read as a type, by the function that the reader will use.
func holds(dt arrow.DataType, v string) bool {
	var err error
	switch t := dt.(type) {
	case *arrow.Int64Type:
		_, err = strconv.ParseInt(v, 10, 64)
	case *arrow.Float64Type:
		var f float64
		f, err = strconv.ParseFloat(v, 64)
		return err == nil && !losesDigits(v, f)
	case *arrow.BooleanType:
		// The reader takes "1" and "t" too, but a column of these does not hold truth values.
		_, err = strconv.ParseBool(v)
		return err == nil && len(v) >= len("true")
	case *arrow.Date32Type:
		_, err = time.Parse(time.DateOnly, v)
	case *arrow.TimestampType:
		var zoned bool
		_, zoned, err = arrow.TimestampFromStringInLocation(v, t.Unit, time.UTC)
		return err == nil && zoned == (t.TimeZone != "")
	}
	return err == nil
}

// losesDigits reports whether v, which ParseFloat reads as f, is an integer in digits that would not
// stay what it is as a float64: one that float64 rounds, or that does not fit an int64 and has no
// point to mark it as a float. Float64 may round fractions and numbers with an exponent: these are
// floats.
func losesDigits(v string, f float64) bool {
	if len(v) <= 15 { // float64 holds 15 digits
		return false
	}
	digits, fraction, point := strings.Cut(v, ".")
	whole, ok := new(big.Int).SetString(digits, 10)
	if !ok || strings.Trim(fraction, "0") != "" {
		return false // it is no integer, or one with an exponent
	}
	rounded, _ := big.NewFloat(f).Int(nil)
	return whole.Cmp(rounded) != 0 || !whole.IsInt64() && !point
}
