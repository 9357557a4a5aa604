package test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/devpool"
	"github.com/spillway-db/spillway/internal/host"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// emulated returns a driver library; when the test ends nothing may be left in it.
func emulated(t *testing.T, cfg cudatest.Config) *cudatest.Emulator {
	t.Helper()
	e := cudatest.New(t, cfg)
	t.Cleanup(func() {
		for _, leak := range e.Leaks() {
			t.Error(leak)
		}
	})
	return e
}

// TestBackendOfAGPUSpace: the backend of a space, and the message where a simulated GPU is used.
func TestBackendOfAGPUSpace(t *testing.T) {
	t.Parallel()
	nowhere := filepath.Join(t.TempDir(), "libcuda.so.1")
	for name, c := range map[string]struct {
		library func(t *testing.T) string
		gpus    []spillway.GPUConfig
		want    []string // backends; nil: opening fails
		says    string   // with this in the error, or in the log
	}{
		"no library":              {func(*testing.T) string { return nowhere }, []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20)}}, []string{"sim"}, "no CUDA driver library"},
		"no library, cuda":        {func(*testing.T) string { return nowhere }, []spillway.GPUConfig{{Backend: spillway.CUDA}}, nil, "no CUDA driver library"},
		"no library, sim":         {func(*testing.T) string { return nowhere }, []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, []string{"sim"}, ""},
		"no device":               {emulator(cudatest.Config{Devices: -1}), []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20)}}, []string{"sim"}, "CUDA_ERROR_NO_DEVICE"},
		"no device, cuda":         {emulator(cudatest.Config{Devices: -1}), []spillway.GPUConfig{{Backend: spillway.CUDA}}, nil, "CUDA_ERROR_NO_DEVICE"},
		"a device":                {emulator(cudatest.Config{}), []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20)}}, []string{"cuda"}, ""},
		"a device, all of it":     {emulator(cudatest.Config{}), []spillway.GPUConfig{{}}, []string{"cuda"}, ""},
		"a device, sim":           {emulator(cudatest.Config{}), []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}}, []string{"sim"}, ""},
		"two devices by name":     {emulator(cudatest.Config{Devices: 2}), []spillway.GPUConfig{{ID: "0000:E1:00.0", Memory: spillway.Bytes(1 << 20)}, {ID: "MIG-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedee00", Memory: spillway.Bytes(1 << 20)}}, []string{"cuda", "cuda"}, ""},
		"as nvidia-smi writes it": {emulator(cudatest.Config{Devices: 2}), []spillway.GPUConfig{{ID: "00000000:E1:00.0", Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)}}, []string{"cuda"}, ""},
		"as lspci writes it":      {emulator(cudatest.Config{Devices: 2}), []spillway.GPUConfig{{ID: "e1:00.0", Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)}}, []string{"cuda"}, ""},
		"bare UUID":               {emulator(cudatest.Config{Devices: 2}), []spillway.GPUConfig{{ID: "E0E1E2E3-e4e5-e6e7-e8e9-eaebecedee01", Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)}}, []string{"cuda"}, ""},
		"beginning of a UUID":     {emulator(cudatest.Config{}), []spillway.GPUConfig{{ID: "GPU-e0e1", Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)}}, []string{"cuda"}, ""},
		"bare beginning":          {emulator(cudatest.Config{}), []spillway.GPUConfig{{ID: "e0e1", Backend: spillway.CUDA}}, nil, "no GPU e0e1"},
		"by name and the rest":    {emulator(cudatest.Config{Devices: 2}), []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20)}, {ID: "0000:e0:00.0", Memory: spillway.Bytes(1 << 20)}}, []string{"cuda", "cuda"}, ""},
		"one name twice":          {emulator(cudatest.Config{Devices: 2}), []spillway.GPUConfig{{ID: "0000:e0:00.0"}, {ID: "0000:e0:00.0", Backend: spillway.CUDA}}, nil, "another space's"},
		"one device for two":      {emulator(cudatest.Config{}), []spillway.GPUConfig{{Memory: spillway.Bytes(1 << 20)}, {Memory: spillway.Bytes(1 << 20)}}, []string{"cuda", "sim"}, "no GPU that is not another"},
		"another device":          {emulator(cudatest.Config{}), []spillway.GPUConfig{{ID: "0000:01:00.0", Memory: spillway.Bytes(math.MaxInt64)}}, []string{"sim"}, "no GPU 0000:01:00.0"},
		"another, cuda":           {emulator(cudatest.Config{}), []spillway.GPUConfig{{ID: "GPU-1", Backend: spillway.CUDA}}, nil, "no GPU GPU-1"},
		"too old":                 {emulator(cudatest.Config{Version: 10020}), []spillway.GPUConfig{{Backend: spillway.CUDA}}, nil, "10.2"},
	} {
		t.Run(name, func(t *testing.T) {
			var log strings.Builder
			eng, err := spillway.Open(t.Context(), spillway.Config{
				GPUs: c.gpus, CUDALibrary: c.library(t), HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{},
				Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			if c.want == nil {
				if !errors.Is(err, tier.ErrNotSupported) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
					t.Fatalf("opening: %v; want ErrNotSupported, in one line, with %q", err, c.says)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := eng.Close(); err != nil {
					t.Error(err)
				}
			}()
			seen := make(map[string]bool)
			for _, s := range eng.Reservations().Spaces().InTier(tier.GPU) {
				info := s.Pool.(*devpool.Memory).Device().Info()
				if info.Backend == "cuda" && seen[info.PCI] {
					t.Errorf("two spaces have the GPU at %s", info.PCI)
				}
				seen[info.PCI] = true
			}
			for i, s := range eng.Stats().Spaces[:len(c.want)] {
				if s.Backend != c.want[i] {
					t.Errorf("%s is served by %s, want %s", s.ID, s.Backend, c.want[i])
				}
			}
			if !strings.Contains(log.String(), c.says) || c.says == "" && strings.Contains(log.String(), "stands in") {
				t.Errorf("the log says %q, want %q", log.String(), c.says)
			}
		})
	}
}

// TestAmbiguousGPU: the beginning of two GPUs' UUIDs names neither of them, whether or not one is
// taken, and no simulated one is used.
func TestAmbiguousGPU(t *testing.T) {
	e := emulated(t, cudatest.Config{Devices: 2})
	const begin, first = "GPU-e0e1e2e3", "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedee00"
	for name, gpus := range map[string][]spillway.GPUConfig{
		"auto":         {{ID: begin, Memory: spillway.Bytes(1 << 20)}},
		"cuda":         {{ID: begin, Memory: spillway.Bytes(1 << 20), Backend: spillway.CUDA}},
		"one is taken": {{ID: first, Memory: spillway.Bytes(1 << 20)}, {ID: begin, Memory: spillway.Bytes(1 << 20)}},
	} {
		eng, err := spillway.Open(t.Context(), spillway.Config{GPUs: gpus, CUDALibrary: e.Path, HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{}})
		if err == nil {
			_ = eng.Close()
		}
		var ambiguous *spillway.AmbiguousGPUError
		if !errors.As(err, &ambiguous) || ambiguous.ID != begin || len(ambiguous.UUIDs) != 2 || !strings.Contains(err.Error(), first) {
			t.Errorf("%s: %v; want an AmbiguousGPUError", name, err)
		}
	}
}

func emulator(cfg cudatest.Config) func(t *testing.T) string {
	return func(t *testing.T) string { return emulated(t, cfg).Path }
}

// TestRandomOperationsOnCUDA is TestRandomOperations on an emulated GPU.
func TestRandomOperationsOnCUDA(t *testing.T) {
	t.Parallel()
	kinds := map[string]cudatest.Config{
		"CUDA 12.8":     {Devices: 1},
		"without pools": {Devices: 1, Version: 11010, Without: []string{"cuMemAllocAsync", "cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"}},
		"slow":          {Devices: 1, Delay: 30 * time.Microsecond},
	}
	seed := uint64(0)
	for name, cfg := range kinds {
		seed++
		t.Run(name, func(t *testing.T) {
			runRandomOperations(t, seed, spillway.Config{CUDALibrary: emulated(t, cfg).Path, GPUs: []spillway.GPUConfig{{Backend: spillway.CUDA}}})
		})
		if testseed.Hurried() {
			return // after one, which in each run may be another
		}
	}
}

// TestEveryCallOfTheDriverOfAnEngineFailsOnce, from opening to closing: nothing is lost, and
// nothing is left in the driver.
func TestEveryCallOfTheDriverOfAnEngineFailsOnce(t *testing.T) {
	codes := []cuda.Code{cuda.ErrInvalidValue, cuda.ErrOutOfMemory} // in turn; which comes first, the seed says
	seed := testseed.One(t)
	e := emulated(t, cudatest.Config{Memory: 8 << 20})
	tried, told := faultLives(t, func(l *life, n int, _ func()) func() int {
		l.cuda = e.Path
		e.ClearFailures()
		before := e.Calls("")
		e.Fail("", int64(n), codes[(uint64(n)+seed)%2], 1)
		return func() int { return int(max(0, e.Calls("")-before-int64(n))) }
	}, codes[0], codes[1], tier.ErrNotSupported, tier.ErrNoSpace)
	least := testseed.Rounds(60, 8)
	if tried < least || !testseed.Hurried() && told < tried/4 { // a quarter of few is chance
		t.Errorf("%d calls, of which %d were told of: want at least %d, and a quarter of them", tried, told, least)
	}
}

// TestHostMemoryThatCannotBePinned: everything works nevertheless, and the memory is locked
// instead.
func TestHostMemoryThatCannotBePinned(t *testing.T) {
	t.Parallel()
	e := emulated(t, cudatest.Config{})
	e.Fail("cuMemHostRegister_v2", 0, cuda.ErrOutOfMemory, -1)
	cfg := spillway.Config{CUDALibrary: e.Path, GPUs: []spillway.GPUConfig{{Backend: spillway.CUDA}}}
	runRandomOperations(t, 9, cfg)

	cfg.HostMemory, cfg.Disks = spillway.Bytes(1<<20), []spillway.DiskConfig{}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer eng.Close()
	space, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.Host})
	told := slices.ContainsFunc(eng.Warnings(), func(w diag.Warning) bool {
		return w.Space == space.ID().String() && strings.Contains(w.What, "bytes are locked")
	})
	if s := space.Pool.(*host.Arena).Stats(); s.Locked != s.Capacity && !told {
		t.Errorf("%d of %d bytes are locked, which nobody is told: %v", s.Locked, s.Capacity, eng.Warnings())
	}
}

// TestRealRandomOperations is TestRandomOperations on a real GPU.
func TestRealRandomOperations(t *testing.T) {
	library := cudatest.Real(t)
	for seed := range uint64(4) {
		t.Run(fmt.Sprintf("seed=%d", seed+1), func(t *testing.T) {
			runRandomOperations(t, seed+1, spillway.Config{CUDALibrary: library, GPUs: []spillway.GPUConfig{{Backend: spillway.CUDA}}})
		})
	}
}

// TestRealHostMemoryIsPinned: the driver of a real GPU pins the engine's host memory without a
// warning.
func TestRealHostMemoryIsPinned(t *testing.T) {
	eng, err := spillway.Open(t.Context(), spillway.Config{
		CUDALibrary: cudatest.Real(t), GPUs: []spillway.GPUConfig{{Backend: spillway.CUDA, Memory: spillway.Bytes(16 << 20)}}, HostMemory: spillway.Bytes(64 << 20), Disks: []spillway.DiskConfig{},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range eng.Warnings() {
		if w.Cause == causes.NotPinned {
			t.Error(w)
		}
	}
	for _, s := range eng.Stats().Spaces {
		if s.ID.Kind == tier.GPU && s.Backend != "cuda" {
			t.Errorf("%s is served by %s", s.ID, s.Backend)
		}
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
}

// TestShareOfACard: the size of a GPU space may be a share of what the card has, but not of what a
// simulated GPU is given.
func TestShareOfACard(t *testing.T) {
	const card = 32 << 20
	open := func(t *testing.T, library string, gpus ...spillway.GPUConfig) (*spillway.Engine, error) {
		return spillway.Open(t.Context(), spillway.Config{GPUs: gpus, CUDALibrary: library, HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{}})
	}
	e := emulated(t, cudatest.Config{Devices: 2, Memory: card})
	gpus := []spillway.GPUConfig{{Memory: spillway.Share(0.25)}, {Backend: spillway.CUDA, Memory: spillway.Share(1e-9)}}
	eng, err := open(t, e.Path, gpus...)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []int64{card / 4, tier.Page} {
		if s := eng.Stats().Spaces[i]; s.Capacity != want {
			t.Errorf("%s has %d bytes, want %d", s.ID, s.Capacity, want)
		}
		if gpus[i].Memory.Bytes != 0 {
			t.Error("the program's configuration was changed")
		}
	}
	if err := eng.Close(); err != nil {
		t.Error(err)
	}
	nowhere := filepath.Join(t.TempDir(), "libcuda.so.1")
	for name, c := range map[string]struct {
		library   string
		gpu       spillway.GPUConfig
		simulated bool
	}{
		"sim":           {e.Path, spillway.GPUConfig{Backend: spillway.Sim, Memory: spillway.Share(0.5)}, true},
		"no driver":     {nowhere, spillway.GPUConfig{Memory: spillway.Share(0.5)}, true},
		"not this card": {e.Path, spillway.GPUConfig{ID: "GPU-1", Memory: spillway.Share(0.5)}, true},
		"cuda only":     {nowhere, spillway.GPUConfig{Backend: spillway.CUDA, Memory: spillway.Share(0.5)}, false},
	} {
		eng, err := open(t, c.library, c.gpu)
		if err == nil {
			t.Errorf("%s: opened", name)
			_ = eng.Close()
		} else if errors.Is(err, spillway.ErrShareOfSimulated) != c.simulated || !c.simulated && !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestLyingPeers: between GPUs that do not copy to each other as their driver promises
// batches go through host memory, rows are right, and there is a warning.
func TestLyingPeers(t *testing.T) {
	t.Parallel()
	for lying, want := range []int{0, 1, 1, 1} {
		t.Run(fmt.Sprint(lying), func(t *testing.T) {
			e := emulated(t, cudatest.Config{Devices: 2, LyingPeer: lying})
			gpu := spillway.GPUConfig{Backend: spillway.CUDA, Memory: spillway.Bytes(2 << 20)}
			eng, err := spillway.Open(t.Context(), spillway.Config{
				CUDALibrary: e.Path, GPUs: []spillway.GPUConfig{gpu, gpu}, HostMemory: spillway.Bytes(1 << 20), Disks: []spillway.DiskConfig{},
				Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			defer closeEngine(t, eng)
			if n := warningsOf(eng.Warnings(), causes.PeerAccess); n != want {
				t.Errorf("%d warnings of peers: %v", n, eng.Warnings())
			}
			plan, err := eng.Plan("p")
			if err != nil {
				t.Fatal(err)
			}
			defer plan.Close()
			repo, err := plan.Repository("scan", 0)
			if err != nil {
				t.Fatal(err)
			}
			rec := numberedRecord(7, 1000, wordList(1, 500))
			defer rec.Release()
			if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.Specific(lostGPU))); err != nil {
				t.Fatal(err)
			}
			b, _ := repo.Peek(0)
			for _, to := range []tier.ID{otherGPU, lostGPU, otherGPU} {
				if err := eng.Mover().Move(t.Context(), b, reservation.Specific(to)); err != nil || b.Info().Space != to {
					t.Fatalf("to %s: %v; it is in %s", to, err, b.Info().Space)
				}
			}
			got, err := openedFrom(t, eng, b)
			if err != nil {
				t.Fatal(err)
			}
			defer got.Release()
			if err := convert.Equal(rec, got); err != nil {
				t.Error(err)
			}
		})
	}
}
