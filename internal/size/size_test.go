package size_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/size"
)

func Example() {
	n, err := size.Parse("1.5GiB")
	fmt.Println(n, size.Format(n), err)
	_, err = size.Parse("-1")
	fmt.Println(err)
	half, _ := size.ParseShare("50%")
	n, err = size.Part(half, 8<<30)
	fmt.Println(size.Format(n), err)
	// Output:
	// 1610612736 1.5GiB <nil>
	// "-1" is not a size: it is negative
	// 4GiB <nil>
}

func TestParse(t *testing.T) {
	for _, c := range []struct {
		text string
		want int64
	}{
		{"1", 1}, {"4096", 4096}, {"007", 7}, {"2.0", 2}, {"9223372036854775807", math.MaxInt64},
		{"1Ki", 1 << 10}, {"1Mi", 1 << 20}, {"1Gi", 1 << 30}, {"1Ti", 1 << 40}, {"1Pi", 1 << 50}, {"1Ei", 1 << 60},
		{"1KiB", 1 << 10}, {"1MiB", 1 << 20}, {"1GiB", 1 << 30}, {"1TiB", 1 << 40}, {"1PiB", 1 << 50}, {"7EiB", 7 << 60},
		{"1k", 1e3}, {"1M", 1e6}, {"1G", 1e9}, {"1T", 1e12}, {"1P", 1e15}, {"9E", 9e18},
		{"1kB", 1e3}, {"1MB", 1e6}, {"1GB", 1e9}, {"1TB", 1e12}, {"1PB", 1e15}, {"1EB", 1e18},
		{"1.5GiB", 3 << 29}, {"0.5Ki", 512}, {"0.001k", 1}, {"1.25M", 1250000}, {"0.0009765625Ki", 1},
		{"7.5Ei", 15 << 59}, {"9.223372036854775807E", math.MaxInt64},
		{"1.50000000000000000000000000000000000000Gi", 3 << 29},
		{"1e9", 1e9}, {"1E9", 1e9}, {"12E6", 12e6}, {"1e0", 1}, {"1.5e3", 1500},
		{"1e+3", 1000}, {"1E+3", 1000}, {"5000e-3", 5}, {"1E-0", 1}, {"1e018", 1e18}, {"0.000001e6", 1},
		{"9.223372036854775807e18", math.MaxInt64}, {"9223372036854775807000E-3", math.MaxInt64},
	} {
		got, err := size.Parse(c.text)
		if err != nil || got != c.want {
			t.Errorf("Parse(%q) = %d, %v; want %d", c.text, got, err, c.want)
		}
	}
}

// Whatever is not a size is an error that quotes it, never "no limit".
func TestParseErrors(t *testing.T) {
	for _, c := range []struct{ text, says string }{
		{"", "missing"},
		{"0", "above zero"}, {"0Gi", "above zero"}, {"0.0", "above zero"},
		{"-1", "negative"}, {"-1Gi", "negative"}, {"-", "negative"}, {"+1", "a digit"}, {"−1", "a digit"},
		{"m", "a digit"}, {"5m", "not a unit"}, {"K", "a digit"}, {"5K", "not a unit"}, {"5KB", "not a unit"},
		{"Gi", "digit"}, {"GiB", "digit"}, {"B", "a digit"}, {"5B", "not a unit"}, {"5b", "not a unit"},
		{"5gib", "not a unit"}, {"5GIB", "not a unit"}, {"5Mib", "not a unit"}, {"5Kib", "not a unit"},
		{"5mB", "not a unit"},
		{"5GiBx", "not a unit"}, {"5Gi5", "not a unit"}, {"5MiMi", "not a unit"}, {"5 GiB", "space"},
		{"5GiB ", "space"}, {"5GiB\n", "space"},
		{" 5GiB", "a digit"}, {"\t", "a digit"}, {" ", "a digit"},
		{"1e", "not a unit"}, {"1e+", "not a unit"}, {"1e-", "not a unit"}, {"1e3.5", "not a unit"},
		{"1e1e1", "not a unit"}, {"1ee3", "not a unit"}, {"1e3Ki", "not a unit"}, {"1e9B", "not a unit"},
		{"1Ei3", "not a unit"}, {"1e 3", "space"}, {"1e--3", "not a unit"}, {"1e_3", "not a unit"},
		{"-1e9", "negative"}, {"+1e9", "a digit"}, {"e9", "a digit"}, {"E9", "a digit"}, {".5e3", "point"},
		{"5.e3", "point"}, {"0e9", "above zero"}, {"0e99999999999999999999", "above zero"},
		{"1e-1", "whole number"}, {"1.5e0", "whole number"}, {"1.2345e3", "whole number"},
		{"1e-99999999999999999999", "whole number"}, {"1e19", "largest"}, {"9223372036854775808e0", "largest"},
		{"9.223372036854775808e18", "largest"}, {"1e1000000000", "largest"},
		{"1e99999999999999999999", "largest"}, {"0." + strings.Repeat("0", 97) + "1e199", "largest"},
		{"0x10", "not a unit"}, {"1_000", "not a unit"}, {"1,5Gi", "not a unit"},
		{"NaN", "a digit"}, {"Inf", "a digit"}, {"٣", "a digit"}, {"5%", "not a unit"}, {"1\x00", "not a unit"},
		{".", "point"}, {".5Gi", "point"}, {"5.Gi", "point"}, {"1.2.3", "point"}, {"1..2", "point"},
		{"0.0001k", "whole number"}, {"1.1Ki", "whole number"}, {"0.5", "whole number"},
		{"1.0000000000000000000001Gi", "whole number"},
		{"9223372036854775808", "largest"}, {"8Ei", "largest"}, {"8EiB", "largest"}, {"9.3E", "largest"},
		{"16E", "largest"},
		{strings.Repeat("9", 100) + "E", "largest"}, {strings.Repeat("1", 101), "digits"},
		{"1." + strings.Repeat("0", 1<<20) + "Gi", "digits"},
	} {
		got, err := size.Parse(c.text)
		if err == nil {
			t.Errorf("Parse(%.80q) = %d, want an error", c.text, got)
			continue
		}
		if !strings.Contains(err.Error(), c.says) {
			t.Errorf("Parse(%.80q): %v; want it to contain %q", c.text, err, c.says)
		}
		if len(c.text) < 60 && c.text != "" && !strings.Contains(err.Error(), fmt.Sprintf("%q", c.text)) {
			t.Errorf("Parse(%q): %v; want the text quoted", c.text, err)
		}
		if len(err.Error()) > 300 {
			t.Errorf("Parse(%.80q): an error of %d bytes", c.text, len(err.Error()))
		}
	}
}

func TestFormat(t *testing.T) {
	for _, c := range []struct {
		n    int64
		want string
	}{
		{1, "1"}, {999, "999"}, {1000, "1kB"}, {1023, "1023"}, {1024, "1KiB"}, {1536, "1536"}, {1537, "1537"},
		{4096, "4KiB"},
		{1 << 20, "1MiB"}, {1e6, "1MB"}, {3 << 29, "1.5GiB"}, {500e6, "500MB"}, {5e9, "5GB"}, {64 << 30, "64GiB"},
		{10 << 40, "10TiB"}, {1 << 60, "1EiB"}, {math.MaxInt64, "9223372036854775807"}, {1 << 62, "4EiB"},
		{1250 << 20, "1250MiB"},
		{5 << 27, "640MiB"}, {0, "0"}, {-1, "-1"}, {-1 << 30, "-1073741824"}, {math.MinInt64, "-9223372036854775808"},
	} {
		if got := size.Format(c.n); got != c.want {
			t.Errorf("Format(%d) = %q, want %q", c.n, got, c.want)
		}
	}
}

func TestApprox(t *testing.T) {
	for _, c := range []struct {
		n    int64
		want string
	}{
		{0, "0 B"}, {1023, "1023 B"}, {1024, "1.0 KiB"}, {1 << 20, "1.0 MiB"}, {1<<20 - 1, "1.0 MiB"},
		{1<<30 - 1, "1.0 GiB"},
		{1000 << 20, "1000.0 MiB"}, {25276510208, "23.5 GiB"}, {math.MaxInt64, "8.0 EiB"},
		{math.MinInt64, "-8.0 EiB"}, {-1, "-1 B"},
	} {
		if got := size.Approx(c.n); got != c.want {
			t.Errorf("Approx(%d) = %q, want %q", c.n, got, c.want)
		}
	}
}

// TestApart: two sizes that differ are printed so that they do.
func TestApart(t *testing.T) {
	for _, c := range []struct {
		a, b int64
		x, y string
	}{
		{808 << 20, 809 << 20, "808.0 MiB", "809.0 MiB"}, {1 << 30, 1 << 30, "1.0 GiB", "1.0 GiB"},
		{808 << 20, 808<<20 + 4096, "847249408 B", "847253504 B"}, {1<<30 - 1, 1 << 30, "1073741823 B", "1073741824 B"},
	} {
		if x, y := size.Apart(c.a, c.b); x != c.x || y != c.y {
			t.Errorf("Apart(%d, %d) = %q and %q, want %q and %q", c.a, c.b, x, y, c.x, c.y)
		}
	}
}

func TestShare(t *testing.T) {
	for _, c := range []struct {
		text  string
		total int64
		want  int64
	}{
		{"50%", 8 << 30, 4 << 30}, {"100%", math.MaxInt64, math.MaxInt64}, {"12.5%", 1000, 125}, {"33.3%", 100, 33},
		{"0.1%", 1000, 1}, {"100.0%", 5, 5}, {"29%", 100, 29}, {"7%", 100, 7}, {"57%", 10000, 5700},
		{"99.9999999999999%", math.MaxInt64, 9223372036854766583},
	} {
		share, err := size.ParseShare(c.text)
		if err != nil {
			t.Errorf("ParseShare(%q): %v", c.text, err)
		}
		if got, err := size.Part(share, c.total); err != nil || got != c.want {
			t.Errorf("%s of %d = %d, %v; want %d", c.text, c.total, got, err, c.want)
		}
	}
	for text, says := range map[string]string{
		"0%": "above 0%", "101%": "above 100%", "100.0001%": "above 100%",
		"100.0000000000000000000001%": "above 100%", "%": "digits",
		"-5%": "number before", "5 %": "number before", "5%%": "number before", "NaN%": "number before",
		"5": "number before", "": "number before",
		"1e1%": "number before", ".5%": "point", "5.%": "point", "50% ": "number before",
		"0.00000000000000000001%": "less than a byte of any",
	} {
		if got, err := size.ParseShare(text); err == nil || got != 0 || !strings.Contains(err.Error(), says) {
			t.Errorf("ParseShare(%q) = %v, %v; want an error with %q", text, got, err, says)
		}
	}
	for total, says := range map[int64]string{99: `"1%" of 99 is less than a byte`, 0: "not known", -1: "not known"} {
		if got, err := size.Part(0.01, total); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("1%% of %d = %d, %v; want an error with %q", total, got, err, says)
		}
	}
}

// TestTimes: what is whole in decimals is not rounded up, and nothing overflows.
func TestTimes(t *testing.T) {
	for _, c := range []struct {
		factor  float64
		n, want int64
	}{
		{1, 30, 30}, {1.25, 30, 38}, {1.1, 100, 110}, {1.1, 30, 33}, {1.01, 30, 31}, {1.1, 0, 0}, {0.5, 3, 2},
		{1, math.MaxInt64, math.MaxInt64}, {1.000001, math.MaxInt64, math.MaxInt64}, {math.MaxFloat64, 1, math.MaxInt64},
		{1.1, 1e18, 11e17}, {1.1, 1e18 + 1, 11e17 + 2},
	} {
		if got := size.Times(c.factor, c.n); got != c.want {
			t.Errorf("%v times %d = %d; want %d", c.factor, c.n, got, c.want)
		}
	}
}

func FuzzShare(f *testing.F) {
	for _, s := range []string{
		"1%", "12.5%", "33.333333333333333333%", "0.0000000000000000109%", "100%", "99.999999999999999999%",
	} {
		f.Add(s, int64(1)<<40)
	}
	f.Fuzz(func(t *testing.T, s string, total int64) {
		share, err := size.ParseShare(s)
		if err != nil {
			return
		}
		text := size.FormatShare(share)
		if back, err := size.ParseShare(text); err != nil || back != share {
			t.Errorf("%q is printed %q, and read back as %v, %v", s, text, back, err)
		}
		if n, err := size.Part(share, total); err == nil && (n <= 0 || n > total) {
			t.Errorf("%s of %d is %d", s, total, n)
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"1", "1.5GiB", "0.0001k", "8EiB", "9.223372036854775807E", "5m", "1e3", "1.5E+3", "1e-3", "1e999999999",
		"0x1", "-1", " 1", "1%", "12.5%", "٣",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := size.Parse(s)
		if err != nil {
			if n != 0 {
				t.Errorf("Parse(%q) = %d with an error", s, n)
			}
		} else {
			back, err := size.Parse(size.Format(n))
			if n <= 0 || err != nil || back != n {
				t.Errorf("Parse(%q) = %d, printed %q, read back %d, %v", s, n, size.Format(n), back, err)
			}
		}
	})
}

func FuzzFormat(f *testing.F) {
	for _, n := range []int64{1, 1000, 1024, 1536, 3 << 29, 1e18, math.MaxInt64, -1, 0} {
		f.Add(n)
	}
	f.Fuzz(func(t *testing.T, n int64) {
		s := size.Format(n)
		back, err := size.Parse(s)
		if n > 0 && (err != nil || back != n) || n <= 0 && err == nil {
			t.Errorf("Format(%d) = %q reads back as %d, %v", n, s, back, err)
		}
		if len(s) > len(fmt.Sprint(n)) {
			t.Errorf("Format(%d) = %q is longer than the number", n, s)
		}
		size.Approx(n)
	})
}

func TestLargest(t *testing.T) {
	pages := func(n int64) int64 { return (n + 4095) / 4096 * 4096 }
	for _, c := range []struct{ least, most, room, want int64 }{
		{0, 0, 0, 0}, {0, 10, 4095, 0}, {0, 10, 4096, 10}, {0, 5000, 8191, 4096}, {0, 5000, 8192, 5000},
		{100, 1 << 40, 12288, 12288}, {1, 4097, 8191, 4096},
	} {
		if got := size.Largest(pages, c.least, c.most, c.room); got != c.want {
			t.Errorf("from %d to %d in %d bytes: %d, want %d", c.least, c.most, c.room, got, c.want)
		}
	}
}
