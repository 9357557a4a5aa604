package decide

import (
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/stripe"
	"github.com/spillway-db/spillway/tier"
)

// Victims are spread over volumes as they are behind with their share, also within a
// step, and are not sent to one that fails or has no room while another can take them.
func TestStepStripesVolumes(t *testing.T) {
	for _, tt := range []struct {
		name    string
		paces   [2]stripe.Pace
		used    [2]int64
		free    int // moves that may begin on each edge
		blocked [2]bool
		want    [2]int // moves that begin
	}{
		{"by bandwidth", [2]stripe.Pace{{Bandwidth: 30}, {Bandwidth: 10}}, [2]int64{}, 8, [2]bool{}, [2]int{3, 1}},
		{"none has a pace", [2]stripe.Pace{}, [2]int64{}, 8, [2]bool{}, [2]int{2, 2}},
		{"one is ahead", [2]stripe.Pace{{Lead: time.Minute, Bandwidth: 30}, {Bandwidth: 10}}, [2]int64{}, 8, [2]bool{}, [2]int{0, 4}},
		{"one is ahead, and the other busy", [2]stripe.Pace{{Lead: time.Minute, Bandwidth: 30}, {Bandwidth: 10}}, [2]int64{}, 2, [2]bool{}, [2]int{0, 2}},
		{"one fails", [2]stripe.Pace{{Bandwidth: 30, Ailing: true}, {Lead: time.Minute, Bandwidth: 10}}, [2]int64{}, 8, [2]bool{}, [2]int{0, 4}},
		{"one fails, the other is full", [2]stripe.Pace{{Bandwidth: 30, Ailing: true}, {Bandwidth: 10}}, [2]int64{0, 95}, 8, [2]bool{}, [2]int{4, 0}},
		{"one fails, the other is blocked", [2]stripe.Pace{{Bandwidth: 30, Ailing: true}, {Bandwidth: 10}}, [2]int64{}, 8, [2]bool{false, true}, [2]int{4, 0}},
		{"one fills up", [2]stripe.Pace{{Bandwidth: 30}, {Bandwidth: 10}}, [2]int64{85, 0}, 8, [2]bool{}, [2]int{1, 3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := build([]tier.ID{host0, disk0, disk1}, shape{used: 100, victims: []int64{10, 10, 10, 10, 10}, blocked: tt.blocked[:]},
				shape{used: tt.used[0]}, shape{used: tt.used[1]})
			for i := range 2 {
				s.Spaces[0].Down[i].Free = tt.free
				s.Spaces[1+i].Pace = tt.paces[i]
			}
			var got [2]int
			for _, c := range Decide(s).Moves {
				got[c.To-1]++
			}
			if got != tt.want {
				t.Errorf("the volumes get %d moves; want %d", got, tt.want)
			}
		})
	}
}
