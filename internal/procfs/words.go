package procfs

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// MaxMember bounds the members of a set, so that a range such as 0-4294967295 is an error and not
// four billion integers. The kernel's largest build has 8192 CPUs.
const MaxMember = 1<<16 - 1

// MaxRanges bounds the ranges of a list; every other CPU of the kernel's largest build is 4096 of
// them.
const MaxRanges = 1 << 13

// List parses the lists of numbers and ranges between commas that the kernel prints, in any order. It
// returns the numbers, ascending, each once. An empty text has none.
func List(s string) ([]int, error) {
	set := []int{}
	if s = strings.TrimSpace(s); s == "" {
		return set, nil
	}
	if strings.Count(s, ",") >= MaxRanges {
		return nil, fmt.Errorf("a list of more than %d ranges", MaxRanges)
	}
	var seen [MaxMember + 1]bool
	for part := range strings.SplitSeq(s, ",") {
		from, to, isRange := strings.Cut(strings.TrimSpace(part), "-")
		first, err := Member(from)
		last := first
		if err == nil && isRange {
			last, err = Member(to)
		}
		if err != nil {
			return nil, err
		}
		if last < first {
			return nil, fmt.Errorf("the range %s runs backwards", Quote(part))
		}
		for i := first; i <= last; i++ {
			seen[i] = true
		}
	}
	for i, in := range seen {
		if in {
			set = append(set, i)
		}
	}
	return set, nil
}

// Member parses one number of a list.
func Member(s string) (int, error) {
	n, err := Count(s)
	if err == nil && n > MaxMember {
		err = fmt.Errorf("%s is above %d", Quote(s), MaxMember)
	}
	return int(n), err
}

// Count parses a decimal number from 0.
func Count(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%s is out of range", Quote(s))
	case strings.HasPrefix(s, "-"):
		return 0, fmt.Errorf("%s is negative", Quote(s))
	case err != nil:
		return 0, fmt.Errorf("%s is not a number", Quote(s))
	}
	return int64(n), nil
}

// Quote quotes a text of a file for a warning, and cuts a long one.
func Quote(s string) string {
	const maxBytes = 40
	if len(s) > maxBytes {
		return strconv.Quote(s[:maxBytes]) + "…"
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

// MaxNameBytes bounds what Label returns.
const MaxNameBytes = 256

// Label makes a name of a text that a device describes itself with.
func Label(s string) string {
	if s = Printable(s); len(s) > MaxNameBytes {
		s = strings.ToValidUTF8(s[:MaxNameBytes], "")
	}
	return s
}
