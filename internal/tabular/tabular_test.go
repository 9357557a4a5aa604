package tabular

import (
	"strings"
	"testing"
)

// TestWrite: columns are as wide as their longest cell, in runes, and those marked by ">" end at the
// same place.
func TestWrite(t *testing.T) {
	rows := Rows{{"name", ">bytes", "note"}}
	rows.Add("größe", 12345678, "")
	rows.Add("b", 1, "x y")
	var b strings.Builder
	rows.Write(&b, "  ")
	want := "  name      bytes  note\n  größe  12345678\n  b             1  x y\n"
	if b.String() != want {
		t.Errorf("got\n%swant\n%s", b.String(), want)
	}
}
