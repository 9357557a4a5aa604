package httpui

import (
	"strings"
	"testing"
	"unicode/utf8"
)

// A name that is a whole query is cut, between characters.
func TestLongNames(t *testing.T) {
	for _, long := range []string{strings.Repeat("ä", maxName), "x" + strings.Repeat("ä", maxName)} {
		if got := cut(long); len(got) > maxName+len("…") || len(got) < maxName || !utf8.ValidString(got) || !strings.HasSuffix(got, "ä…") {
			t.Errorf("%q", got)
		}
	}
	if got := cut("plan"); got != "plan" {
		t.Errorf("%q", got)
	}
}
