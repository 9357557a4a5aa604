package topology

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Set is a set of CPUs or of NUMA nodes: their numbers, ascending, each once. Contains depends on
// that order. It marshals to the kernel's list format, 0-31,64-95, also in JSON.
type Set []int

// String prints the set in the kernel's list format: ascending, with neighbours as ranges.
func (s Set) String() string {
	var ranges []string
	// Each turn prints one range, from i up to j.
	for i, j := 0, 0; i < len(s); i = j {
		for j = i + 1; j < len(s) && s[j] == s[j-1]+1; j++ {
		}
		text := strconv.Itoa(s[i])
		if j > i+1 {
			text += "-" + strconv.Itoa(s[j-1])
		}
		ranges = append(ranges, text)
	}
	return strings.Join(ranges, ",")
}

// MarshalText prints the set as String does.
func (s Set) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText parses the kernel's list format. On an error s is unchanged.
func (s *Set) UnmarshalText(b []byte) error {
	set, err := parseSet(string(b))
	if err != nil {
		return fmt.Errorf("topology: %w", err)
	}
	*s = set
	return nil
}

// Contains reports whether n is in the set, by binary search.
func (s Set) Contains(n int) bool {
	_, found := slices.BinarySearch(s, n)
	return found
}

// intersect returns the members that are in both sets, as a new set.
func (s Set) intersect(other Set) Set {
	return slices.DeleteFunc(append(Set{}, s...), func(n int) bool { return !other.Contains(n) })
}
