package input

import (
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/csv"
)

// candidate is a type that the values of a column may have.
type candidate uint8

// The candidates, narrowest first: a column gets the first that holds all of
// its values.
const (
	isInt candidate = 1 << iota
	isFloat
	isBool
	isDate
	isTime // a timestamp without a time zone, to the microsecond
	isNano // the same to the nanosecond
	isZoned
	isZonedNano

	isAnything = isInt | isFloat | isBool | isDate | isTime | isNano | isZoned | isZonedNano
)

// column collects what a column's values can be. The zero value has seen
// nothing.
type column struct {
	seen   bool      // a value that is not null
	cannot candidate // what at least one value is not
}

// see takes one value into account. It asks only for the types that are left,
// the narrowest first.
func (c *column) see(v string) {
	if slices.Contains(csv.DefaultNullValues, v) {
		return
	}
	c.seen = true
	for left := isAnything &^ c.cannot; left != 0; {
		t := candidate(1) << bits.TrailingZeros8(uint8(left))
		left &^= t
		if !t.holds(v) {
			c.cannot |= t
		} else if t == isInt {
			c.cannot |= isAnything &^ (isInt | isFloat)
			return // an integer is a float and nothing else
		}
	}
}

// holds reports whether v can be read as t, by the function that the reader will
// use.
func (t candidate) holds(v string) bool {
	var err error
	switch t {
	case isInt:
		_, err = strconv.ParseInt(v, 10, 64)
	case isFloat:
		_, err = strconv.ParseFloat(v, 64)
		if err == nil && strings.IndexFunc(v, notDigit) < 0 {
			return false // digits only, and too many for an integer: a float would lose some
		}
	case isBool:
		// The reader takes "1", "t" and such too, but a column of these is not meant so.
		_, err = strconv.ParseBool(v)
		return err == nil && len(v) >= len("true")
	case isDate:
		_, err = time.Parse(time.DateOnly, v)
	case isTime:
		return isTimestamp(v, arrow.Microsecond, false)
	case isNano:
		return isTimestamp(v, arrow.Nanosecond, false)
	case isZoned:
		return isTimestamp(v, arrow.Microsecond, true)
	case isZonedNano:
		return isTimestamp(v, arrow.Nanosecond, true)
	}
	return err == nil
}

func notDigit(r rune) bool { return r < '0' || r > '9' }

func isTimestamp(v string, unit arrow.TimeUnit, zoned bool) bool {
	if len(v) < len(time.DateOnly) || v[4] != '-' { // spares most strings the parsing
		return false
	}
	_, hasZone, err := arrow.TimestampFromStringInLocation(v, unit, time.UTC)
	return err == nil && hasZone == zoned
}

func (c *column) dataType() arrow.DataType {
	if !c.seen {
		return arrow.BinaryTypes.String
	}
	can := isAnything &^ c.cannot
	switch candidate(1) << bits.TrailingZeros8(uint8(can)) & can {
	case isInt:
		return arrow.PrimitiveTypes.Int64
	case isFloat:
		return arrow.PrimitiveTypes.Float64
	case isBool:
		return arrow.FixedWidthTypes.Boolean
	case isDate:
		return arrow.FixedWidthTypes.Date32
	case isTime:
		return &arrow.TimestampType{Unit: arrow.Microsecond}
	case isNano:
		return &arrow.TimestampType{Unit: arrow.Nanosecond}
	case isZoned:
		return &arrow.TimestampType{Unit: arrow.Microsecond, TimeZone: "UTC"}
	case isZonedNano:
		return &arrow.TimestampType{Unit: arrow.Nanosecond, TimeZone: "UTC"}
	}
	return arrow.BinaryTypes.String
}
