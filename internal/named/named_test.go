package named

import (
	"strings"
	"testing"
)

func TestNamed(t *testing.T) {
	for _, c := range []struct{ name, plain, quoted string }{
		{"join", "join", `"join"`},
		{"größe 3", "größe 3", `"größe 3"`},
		{"a\tb\n", `"a\tb\n"`, `"a\tb\n"`},
		{"\x1b[31m", `"\x1b[31m"`, `"\x1b[31m"`},
		{"\xff", `"\xff"`, `"\xff"`},
		{"a\u202eb", `"a\u202eb"`, `"a\u202eb"`},
		{strings.Repeat("x", 100), strings.Repeat("x", 100), `"` + strings.Repeat("x", 100) + `"`},
		{strings.Repeat("x", 5000), strings.Repeat("x", 100) + "…", `"` + strings.Repeat("x", 100) + `…"`},
		{"x" + strings.Repeat("ä", 100), "x" + strings.Repeat("ä", 49) + "…", `"x` + strings.Repeat("ä", 49) + `…"`},
		{strings.Repeat("\xbf", 101), `"` + strings.Repeat(`\xbf`, 96) + `…"`, `"` + strings.Repeat(`\xbf`, 96) + `…"`},
	} {
		if plain, quoted := Plain(c.name), Quoted(c.name); plain != c.plain || quoted != c.quoted {
			t.Errorf("%q is %s and %s, not %s and %s", c.name, plain, quoted, c.plain, c.quoted)
		}
	}
}

// TestInert: what a terminal would act on is seen, and all else stays as it is.
func TestInert(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "",
		`größe "3" \ → 日本 � ` + "`":        `größe "3" \ → 日本 � ` + "`",
		"a\tb\r\nc\x00\x7f":                `a\tb\r\nc\x00\x7f`,
		"\x1b[31mred":                      `\x1b[31mred`,
		"\u0085\u009b1m":                   `\u0085\u009b1m`,
		"a\u2028b\u2029":                   `a\u2028b\u2029`,
		"\u061c\u200e\u202ex\u2066y\u2069": `\u061c\u200e\u202ex\u2066y\u2069`,
		"ä\xff\xc3":                        `ä\xff\xc3`,
		"\xed\xa0\x80":                     `\xed\xa0\x80`,
	} {
		if got := Inert(text); got != want || Inert(got) != got {
			t.Errorf("%q is %s, not %s", text, got, want)
		}
	}
}
