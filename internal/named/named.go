// Package named writes the names that programs give, of plans, operators and tasks, into texts for
// people. Such a name may be a whole query: it is cut, and nothing in it may break a line or a table, or
// reach a terminal as a command. It also compares the names that GPUs have: see gpuid.go.
package named

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// longest is how many bytes of a name are written.
const longest = 100

// Quoted returns a name in quotes, cut where it is very long.
func Quoted(name string) string { return strconv.Quote(cut(name)) }

// Plain returns a name as it is, cut where it is very long, or in quotes if it has what cannot be
// printed.
func Plain(name string) string {
	if name = cut(name); !isPlain(name) {
		return strconv.Quote(name)
	}
	return name
}

// Inert returns a text with Go's escapes in the place of what cannot be printed: ends of lines,
// tabs, a terminal's commands, marks that turn the direction of writing, and what is no UTF-8.
func Inert(text string) string {
	if isPlain(text) {
		return text
	}
	var b strings.Builder
	for len(text) > 0 {
		r, n := utf8.DecodeRuneInString(text)
		if strconv.IsPrint(r) && !(r == utf8.RuneError && n == 1) {
			b.WriteString(text[:n])
		} else {
			quoted := strconv.Quote(text[:n])
			b.WriteString(quoted[1 : len(quoted)-1])
		}
		text = text[n:]
	}
	return b.String()
}

// isPlain reports whether all of a text can be printed.
func isPlain(text string) bool {
	return utf8.ValidString(text) && !strings.ContainsFunc(text, func(r rune) bool { return !strconv.IsPrint(r) })
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
