package quota_test

import (
	"math"
	"testing"

	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func simFor(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
	var hook func(sim.Op) error
	if faults != nil {
		hook = func(op sim.Op) error {
			return faults(op.Index, op.Stage == sim.Run)
		}
	}
	d, err := sim.NewFaulty(sim.Config{Memory: memory}, hook)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func budgeted(t *testing.T, limit int64, dev tier.Device) tier.Device {
	d, err := newBudget(t, limit).Wrap(dev)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// TestConforms: whatever wraps the device, it is one.
func TestConforms(t *testing.T) {
	for name, stack := range map[string]func(t *testing.T, memory int64, d tier.Device) tier.Device{
		"budget": func(t *testing.T, memory int64, d tier.Device) tier.Device {
			return budgeted(t, memory, d) // the whole memory, so that out of memory is out of budget
		},
		"logging": func(_ *testing.T, _ int64, d tier.Device) tier.Device { return quota.Logged(d, discard) },
		"budget over logging": func(t *testing.T, memory int64, d tier.Device) tier.Device {
			return budgeted(t, memory, quota.Logged(d, discard))
		},
		"logging over budget": func(t *testing.T, _ int64, d tier.Device) tier.Device {
			return quota.Logged(budgeted(t, math.MaxInt64, d), discard) // so that out of memory is the device's
		},
	} {
		t.Run(name, func(t *testing.T) {
			tiertest.RunDevice(t, func(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
				return stack(t, memory, simFor(t, memory, faults))
			})
		})
	}
}

// TestPoolConforms: the pool of a space works over a budget of its capacity.
func TestPoolConforms(t *testing.T) {
	tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool {
		dev := budgeted(t, capacity, simFor(t, capacity, nil))
		t.Cleanup(func() {
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		})
		p, err := devpool.NewMemory(dev)
		if err != nil {
			t.Fatal(err)
		}
		return p
	})
}
