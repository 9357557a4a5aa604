package spillway

import (
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/admission"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// Stats is what the engine has done and holds. Sizes are in bytes. Each part is consistent in
// itself; the parts are read one after the other.
type Stats struct {
	Spaces    []SpaceStats
	Edges     []convert.EdgeStats   // what was moved, a pair of spaces each
	Waits     reservation.WaitStats // for room
	Monitor   monitor.Stats
	Admission admission.Stats
	Permits   permit.Stats // also of a pool that engines share
	Quota     *quota.Stats // nil without a limit of GPU memory
}

// SpaceStats describes one space.
type SpaceStats struct {
	ID       tier.ID
	Backend  string
	Capacity int64
	Foreign  int64 // what others hold of it on the device, sampled each second; part of the pressure
	Lost     bool  // its device is lost, with what is in use here; see tier.Space.Lost
	tier.Usage
	Host *tier.HostStats // of host memory; else nil
	Disk *disk.Stats     // of a spill volume; else nil
}

// Stats returns the present numbers. It may be called at any time, also after Close.
func (e *Engine) Stats() Stats {
	s := Stats{
		Edges: e.mover.Stats(), Waits: e.reservations.Waits(), Monitor: e.monitor.Stats(),
		Admission: e.admitter.Stats(), Permits: e.permits.Stats(),
	}
	if e.limits.quota != nil {
		q := e.limits.quota.Stats()
		s.Quota = &q
	}
	for _, space := range e.spaces {
		s.Spaces = append(s.Spaces, statsOf(space))
	}
	return s
}

func statsOf(space *tier.Space) SpaceStats {
	s := SpaceStats{
		ID: space.ID(), Backend: space.Backend(), Capacity: space.Capacity(),
		Foreign: space.Foreign(), Lost: space.Lost() != nil, Usage: space.Usage(),
	}
	switch pool := space.Pool().(type) {
	case *host.Arena:
		arena := pool.Stats()
		s.Host = &arena
	case *volumes.Volume:
		volume := pool.Stats()
		s.Disk = &volume
	}
	return s
}

// Spaces returns the engine's spaces, ordered by tier and number.
func (e *Engine) Spaces() []*tier.Space { return e.reservations.Spaces().All() }
