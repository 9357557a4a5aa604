package test

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation/permit"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// hostOf sets the host memory, and gives the disk four times as much.
func hostOf(n int64) func(*spillway.Config) {
	return func(c *spillway.Config) {
		c.HostMemory = spillway.Bytes(n)
		c.Disks[0].Capacity = spillway.Bytes(4 * n)
	}
}

// TestManySmallBatchesAreWrittenAhead: as many get copies as lie above the stop mark.
func TestManySmallBatchesAreWrittenAhead(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng, repo, host := openWritingAhead(t, 1<<30, hostOf(int64(testseed.Rounds(64*mib, 16*mib))))
		words := wordList(1, 10)
		for i := int64(0); host.State().Pressure < host.State().Trigger-mib; i++ {
			if err := repo.Put(t.Context(), 0, numberedRecord(i, 100, words), in(tier.Host)); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(5 * time.Minute)
		n := 0
		for b := range repo.Batches(0) {
			if len(b.Copies()) > 0 {
				n++
			}
		}
		if got, above := aheadOf(eng).Ahead, host.State().Pressure-host.State().Stop; got < above {
			t.Errorf("%d batches of %d bytes were copied; %d bytes lie above the stop mark", n, got, above)
		}
		closeRepo(t, eng, repo)
	})
}

// TestWritingAheadFollowsThePressure: what is copied is what lies above the stop mark now, not when
// a job was begun.
func TestWritingAheadFollowsThePressure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		eng, repo, host := openWritingAhead(t, mib, hostOf(128*mib))
		words := wordList(1, 10)
		for i := int64(0); host.State().Pressure < host.State().Trigger-6*mib; i++ {
			if err := repo.Put(t.Context(), 0, numberedRecord(i, 50_000, words), in(tier.Host)); err != nil {
				t.Fatal(err)
			}
		}
		var all []*batch.Batch
		for b := range repo.Batches(0) {
			all = append(all, b)
		}
		one := all[0].Info().Bytes
		for aheadOf(eng).Ahead == 0 {
			time.Sleep(time.Second)
		}
		for i := len(all) - 1; host.State().Pressure-one > host.State().Stop; i-- { // the hot ones
			if err := all[i].Drop(); err != nil {
				t.Fatal(err)
			}
		}
		before, above := aheadOf(eng).Ahead, host.State().Pressure-host.State().Stop
		time.Sleep(2 * time.Minute)
		if got := aheadOf(eng).Ahead; got > before+one {
			t.Errorf("%d bytes lie above the stop mark, batches have %d; %d are copied, of which %d were before", above, one, got, before)
		}
		closeRepo(t, eng, repo)
	})
}

// TestRateOfWhatIsDropped: a batch that is dropped while it is written counts for the rate.
func TestRateOfWhatIsDropped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		files := faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Slow(100 * time.Millisecond)})
		eng, repo, host := openWritingAhead(t, mib, hostOf(128*mib), func(c *spillway.Config) { c.Disks[0].FS = files })
		words := wordList(1, 10)
		for i := int64(0); host.State().Pressure < host.State().Trigger-6*mib; i++ {
			if err := repo.Put(t.Context(), 0, numberedRecord(i, 100_000, words), in(tier.Host)); err != nil {
				t.Fatal(err)
			}
		}
		var all []*batch.Batch
		for b := range repo.Batches(0) {
			all = append(all, b)
		}
		seen := make(map[*batch.Batch]int)
		dropped := 0
		start := time.Now()
		before := files.Count("write")
		for time.Since(start) < 2*time.Second && host.State().Pressure > host.State().Stop {
			time.Sleep(5 * time.Millisecond)
			for _, b := range all {
				i := b.Info()
				if i.State == batch.Idle && i.Leased {
					if seen[b]++; seen[b] == 2 { // it is being written
						if err := b.Drop(); err != nil {
							t.Error(err)
						}
						dropped++
					}
				}
			}
		}
		writes := files.Count("write") - before
		one := all[len(all)-1].Info().Bytes
		t.Logf("batches of %d bytes, %d dropped, %d write requests in %v, ahead %+v", one, dropped, writes, time.Since(start), aheadOf(eng).Ahead)
		if most := 1 + int(time.Since(start)*mib/time.Second/time.Duration(one)); dropped > most+1 {
			t.Errorf("with 1 MiB/s %d batches of %d bytes were begun, and %d requests written, in %v", dropped, one, writes, time.Since(start))
		}
		closeRepo(t, eng, repo)
	})
}

// TestNoRecordOfWhatWasWrittenAhead: what is in host memory is changed and dropped without waiting
// for a disk that hangs and persists.
func TestNoRecordOfWhatWasWrittenAhead(t *testing.T) {
	persistNeedsLinux(t)
	for name, ahead := range map[string]bool{"with": true, "without": false} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			files := faultfs.New(disk.OS(), 1)
			eng := persistentEngine(t, dir, func(c *spillway.Config) { c.WriteAhead, c.Disks[0].FS = -1, files })
			repo := scanOf(t, eng)
			if err := repo.Put(t.Context(), 0, persistedRecord(1), in(tier.Host)); err != nil {
				t.Fatal(err)
			}
			b, _ := repo.Peek(0)
			if ahead {
				if n, err := eng.Mover().WriteAhead(t.Context(), b, 0); n != 0 || err != nil {
					t.Fatalf("%d bytes were written to a disk that persists, %v", n, err)
				}
			}
			release := make(chan struct{})
			remove := files.Add(faultfs.Rule{Ops: []string{"write", "punch", "allocate"}, Effect: faultfs.Do(func(op, path string) { t.Logf("%s %s", op, path); <-release })})
			done := make(chan struct{})
			go func() { b.SetPlace(batch.Place{Plan: 7, Name: "x", Operator: "other"}); close(done) }()
			select {
			case <-done:
			case <-time.After(2 * time.Second):
				t.Error("SetPlace waits for the disk")
			}
			dropped := make(chan struct{})
			go func() { <-done; b.Drop(); close(dropped) }()
			select {
			case <-dropped:
			case <-time.After(2 * time.Second):
				t.Error("Drop waits for the disk")
			}
			remove()
			close(release)
			<-dropped
			closePersistent(t, eng)
		})
	}
}

// TestMonitorSleepsWhilePermitsAreHeld: an idle engine sleeps while the program keeps the permits.
func TestMonitorSleepsWhilePermitsAreHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool, err := permit.New(permit.Config{Slots: new(1)})
		if err != nil {
			t.Fatal(err)
		}
		eng, repo, host := openWritingAhead(t, 64*mib, func(c *spillway.Config) { c.Limits.PermitPool = pool })
		slot, err := pool.TryAcquire(permit.Request{Spill: true})
		if err != nil {
			t.Fatal(err)
		}
		fillHost(t, eng, repo, host.State().Trigger-200<<10)
		time.Sleep(time.Minute)
		looks := eng.Stats().Monitor.Looks
		time.Sleep(100 * time.Second)
		if n := eng.Stats().Monitor.Looks - looks; n > 110 {
			t.Errorf("the monitor looked %d times in 100 s", n)
		}
		if err := slot.Release(); err != nil {
			t.Error(err)
		}
		closeRepo(t, eng, repo)
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	})
}
