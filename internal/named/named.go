// Package named writes the names that programs give, of plans, operators and tasks, into texts for
// people. Such a name may be a whole query: it is cut, and nothing in it may break a line or a table, or
// reach a terminal as a command.
package named

import (
	"strconv"
	"unicode/utf8"
)

// longest is how many bytes of a name are written.
const longest = 100

// Quoted returns a name in quotes, cut where it is very long.
func Quoted(name string) string { return strconv.Quote(cut(name)) }

// Plain returns a name as it is, cut where it is very long, or in quotes if it has what cannot be
// printed.
func Plain(name string) string {
	name = cut(name)
	if !utf8.ValidString(name) {
		return strconv.Quote(name)
	}
	for _, r := range name {
		if !strconv.IsPrint(r) {
			return strconv.Quote(name)
		}
	}
	return name
}

func cut(name string) string {
	if len(name) <= longest {
		return name
	}
	end := longest
	for end > longest-utf8.UTFMax && !utf8.RuneStart(name[end]) {
		end--
	}
	return name[:end] + "…"
}
