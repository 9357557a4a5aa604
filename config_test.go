package spillway_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/reservation/quota"
	"github.com/spillway-db/spillway/tier"
)

// TestValidate: what cannot be is refused without the machine, by its name.
func TestValidate(t *testing.T) {
	wrong := tier.Fractions{Limit: 0.5, Trigger: 0.9, Stop: 0.1}
	for _, c := range []struct {
		want string
		cfg  spillway.Config
	}{
		{"gpu:1: memory of -1 bytes", spillway.Config{GPUs: []spillway.GPUConfig{{}, {Memory: -1}}}},
		{"host memory of 4096 bytes is too little", spillway.Config{HostMemory: 4096}},
		{"disk:0: capacity and reserve", spillway.Config{Disks: []spillway.DiskConfig{{Capacity: -1}}}},
		{"disk:1: capacity and reserve", spillway.Config{Disks: []spillway.DiskConfig{{}, {Reserve: -1}}}},
		{"disk:0: with Persist it needs a capacity", spillway.Config{Disks: []spillway.DiskConfig{{Persist: true}}}},
		{"gpu marks: ", spillway.Config{GPUMarks: wrong}},
		{"host marks: ", spillway.Config{HostMarks: wrong}},
		{"disk marks: ", spillway.Config{DiskMarks: wrong}},
		{"codec", spillway.Config{Codec: 99}},
	} {
		if err := c.cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), "spillway: ") || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
	both := spillway.Config{HostMemory: -1, GPUs: []spillway.GPUConfig{{Memory: -1}}}
	if err := both.Validate(); err == nil || !strings.Contains(err.Error(), "gpu:0: ") || !strings.Contains(err.Error(), "host memory") {
		t.Errorf("of two faults it says %v", err)
	}
}

// TestHints: who asks for more than a space has is told which setting would help.
func TestHints(t *testing.T) {
	cfg := plainConfig(t)
	told := func(want ...string) {
		t.Helper()
		eng, err := spillway.Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		for i, k := range []tier.Kind{tier.GPU, tier.Host, tier.Disk} {
			_, err := eng.Reservations().TryReserve(reservation.Specific(spaceAt(eng, k, 0).ID()), 1<<40)
			var e *reservation.ExceededError
			if !errors.As(err, &e) || e.Hint != want[i] {
				t.Errorf("%v; want the hint %q", err, want[i])
			}
		}
		closeClean(t, eng)
	}
	host, onDisk := "more host memory would help", "a larger disk capacity of "+cfg.Disks[0].Dir+" would help"
	told("a larger GPU memory would help", host, onDisk)
	cfg.Quota = &quota.Settings{Limit: limitOf(t, "512Ki"), Source: "THE_LIMIT"}
	told("a larger GPU memory, or a higher limit by THE_LIMIT, would help", host, onDisk)
	cfg.Quota = &quota.Settings{}
	cfg.GPUs[0].Wrap = wrapIn(newBudget(t, 512<<10))
	told("a larger GPU memory, or a higher limit of its budget, would help", host, onDisk)
}
