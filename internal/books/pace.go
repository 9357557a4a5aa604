package books

import (
	"cmp"
	"math"
	"time"
)

// Pace says which of several spaces, that are written side by side, comes next. It measures how far
// ahead of the others a space is with its share of what is written. If a space is given more only
// while no other has a smaller Lead, all are busy for equally long. So they are given bytes in
// proportion to their speed.
//
// The zero Pace is that of a space which has none: it is before and behind no other.
type Pace struct {
	// Lead is for how long the space has been written to, and will be for what it
	// has taken on. Only the difference from another's means something.
	Lead time.Duration
	// Bandwidth, in bytes a second, is how fast it is written to, as far as is
	// known; above 0 except for the zero Pace.
	Bandwidth int64
	// Ailing says that it failed a moment ago. It comes after all others then.
	Ailing bool
}

// longest is what a Lead does not exceed, so that two of them can be added: 73 years.
const maxLead = math.MaxInt64 / 4

// After returns the pace of the space when it has taken on n more bytes.
func (p Pace) After(n int64) Pace {
	if p.Bandwidth > 0 {
		took := min(float64(n)/float64(p.Bandwidth)*float64(time.Second), maxLead)
		p.Lead = min(min(p.Lead, maxLead)+time.Duration(took), maxLead)
	}
	return p
}

// Compare returns -1 if a space of pace p should be given bytes before one of pace q,
// 1 if after, and 0 if neither has a claim.
func (p Pace) Compare(q Pace) int {
	switch {
	case p.Bandwidth == 0 || q.Bandwidth == 0:
		return 0
	case p.Ailing != q.Ailing:
		if p.Ailing {
			return 1
		}
		return -1
	}
	return cmp.Compare(p.Lead, q.Lead)
}
