package suggest

import "testing"

// TestNearest: what is like a word, and what is not.
func TestNearest(t *testing.T) {
	flags := []string{"passes", "partitions", "policy", "place", "gpu", "gpu-memory", "host-memory", "q"}
	for typed, want := range map[string]string{
		"pases": "passes", "passses": "passes", "polciy": "policy", "Policy": "policy", "gpu-mem": "gpu-memory", "gpumemory": "gpu-memory",
		"host_memory": "host-memory", "plcae": "place", "part": "partitions",
		"html": "", "x": "", "": "", "xyz": "",
	} {
		if got := Nearest(typed, flags); got != want {
			t.Errorf("%q: %q, want %q", typed, got, want)
		}
	}
	if got := Nearest("anything", nil); got != "" {
		t.Errorf("of nothing: %q", got)
	}
	if got := Hint("polciy", "--", flags); got != "did you mean --policy? " {
		t.Errorf("%q", got)
	}
	if got := Hint("html", "--", flags); got != "" {
		t.Errorf("%q", got)
	}
}

// TestDistance: of small words it is known.
func TestDistance(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"", "ab", 2}, {"ab", "", 2}, {"ab", "ab", 0}, {"ab", "ba", 1}, {"ab", "ac", 1}, {"abc", "ac", 1}, {"lur", "lru", 1}, {"ca", "abc", 3}, {"größe", "grösse", 2}} {
		if got := distance(c.a, c.b); got != c.want {
			t.Errorf("%q, %q: %d, want %d", c.a, c.b, got, c.want)
		}
	}
}
