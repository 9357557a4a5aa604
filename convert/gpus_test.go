package convert

import (
	"errors"
	"os"
	"testing"

	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/sim"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/cuda"
)

// gpus are what a machine's GPUs are made of. The zero value makes simulated ones.
type gpus struct {
	driver   *cuda.Driver
	emulator *cudatest.Emulator // nil for simulated and for real GPUs
	unpinned bool               // host memory is not the driver's
}

// backend names the GPUs, as a space does.
func (g gpus) backend() string {
	if g.driver == nil {
		return "sim"
	}
	return "cuda"
}

// open opens a GPU, which the caller closes. cfg has further settings of simulated ones.
func (g gpus) open(t testing.TB, ordinal int, cfg sim.Config, faults func(sim.Op) error) tier.Device {
	t.Helper()
	var dev tier.Device
	var err error
	if g.driver == nil {
		dev, err = sim.NewFaulty(cfg, faults)
	} else {
		dev, err = g.driver.Open(cuda.Config{Ordinal: ordinal, Node: -1, Memory: cfg.Memory})
	}
	if err != nil {
		t.Fatal(err)
	}
	return dev
}

// pin has the GPU's driver pin what an arena has, as an engine does. An arena on Go's heap stays as
// it is.
func (g gpus) pin(t testing.TB, arena *host.Arena, dev tier.Device) {
	t.Helper()
	p, ok := tier.As[tier.Pinner](dev)
	if !ok || g.unpinned {
		return
	}
	if err := arena.Pin(p); err != nil && !errors.Is(err, tier.ErrNotSupported) {
		t.Fatal(err)
	}
}

// emulatedMemory is what an emulated GPU has: as much as the largest machine wants, and some for
// digests.
const emulatedMemory = 65 << 20

// emulated makes n emulated GPUs; when the test ends nothing may be left in their driver.
func emulated(t testing.TB, n int) gpus {
	t.Helper()
	return emulatedBy(t, cudatest.Config{Devices: n})
}

// emulatedBy makes them with a driver that may be another than the newest.
func emulatedBy(t testing.TB, cfg cudatest.Config) gpus {
	t.Helper()
	g := withDriver(t, cfg)
	t.Cleanup(func() {
		for _, leak := range g.emulator.Leaks() {
			t.Error(leak)
		}
	})
	return g
}

// withDriver makes them without looking at the end for what is left.
func withDriver(t testing.TB, cfg cudatest.Config) gpus {
	t.Helper()
	cfg.Memory = emulatedMemory
	e := cudatest.New(t, cfg)
	driver, err := cuda.Load(e.Path)
	if err != nil {
		t.Fatal(err)
	}
	return gpus{driver: driver, emulator: e}
}

// brief says whether tests are to try a part only, for what they are about is not the GPU, and they
// take long: emulated ones copy in threads, which cost more than short copies do.
func (g gpus) brief() bool { return g.emulator != nil && testseed.Hurried() }

// skips says whether the i-th of many types is left out. The simulated GPU tries all. Of what a
// type consists of the driver sees only buffers, so emulated GPUs try one of five. Hurried tests
// try one of four, and on emulated GPUs one of twenty.
func (g gpus) skips(i int) bool {
	brief, part := testseed.Hurried(), 1
	switch {
	case g.emulator != nil && brief:
		part = 20
	case g.emulator != nil:
		part = 5
	case brief:
		part = 4
	}
	return i%part != 0
}

// rowsOf returns with how many rows the i-th of many types is tried: none or one, in turns, and what takes more
// than one byte of each bitmap. Where not all is tried, all three take turns.
func (g gpus) rowsOf(i int) []int {
	if g.emulator != nil || testseed.Hurried() {
		return []int{0, 1, 70}[(i+2)%3:][:1]
	}
	return []int{i % 2, 70}
}

// wanted returns the driver that tests are to use in place of emulated ones, and whether there is
// one: SPILLWAY_CUDA says "real" for the machine's, or a path.
func wanted() (path string, ok bool) {
	path = os.Getenv("SPILLWAY_CUDA")
	if path == "real" {
		return "", true
	}
	return path, path != ""
}

// real makes GPUs of the driver at path, of which there must be n.
func real(t testing.TB, path string, n int) gpus {
	t.Helper()
	driver, err := cuda.Load(path)
	if err != nil {
		t.Fatal(err)
	}
	found, err := driver.Devices()
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < n {
		t.Skipf("the machine has %d GPUs, and the test needs %d", len(found), n)
	}
	return gpus{driver: driver}
}

// onEachGPU runs a test on n simulated GPUs and on n of CUDA's: emulated ones, or with
// SPILLWAY_CUDA those of its driver.
//
// With the race detector a test sees one of both, which a seed chooses: they share the code above the device.
func onEachGPU(t *testing.T, n int, test func(t *testing.T, g gpus)) {
	first, step := testseed.Share(t, 1)
	if first == 0 {
		t.Run("sim", func(t *testing.T) { test(t, gpus{}) })
	}
	if first == 0 && step > 1 {
		return
	}
	t.Run("cuda", func(t *testing.T) {
		if path, ok := wanted(); ok {
			test(t, real(t, path, n))
			return
		}
		test(t, emulated(t, n))
	})
}

// onEachGPUPinnedOrNot is onEachGPU, and on one of CUDA's whose driver has no part in the host's
// memory: copies go by way of pinned memory of the device's.
func onEachGPUPinnedOrNot(t *testing.T, test func(t *testing.T, g gpus)) {
	onEachGPU(t, 1, test)
	if testseed.Hurried() {
		return // it takes long; what is pinned makes no difference to the locks, and the race detector's memory is not
	}
	t.Run("cuda, not pinned", func(t *testing.T) {
		var g gpus
		if path, ok := wanted(); ok {
			g = real(t, path, 1)
		} else {
			g = emulated(t, 1)
		}
		g.unpinned = true
		test(t, g)
	})
}
