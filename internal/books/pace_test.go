package books_test

import (
	"math"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/books"
)

func TestPaceCompare(t *testing.T) {
	well := func(lead time.Duration) books.Pace { return books.Pace{Lead: lead, Bandwidth: 1} }
	ailing := func(lead time.Duration) books.Pace { return books.Pace{Lead: lead, Bandwidth: 1, Ailing: true} }
	for _, test := range []struct {
		name string
		p, q books.Pace
		want int
	}{
		{"behind", well(1), well(2), -1},
		{"the bandwidth is in the lead already", books.Pace{Lead: 1, Bandwidth: 5}, well(1), 0},
		{"ailing, though behind", ailing(1), well(2), 1},
		{"both ailing", ailing(1), ailing(2), -1},
		{"no pace", books.Pace{}, well(9), 0},
		{"no pace, beside one that ails", books.Pace{}, ailing(9), 0},
	} {
		if got := test.p.Compare(test.q); got != test.want {
			t.Errorf("%s: %d; want %d", test.name, got, test.want)
		}
		if got := test.q.Compare(test.p); got != -test.want {
			t.Errorf("%s, the other way round: %d; want %d", test.name, got, -test.want)
		}
	}
}

func TestPaceAfter(t *testing.T) {
	p := books.Pace{Lead: time.Second, Bandwidth: 100}
	if got := p.After(250); got.Lead != 3500*time.Millisecond || got.Bandwidth != 100 {
		t.Errorf("250 bytes at 100 a second later it is %+v", got)
	}
	if got := (books.Pace{}).After(1 << 40); got != (books.Pace{}) {
		t.Errorf("a space without a pace has %+v", got)
	}
	for _, p := range []books.Pace{{Bandwidth: 1}, {Lead: math.MaxInt64, Bandwidth: 1}} { // as far as a number goes
		for range 10 {
			before := p.After(0)
			if p = p.After(math.MaxInt64); p.Lead <= 0 || p.Lead < before.Lead {
				t.Errorf("the lead fell from %v to %v", before.Lead, p.Lead)
			}
		}
	}
}
