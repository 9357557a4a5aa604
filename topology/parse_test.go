package topology

import (
	"slices"
	"strings"
	"testing"
)

func TestParseSet(t *testing.T) {
	for text, want := range map[string]Set{
		"": {}, "\n": {}, "0": {0}, "0-3\n": {0, 1, 2, 3}, "3,1,2,1": {1, 2, 3}, " 0-1 , 5 ": {0, 1, 5}, "0-2,1-4": {0, 1, 2, 3, 4},
		"65535": {65535}, "7-7": {7},
	} {
		if got, err := parseSet(text); err != nil || !slices.Equal(got, want) || got == nil {
			t.Errorf("parseSet(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, text := range []string{
		",", "0,", ",0", "-", "0-", "-3", "3-1", "a", "0x1", "1.5", "+1", "1 2", "65536", "0-65536", "4294967295",
		"18446744073709551616", "0-3:2", "0-3:1/2", "\x00", "٣", strings.Repeat("0,", maxRanges) + "0",
	} {
		if got, err := parseSet(text); err == nil {
			t.Errorf("parseSet(%.40q) = %v, want an error", text, got)
		}
	}
	if got := (Set{0, 1, 2, 4, 6, 7}).String(); got != "0-2,4,6-7" {
		t.Errorf("String: %q", got)
	}
	if got := (Set{1, 2, 3}).intersect(Set{3, 4}); !slices.Equal(got, Set{3}) {
		t.Errorf("Intersect: %v", got)
	}
	s := Set{9}
	if err := s.UnmarshalText([]byte("x")); err == nil || !slices.Equal(s, Set{9}) {
		t.Errorf("UnmarshalText: %v, %v", s, err)
	}
}

func TestBusAddress(t *testing.T) {
	for text, want := range map[string]bool{
		"0000:3b:00.0": true, "10000:e1:00.0": true, "00000000:3b:00.0": false, "0000:3B:00.0": false, "3b:00.0": false, "": false, "..": false,
	} {
		if got := isBusAddress(text); got != want {
			t.Errorf("isBusAddress(%q) = %v, want %v", text, got, want)
		}
	}
}

func FuzzParseSet(f *testing.F) {
	for _, s := range []string{"0-3,8", "0-9:2/4", "3-1", "4294967295", "", ","} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		set, err := parseSet(s)
		if err != nil {
			return
		}
		if !slices.IsSorted(set) || len(slices.Compact(slices.Clone(set))) != len(set) || len(set) > maxMember+1 {
			t.Errorf("parseSet(%q): %d members, not ascending or too many", s, len(set))
		}
		if back, err := parseSet(set.String()); err != nil || !slices.Equal(back, set) {
			t.Errorf("parseSet(%q) prints as %q, which is %v, %v", s, set, back, err)
		}
	})
}
