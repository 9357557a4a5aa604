package size

import (
	"fmt"
	"math/big"
	"strings"
)

// Value is a size as a flag: it implements the flag package's Value, and the
// Type method that other flag packages ask for. The zero value is "not set"
// and prints as 0.
type Value int64

// Set parses s as Parse does. On an error the value stays what it was.
func (v *Value) Set(s string) error {
	n, err := Parse(s)
	if err == nil {
		*v = Value(n)
	}
	return err
}

// String prints the size as Format does.
func (v *Value) String() string {
	if v == nil {
		return "0"
	}
	return Format(int64(*v))
}

// Type names the kind of value in a usage text.
func (*Value) Type() string { return "size" }

// Amount is a flag that takes a size or a share: 512MiB or 50%. What a share
// comes to is known only when the size of the whole is: see [Amount.Of]. The
// zero value is "not set" and prints as the empty text. Amounts are comparable.
type Amount struct {
	bytes int64
	share string // digits of a percentage; empty: bytes says it
}

// Set parses s as ParseShare does. On an error the amount stays what it was.
func (a *Amount) Set(s string) error {
	if digits, ok := strings.CutSuffix(s, "%"); ok {
		if _, err := parsePercent(digits); err != nil {
			return fmt.Errorf("%s is not a share: %w", quote(s), err)
		}
		*a = Amount{share: digits}
		return nil
	}
	n, err := Parse(s)
	if err == nil {
		*a = Amount{bytes: n}
	}
	return err
}

// IsSet says whether the amount was set.
func (a *Amount) IsSet() bool { return a != nil && *a != Amount{} }

// Of returns the amount in bytes, of total bytes where it is a share. Not set,
// it is 0.
func (a *Amount) Of(total int64) (int64, error) {
	if !a.IsSet() {
		return 0, nil
	}
	if a.share != "" {
		return ParseShare(a.share+"%", total)
	}
	return a.bytes, nil
}

// Share returns the amount as a fraction in (0, 1], if it is a share.
func (a *Amount) Share() (fraction float64, ok bool) {
	if a == nil || a.share == "" {
		return 0, false
	}
	r, err := parsePercent(a.share)
	if err != nil {
		return 0, false
	}
	fraction, _ = new(big.Rat).Set(r).Float64()
	return fraction, true
}

// String prints the amount as it would be set.
func (a *Amount) String() string {
	switch {
	case !a.IsSet():
		return ""
	case a.share != "":
		return a.share + "%"
	}
	return Format(a.bytes)
}

// Type names the kind of value in a usage text.
func (*Amount) Type() string { return "size or share" }
