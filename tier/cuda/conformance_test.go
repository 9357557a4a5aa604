package cuda_test

import (
	"errors"
	"testing"
	"time"

	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/invariants"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func TestMain(m *testing.M) { testseed.Main(m) }

// rig is an emulated driver; when the test ends nothing may be left in it.
type rig struct {
	*cudatest.Emulator
	driver *cuda.Driver
}

func load(t testing.TB, cfg cudatest.Config) *rig {
	t.Helper()
	r := &rig{Emulator: cudatest.New(t, cfg)}
	var err error
	if r.driver, err = cuda.Load(r.Path); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, leak := range r.Leaks() {
			t.Error(leak)
		}
	})
	return r
}

// open opens a device, which the test's end closes.
func (r *rig) open(t testing.TB, cfg cuda.Config) *cuda.Device {
	t.Helper()
	d, err := r.driver.OpenDevice(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Errorf("closing the device: %v", err)
		}
	})
	return d
}

// kinds are the drivers that a device must get on with.
var kinds = []struct {
	name     string
	emulator cudatest.Config
	onePiece bool
	holes    []tiertest.Trait
}{
	{"CUDA 12.8", cudatest.Config{}, false, []tiertest.Trait{tiertest.HolesUnknown}},
	{"slow", cudatest.Config{Delay: 20 * time.Microsecond}, false, []tiertest.Trait{tiertest.HolesUnknown}},
	{"old", cudatest.Config{Version: 11000, Without: []string{
		"cuStreamWaitValue32_v2", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", "cuMemAllocAsync",
	}}, false, nil},
	{"one piece", cudatest.Config{}, true, nil},
}

// opener opens devices for one test at a time: the first on the first GPU of a driver, the next on
// the next.
type opener struct {
	t     *testing.T
	rig   *rig
	count int
}

func (o *opener) open(t *testing.T, emulator cudatest.Config, onePiece bool, memory int64) *cuda.Device {
	t.Helper()
	if o.t != t {
		emulator.Devices, emulator.Memory = 2, memory+1<<20
		*o = opener{t: t, rig: load(t, emulator)}
	}
	d, err := o.rig.driver.OpenDevice(cuda.Config{Ordinal: o.count % 2, Node: -1, Memory: memory, OnePiece: onePiece})
	if err != nil {
		t.Fatal(err)
	}
	o.count++
	return d
}

// brief says whether to leave out what other kinds cover, too.
func brief(kind string) bool {
	return (testing.Short() || invariants.Enabled) && (kind == "slow" || kind == "one piece")
}

func TestDeviceConforms(t *testing.T) {
	for _, k := range kinds {
		if brief(k.name) {
			continue
		}
		t.Run(k.name, func(t *testing.T) {
			var o opener
			tiertest.RunDevice(t, func(t *testing.T, memory int64, faults tiertest.FaultFunc) tier.Device {
				d := o.open(t, k.emulator, k.onePiece, memory)
				if faults == nil {
					return d
				}
				return &faulty{Device: d, emulator: o.rig.Emulator, onePiece: k.holes == nil, faults: faults}
			})
		})
	}
}

func TestDevicePoolConforms(t *testing.T) {
	for _, k := range kinds {
		if brief(k.name) {
			continue
		}
		t.Run(k.name, func(t *testing.T) {
			tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool {
				cfg := k.emulator
				cfg.Memory = capacity
				p, err := devpool.NewMemory(load(t, cfg).open(t, cuda.Config{Memory: capacity, OnePiece: k.onePiece}))
				if err != nil {
					t.Fatal(err)
				}
				return p
			}, k.holes...)
		})
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
