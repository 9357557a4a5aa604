package faultrule

import (
	"math/rand/v2"
	"testing"
)

// row tells of n operations which were hit; those in taken belong to another rule.
func row(t *Turns, n int, taken ...int) string {
	random := rand.New(rand.NewPCG(1, 0))
	var out []byte
	for i := range n {
		other := false
		for _, j := range taken {
			other = other || i == j
		}
		if t.Next(random, other) {
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
			if got != c.want || c.turns.Hits() != hits {
				t.Errorf("hit %s, told as %d; want %s", got, c.turns.Hits(), c.want)
			}
		})
	}
}

// TestChance: a chance hits its share, of those that are due, and no more than Times.
func TestChance(t *testing.T) {
	quarter := Turns{Probability: 0.25}
	row(&quarter, 4000)
	if n := quarter.Hits(); n < 900 || n > 1100 {
		t.Errorf("%d of 4000 were hit at a chance of a quarter", n)
	}
	few := Turns{Probability: 0.25, Times: 3}
	row(&few, 4000)
	if few.Hits() != 3 {
		t.Errorf("%d were hit, want 3", few.Hits())
	}
}
