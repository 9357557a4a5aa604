package spillway_test

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
	"github.com/spillway-db/spillway/internal/cuda"
	"github.com/spillway-db/spillway/internal/cuda/cudatest"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// TestGPUIsLostUnderLoad: work fails that takes the context with it, and every call of the driver then. Whoever waits is
// told, what is not on the GPU is as it was, and the engine closes with its books at zero.
func TestGPUIsLostUnderLoad(t *testing.T) {
	for _, after := range []int64{0, 20, 300} {
		t.Run(fmt.Sprint(after), func(t *testing.T) {
			tiertest.NoLeaks(t)
			e := cudatest.New(t, cudatest.Config{})
			eng, err := spillway.Open(t.Context(), spillway.Config{
				CUDALibrary: e.Path, GPUs: []spillway.GPU{{Backend: spillway.CUDA, Memory: 1 << 20}}, HostMemory: 1 << 20,
				Disks: []spillway.Disk{{Dir: t.TempDir(), Capacity: 64 << 20}}, MonitorPeriod: time.Millisecond,
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
					for range 100 {
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

// openedFrom opens a batch in the host's memory.
func openedFrom(t *testing.T, eng *spillway.Engine, b *batch.Batch) (arrow.RecordBatch, error) {
	h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
	if err != nil {
		return nil, err
	}
	rec, err := eng.Mover().Record(t.Context(), h)
	return rec, errors.Join(err, h.Close())
}
