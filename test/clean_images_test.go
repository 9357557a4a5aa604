package test

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/events"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
)

// TestOtherBytesWhileACopyIsMade: a program gives a batch other bytes while the engine copies it to
// the disk ahead of need. The copy has the old bytes, so no move may use it.
func TestOtherBytesWhileACopyIsMade(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		words := wordList(1, 10)
		before, after := numberedRecord(1, 2500, words), numberedRecord(1_000_000, 2500, words)
		var b *batch.Batch
		var commit func() error
		var once sync.Once
		eng, repo, host := openWritingAhead(t, mib, func(c *spillway.Config) {
			c.Events = on(events.CopyMade, func(e spillway.Event) {
				once.Do(func() {
					if !e.Ahead || e.Batch != uint64(b.ID()) {
						t.Errorf("the first copy is %s", e)
					}
					if err := commit(); err != nil {
						t.Error(err)
					}
				})
			})
		})
		if err := repo.Put(t.Context(), 0, before, in(tier.Host)); err != nil {
			t.Fatal(err)
		}
		b, _ = repo.Peek(0)
		other, err := eng.Mover().Ingest(t.Context(), after, reservation.Specific(host.ID()))
		if err != nil {
			t.Fatal(err)
		}
		commit = func() error {
			transit, err := b.TryTransit()
			if err != nil {
				return err
			}
			return transit.Commit(other, false)
		}
		// All that is above the stop mark is copied.
		if err := host.SetMarks(tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.001}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		for _, to := range []tier.Kind{tier.Disk, tier.Host} {
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(to)); err != nil {
				t.Fatal(err)
			}
		}
		if s := aheadOf(eng); s.Ahead == 0 {
			t.Error("nothing was copied ahead: the test shows nothing")
		}
		got := recordOf(t, eng, b)
		if err := convert.Equal(after, got); err != nil {
			t.Error(err)
		}
		got.Release()
		closeRepo(t, eng, repo)
	})
}

// TestWritingAheadEndsAtTheStopMark: when the pressure falls to the stop mark while batches are
// copied ahead of need, no other batch is copied.
func TestWritingAheadEndsAtTheStopMark(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var copies atomic.Int64
		var host *tier.Space
		eng, repo, space := openWritingAhead(t, 64*mib, func(c *spillway.Config) {
			c.Events = on(events.CopyMade, func(spillway.Event) {
				if copies.Add(1) == 1 { // as if memory had become free
					if err := host.SetMarks(tier.Marks{Limit: 1, Trigger: 1, Stop: 0.95}); err != nil {
						t.Error(err)
					}
				}
			})
		})
		host = space
		fillHost(t, eng, repo, host.State().Trigger-200<<10)
		time.Sleep(time.Minute)
		if n := copies.Load(); n != 1 {
			t.Errorf("%d batches were copied, want 1: the space was below its stop mark then", n)
		}
		closeRepo(t, eng, repo)
	})
}

// TestOldestCopyGoesFirst: where a disk needs the room of copies, it frees them in the order in which
// they were made, whether they share a dictionary or not, and only as many as are needed.
func TestOldestCopyGoesFirst(t *testing.T) {
	t.Parallel()
	told := new(heard)
	eng := openMarked(t, 8*mib, func(c *spillway.Config) {
		c.Disks[0].Capacity, c.WriteAhead = spillway.Bytes(8*mib), -1
		// Above the stop mark, the monitor frees copies that share a dictionary first. The disk is not
		// so full before the last copy has gone.
		c.DiskMarks = tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9999}
		c.Events = told.add
	})
	dropped := func() (all []batch.ID) {
		for _, e := range told.of(events.CopyDropped) {
			all = append(all, batch.ID(e.Batch))
		}
		return all
	}
	repo := scanOf(t, eng)
	var want []batch.ID
	for n := range 8 { // every other one has a dictionary that is too large to be part of the batch
		words := wordList(1, 10)
		if n%2 == 1 {
			words = wordList(uint64(n), 3000)
		}
		if err := repo.Put(t.Context(), n, numberedRecord(int64(n), 2500, words), in(tier.Disk)); err != nil {
			t.Fatal(err)
		}
	}
	for _, n := range []int{3, 0, 6, 1, 4, 7, 2, 5} {
		b, _ := repo.Peek(n)
		moveAlong(t, eng, b, firstHost)
		want = append(want, b.ID())
	}
	disk := eng.Spaces()[2]
	var taken []*tier.Buffer
	take := func() { // a page, so that it fits wherever one is free
		r, err := eng.Reserve(t.Context(), reservation.Specific(disk.ID()), tier.Page)
		if err != nil {
			t.Fatal(err)
		}
		buf, err := r.Alloc(tier.Page)
		if err := errors.Join(err, r.Release()); err != nil {
			t.Fatal(err)
		}
		taken = append(taken, buf)
	}
	for n := range want {
		for disk.State().Limit-disk.State().Used() > disk.State().Cached {
			take()
		}
		if got := dropped(); len(got) > n {
			t.Fatalf("the copies of %v went while there was room", got)
		}
		take()
		if got := dropped(); !slices.Equal(got, want[:n+1]) {
			t.Fatalf("the copies of %v went, want those of %v", got, want[:n+1])
		}
	}
	for _, buf := range taken {
		if err := buf.Release(); err != nil {
			t.Error(err)
		}
	}
	closeRepo(t, eng, repo)
}
