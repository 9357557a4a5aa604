package decide

import (
	"slices"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// TestBrokenEdgeIsNotPreferred: moves to the disk fail again and again. What fits only there waits
// for host memory to be relieved, where that can be tried. Otherwise it would never be found out
// that it cannot, and waiters would wait for ever. Where host memory cannot be relieved the edge is
// tried still.
func TestBrokenEdgeIsNotPreferred(t *testing.T) {
	ids := []tier.ID{{Kind: tier.GPU}, {Kind: tier.Host}, {Kind: tier.Disk}}
	for name, c := range map[string]struct {
		broken  bool
		victims []int64 // of host memory, each of which goes after those of the GPU
		want    [2]int  // from, to
		held    bool
	}{
		"the disk works":                  {false, []int64{40, 40}, [2]int{0, 2}, false},
		"the disk is broken":              {true, []int64{40, 40}, [2]int{1, 2}, true},
		"broken, and the host is at work": {true, nil, [2]int{0, 2}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := build(ids,
				shape{used: 60, waiting: 80, victims: []int64{60}},
				shape{used: 80, victims: c.victims, first: 10},
				shape{})
			s.Spaces[0].Down[1].Broken = c.broken
			d := Decide(s)
			if len(d.Moves) == 0 || d.Held != c.held || !slices.Equal([]int{d.Moves[0].From, d.Moves[0].To}, c.want[:]) {
				t.Errorf("decided on %+v", d)
			}
		})
	}
}
