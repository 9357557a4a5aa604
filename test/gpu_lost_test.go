package test

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// TestGPUIsLostUnderLoad: work fails and ends the context, and then every call of the driver fails.
// Waiters get the error, what is not on the GPU is as it was, and the engine closes with its books
// at zero.
func TestGPUIsLostUnderLoad(t *testing.T) {
	for _, after := range []int64{0, 20, 300} {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			tiertest.NoLeaks(t)
			e := cudatest.New(t, cudatest.Config{})
			eng, err := spillway.Open(t.Context(), spillway.Config{
				CUDALibrary: e.Path, GPUs: []spillway.GPUConfig{{Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)}}, HostMemory: spillway.Bytes(1 << 20),
				Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}}, MonitorPeriod: time.Millisecond,
				Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			})
			if err != nil {
				t.Fatal(err)
			}
			plan, err := eng.Plan("load")
			if err != nil {
				t.Fatal(err)
			}
			repo, err := plan.Repository("scan", 0)
			if err != nil {
				t.Fatal(err)
			}
			run := &randomRun{eng: eng, repo: repo, words: wordList(1, 1500), sources: make(map[int64]*source)}
			kept := numberedRecord(1, 1000, run.words)
			defer kept.Release()
			if err := repo.Put(t.Context(), randomPartitions, kept, repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
				t.Fatal(err)
			}
			b, _ := repo.Peek(randomPartitions)

			e.FailWork(after, cuda.ErrIllegalAddress, true)
			var lost atomic.Int64
			var workers sync.WaitGroup
			for w := range randomWorkers {
				workers.Go(func() {
					rng := rand.New(rand.NewPCG(1, uint64(w+1)))
					// On, until the loss has come, however little of this was work of the GPU's.
					for op := 0; op < testseed.Rounds(100, 40) || lost.Load() == 0 && op < 2000; op++ {
						if errors.Is(run.step(t.Context(), rng), cuda.ErrIllegalAddress) {
							lost.Add(1)
						}
					}
				})
			}
			workers.Wait()
			if lost.Load() == 0 {
				t.Error("the GPU was lost, and nobody was told")
			}
			isPassedBy(t, eng, repo)
			got, err := openedFrom(t, eng, b)
			if err != nil {
				t.Fatal(err)
			}
			if err := convert.Equal(kept, got); err != nil {
				t.Error(err)
			}
			got.Release()
			if err := eng.Close(); !errors.Is(err, cuda.ErrIllegalAddress) {
				t.Errorf("closing says %v", err)
			}
			for _, s := range eng.Stats().Spaces {
				if s.Used() != 0 {
					t.Errorf("%s ends with %+v", s.ID, s.Usage)
				}
			}
			if n := e.Live("contexts"); n != 0 {
				t.Errorf("%d contexts are left", n)
			}
		})
	}
}

// isPassedBy checks that what may go elsewhere than to the GPU that is lost does, and that the rest
// is refused.
func isPassedBy(t *testing.T, eng *spillway.Engine, repo *repository.Repository) {
	t.Helper()
	rec := numberedRecord(1<<20, 1000, wordList(1, 10))
	defer rec.Release()
	if err := repo.Put(t.Context(), randomPartitions+1, rec); err != nil {
		t.Fatal(err)
	}
	if b, _ := repo.Peek(randomPartitions + 1); b.Info().Space == lostGPU {
		t.Errorf("what is put after the loss lies in %s", b.Info().Space)
	}
	err := repo.Put(t.Context(), randomPartitions+2, rec, repository.WithPlacement(reservation.Specific(lostGPU)))
	var lost *tier.LostError
	if !errors.As(err, &lost) || lost.Space != lostGPU || !errors.Is(err, cuda.ErrIllegalAddress) || errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("putting there: %v", err)
	}
	if n := warningsOf(eng.Warnings(), causes.GPULost); n != 1 {
		t.Errorf("there are %d warnings of it: %v", n, eng.Warnings())
	}
}

// TestOneOfTwoContextsIsLost: the Put that finds out goes to the other GPU, as do those after it.
func TestOneOfTwoContextsIsLost(t *testing.T) {
	tiertest.NoLeaks(t)
	e := cudatest.New(t, cudatest.Config{Devices: 2})
	gpu := spillway.GPUConfig{Backend: spillway.CUDA, Memory: spillway.Bytes(1 << 20)}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		CUDALibrary: e.Path, GPUs: []spillway.GPUConfig{gpu, gpu}, HostMemory: spillway.Bytes(1 << 20),
		Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}}, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	plan, err := eng.Plan("two")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	words := wordList(1, 1500)
	e.FailWork(0, cuda.ErrIllegalAddress, true)
	for i := range 4 {
		rec := numberedRecord(int64(i), 1000, words)
		if err := repo.Put(t.Context(), i, rec, repository.WithPlacement(reservation.AnyInTierPreferring(tier.GPU, 0))); err != nil {
			t.Fatal(err)
		}
		b, _ := repo.Peek(i)
		if at := b.Info().Space; at != otherGPU {
			t.Errorf("batch %d lies in %s", i, at)
		}
		for h, err := range repo.Drain(t.Context(), i, tier.GPU) {
			if err != nil {
				t.Fatal(err)
			}
			got, err := eng.Mover().Record(t.Context(), h)
			if err == nil {
				err = convert.Equal(rec, got)
				got.Release()
			}
			if err := errors.Join(err, h.Close()); err != nil {
				t.Error(err)
			}
		}
		rec.Release()
	}
	isPassedBy(t, eng, repo)
	for _, s := range eng.Stats().Spaces {
		if s.Lost != (s.ID == lostGPU) {
			t.Errorf("the stats of %s say lost: %v", s.ID, s.Lost)
		}
	}
	if err := eng.Close(); !errors.Is(err, cuda.ErrIllegalAddress) {
		t.Errorf("closing says %v", err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Used() != 0 {
			t.Errorf("%s ends with %+v", s.ID, s.Usage)
		}
	}
}

// openedFrom opens a batch in the host's memory.
func openedFrom(t *testing.T, eng *spillway.Engine, b *batch.Batch) (arrow.RecordBatch, error) {
	h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		return nil, err
	}
	rec, err := eng.Mover().Record(t.Context(), h)
	return rec, errors.Join(err, h.Close())
}
