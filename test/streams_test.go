package test

import (
	"io"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// Sixteen moves out of a GPU are under way at a time: each has a stream, although none of
// those before it ends.
func TestSixteenMovesOutOfAGPUAtOnce(t *testing.T) {
	const moves = 16
	var mu sync.Mutex
	under := 0
	all, giveUp := make(chan struct{}), make(chan struct{})
	inside := func(string, int64) {
		mu.Lock()
		if under++; under == moves {
			close(all)
		}
		mu.Unlock()
		select {
		case <-all:
		case <-giveUp:
		}
	}
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs: []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(4 << 20), Wrap: func(d tier.Device) (tier.Device, error) {
			return faultdev.New(d, 1, faultdev.Rule{Ops: []string{"copy-to-host"}, Effect: faultdev.Do(inside)}), nil
		}}},
		HostMemory: spillway.Bytes(8 << 20),
		Disks:      []spillway.DiskConfig{},
		Logger:     slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer eng.Close()
	plan, err := eng.Plan("p")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("scan", 0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range moves {
		if err := repo.Put(t.Context(), i, numberedRecord(int64(i), 50, wordList(1, 5)), repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			t.Fatal(err)
		}
	}
	var wg sync.WaitGroup
	for i := range moves {
		b, err := repo.Take(t.Context(), i, batch.Idle)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Host)); err != nil {
				t.Error(err)
			}
			if err := b.Drop(); err != nil {
				t.Error(err)
			}
		})
	}
	select {
	case <-all:
	case <-time.After(20 * time.Second): // only when it fails
		mu.Lock()
		t.Errorf("only %d of %d moves are under way at once", under, moves)
		mu.Unlock()
	}
	close(giveUp)
	wg.Wait()
}
