package input

import (
	"math/big"
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

// The candidates, narrowest first. A column gets the first that holds all of its values.
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

// column collects the types that a column's values can have. The zero value has seen no value.
type column struct {
	seen   bool      // at least one value is not null
	cannot candidate // the types that at least one value does not have
}

// see takes one value into account. It tries only the types that are left, the narrowest first.
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
		} else if t == isInt { // which can be a float too, and no other type
			c.cannot |= isAnything &^ (isInt | isFloat)
			if losesDigits(v) {
				c.cannot |= isFloat
			}
			return
		}
	}
}

// holds reports whether v can be read as t, by the function that the reader will use.
func (t candidate) holds(v string) bool {
	var err error
	switch t {
	case isInt:
		_, err = strconv.ParseInt(v, 10, 64)
	case isFloat:
		_, err = strconv.ParseFloat(v, 64)
		return err == nil && !losesDigits(v)
	case isBool:
		// The reader takes "1" and "t" too, but a column of these does not hold truth values.
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

// losesDigits reports whether v, which ParseFloat reads, is an integer in digits that would not
// stay what it is as a float64: one that float64 rounds, or that does not fit an int64 and has no
// point to mark it as a float. Float64 may round fractions and numbers with an exponent: these are
// floats.
func losesDigits(v string) bool {
	if len(v) <= 15 { // float64 holds 15 digits
		return false
	}
	digits := strings.TrimLeft(v, "+-")
	if strings.Trim(digits, "0123456789.") != "" {
		return false
	}
	r, ok := new(big.Rat).SetString(v)
	if !ok || !r.IsInt() {
		return false
	}
	_, exact := r.Float64()
	return !exact || !r.Num().IsInt64() && !strings.Contains(digits, ".")
}

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
