package monitor

import "github.com/spillway-db/spillway/batch"

// inside is a Monitor as reservations and engines see it.
type inside struct{ *Monitor }

// Inside returns what only this module's packages do with a monitor. Programs have no use for it.
func (m *Monitor) Inside() inside { return inside{m} }

// walkStep is how many batches are looked up at a time: some ten microseconds.
const walkStep = 4096

// Each calls f with all batches that the monitor knows, with no lock held. Those that come, or go,
// meanwhile may be left out.
func (in inside) Each(f func(*batch.Batch)) {
	var some []*batch.Batch
	for from := uint32(1); ; from += walkStep {
		some = some[:0]
		in.index.mu.Lock()
		most := in.index.mu.entries.Numbers()
		for n := from; n < from+walkStep && n <= most; n++ {
			if b := in.index.mu.entries.Of(n); b != nil {
				some = append(some, b)
			}
		}
		in.index.mu.Unlock()
		for _, b := range some {
			f(b)
		}
		if from+walkStep > most {
			return
		}
	}
}
