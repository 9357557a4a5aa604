package procfs

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// MaxMember bounds the members of a set, so that a range such as
// 0-4294967295 is an error and not four billion integers. The kernel's largest
// build has 8192 CPUs.
const MaxMember = 1<<16 - 1

// MaxRanges bounds the ranges of a list; every other CPU of the kernel's
// largest build is 4096 of them.
const MaxRanges = 1 << 13

// List reads the kernel's list format: numbers and ranges between commas, in any order. It returns
// the numbers, ascending, each once. An empty text has none. Ranges may have a stride (0-31:2/8 is
// two of every eight), which the kernel reads though it prints none.
func List(s string) ([]int, error) {
	s = strings.TrimSpace(s)
	set := []int{}
	if s == "" {
		return set, nil
	}
	if strings.Count(s, ",") >= MaxRanges {
		return nil, fmt.Errorf("a list of more than %d ranges", MaxRanges)
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
	if first, err = Member(from); err != nil {
		return 0, 0, 0, 0, err
	}
	last = first
	if isRange {
		if last, err = Member(to); err != nil {
			return 0, 0, 0, 0, err
		}
		if last < first {
			return 0, 0, 0, 0, fmt.Errorf("the range %s runs backwards", Quote(s))
		}
	}
	used, group = 1, 1
	if hasStride {
		a, b, ok := strings.Cut(stride, "/")
		if !ok || !isRange {
			return 0, 0, 0, 0, fmt.Errorf("%s is not a range", Quote(s))
		}
		if used, err = Member(a); err != nil {
			return 0, 0, 0, 0, err
		}
		if group, err = Member(b); err != nil {
			return 0, 0, 0, 0, err
		}
		if used < 1 || used > group {
			return 0, 0, 0, 0, fmt.Errorf("%s is not a range", Quote(s))
		}
	}
	return first, last, used, group, nil
}

// Member reads one number of a list.
func Member(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("%s is not a number", Quote(s))
	}
	if n > MaxMember {
		return 0, fmt.Errorf("%s is above %d", Quote(s), MaxMember)
	}
	return int(n), nil
}

// Count reads a decimal number from 0.
func Count(s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 64)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%s is out of range", Quote(s))
	case err != nil:
		return 0, fmt.Errorf("%s is not a number", Quote(s))
	case n < 0:
		return 0, fmt.Errorf("%s is negative", Quote(s))
	}
	return n, nil
}

// Quote shows what a file said in a warning, cut when it is long.
func Quote(s string) string {
	const most = 40
	if len(s) > most {
		return strconv.Quote(s[:most]) + "…"
	}
	return strconv.Quote(s)
}

// Printable returns s without control characters that a terminal would act on: names come from
// devices and from users that mount things. Runs of space become one.
func Printable(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return -1
		}
		return r
	}, strings.ToValidUTF8(s, ""))
	return strings.Join(strings.Fields(s), " ")
}

// Label makes a name out of what a device says of itself.
func Label(s string) string {
	if s = Printable(s); len(s) > MaxNameBytes {
		s = strings.ToValidUTF8(s[:MaxNameBytes], "")
	}
	return s
}

// MaxNameBytes bounds what a device says of itself.
const MaxNameBytes = 256
