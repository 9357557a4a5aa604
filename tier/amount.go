package tier

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
)

// Amount is a size: a number of bytes, or a share of a whole. The zero value is neither, and means
// the default.
type Amount struct {
	Bytes int64
	Share float64 // above 0, up to 1
}

// ParseAmount reads a size such as 512MiB, 500MB, 1e9 or 4096, or a share such as 25%. The units
// and exponents of sizes are those of Kubernetes' quantities, and a B may follow a unit. Everything
// else is an error that quotes the text, including 0, a negative number and an empty text.
func ParseAmount(s string) (a Amount, err error) {
	if strings.HasSuffix(s, "%") {
		a.Share, err = size.ParseShare(s)
	} else {
		a.Bytes, err = size.Parse(s)
	}
	return a, err
}

// IsZero reports whether the amount is not set.
func (a Amount) IsZero() bool { return a == Amount{} }

// Validate returns an error if the amount has both bytes and a share, or one out of range.
func (a Amount) Validate() error {
	switch {
	case a.Bytes != 0 && a.Share != 0:
		return errors.New("there are both bytes and a share: want one of them")
	case a.Bytes < 0:
		return fmt.Errorf("%d bytes are negative", a.Bytes)
	case a.Share != 0 && !(a.Share >= size.MinShare && a.Share <= 1): // NaN is neither
		return fmt.Errorf("a share of %v: want one above 0, up to 1", a.Share)
	}
	return nil
}

// Of returns the amount in bytes. A share is of total bytes, rounded down. A number of bytes may be
// larger than total. An unset amount is 0. Of returns an error if the amount is not valid, if a
// share is less than a byte, or if the amount is a share and total is not above 0.
func (a Amount) Of(total int64) (int64, error) {
	if err := a.Validate(); err != nil || a.Share == 0 {
		return a.Bytes, err
	}
	return size.Part(a.Share, total)
}

// String returns a valid amount as ParseAmount reads it, and an empty text if it is not set.
func (a Amount) String() string {
	switch err := a.Validate(); {
	case err != nil:
		return fmt.Sprintf("%d bytes, share %v", a.Bytes, a.Share)
	case a.Share != 0:
		return size.FormatShare(a.Share)
	case a.Bytes != 0:
		return size.Format(a.Bytes)
	}
	return ""
}

// MarshalText returns the text of String. It returns an error if the amount is not valid.
func (a Amount) MarshalText() ([]byte, error) { return []byte(a.String()), a.Validate() }

// UnmarshalText reads a text as ParseAmount does. An error leaves the amount unchanged.
func (a *Amount) UnmarshalText(text []byte) error {
	parsed, err := ParseAmount(string(text))
	if err == nil {
		*a = parsed
	}
	return err
}
