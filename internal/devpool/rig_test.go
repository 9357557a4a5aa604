package devpool_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
)

// rounds is how often a test that works the locks does so: in an invariants
// build, where each lock looks at the goroutine's stack, a tenth of n.
func rounds(n int) int {
	if invariants.Enabled {
		return n / 10
	}
	return n
}

func ok(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// openDevice returns a simulated device, which the test's end closes.
func openDevice(t testing.TB, cfg sim.Config, faults ...func(sim.Op) error) tier.Device {
	t.Helper()
	d, err := sim.NewFaulty(cfg, append(faults, nil)[0])
	ok(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil && err != tier.ErrClosed {
			t.Errorf("closing the device: %v", err)
		}
	})
	return d
}

// mustPanic calls f and returns what it panicked with.
func mustPanic(t testing.TB, f func()) (p any) {
	t.Helper()
	defer func() {
		if p = recover(); p == nil {
			t.Error("no panic")
		}
	}()
	f()
	return nil
}

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
func faultyDevice(t testing.TB, memory int64) (tier.Device, *faults) {
	f := &faults{}
	return openDevice(t, sim.Config{Memory: memory}, f.ask), f
}
