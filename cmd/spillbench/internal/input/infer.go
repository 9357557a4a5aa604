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

// candidate is a type that a column may have. holds reports whether a value can be read as the type,
// by the function that the reader will use.
type candidate struct {
	dataType arrow.DataType
	holds    func(v string) bool
}

// candidates are the types of columns, narrowest first. A column gets the first that holds all of its
// values, and text if there is none.
var candidates = [...]candidate{
	{arrow.PrimitiveTypes.Int64, func(v string) bool {
		_, err := strconv.ParseInt(v, 10, 64)
		return err == nil
	}},
	{arrow.PrimitiveTypes.Float64, func(v string) bool {
		_, err := strconv.ParseFloat(v, 64)
		return err == nil && !losesDigits(v)
	}},
	{arrow.FixedWidthTypes.Boolean, func(v string) bool {
		// The reader takes "1" and "t" too, but a column of these does not hold truth values.
		_, err := strconv.ParseBool(v)
		return err == nil && len(v) >= len("true")
	}},
	{arrow.FixedWidthTypes.Date32, func(v string) bool {
		_, err := time.Parse(time.DateOnly, v)
		return err == nil
	}},
	timestamps(arrow.Microsecond, ""),
	timestamps(arrow.Nanosecond, ""),
	timestamps(arrow.Microsecond, "UTC"),
	timestamps(arrow.Nanosecond, "UTC"),
}

// timestamps returns the type of timestamps with a time zone, or without one if zone is empty.
func timestamps(unit arrow.TimeUnit, zone string) candidate {
	return candidate{&arrow.TimestampType{Unit: unit, TimeZone: zone}, func(v string) bool {
		if len(v) < len(time.DateOnly) || v[4] != '-' { // spares most strings the parsing
			return false
		}
		_, zoned, err := arrow.TimestampFromStringInLocation(v, unit, time.UTC)
		return err == nil && zoned == (zone != "")
	}}
}

// column collects the types that a column's values can have. The zero value has seen no value.
type column struct {
	seen   bool                  // at least one value is not null
	cannot [len(candidates)]bool // at least one value does not have the type
}

// add takes one value into account.
func (c *column) add(v string) {
	if slices.Contains(csv.DefaultNullValues, v) {
		return
	}
	c.seen = true
	for i, t := range candidates {
		c.cannot[i] = c.cannot[i] || !t.holds(v)
	}
}

func (c *column) dataType() arrow.DataType {
	i := slices.Index(c.cannot[:], false)
	if !c.seen || i < 0 {
		return arrow.BinaryTypes.String
	}
	return candidates[i].dataType
}

// losesDigits reports whether v, which ParseFloat reads, is an integer in digits that would not
// stay what it is as a float64: one that float64 rounds, or that does not fit an int64 and has no
// point to mark it as a float. Float64 may round fractions and numbers with an exponent: these are
// floats.
func losesDigits(v string) bool {
	if len(v) <= 15 { // float64 holds 15 digits
		return false
	}
	whole, fraction, point := strings.Cut(strings.TrimLeft(v, "+-"), ".")
	if strings.Trim(whole, "0123456789") != "" || strings.Trim(fraction, "0") != "" {
		return false // it is no integer, or one with an exponent
	}
	// At most 309 digits are left, as ParseFloat reads v: arithmetic on millions takes minutes.
	n, ok := new(big.Int).SetString("0"+strings.TrimLeft(whole, "0"), 10)
	if !ok {
		return false
	}
	if v[0] == '-' {
		n.Neg(n)
	}
	_, accuracy := n.Float64()
	return accuracy != big.Exact || !point && !n.IsInt64()
}
