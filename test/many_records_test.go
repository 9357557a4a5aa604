package test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestReleaseAmongManyRecords: with many open records, each on a batch that stays, a waiter for the
// room of one has it once that is released: before the monitor's next period begins.
func TestReleaseAmongManyRecords(t *testing.T) {
	t.Parallel()
	records := testseed.Rounds(10000, 300)
	synctest.Test(t, func(t *testing.T) {
		eng, repo := openPlain(t, spillway.Config{HostMemory: spillway.Bytes(128 << 20), Disks: []spillway.DiskConfig{{Dir: t.TempDir(), Capacity: spillway.Bytes(64 << 20)}}})
		rec := arrowgen.Ints(1, 10, 1)
		defer rec.Release()
		var open []arrow.RecordBatch
		for i := range records {
			if err := repo.Put(t.Context(), i, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
				t.Fatal(err)
			}
			b, _ := repo.Peek(i)
			h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
			if err != nil {
				t.Fatal(err)
			}
			r, err := eng.Mover().Record(t.Context(), h)
			if err := errors.Join(err, h.Close()); err != nil {
				t.Fatal(err)
			}
			open = append(open, r)
		}
		host := tier.ID{Kind: tier.Host}
		account, _ := eng.Holders(host)
		one := account.Holders[0].Bytes / int64(records)
		full, err := eng.Reserve(t.Context(), reservation.Specific(host), account.Available/4096*4096)
		if err != nil {
			t.Fatal(err)
		}
		defer synctest.Wait()
		for i := range 5 {
			served := make(chan time.Time)
			go func() {
				r, err := eng.Reserve(t.Context(), reservation.Specific(host), one)
				at := time.Now()
				if err != nil {
					t.Error(err)
				} else {
					defer r.Release()
				}
				served <- at
				<-served // it keeps its room, so that the next has to wait, too
			}()
			time.Sleep(300 * time.Millisecond) // the monitor and the search for deadlocks find nothing
			begun := time.Now()
			open[i*37%len(open)].Release()
			open[i*37%len(open)] = nil
			if took := (<-served).Sub(begun); took >= 50*time.Millisecond {
				t.Errorf("release %d: the one who waited was served after %v", i, took)
			}
			defer close(served)
		}
		for _, r := range open {
			if r != nil {
				r.Release()
			}
		}
		if err := full.Release(); err != nil {
			t.Error(err)
		}
	})
}
