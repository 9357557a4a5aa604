package size

import (
	"fmt"
	"math"
	"math/big"
	"strconv"
	"strings"
)

// MinShare is the smallest share that [ParseShare] returns: a smaller one is less than a byte of
// every size.
const MinShare = 1.0 / (1 << 63)

// ParseShare reads a text such as 25% or 12.5% and returns the fraction, here 0.25 or 0.125. A
// share is above 0% and at most 100%. An error quotes s.
func ParseShare(s string) (float64, error) {
	share, err := parsePercent(s)
	if err != nil {
		return 0, fmt.Errorf("%s is not a share: %w", quote(s), err)
	}
	return share, nil
}

func parsePercent(s string) (float64, error) {
	number, rest := splitNumber(s)
	if rest != "%" {
		return 0, fmt.Errorf("want a number before the %%, such as 25%%")
	}
	r, err := decimal(number, -2)
	if err != nil {
		return 0, err
	}
	share, _ := r.Float64()
	switch {
	case r.Sign() == 0:
		return 0, fmt.Errorf("it must be above 0%%")
	case r.Cmp(big.NewRat(1, 1)) > 0:
		return 0, fmt.Errorf("it is above 100%%")
	case share < MinShare:
		return 0, fmt.Errorf("it is less than a byte of any size")
	}
	return share, nil
}

// FormatShare prints a share from [MinShare] to 1 as the shortest text that ParseShare reads back
// to the same number.
func FormatShare(share float64) string {
	text := strconv.FormatFloat(share, 'f', -1, 64)
	_, decimals, _ := strings.Cut(text, ".")
	percent := exactly(share)
	percent.Mul(percent, big.NewRat(100, 1))
	return percent.FloatString(max(0, len(decimals)-2)) + "%"
}

// Part returns a share of total bytes, rounded down to a whole byte, which is an error if that is
// none. The share counts as its shortest decimal: 0.29 of 100 bytes is 29, though the float64
// is below that.
func Part(share float64, total int64) (int64, error) {
	if total <= 0 {
		return 0, fmt.Errorf("%q has no meaning here: the size of the whole is not known", FormatShare(share))
	}
	part := exactly(share)
	part.Mul(part, new(big.Rat).SetInt64(total))
	n := new(big.Int).Quo(part.Num(), part.Denom()).Int64() // ≤ total
	if n == 0 {
		return 0, fmt.Errorf("%q of %s is less than a byte", FormatShare(share), Format(total))
	}
	return n, nil
}

// Times returns ⌈factor × n⌉, or the largest int64 if that is more; neither is negative. The factor
// counts as its shortest decimal: 1.1 × 100 is 110, though the float64 is above that.
func Times(factor float64, n int64) int64 {
	product := exactly(factor)
	product.Mul(product, new(big.Rat).SetInt64(n))
	whole, rest := new(big.Int).QuoRem(product.Num(), product.Denom(), new(big.Int))
	if rest.Sign() > 0 {
		whole.Add(whole, big.NewInt(1))
	}
	if !whole.IsInt64() {
		return math.MaxInt64
	}
	return whole.Int64()
}

// exactly returns the shortest decimal that stands for a number, which is finite.
func exactly(n float64) *big.Rat {
	r, _ := new(big.Rat).SetString(strconv.FormatFloat(n, 'g', -1, 64)) // strconv's text is a number
	return r
}
