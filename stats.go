package spillway

import (
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// Handle holds a batch in place while it is worked on.
type Handle = batch.Handle

// Stats is what the engine has done and holds. Sizes are in bytes.
type Stats struct {
	Spaces []SpaceStats
	Edges  []convert.EdgeStats // what was moved, a pair of spaces each
	Waits  reservation.WaitStats
	Quota  *quota.Stats // nil without a limit of GPU memory
}

// SpaceStats is one space's books.
type SpaceStats struct {
	ID       tier.ID
	Backend  string
	Capacity int64
	Foreign  int64 // what others hold of it on the device, sampled each second; part of the pressure
	Lost     bool  // its device is lost, with what is in use here; see tier.Space.Lost
	tier.Usage
}

// Stats returns a picture; each space's numbers are a consistent cut.
func (e *Engine) Stats() Stats {
	s := Stats{Edges: e.mover.Stats(), Waits: e.reservations.Waits()}
	if e.limits.quota != nil {
		q := e.limits.quota.Stats()
		s.Quota = &q
	}
	for _, space := range e.spaces {
		s.Spaces = append(s.Spaces, SpaceStats{ID: space.ID(), Backend: space.Backend(), Capacity: space.Capacity(), Foreign: space.Foreign(), Lost: space.Lost() != nil, Usage: space.Usage()})
	}
	return s
}

// Spaces returns the engine's spaces, ordered by tier and number.
func (e *Engine) Spaces() []*tier.Space { return e.reservations.Spaces().All() }
