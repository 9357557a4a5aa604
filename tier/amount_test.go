package tier_test

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

func TestAmount(t *testing.T) {
	for text, c := range map[string]struct {
		want  tier.Amount
		of    int64
		bytes int64
	}{
		"512MiB": {tier.Amount{Bytes: 512 << 20}, 1, 512 << 20}, // more than the whole, which is not asked
		"4096":   {tier.Amount{Bytes: 4096}, 0, 4096},
		"1.5E3":  {tier.Amount{Bytes: 1500}, 1, 1500},
		"12.5%":  {tier.Amount{Share: 0.125}, 1000, 125},
		"29%":    {tier.Amount{Share: 0.29}, 100, 29}, // exactly, though the float64 is less
		"100%":   {tier.Amount{Share: 1}, math.MaxInt64, math.MaxInt64},
	} {
		a, err := tier.ParseAmount(text)
		if err != nil || a != c.want || a.IsZero() || a.Validate() != nil {
			t.Errorf("%q is %+v, %v; want %+v", text, a, err, c.want)
		}
		if n, err := a.Of(c.of); err != nil || n != c.bytes {
			t.Errorf("%q of %d is %d, %v; want %d", text, c.of, n, err, c.bytes)
		}
		printed := a.String()
		if back, err := tier.ParseAmount(printed); err != nil || back != a {
			t.Errorf("%q prints as %q, which is %+v, %v", text, printed, back, err)
		}
		coded, err := json.Marshal(a)
		var decoded tier.Amount
		if err != nil || json.Unmarshal(coded, &decoded) != nil || decoded != a {
			t.Errorf("%q is %s in JSON, and back %+v, %v", text, coded, decoded, err)
		}
	}
	var unset tier.Amount
	n, err := unset.Of(100)
	if n != 0 || err != nil || !unset.IsZero() || unset.Validate() != nil || unset.String() != "" {
		t.Errorf("not set: %d, %v, %q", n, err, unset)
	}
}

// TestAmountRefuses: what makes no sense is an error, never "not set".
func TestAmountRefuses(t *testing.T) {
	for text, says := range map[string]string{
		"": "missing", "0": "above zero", "0%": "above 0%", "101%": "above 100%", "-1": "negative",
		"-5%": "number before", "NaN%": "number before",
		"8EiB": "largest",
		"1e19": "largest", "1e-1": "whole number", "-1e9": "negative", "1e1%": "number before",
		"1%B": "not a unit", "5 GiB": "space",
	} {
		a := tier.Amount{Bytes: 7}
		if err := a.UnmarshalText([]byte(text)); err == nil || !strings.Contains(err.Error(), says) || a.Bytes != 7 {
			t.Errorf("%q: %+v, %v; want it as it was, and an error with %q", text, a, err, says)
		}
	}
	for says, a := range map[string]tier.Amount{
		"both bytes and": {Bytes: 1, Share: 0.5}, "-1 bytes": {Bytes: -1},
		"a share of 1.5": {Share: 1.5}, "a share of -0.1": {Share: -0.1}, "a share of NaN": {Share: math.NaN()},
		"a share of +Inf": {Share: math.Inf(1)}, "a share of 5e-324": {Share: math.SmallestNonzeroFloat64},
	} {
		_, err := a.Of(1 << 40)
		_, inText := a.MarshalText()
		for _, err := range []error{a.Validate(), err, inText} {
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%+v: %v; want an error with %q", a, err, says)
			}
		}
	}
	for total, a := range map[int64]tier.Amount{0: {Share: 0.5}, 99: {Share: 0.01}} {
		if n, err := a.Of(total); err == nil {
			t.Errorf("%s of %d is %d", a, total, n)
		}
	}
}
