package decide

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
)

// chosen is s with each choice waiting where room is made for it.
func chosen(s Snapshot) Snapshot {
	p := planStep(s)
	s = cloneState(s)
	s.Choices = nil
	for i := range s.Spaces {
		s.Spaces[i].Waiting = p.sp[i].waiting
	}
	return s
}

// TestChoices: room for a request that several spaces may serve is made in one of them.
func TestChoices(t *testing.T) {
	gpu2 := tier.ID{Kind: tier.GPU, Ordinal: 2}
	ids := []tier.ID{gpu0, gpu1, gpu2, host0}
	ten := []int64{10, 10, 10}
	all := func(n int64) []Want { return []Want{{0, n}, {1, n}, {2, n}} }
	for _, tt := range []struct {
		name    string
		state   []shape
		choices [][]Want
		want    []int64 // where they wait
	}{
		{"one request", []shape{{used: 79, victims: ten}, {used: 79, victims: ten}, {used: 79, victims: ten}, {}}, [][]Want{all(30)}, []int64{30, 0, 0, 0}},
		{"what lacks least", []shape{{used: 79, victims: ten}, {used: 75, victims: ten}, {used: 79, victims: ten}, {}}, [][]Want{all(30)}, []int64{0, 30, 0, 0}},
		{"where something can leave", []shape{{used: 79}, {used: 79, victims: []int64{5}}, {used: 79, victims: ten}, {}}, [][]Want{all(30)}, []int64{0, 0, 30, 0}},
		{"where there is room", []shape{{used: 79, victims: ten}, {used: 70}, {used: 79, victims: ten}, {}}, [][]Want{all(30)}, []int64{0, 30, 0, 0}},
		{"where room is coming", []shape{{used: 79, victims: ten}, {used: 79, leaving: 10}, {used: 79, victims: ten}, {}}, [][]Want{all(30)}, []int64{0, 30, 0, 0}},
		{"one each", []shape{{used: 79, victims: ten}, {used: 79, victims: ten}, {used: 79, victims: ten}, {}}, [][]Want{all(30), all(30), all(30)}, []int64{30, 30, 30, 0}},
		{"beside one for one space", []shape{{used: 79, waiting: 30, victims: ten}, {used: 79, victims: ten}, {used: 79, victims: ten}, {}}, [][]Want{all(30)}, []int64{30, 30, 0, 0}},
		{"a need of its own in each", []shape{{used: 79, victims: ten}, {used: 79, victims: ten}, {used: 79, victims: ten}, {}}, [][]Want{{{0, 40}, {2, 30}}}, []int64{0, 0, 30, 0}},
		{"what leaves for another is enough", []shape{{used: 100, victims: []int64{25}}, {used: 100, victims: ten}, {used: 100, victims: ten}, {}},
			[][]Want{all(10), all(10), all(5), all(5)}, []int64{25, 5, 0, 0}},
		{"what leaves for a waiter is enough", []shape{{used: 100, victims: ten}, {used: 100, waiting: 1, victims: ten}, {used: 99, victims: ten}, {}},
			[][]Want{all(9)}, []int64{0, 10, 0, 0}},
		{"what would leave has no place", []shape{{used: 100, waiting: 10, victims: []int64{25}}, {used: 100, victims: []int64{10}}, {used: 100, victims: []int64{5}}, {used: 85}},
			[][]Want{all(10)}, []int64{10, 10, 0, 0}},
		{"bytes that linger are no room", []shape{{used: 79, retired: 10, lingering: 10, victims: ten}, {used: 78, victims: ten}, {used: 79, victims: []int64{5}}, {}},
			[][]Want{all(30)}, []int64{0, 30, 0, 0}},
		{"where some do not linger", []shape{{used: 79, retired: 10, lingering: 1, victims: ten}, {used: 79, victims: ten}, {used: 79, victims: ten}, {}},
			[][]Want{all(30)}, []int64{30, 0, 0, 0}},
		{"at least they linger", []shape{{used: 79}, {used: 79, retired: 10, lingering: 10}, {used: 78}, {}}, [][]Want{all(30)}, []int64{0, 30, 0, 0}},
		{"nowhere", []shape{{used: 79}, {used: 78}, {used: 79}, {}}, [][]Want{all(30)}, []int64{0, 30, 0, 0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := build(ids, tt.state...)
			s.Choices = tt.choices
			for i, sp := range chosen(s).Spaces {
				if sp.Waiting != tt.want[i] {
					t.Errorf("%d bytes wait in %s, want %d", sp.Waiting, sp.ID, tt.want[i])
				}
			}
		})
	}
}

// TestChoicesAreNotStuckAvoidably: where room for a choice cannot be made, something can leave none
// of its spaces.
func TestChoicesAreNotStuckAvoidably(t *testing.T) {
	stuck := 0
	for seed := range testseed.Each(t, 20000) {
		r := rand.New(rand.NewPCG(seed, 77))
		s := randomState(r)
		if len(s.Choices) == 0 {
			continue
		}
		s.Choices = s.Choices[:1]
		d := Decide(s)
		at := planStep(s).chosen[0]
		if d.Held || !slices.ContainsFunc(d.Stuck, func(w Shortage) bool { return w.Space == at && w.Reason == Demand }) {
			continue
		}
		stuck++
		for _, w := range s.Choices[0] {
			alone := cloneState(s)
			alone.Choices = nil
			alone.Spaces[w.Space].Waiting += w.Bytes
			other := Decide(alone)
			if slices.ContainsFunc(other.Moves, func(c Move) bool { return c.From == w.Space && w.Space != at && c.Reason == Demand }) {
				t.Errorf("seed %d: it is stuck in %s, but something could leave %s: %s\n%+v", seed, s.Spaces[at].ID, s.Spaces[w.Space].ID, other.text(s), s)
				break
			}
		}
	}
	if stuck == 0 {
		t.Error("no choice was stuck: the test shows nothing")
	}
}

// TestLingeringChoicesShareWhatLeaves: eight requests for any GPU lack 1 byte each, or what those
// before them lack. One batch of 25 bytes is enough for all, also where a byte lingers in each GPU.
func TestLingeringChoicesShareWhatLeaves(t *testing.T) {
	for _, lingering := range []int64{0, 1} {
		var ids []tier.ID
		var shapes []shape
		var any []Want
		for i := range 8 {
			ids = append(ids, tier.ID{Kind: tier.GPU, Ordinal: i})
			shapes = append(shapes, shape{used: 79, limit: 79, retired: lingering, lingering: lingering, victims: []int64{25, 25, 25}})
			any = append(any, Want{i, 2})
		}
		s := build(append(ids, host0), append(shapes, shape{limit: 10000})...)
		for range 8 {
			s.Choices = append(s.Choices, any)
		}
		moved := int64(0)
		for _, m := range planStep(s).out.Moves {
			moved += m.Victim.Bytes
		}
		if moved > 25 {
			t.Errorf("with %d bytes that linger in each GPU %d bytes leave for eight requests of 2, want 25", lingering, moved)
		}
	}
}

// TestAByteLingers: a GPU in which one of 10 retired bytes lingers, and a small batch leaving is
// enough, is better than one that must move much more.
func TestAByteLingers(t *testing.T) {
	s := build([]tier.ID{gpu0, gpu1, host0},
		shape{used: 99, retired: 1, lingering: 1, victims: []int64{5, 5}},
		shape{used: 100, victims: []int64{30, 30, 30}},
		shape{limit: 10000})
	for i := range s.Spaces[:2] {
		s.Spaces[i].Trigger = 101
	}
	s.Choices = [][]Want{{{0, 5}, {1, 5}}}
	moved := int64(0)
	for _, m := range planStep(s).out.Moves {
		moved += m.Victim.Bytes
	}
	if moved > 5 {
		t.Errorf("%d bytes leave, and 5 are enough", moved)
	}
}

// TestVictimPassesALingeringHost: a victim does not wait for bytes that linger in host memory where
// a disk has room.
func TestVictimPassesALingeringHost(t *testing.T) {
	s := build([]tier.ID{gpu0, host0, disk0},
		shape{used: 100, waiting: 10, victims: []int64{10, 10}},
		shape{used: 100, retired: 20, lingering: 20},
		shape{limit: 10000})
	s.Spaces[0].Trigger, s.Spaces[1].Trigger = 101, 101
	d := planStep(s).out
	if len(d.Moves) == 0 {
		t.Errorf("nothing moves: %s", d.text(s))
	}
}
