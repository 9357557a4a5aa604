package topology

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// maxSetMember bounds the members of a set, so that a range such as
// 0-4294967295 is an error and not four billion integers. The kernel's largest
// build has 8192 CPUs.
const maxSetMember = 1<<16 - 1

// maxRanges bounds the ranges of a list; every other CPU of the kernel's
// largest build is 4096 of them.
const maxRanges = 1 << 13

// Set is a set of CPUs or of NUMA nodes: their numbers, ascending, each once.
// It marshals to the kernel's list format: 0-31,64-95.
type Set []int

// ParseSet reads the kernel's list format: numbers and ranges between commas,
// in any order. An empty text is the empty set. Ranges may have a stride
// (0-31:2/8 is two of every eight), which the kernel reads though it prints
// none.
func ParseSet(s string) (Set, error) {
	s = strings.TrimSpace(s)
	set := Set{}
	if s == "" {
		return set, nil
	}
	if strings.Count(s, ",") >= maxRanges {
		return nil, fmt.Errorf("a list of more than %d ranges", maxRanges)
	}
	seen := make([]bool, 0, 64)
	for part := range strings.SplitSeq(s, ",") {
		first, last, used, group, err := parseRange(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		if last >= len(seen) {
			seen = append(seen, make([]bool, last+1-len(seen))...)
		}
		for base := first; base <= last; base += group {
			for i := base; i < base+used && i <= last; i++ {
				seen[i] = true
			}
		}
	}
	for i, in := range seen {
		if in {
			set = append(set, i)
		}
	}
	return set, nil
}

// parseRange reads first, first-last or first-last:used/group.
func parseRange(s string) (first, last, used, group int, err error) {
	span, stride, hasStride := strings.Cut(s, ":")
	from, to, isRange := strings.Cut(span, "-")
	if first, err = parseMember(from); err != nil {
		return 0, 0, 0, 0, err
	}
	last = first
	if isRange {
		if last, err = parseMember(to); err != nil {
			return 0, 0, 0, 0, err
		}
		if last < first {
			return 0, 0, 0, 0, fmt.Errorf("the range %s runs backwards", quote(s))
		}
	}
	used, group = 1, 1
	if hasStride {
		a, b, ok := strings.Cut(stride, "/")
		if !ok || !isRange {
			return 0, 0, 0, 0, fmt.Errorf("%s is not a range", quote(s))
		}
		if used, err = parseMember(a); err != nil {
			return 0, 0, 0, 0, err
		}
		if group, err = parseMember(b); err != nil {
			return 0, 0, 0, 0, err
		}
		if used < 1 || used > group {
			return 0, 0, 0, 0, fmt.Errorf("%s is not a range", quote(s))
		}
	}
	return first, last, used, group, nil
}

func parseMember(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s is not a number", quote(s))
	}
	if n > maxSetMember {
		return 0, fmt.Errorf("%s is above %d", quote(s), maxSetMember)
	}
	return int(n), nil
}

// String prints the set in the kernel's list format.
func (s Set) String() string {
	var b strings.Builder
	for i := 0; i < len(s); {
		j := i
		for j+1 < len(s) && s[j+1] == s[j]+1 {
			j++
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.Itoa(s[i]))
		if j > i {
			b.WriteByte('-')
			b.WriteString(strconv.Itoa(s[j]))
		}
		i = j + 1
	}
	return b.String()
}

// MarshalText prints the set as String does.
func (s Set) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText parses what MarshalText prints.
func (s *Set) UnmarshalText(b []byte) error {
	set, err := ParseSet(string(b))
	if err != nil {
		return fmt.Errorf("topology: %w", err)
	}
	*s = set
	return nil
}

// Contains says whether n is in the set.
func (s Set) Contains(n int) bool {
	_, found := slices.BinarySearch(s, n)
	return found
}

// Intersect returns the members that are in both sets, as a new set.
func (s Set) Intersect(other Set) Set {
	both := Set{}
	for _, n := range s {
		if other.Contains(n) {
			both = append(both, n)
		}
	}
	return both
}
