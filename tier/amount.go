package tier

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spillway-db/spillway/internal/size"
)

// Amount says how large something is: a number of bytes, or a share of what there is. The zero
// value is neither, and means the default.
type Amount struct {
	Bytes int64
	Share float64 // above 0, up to 1
}

// ParseAmount reads a size such as 512MiB, 500MB or 4096, or a share such as 25%. Everything else,
// also 0 and an empty text, is an error that quotes it.
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

// Validate says what is wrong with the amount.
func (a Amount) Validate() error {
	switch {
	case a.Bytes != 0 && a.Share != 0:
		return errors.New("there are both bytes and a share: want one of them")
	case a.Bytes < 0:
		return fmt.Errorf("%d bytes are negative", a.Bytes)
	case a.Share != 0 && !(a.Share >= size.LeastShare && a.Share <= 1): // NaN is neither
		return fmt.Errorf("a share of %v: want one above 0, up to 1", a.Share)
	}
	return nil
}

// Of returns the amount in bytes, of total bytes where it is a share, rounded down. A number of
// bytes may be larger than total. An unset amount is 0. It is an error if the amount is not valid,
// if a share is less than a byte, or if total is needed and not above 0.
func (a Amount) Of(total int64) (int64, error) {
	if err := a.Validate(); err != nil || a.Share == 0 {
		return a.Bytes, err
	}
	return size.Part(a.Share, total)
}

// String prints a valid amount as ParseAmount reads it; empty if it is not set.
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

// MarshalText returns what String does; an amount that is not valid is an error.
func (a Amount) MarshalText() ([]byte, error) { return []byte(a.String()), a.Validate() }

// UnmarshalText reads what ParseAmount does. On an error the amount stays what it was.
func (a *Amount) UnmarshalText(text []byte) error {
	parsed, err := ParseAmount(string(text))
	if err == nil {
		*a = parsed
	}
	return err
}
