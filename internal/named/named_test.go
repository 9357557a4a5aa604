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
