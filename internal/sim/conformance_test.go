package sim_test

import (
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func open(t testing.TB, cfg sim.Config, faults ...func(sim.Op) error) *sim.Device {
	t.Helper()
	d, err := sim.OpenFaulty(cfg, append(faults, nil)[0])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && err != tier.ErrClosed {
			t.Errorf("closing the device: %v", err)
		}
	})
	return d
}

func TestDevicePoolConforms(t *testing.T) {
	tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool {
		p, err := devpool.NewMemory(open(t, sim.Config{Memory: capacity}))
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
}

func TestDeviceConforms(t *testing.T) {
	tiertest.RunDevice(t, func(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
		var hook func(sim.Op) error
		if faults != nil {
			hook = func(op sim.Op) error {
				return faults(op.Index, op.Stage == sim.Run)
			}
		}
		d, err := sim.OpenFaulty(sim.Config{Memory: memory}, hook)
		if err != nil {
			t.Fatal(err)
		}
		return d
	})
}
