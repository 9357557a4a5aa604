package test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/books"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// openPlain opens an engine in which nothing may stand still for 10 s, with a repository.
func openPlain(t *testing.T, cfg spillway.Config) (*spillway.Engine, *repository.Repository) {
	t.Helper()
	cfg.StallTimeout, cfg.Logger = 10*time.Second, slog.New(slog.NewTextHandler(io.Discard, nil))
	if cfg.Topology == nil {
		cfg.Topology = thisMachine()
	}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeEngine(t, eng) })
	return eng, scanOf(t, eng)
}

// TestPlainReaderInItsOwnWay: a reader without an owner waits for room that the records keep which
// it returned before, by their bodies or by their dictionaries. Its error names the holders, and
// its batch stays.
func TestPlainReaderInItsOwnWay(t *testing.T) {
	t.Parallel()
	for name, one := range map[string]func() arrow.RecordBatch{
		"numbers":            func() arrow.RecordBatch { return arrowgen.Ints(1, 7000, 1) },
		"a dictionary each":  func() arrow.RecordBatch { return arrowgen.Coded(18) },
		"large dictionaries": func() arrow.RecordBatch { return arrowgen.Coded(30) },
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, func(t *testing.T) { readerInItsOwnWay(t, one) }) })
	}
}

func readerInItsOwnWay(t *testing.T, one func() arrow.RecordBatch) {
	const batches = 40
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // only a hang takes so long
	defer cancel()
	eng, repo := openPlain(
		t,
		spillway.Config{
			HostMemory: spillway.Bytes(1 << 20),
			Disks:      []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}},
		},
	)
	for i := range batches {
		rec := one() // with dictionaries of its own
		if err := repo.Put(
			t.Context(),
			i,
			rec,
			repository.WithPlacement(reservation.AnyInTier(tier.Disk)),
		); err != nil {
			t.Fatal(err)
		}
		rec.Release()
	}
	repo.CloseInput()
	var open []arrow.RecordBatch
	read := func() error {
		for i := range batches {
			rd, err := repo.Reader(ctx, i)
			if err != nil {
				return err
			}
			for rd.Next() {
				rd.RecordBatch().Retain()
				open = append(open, rd.RecordBatch())
			}
			err = rd.Err()
			rd.Release()
			if err != nil {
				return err
			}
		}
		return nil
	}
	begun := time.Now()
	err := read()
	var e *reservation.DeadlockError
	if !errors.As(err, &e) || e.Owner != "" || e.Space.Kind != tier.Host || len(e.Holdings.Holders) != 1 ||
		e.Holdings.Holders[0].Count != len(
			open,
		) || e.Holdings.Holders[0].Plan != "p" || e.Holdings.Holders[0].What != books.Record {
		t.Errorf("with %d records open it ended with %v", len(open), err)
	}
	if waited := time.Since(begun); waited < 10*time.Second || waited > 15*time.Second {
		t.Errorf("it ended after %v", waited)
	}
	account, _ := eng.Holders(tier.ID{Kind: tier.Host})
	if len(account.Holders) != 1 || account.Holders[0].Bytes+account.Engine != account.Used {
		t.Errorf("what keeps the memory is not explained by %+v", account)
	}
	first := len(open)
	for _, r := range open {
		r.Release()
	}
	open = nil
	left := 0
	for i := range batches {
		if _, ok := repo.Peek(i); ok {
			left++
		}
	}
	if first == 0 || first+left != batches {
		t.Errorf("%d records were read and %d batches are left, of %d", first, left, batches)
	}
}

// TestPlainHoldAndWaitOnHandles: sixteen goroutines of no owner hold a batch on the GPU each and
// acquire another one. Those with the error close theirs, and all others finish.
func TestPlainHoldAndWaitOnHandles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		eng, repo := openPlain(
			t,
			spillway.Config{
				GPUs:       []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(1 << 20)}},
				HostMemory: spillway.Bytes(8 << 20),
				Disks:      []spillway.DiskConfig{},
			},
		)
		fillGPU(t.Context(), t, eng, repo, 2*crowdSize)
		onGPU := reservation.AnyInTier(tier.GPU)
		var mu sync.Mutex
		var told, done int
		var all, holding sync.WaitGroup
		holding.Add(crowdSize)
		for i := range crowdSize {
			first, _ := repo.Peek(2 * i)
			second, _ := repo.Peek(2*i + 1)
			all.Go(func() {
				one, err := eng.Mover().Acquire(t.Context(), first, onGPU)
				holding.Done()
				if err != nil {
					t.Error(err)
					return
				}
				holding.Wait()
				two, err := eng.Mover().Acquire(t.Context(), second, onGPU)
				if err == nil {
					err = two.Close()
				}
				mu.Lock()
				defer mu.Unlock()
				var e *reservation.DeadlockError
				switch {
				case err == nil:
					done++
				case errors.As(err, &e) && len(e.Holdings.Holders) == 1 && e.Holdings.Holders[0].Count == crowdSize &&
					e.Holdings.Holders[0].Operator == "scan":
					told++
				default:
					t.Errorf("goroutine %d: %v", i, err)
				}
				if err := one.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if told != 1 || done != crowdSize-1 {
			t.Errorf("%d were told and %d finished, want 1 and %d", told, done, crowdSize-1)
		}
	})
}

// TestSlowConsumerIsWaitedFor: Put waits for a consumer that works on one record for long. The room
// is full of batches at rest, which it will take; its record alone blocks no caller.
func TestSlowConsumerIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, repo := openPlain(
			t,
			spillway.Config{
				HostMemory: spillway.Bytes(1 << 20),
				GPUs:       []spillway.GPUConfig{},
				Disks:      []spillway.DiskConfig{},
			},
		)
		rec := arrowgen.Ints(1, 7000, 1)
		defer rec.Release()
		const batches = 40
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer repo.CloseInput()
			for range batches {
				if err := repo.Put(t.Context(), 0, rec); err != nil {
					t.Error(err)
					return
				}
			}
		}()
		rd, err := repo.Reader(t.Context(), 0)
		if err != nil {
			t.Fatal(err)
		}
		read := 0
		for rd.Next() {
			if read++; read == 3 {
				time.Sleep(time.Duration(testseed.Rounds(10, 2)) * time.Minute)
			}
		}
		if rd.Err() != nil || read != batches {
			t.Errorf("%d records were read: %v", read, rd.Err())
		}
		rd.Release()
		<-done
	})
}
