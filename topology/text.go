package topology

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
)

// maxMember bounds the members of a set, so that a range such as 0-4294967295 in a broken file is
// an error and not four billion integers. The kernel's largest build has 8192 CPUs.
const maxMember = 1<<16 - 1

// maxRanges bounds the ranges of a list. If every other CPU of the kernel's largest build is in the
// set, the list has 4096.
const maxRanges = 1 << 13

// parseSet parses the kernel's list format ("0-31,64-95"; see cpuset(7)): numbers and ranges
// between commas. The kernel writes them in ascending order; any order, and overlaps, are accepted.
// An empty text is the empty set, which is not nil.
func parseSet(s string) (Set, error) {
	set := Set{}
	if s = strings.TrimSpace(s); s == "" {
		return set, nil
	}
	if strings.Count(s, ",") >= maxRanges {
		return nil, fmt.Errorf("a list of more than %d ranges", maxRanges)
	}
	// A bitmap bounds the time whatever the ranges are, and sorts them.
	var seen [maxMember + 1]bool
	for part := range strings.SplitSeq(s, ",") {
		from, to, isRange := strings.Cut(strings.TrimSpace(part), "-")
		first, err := parseMember(from)
		last := first
		if err == nil && isRange {
			last, err = parseMember(to)
		}
		if err != nil {
			return nil, err
		}
		if last < first {
			return nil, fmt.Errorf("the range %s runs backwards", quote(part))
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

// parseMember parses one number of a list: a CPU, a node, or a port.
func parseMember(s string) (int, error) {
	n, err := parseCount(s)
	if err == nil && n > maxMember {
		err = fmt.Errorf("%s is above %d", quote(s), maxMember)
	}
	return int(n), err
}

// parseCount parses a decimal number from 0 to the largest int64. It has a message of its own for
// each mistake, because they end up in warnings that name only the file.
func parseCount(s string) (int64, error) {
	n, err := strconv.ParseUint(s, 10, 63)
	switch {
	case errors.Is(err, strconv.ErrRange):
		return 0, fmt.Errorf("%s is out of range", quote(s))
	case strings.HasPrefix(s, "-"):
		return 0, fmt.Errorf("%s is negative", quote(s))
	case err != nil:
		return 0, fmt.Errorf("%s is not a number", quote(s))
	}
	return int64(n), nil
}

// quote quotes a text of a file for a warning, and cuts a long one.
func quote(s string) string {
	const maxBytes = 40
	if len(s) > maxBytes {
		return strconv.Quote(s[:maxBytes]) + "…"
	}
	return strconv.Quote(s)
}

// printable returns s in one line and without control characters that a terminal would act on:
// names come from devices and from users that mount things. Runs of white space become one space;
// invalid UTF-8 is dropped.
func printable(s string) string {
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

// maxNameBytes bounds what label returns.
const maxNameBytes = 256

// label makes a name of a text that a device describes itself with: printable, and not longer than
// maxNameBytes.
func label(s string) string {
	if s = printable(s); len(s) > maxNameBytes {
		s = strings.ToValidUTF8(s[:maxNameBytes], "")
	}
	return s
}
