package test

import (
	"errors"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert/cdevice"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// TestExportOutlivesTheEngine: closing an engine reports what is exported, waits for no release,
// and leaves no goroutine. The later release gives the GPU up.
func TestExportOutlivesTheEngine(t *testing.T) {
	for _, backend := range []spillway.Backend{spillway.Sim, spillway.CUDA} {
		t.Run(string(backend), func(t *testing.T) {
			cfg := spillway.Config{GPUs: []spillway.GPUConfig{{Backend: backend, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{}}
			contexts := func() int64 { return 0 }
			if backend == spillway.CUDA {
				e := emulated(t, cudatest.Config{})
				cfg.CUDALibrary = e.Path
				contexts = func() int64 { return e.Live("contexts") }
			}
			tiertest.NoLeaks(t)
			eng, err := spillway.Open(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			plan, err := eng.Plan("query")
			if err != nil {
				t.Fatal(err)
			}
			repo, err := plan.Repository("scan", 0)
			if err != nil {
				t.Fatal(err)
			}
			rec := arrowgen.Ints(1, 1000, 1)
			defer rec.Release()
			onGPU := reservation.AnyInTier(tier.GPU)
			if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(onGPU)); err != nil {
				t.Fatal(err)
			}
			b, _ := repo.Peek(0)
			h, err := eng.Mover().Acquire(t.Context(), b, onGPU)
			if err != nil {
				t.Fatal(err)
			}
			var array cdevice.DeviceArray
			var schema cdevice.Schema
			if err := cdevice.Export(h, &array, &schema, cdevice.Config{Failed: func(err error) { t.Error(err) }}); err != nil {
				t.Fatal(err)
			}
			space := h.Payload().Space()
			before := contexts()
			var leak *spillway.LeakError
			if err := eng.Close(); !errors.As(err, &leak) || len(leak.Leaks) != 1 || leak.Leaks[0].Space.Kind != tier.GPU {
				t.Errorf("closing with an export out: %v", err)
			}
			if contexts() != before {
				t.Errorf("%d contexts, %d before", contexts(), before)
			}
			released := make(chan bool) // by a thread that the engine does not know
			go func() { array.Release(); schema.Close(); close(released) }()
			<-released
			if n := contexts(); n != 0 || space.State().Used() != 0 || array.Array.Release != 0 {
				t.Errorf("after the release there are %d contexts, and %d bytes are used", n, space.State().Used())
			}
		})
	}
}
