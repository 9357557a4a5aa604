package test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// openSmallTiers opens an engine of 1 MiB of GPU memory, 1 MiB of host memory and 2 MiB of disk.
func openSmallTiers(t *testing.T, stallTimeout time.Duration) *spillway.Engine {
	t.Helper()
	eng, err := spillway.Open(t.Context(), spillway.Config{
		GPUs:         []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(mib)}},
		HostMemory:   spillway.Bytes(mib),
		Disks:        []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(2 * mib)}},
		StallTimeout: stallTimeout,
	})
	if err != nil {
		t.Fatal(err)
	}
	return eng
}

// putUntilFull puts batches of so many rows until there is no room without waiting, and returns how
// many.
func putUntilFull(t *testing.T, repo *repository.Repository, rows func() int) (n int64) {
	t.Helper()
	words := wordList(1, 10)
	for refused := 0; refused < 3; { // the monitor may move one a little later
		err := repo.Put(t.Context(), 0, numberedRecord(n, rows(), words), repository.WithoutWait())
		switch {
		case err == nil:
			n++
			refused = 0
		case !errors.Is(err, tier.ErrNoSpace):
			t.Fatal(err)
		default:
			refused++
			time.Sleep(20 * time.Millisecond)
		}
		if n > 10_000 {
			t.Fatal("it is never full")
		}
	}
	return n
}

// TestProducersAreHeldBack: when all tiers are full, consumers still bring up what they need, and
// who puts more waits until they have freed room.
func TestProducersAreHeldBack(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		to   tier.Kind
		rows func() int
	}{
		{"a drain to host", tier.Host, func() int { return 1000 }},
		{"a drain to a GPU", tier.GPU, func() int { return 1000 }},
		{"batches of all sizes", tier.Host, rowsUpTo(5000)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eng := openSmallTiers(t, 0)
			repo := scanOf(t, eng)
			n := putUntilFull(t, repo, tt.rows)
			more := n
			put := make(chan error, 1)
			go func() {
				words := wordList(1, 10)
				for i := range more {
					if err := repo.Put(t.Context(), 0, numberedRecord(n+i, tt.rows(), words)); err != nil {
						put <- err
						return
					}
				}
				repo.CloseInput()
				put <- nil
			}()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			got := int64(0)
			for h, err := range repo.Drain(ctx, 0, tt.to, repository.WaitInput()) {
				if err != nil {
					t.Fatalf("after %d of %d batches: %v", got, n+more, err)
				}
				got++
				if err := h.Close(); err != nil {
					t.Fatal(err)
				}
			}
			if err := <-put; err != nil {
				t.Error(err)
			}
			if got != n+more {
				t.Errorf("%d batches of %d", got, n+more)
			}
			closeClean(t, eng)
		})
	}
}

// rowsUpTo returns numbers of rows by chance, the largest first: what is kept free for consumers is
// the room for the largest so far.
func rowsUpTo(most int) func() int {
	first := true
	return func() int {
		if first {
			first = false
			return most
		}
		return 1 + rand.IntN(most)
	}
}

// TestNobodyIsLeft: if nobody frees anything, the error comes after StallTimeout and names it.
func TestNobodyIsLeft(t *testing.T) {
	t.Parallel()
	eng := openSmallTiers(t, 100*time.Millisecond)
	repo := scanOf(t, eng)
	rows := func() int { return 1000 }
	n := putUntilFull(t, repo, rows)
	var err error
	for last := n + 10; err == nil && n < last; n++ { // the first ones get the headroom
		err = repo.Put(t.Context(), 0, numberedRecord(n, 1000, wordList(1, 10)))
	}
	if !errors.Is(err, tier.ErrNoSpace) || !strings.Contains(err.Error(), "batches at rest fill it") {
		t.Errorf("the outcome is %v", err)
	}
	closeClean(t, eng)

	eng = openSmallTiers(t, -1)
	repo = scanOf(t, eng)
	n = putUntilFull(t, repo, rows)
	ctx, cancel := context.WithTimeoutCause(t.Context(), 300*time.Millisecond, errEnough)
	defer cancel()
	if err := repo.Put(ctx, 0, numberedRecord(n, 1000, wordList(1, 10))); !errors.Is(err, errEnough) {
		t.Errorf("without a bound the outcome is %v", err)
	}
	closeClean(t, eng)
}

var errEnough = errors.New("enough")

// TestHeadroomIsNoLoss: what is kept free for batches on their way up can be had by a reservation,
// and while slower tiers have room nothing is kept.
func TestHeadroomIsNoLoss(t *testing.T) {
	t.Parallel()
	eng := openSmallTiers(t, 100*time.Millisecond)
	repo := scanOf(t, eng)
	putUntilFull(t, repo, func() int { return 1000 })
	i := slices.IndexFunc(eng.Spaces(), func(s *tier.Space) bool { return s.Kind() == tier.Host })
	host := eng.Spaces()[i]
	free := host.State().Available / 4096 * 4096
	if free < 40_000 {
		t.Fatalf("%d bytes are free in host: too few for one batch", free)
	}
	r, err := eng.Reservations().TryReserve(reservation.Specific(host.ID()), free, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Release(); err != nil {
		t.Fatal(err)
	}
	closeClean(t, eng)
}
