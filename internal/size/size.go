// Package size reads and prints sizes in bytes, as flags, environment variables and configuration
// files give them.
//
//	64Mi  64MiB          binary:  Ki Mi Gi Ti Pi Ei, with or without a B
//	500M  500MB  10k     decimal: k M G T P E, with or without a B
//	1e9   12E6  5000e-3  a power of ten; E alone is the unit above
//	1.5GiB               an exact fraction: it must come to whole bytes
//	4096                 bytes
//	25%                  a share of a whole, where [ParseShare] reads it
//
// Units and exponents are those of Kubernetes' quantities
// (https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity). A size is
// above zero and fits an int64. Everything else is an error that quotes the text: a sign, a space,
// a fraction of a byte, another unit, text behind the unit. A mistyped limit is never read as no
// limit.
//
// [Format] prints the shortest text that [Parse] reads back as the same number. [Approx] is for
// people and is not exact.
//
// All functions are pure and safe for concurrent use.
package size

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

type unit struct {
	name  string // as Format prints it
	bytes int64
}

// Largest first. Format tries the binary units first, because memory has binary sizes.
var units = [...]unit{
	{"EiB", 1 << 60}, {"PiB", 1 << 50}, {"TiB", 1 << 40}, {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
	{"EB", 1e18}, {"PB", 1e15}, {"TB", 1e12}, {"GB", 1e9}, {"MB", 1e6}, {"kB", 1e3},
}

// maxDigits is the longest text of a number that is read. No size needs more, and the limit bounds
// the work on hostile input.
const maxDigits = 100

// maxExponent bounds the work in the same way. A number of maxDigits digits times this power of ten
// is 0 or above the largest size, and divided by it less than a byte.
const maxExponent = 2 * maxDigits

// Parse returns the number of bytes that s stands for, which is above zero. An error quotes s.
func Parse(s string) (int64, error) {
	if s == "" {
		return 0, fmt.Errorf("a size is missing: want a number of bytes, such as 512MiB")
	}
	n, err := parse(s)
	if err != nil {
		return 0, fmt.Errorf("%s is not a size: %w", quote(s), err)
	}
	return n, nil
}

func parse(s string) (int64, error) {
	number, suffix := splitNumber(s)
	if number == "" {
		if strings.HasPrefix(s, "-") {
			return 0, errors.New("it is negative")
		}
		return 0, errors.New("it does not begin with a digit")
	}
	bytes := int64(1)
	exponent, ok := parseExponent(suffix)
	if !ok && suffix != "" {
		i := slices.IndexFunc(units[:], func(u unit) bool {
			return suffix == u.name || suffix == strings.TrimSuffix(u.name, "B")
		})
		switch {
		case i >= 0:
			bytes = units[i].bytes
		case strings.ContainsFunc(suffix, unicode.IsSpace):
			return 0, errors.New("it has a space in it")
		default:
			return 0, fmt.Errorf("%s is not a unit: want Ki Mi Gi Ti Pi Ei, k M G T P E, each with or without B, "+
				"an exponent such as e9, or nothing for bytes", quote(suffix))
		}
	}
	r, err := decimal(number, exponent)
	if err != nil {
		return 0, err
	}
	r.Mul(r, new(big.Rat).SetInt64(bytes))
	switch {
	case r.Sign() == 0:
		return 0, errors.New("it must be above zero")
	case !r.IsInt():
		return 0, errors.New("it does not come to a whole number of bytes")
	case !r.Num().IsInt64():
		return 0, fmt.Errorf("it is above the largest size, %d", int64(math.MaxInt64))
	}
	return r.Num().Int64(), nil
}

// splitNumber cuts s behind its leading digits and points.
func splitNumber(s string) (number, rest string) {
	i := strings.IndexFunc(s, func(r rune) bool { return r != '.' && (r < '0' || r > '9') })
	if i < 0 {
		return s, ""
	}
	return s[:i], s[i:]
}

// parseExponent returns the power of ten of a suffix such as e9 or E-3, and false for any other
// suffix. It returns a power beyond maxExponent as maxExponent with the same sign.
func parseExponent(suffix string) (exponent int, ok bool) {
	if suffix == "" || suffix[0] != 'e' && suffix[0] != 'E' {
		return 0, false
	}
	exponent, err := strconv.Atoi(suffix[1:])
	if errors.Is(err, strconv.ErrSyntax) {
		return 0, false
	}
	return max(-maxExponent, min(exponent, maxExponent)), true
}

// decimal returns a number, which must be digits, or digits with one point between them, times a power
// of ten.
func decimal(number string, exponent int) (*big.Rat, error) {
	if len(number) > maxDigits {
		return nil, fmt.Errorf("it has more than %d digits", maxDigits)
	}
	whole, fraction, point := strings.Cut(number, ".")
	if whole == "" || point && (fraction == "" || strings.Contains(fraction, ".")) {
		return nil, errors.New("want digits, and a point only between digits")
	}
	r, ok := new(big.Rat).SetString(fmt.Sprintf("%se%d", number, exponent))
	if !ok {
		return nil, fmt.Errorf("%s is not a number", quote(number))
	}
	return r, nil
}

// quote returns s in quotes for an error message, and only its beginning if it is long.
func quote(s string) string {
	const most = 60
	if len(s) > most {
		return strconv.Quote(s[:most]) + "…"
	}
	return strconv.Quote(s)
}

// Format returns the shortest text that Parse reads back as n, with at most three decimals. Among
// texts of one length it prefers a binary unit, then a decimal one: 1.5GiB, 500MB, 1537. It returns
// zero and negative numbers, which Parse refuses, as plain numbers.
func Format(n int64) string {
	best := strconv.FormatInt(n, 10)
	if n <= 0 {
		return best
	}
	plain := true
	for _, u := range units {
		if n < u.bytes {
			continue
		}
		s, ok := exact(n, u)
		if !ok {
			continue
		}
		if len(s) < len(best) || plain && len(s) == len(best) {
			best, plain = s, false
		}
	}
	return best
}

// exact returns n in the unit u, and false if that takes more than three decimals.
func exact(n int64, u unit) (string, bool) {
	hi, lo := bits.Mul64(uint64(n%u.bytes), 1000)
	thousandths, rest := bits.Div64(hi, lo, uint64(u.bytes))
	text := fmt.Sprintf("%d.%03d", n/u.bytes, thousandths)
	return strings.TrimSuffix(strings.TrimRight(text, "0"), ".") + u.name, rest == 0
}

// Saturated returns n as "5 bytes". The largest number, which stands for a sum that overflows, is
// "8 EiB or more".
func Saturated(n int64) string {
	if n == math.MaxInt64 {
		return "8 EiB or more"
	}
	return fmt.Sprintf("%d bytes", n)
}

// Approx returns n for people, in the largest binary unit that it reaches and with one decimal:
// 251.5 GiB. It does not read back exactly.
func Approx(n int64) string {
	if n < 0 {
		// Not -n: the smallest int64 has no counterpart.
		return "-" + approx(uint64(-(n+1))+1)
	}
	return approx(uint64(n))
}

// Apart returns two sizes for people: as Approx does, or in bytes where Approx would hide that they
// differ.
func Apart(a, b int64) (string, string) {
	x, y := Approx(a), Approx(b)
	if a != b && x == y {
		return strconv.FormatInt(a, 10) + " B", strconv.FormatInt(b, 10) + " B"
	}
	return x, y
}

func approx(n uint64) string {
	if n < 1<<10 {
		return strconv.FormatUint(n, 10) + " B"
	}
	var u unit
	for _, u = range units {
		// The least number that prints as 1.0, so that no text is 1024.0.
		if float64(n) >= float64(u.bytes)*(1-0.05/1024) {
			break
		}
	}
	return strconv.FormatFloat(float64(n)/float64(u.bytes), 'f', 1, 64) + " " + u.name
}

// Largest returns the largest size from least to most whose charge is at most room. The charge of
// least must be at most room, and a charge must not be below its size or fall when the size rises.
func Largest(charge func(size int64) int64, least, most, room int64) int64 {
	most = min(most, room)
	if charge(most) <= room {
		return most
	}
	for most-least > 1 { // least fits, most does not
		mid := least + (most-least)/2
		if charge(mid) <= room {
			least = mid
		} else {
			most = mid
		}
	}
	return least
}
