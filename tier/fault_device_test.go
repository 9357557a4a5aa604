package tier_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/tier/sim"
)

var errFault = errors.New("a fault on purpose")

// faults fails the next operations of a kind.
type faults struct {
	mu    sync.Mutex
	times map[sim.OpKind]int
}

func (f *faults) next(k sim.OpKind, times int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.times == nil {
		f.times = make(map[sim.OpKind]int)
	}
	f.times[k] = times
}

func (f *faults) ask(op sim.Op) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	want := sim.Submit
	if op.Kind == sim.OpFill {
		want = sim.Run
	}
	if op.Stage != want || f.times[op.Kind] == 0 {
		return nil
	}
	f.times[op.Kind]--
	return errFault
}

// faultyDevice returns a device that fails when f says so: streams and events
// by refusing, fills by failing when they run.
func faultyDevice(t testing.TB, memory int64) (*sim.Device, *faults) {
	f := &faults{}
	return openDevice(t, sim.Config{Memory: memory, Faults: f.ask}), f
}
