package monitor

import (
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/tier"
)

// Headroom returns how many bytes of a space a request for need bytes leaves free, so that
// consumers can bring batches there when all tiers are full of batches at rest. That is room for
// the largest batch elsewhere, of those that take at most half of the space. Nothing is brought to
// a disk. A reservation.Config needs it.
func (m *Monitor) Headroom(id tier.ID, need int64) int64 {
	i, known := m.byID[id]
	if !known {
		return 0
	}
	s := m.spaces[i]
	n := m.headroom(s)
	if n == 0 {
		return 0
	}
	return max(0, min(n, m.spare(s)-need))
}

// spare returns how many bytes of a space would be free if no batch were at rest there. Bytes that
// will soon be in batches at rest count as free, too.
func (m *Monitor) spare(s *space) int64 {
	rest := m.index.summary(s.place).rest + m.cfg.Reservations.Arriving(s.ID())
	return s.Ceiling() - max(0, s.Used()-rest)
}

// headroom returns what the largest batch of the other spaces would take in s, of those that take
// at most half of it.
func (m *Monitor) headroom(s *space) int64 {
	if s.Kind() == tier.Disk {
		return 0
	}
	half := s.Ceiling() / 2
	n := s.Charge(m.largestElsewhere(s, half))
	if n > half { // for rounding
		n = s.Charge(m.largestElsewhere(s, size.Largest(s.Charge, 0, half, half)))
	}
	return n
}

func (m *Monitor) largestElsewhere(s *space, atMost int64) (bytes int64) {
	for i, other := range m.spaces {
		if other != s && other.Lost() == nil {
			bytes = max(bytes, m.index.largest(i, atMost))
		}
	}
	return bytes
}
