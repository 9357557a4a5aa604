package faultrule

import (
	"math/rand/v2"
	"testing"
)

// row returns which of n operations were hit. Another rule has taken those in taken.
func row(t *Turns, n int, taken ...int) string {
	random := rand.New(rand.NewPCG(1, 0))
	var out []byte
	for i := range n {
		other := false
		for _, j := range taken {
			other = other || i == j
		}
		if t.next(random, other) {
			out = append(out, 'x')
		} else {
			out = append(out, '.')
		}
	}
	return string(out)
}

func TestTurns(t *testing.T) {
	for _, c := range []struct {
		name  string
		turns Turns
		taken []int
		want  string
	}{
		{"all", Turns{}, nil, "xxxxxx"},
		{"from an index", Turns{Skip: 2}, nil, "..xxxx"},
		{"one index", Turns{Skip: 3, Times: 1}, nil, "...x.."},
		{"the first two", Turns{Times: 2}, nil, "xx...."},
		{"another rule's count", Turns{Skip: 2, Times: 1}, []int{0, 1}, "..x..."},
		{"another rule's use no turn", Turns{Times: 2}, []int{0, 2}, ".x.x.."},
		{"certain", Turns{Probability: 1}, nil, "xxxxxx"},
	} {
		t.Run(c.name, func(t *testing.T) {
			hits := 0
			got := row(&c.turns, 6, c.taken...)
			for _, b := range got {
				if b == 'x' {
					hits++
				}
			}
			if got != c.want || c.turns.hits != hits {
				t.Errorf("hit %s, counted as %d; want %s", got, c.turns.hits, c.want)
			}
		})
	}
}

// TestChance checks that Probability hits its share of the operations that are due, and at most
// Times.
func TestChance(t *testing.T) {
	quarter := Turns{Probability: 0.25}
	row(&quarter, 4000)
	if n := quarter.hits; n < 900 || n > 1100 {
		t.Errorf("%d of 4000 were hit at a chance of a quarter", n)
	}
	few := Turns{Probability: 0.25, Times: 3}
	row(&few, 4000)
	if few.hits != 3 {
		t.Errorf("%d were hit, want 3", few.hits)
	}
}

// TestSet checks that all rules that match an operation count it, that the first whose turn it is
// applies, and that a removed rule does not.
func TestSet(t *testing.T) {
	s := New[string](1, "read", "write", "sync")
	add := func(name string, turns Turns) func() { return s.Add(name, turns) }
	add("second", Turns{Ops: []string{"read"}, Skip: 1, Times: 1})
	every := add("every", Turns{})
	add("third", Turns{Ops: []string{"re*"}, Skip: 2, Times: 1})
	add("never", Turns{})
	ask := func(op string) string {
		r := s.Choose(op, func(name *string) bool { return *name != "never" })
		if r == nil {
			return ""
		}
		return *r
	}
	for i, want := range []struct{ op, rule string }{
		{"read", "every"}, {"write", "every"}, {"read", "second"}, {"read", "every"},
	} {
		if got := ask(want.op); got != want.rule {
			t.Errorf("operation %d: %q, want %q", i, got, want.rule)
		}
	}
	if s.Hits() != 4 || s.Count() != 4 || s.Count("read") != 3 || s.Count("write", "re*") != 4 || s.Count("sync") != 0 {
		t.Errorf("%d hits of %d, %d reads", s.Hits(), s.Count(), s.Count("read"))
	}
	every()
	if got := ask("read"); got != "third" { // another rule applied when it was due, so it kept its turn
		t.Errorf("%q, want the third", got)
	}
	if got := ask("read"); got != "" || s.Hits() != 2 {
		t.Errorf("%q, and %d hits of the present rules", got, s.Hits())
	}
	for range 100 {
		if n := s.Below(3); n < 0 || n > 2 {
			t.Fatalf("%d is not below 3", n)
		}
	}
}

// TestUnknownOperations checks that a pattern that matches no operation panics: it is a mistake in
// a test.
func TestUnknownOperations(t *testing.T) {
	s := New[int](1, "read")
	for _, pattern := range []string{"reads", "w*", "[", ""} {
		for name, call := range map[string]func(){
			"Add":   func() { s.Add(1, Turns{Ops: []string{"read", pattern}}) },
			"Count": func() { s.Count(pattern) },
		} {
			func() {
				defer func() {
					if r := recover(); r == nil {
						t.Errorf("%s takes %q", name, pattern)
					}
				}()
				call()
			}()
		}
	}
}
