package causes_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
)

// TestWarningsNameTheirRemedy: whatever is warned of has something to do about it, or is
// marked as information.
func TestWarningsNameTheirRemedy(t *testing.T) {
	named := regexp.MustCompile(`^[a-z]+(-[a-z]+)*$`)
	all := causes.All()
	for _, c := range all {
		w := causes.Warn(c, "%d bytes", 7)
		if !named.MatchString(string(c)) {
			t.Errorf("a cause is called %q", c)
		}
		if w.Remedy == "" && !w.Info {
			t.Errorf("%s: there is nothing to do about it, and it is no information", c)
		}
		if strings.TrimSpace(w.Remedy) != w.Remedy || strings.HasSuffix(w.Remedy, ".") || strings.Contains(w.Remedy, "\n") {
			t.Errorf("%s: the remedy %q is no part of a line", c, w.Remedy)
		}
		if w.Cause != c || w.What != "7 bytes" || w.Remedy != causes.Remedy(c) {
			t.Errorf("%s makes %+v", c, w)
		}
	}
	if len(all) < 20 {
		t.Errorf("only %d causes", len(all))
	}
	defer func() {
		if recover() == nil {
			t.Error("there is a warning of no cause")
		}
	}()
	causes.Warn("", "so it is")
}

// TestCausesAreDocumented: the page has a line for each, and names no other.
func TestCausesAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../../docs/machine.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z-]+)` \\|").FindAllStringSubmatch(string(b), -1) {
		rows[row[1]] = true
	}
	for _, c := range causes.All() {
		if !rows[string(c)] {
			t.Errorf("docs/machine.md has no line for %s", c)
		}
		delete(rows, string(c))
	}
	for name := range rows {
		t.Errorf("docs/machine.md has a line for %s, which is no cause", name)
	}
}

func TestWarningString(t *testing.T) {
	w := causes.Warn(causes.DirectIO, "no direct I/O")
	w.Space = "disk:0"
	if s := w.String(); s != "disk:0: no direct I/O ("+causes.Remedy(causes.DirectIO)+")" {
		t.Errorf("%q", s)
	}
	if s := (diag.Warning{What: "so it is"}).String(); s != "so it is" {
		t.Errorf("%q", s)
	}
}
