package decide

import (
	"fmt"
	"slices"
	"testing"

	"github.com/spillway-db/spillway/tier"
)

// TestCopyFurtherDown: a batch with a copy on disk goes there at once if it would be among the next
// to leave host memory, where that is at its trigger.
func TestCopyFurtherDown(t *testing.T) {
	three := []tier.ID{gpu0, host0, disk0}
	const host, disk = 1, 2
	ten := []int64{10, 10}
	for _, tt := range []struct {
		name   string
		copied Places
		first  uint64 // key of the GPU's victim
		host   shape
		disk   shape
		want   string
	}{
		{"host has room", Places(0).With(disk), 1, shape{used: 60, victims: ten, first: 5}, shape{}, "1:gpu:0>host:0 trigger"},
		{"host just has room", Places(0).With(disk), 1, shape{used: 69, victims: ten, first: 5}, shape{}, "1:gpu:0>host:0 trigger"},
		{"host would be at its trigger", Places(0).With(disk), 1, shape{used: 70, victims: ten, first: 5}, shape{}, "1:gpu:0>disk:0 trigger"},
		{"and has what is needed as late", Places(0).With(disk), 5, shape{used: 70, victims: ten, first: 5}, shape{}, "1:gpu:0>disk:0 trigger"},
		{"and has nothing that could leave", Places(0).With(disk), 9, shape{used: 70}, shape{}, "1:gpu:0>disk:0 trigger"},
		{"and has what is needed later", Places(0).With(disk), 9, shape{used: 70, victims: ten, first: 5}, shape{}, "1:gpu:0>host:0 trigger"},
		{"there is a copy in host, too", Places(0).With(host).With(disk), 1, shape{used: 70, victims: ten, first: 5}, shape{}, "1:gpu:0>host:0 trigger"},
		{"there is no copy", 0, 1, shape{used: 70, victims: ten, first: 5}, shape{}, "1:gpu:0>host:0 trigger"},
		{"what leaves host makes room", Places(0).With(disk), 1, shape{used: 75, leaving: 10, underWay: []int{1}, victims: ten, first: 5}, shape{}, "1:gpu:0>host:0 trigger"},
		{"host is full, and room is coming", Places(0).With(disk), 1, shape{used: 100, leaving: 20, underWay: []int{2}, victims: ten, first: 5}, shape{}, "1:gpu:0>disk:0 trigger"},
		{"and has what is needed later", Places(0).With(disk), 9, shape{used: 100, leaving: 20, underWay: []int{2}, victims: ten, first: 5}, shape{}, "held"},
		{"enough is coming", Places(0).With(disk), 1, shape{used: 100, leaving: 40, underWay: []int{2}, victims: ten, first: 5}, shape{}, "held"},
		{"no room on disk", Places(0).With(disk), 1, shape{used: 70, victims: ten, first: 5}, shape{used: 95}, "1:gpu:0>host:0 trigger"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := build(three, shape{used: 80, victims: []int64{10}, first: tt.first}, tt.host, tt.disk)
			s.Spaces[0].Victims[0].Copied = tt.copied
			if got := Decide(s).text(s); got != tt.want {
				t.Errorf("\n got %s\nwant %s", got, tt.want)
			}
		})
	}
	t.Run("the edge to disk has failed", func(t *testing.T) {
		s := build(three, shape{used: 80, victims: []int64{10}}, shape{used: 70}, shape{})
		s.Spaces[0].Victims[0].Copied = Places(0).With(disk)
		s.Spaces[0].Down[1].Broken = true
		if got, want := Decide(s).text(s), "1:gpu:0>host:0 trigger"; got != want {
			t.Errorf("\n got %s\nwant %s", got, want)
		}
	})
	t.Run("what goes to host in the same step counts", func(t *testing.T) {
		s := build(three, shape{used: 95, victims: []int64{10, 10}}, shape{used: 60, victims: ten, first: 5}, shape{})
		for i := range s.Spaces[0].Victims {
			s.Spaces[0].Victims[i].Copied = Places(0).With(disk)
		}
		if got, want := Decide(s).text(s), "1:gpu:0>host:0 trigger, 2:gpu:0>disk:0 trigger"; got != want {
			t.Errorf("\n got %s\nwant %s", got, want)
		}
	})
	for waiting, want := range map[int64]string{0: "", 10: "1:gpu:0>host:0 demand"} {
		t.Run(fmt.Sprintf("the edge to disk is busy and %d bytes are waited for", waiting), func(t *testing.T) {
			s := build(three, shape{used: 80 + 2*waiting, waiting: waiting, victims: []int64{10}, underWay: []int{0, 2}}, shape{used: 70}, shape{})
			s.Spaces[0].Victims[0].Copied = Places(0).With(disk)
			if got := Decide(s).text(s); got != want {
				t.Errorf("\n got %s\nwant %s", got, want)
			}
		})
	}
	t.Run("what follows in host is not known", func(t *testing.T) {
		s := build(three, shape{used: 89, victims: []int64{10, 10}, first: 5}, shape{used: 80, victims: ten}, shape{})
		for i := range s.Spaces[0].Victims {
			s.Spaces[0].Victims[i].Copied = Places(0).With(disk)
		}
		s.Spaces[host].Victims, s.Spaces[host].More = s.Spaces[host].Victims[:1], true
		if d := Decide(s); !slices.Contains(d.Cut, host) {
			t.Errorf("decided without it: %s", d.text(s))
		}
	})
}
