package monitor

import "github.com/spillway-db/spillway/tier"

// outlook is what the last step, in which something was needed, knew of each space:
// published for those who must know whether waiting can help.
type outlook []prospect

// prospect is one space's part of an outlook.
type prospect struct {
	relief  bool   // bytes are on their way out, or will be when something else has moved
	version uint64 // of the index
}

// newOutlook says of each space whether bytes may leave it without anybody's doing:
// they are on their way already, a move was chosen, or a batch was set aside and will be
// tried again. A batch that is held back until a slower space is relieved counts while
// anything moves at all.
func newOutlook(s State, d Decision) outlook {
	o := make(outlook, len(s.Spaces))
	for _, c := range d.Moves {
		o[c.From].relief = true
	}
	busy := len(d.Moves) > 0
	for i := range s.Spaces {
		sp := &s.Spaces[i]
		o[i].relief = o[i].relief || sp.Moving > 0 || sp.coming() > 0 || sp.Aside > 0
		busy = busy || o[i].relief
	}
	for i := range o {
		o[i].relief = o[i].relief || d.Held && busy && len(s.Spaces[i].Victims) > 0
	}
	return o
}

// Movable says whether bytes of a space for which somebody waits may become free
// because batches move: it is what a reservation.Config wants to know. It is false only if
// the last step found nothing, and no batch there has changed since. Unknown spaces, lost ones, and
// all while Run is not running, have nothing that moves. It must be called with no lock held.
func (m *Monitor) Movable(id tier.ID) bool {
	i, known := m.byID[id]
	if !known || !m.running.Load() || m.spaces[i].Lost() != nil {
		return false
	}
	o := m.outlook.Load()
	return o == nil || (*o)[i].relief || m.index.summary(i).version != (*o)[i].version
}

// publish makes the step's result the outlook.
func (m *Monitor) publish(s State, d Decision) {
	o := newOutlook(s, d)
	for i, sp := range m.spaces {
		o[i].version = sp.seen.version
	}
	m.outlook.Store(&o)
}
