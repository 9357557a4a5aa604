package monitor

import "github.com/spillway-db/spillway/batch"

// inside is a Monitor as reservations and engines see it.
type inside struct{ *Monitor }

// Inside returns what only this module's packages do with a monitor. Programs have no use for it.
func (m *Monitor) Inside() inside { return inside{m} }

// Each calls f with all batches of the index, with no lock held. Those that come, or go,
// meanwhile may be left out.
func (in inside) Each(f func(*batch.Batch)) {
	in.index.mu.Lock()
	for _, e := range in.index.mu.entries {
		in.index.mu.Unlock()
		f(e.b)
		in.index.mu.Lock()
	}
	in.index.mu.Unlock()
}
