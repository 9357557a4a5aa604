package test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// openOnHost opens an engine with a host space of 2 MiB and one disk.
func openOnHost(t *testing.T, d spillway.DiskConfig) (*spillway.Engine, *tier.Space) {
	t.Helper()
	cfg := plainConfig(t)
	cfg.GPUs, cfg.Hosts, cfg.Disks = []spillway.GPUConfig{}, cfg.Hosts[:1], []spillway.DiskConfig{d}
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return eng, spaceAt(eng, tier.Host, 0)
}

// fillUp puts batches at rest into all the room of a tier.
func fillUp(t *testing.T, eng *spillway.Engine, k tier.Kind) (all []*batch.Batch) {
	t.Helper()
	s := spaceAt(eng, k, 0)
	for s.State().Available >= tier.Page {
		id := batch.ID(1 + 1000*int(k) + len(all))
		all = append(all, inTier(t, eng, k, id, min(256<<10, s.State().Available/tier.Page*tier.Page), false))
	}
	return all
}

// TestOwnerWaitsForSlowMoves: an owner that holds something and waits for what moves bring is no
// deadlock, however long they take.
func TestOwnerWaitsForSlowMoves(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		files := faultfs.New(disk.OS(), 1)
		eng, host := openOnHost(t, spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(16 << 20), FS: files})
		files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Slow(time.Minute)})
		ctx := reservation.NewOwner("the test").Context(t.Context())
		held, err := eng.Reserve(ctx, reservation.Specific(host.ID()), tier.Page)
		if err != nil {
			t.Fatal(err)
		}
		all := fillUp(t, eng, tier.Host)
		start := time.Now()
		more, err := eng.Reserve(ctx, reservation.Specific(host.ID()), 1<<20)
		if err != nil || time.Since(start) < time.Minute {
			t.Errorf("after %v: %v", time.Since(start), err)
		}
		release(t, held, more)
		dropAll(t, all)
		closeClean(t, eng)
	})
}

// TestWaitBesideWhatTheEngineKeeps: a wait for room that batches at rest and the engine's own bytes
// fill is refused. The engine's own are its chunks for transfers, dictionaries, and what an engine
// before it has left on the disk.
func TestWaitBesideWhatTheEngineKeeps(t *testing.T) {
	persistNeedsLinux(t)
	synctest.Test(t, func(t *testing.T) {
		eng, host := openOnHost(
			t,
			spillway.DiskConfig{Dir: crashed(t, 3), Capacity: spillway.Bytes(16 << 20), Persist: true},
		)
		if n := spaceAt(eng, tier.Disk, 0).State().Held; len(eng.Persisted()) != 3 || n == 0 || host.State().Held == 0 {
			t.Errorf(
				"%d batches are kept, of %d bytes, and %d bytes are for transfers: the test shows nothing",
				len(eng.Persisted()),
				n,
				host.State().Held,
			)
		}
		if err := scanOf(t, eng).Put(t.Context(), 0, numberedRecord(0, 100, commonWords()), in(tier.Host)); err != nil {
			t.Error(err)
		}
		if eng.Mover().DictionaryBytes(host.ID()) == 0 {
			t.Error("the record has no dictionary of its own: the test shows nothing")
		}
		all := append(fillUp(t, eng, tier.Disk), fillUp(t, eng, tier.Host)...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if _, err := eng.Reserve(ctx, reservation.Specific(host.ID()), 1<<20); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("a wait in vain: %v", err)
		}
		dropAll(t, all)
		closeClean(t, eng)
	})
}

// TestIDsIncrease: no batch of an engine has the id of an earlier one, whatever has made either and
// whatever is gone.
func TestIDsIncrease(t *testing.T) {
	eng, _ := openSmall(t, 1<<20, 1<<20)
	last := batch.ID(0)
	next := func(b *batch.Batch, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		if b.ID() <= last {
			t.Errorf("batch %d comes after %d", b.ID(), last)
		}
		last = b.ID()
		dropAll(t, []*batch.Batch{b})
	}
	for _, name := range []string{"one", "two"} {
		plan, err := eng.Plan(name)
		if err != nil {
			t.Fatal(err)
		}
		repo, err := plan.Repository("scan", 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := repo.Put(t.Context(), 0, numberedRecord(0, 100, wordList(1, 10))); err != nil {
			t.Fatal(err)
		}
		b, err := repo.Take(t.Context(), 0, batch.Idle)
		if err != nil {
			t.Fatal(err)
		}
		clone, err := eng.Mover().Clone(t.Context(), b, nil)
		next(b, nil)
		next(clone, err)
		p, err := eng.Mover().
			Ingest(t.Context(), numberedRecord(0, 100, wordList(1, 10)), reservation.AnyInTier(tier.Host))
		if err != nil {
			t.Fatal(err)
		}
		next(eng.NewBatch(p))
	}
	closeClean(t, eng)
}

// TestErrorNamesTheDisk: of several disks.
func TestErrorNamesTheDisk(t *testing.T) {
	files := faultfs.New(disk.OS(), 1)
	cfg := plainConfig(t)
	cfg.Disks = append(cfg.Disks, spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(16 << 20), FS: files})
	eng, err := spillway.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	second := tier.ID{Kind: tier.Disk, Ordinal: 1}
	p, err := eng.Mover().Ingest(t.Context(), numberedRecord(0, 1000, wordList(1, 10)), reservation.Specific(second))
	if err != nil {
		t.Fatal(err)
	}
	b, err := eng.NewBatch(p)
	if err != nil {
		t.Fatal(err)
	}
	files.Add(faultfs.Rule{Ops: []string{"read"}, Effect: faultfs.Fail(errors.New("worn out"))})
	err = eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Host))
	var failed *disk.IOError
	if !errors.As(err, &failed) || failed.Space != second {
		t.Errorf("a move from %s: %v", second, err)
	}
	dropAll(t, []*batch.Batch{b})
	closeClean(t, eng)
}
