package tier_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// TestWarningsNameTheirRemedy: whatever is warned of has something to do about it, or is
// marked as information.
func TestWarningsNameTheirRemedy(t *testing.T) {
	seen := make(map[string]bool)
	named := regexp.MustCompile(`^[a-z]+(-[a-z]+)*$`)
	for _, c := range tier.Causes() {
		w := c.Warning("%d bytes", 7)
		if !named.MatchString(c.String()) || seen[c.String()] || c.String() == "invalid" {
			t.Errorf("cause %d is called %q", c, c)
		}
		seen[c.String()] = true
		if w.Remedy == "" && !w.Info {
			t.Errorf("%s: there is nothing to do about it, and it is no information", c)
		}
		if strings.TrimSpace(w.Remedy) != w.Remedy || strings.HasSuffix(w.Remedy, ".") || strings.Contains(w.Remedy, "\n") {
			t.Errorf("%s: the remedy %q is no part of a line", c, w.Remedy)
		}
		if w.Cause != c || w.What != "7 bytes" {
			t.Errorf("%s makes %+v", c, w)
		}
	}
	if len(seen) < 20 {
		t.Errorf("only %d causes", len(seen))
	}
	if c := tier.Cause(0); c.Valid() || c.Remedy() != "" || c.Info() || c.String() != "invalid" {
		t.Error("the zero cause is one")
	}
}

// TestCausesAreDocumented: the page has a line for each, with the first words of the
// remedy's command where it has one.
func TestCausesAreDocumented(t *testing.T) {
	b, err := os.ReadFile("../docs/machine.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range tier.Causes() {
		if !strings.Contains(string(b), "`"+c.String()+"`") {
			t.Errorf("docs/machine.md has no line for %s", c)
		}
	}
}

func TestWarningString(t *testing.T) {
	w := tier.CauseDirectIO.Warning("no direct I/O")
	w.Space = tier.ID{Kind: tier.Disk}
	if s := w.String(); s != "disk:0: no direct I/O ("+tier.CauseDirectIO.Remedy()+")" {
		t.Errorf("%q", s)
	}
	if s := (tier.Warning{What: "so it is"}).String(); s != "so it is" {
		t.Errorf("%q", s)
	}
}
