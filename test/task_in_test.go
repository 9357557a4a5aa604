package test

import (
	"context"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestTaskInHostMemoryWithoutGPUs: a task runs in host memory on an engine that has no GPU, with
// inputs that are on disk; without Task.In it is refused, and its inputs are restored.
func TestTaskInHostMemoryWithoutGPUs(t *testing.T) {
	t.Parallel()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:       []spillway.GPUConfig{},
		HostMemory: spillway.Bytes(4 * mib),
		Disks:      []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(16 * mib)}},
	})
	if err != nil {
		t.Fatal(err)
	}
	repo := scanOf(t, eng)
	for i := range int64(3) {
		rec := numberedRecord(i, 5_000, wordList(1, 100))
		if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
			t.Fatal(err)
		}
	}
	runs := 0
	for _, c := range []struct {
		in   reservation.Strategy
		left int
	}{{nil, 3}, {reservation.AnyInTier(tier.GPU), 3}, {reservation.AnyInTier(tier.Host), 0}} {
		claim := mustClaim(t, repo, 3)
		task := spillway.Task{Operator: "sum", Inputs: []*repository.Claim{claim}, In: c.in, Output: 4096}
		err := eng.RunTask(t.Context(), task, func(_ context.Context, g *spillway.Grant, in []*spillway.Handle) error {
			runs++
			for _, h := range in {
				if at := h.Space().ID(); at.Kind != tier.Host || at != g.Reservation().Space().ID() {
					t.Errorf("an input is in %s", at)
				}
			}
			return nil
		})
		if (err == nil) != (c.left == 0) || repo.Total() != c.left {
			t.Fatalf("in %v: %v, and %d batches are left", c.in, err, repo.Total())
		}
	}
	if runs != 1 {
		t.Errorf("%d runs", runs)
	}
	closeClean(t, eng)
}
