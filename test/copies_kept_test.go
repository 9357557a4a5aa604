package test

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/faultdev"
)

// TestCopiesOutliveAFaultOfTheGPU: a GPU fails a move, or is lost. That says nothing about the
// disk, so batches keep their copies there, and with them their records.
func TestCopiesOutliveAFaultOfTheGPU(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	for _, name := range []string{"lost", "failed work"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			var gpu *faultdev.Device
			eng := persistentEngine(t, dir, func(c *spillway.Config) {
				c.GPUs = []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(8 * mib), Wrap: func(dev tier.Device) (tier.Device, error) {
					gpu = faultdev.New(dev, 1)
					return gpu, nil
				}}}
			})
			repo := scanOf(t, eng)
			var all []*batch.Batch
			for n := range 2 {
				if err := repo.Put(t.Context(), n, numberedRecord(int64(n), 16_000, wordList(1, 10)), repository.WithPlacement(reservation.AnyInTier([]tier.Kind{tier.Disk, tier.GPU}[n]))); err != nil {
					t.Fatal(err)
				}
				b, _ := repo.Peek(n)
				all = append(all, b)
			}
			a, b := all[0], all[1]
			moveAlong(t, eng, a, tier.ID{Kind: tier.GPU})
			if n := persistIn(t, dir); n != 1 || len(a.Copies()) != 1 {
				t.Fatalf("%d persist, copies in %v", n, a.Copies())
			}
			rule := faultdev.Rule{Ops: []string{"copy-*"}, Times: 1, Effect: faultdev.FailWork(errors.New("one kernel failed"))}
			if name == "lost" {
				rule.Effect = faultdev.Do(func(string, int64) { gpu.Lose(errFellOff) })
			}
			gpu.Add(rule)
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)); err == nil {
				t.Fatal("the move succeeded")
			}
			if n := persistIn(t, dir); n != 1 || len(a.Copies()) != 1 {
				t.Errorf("%d persist; copies in %v: the disk has not failed", n, a.Copies())
			}
			if err := repo.Close(t.Context()); err != nil {
				t.Error(err)
			}
			_ = eng.Close()
		})
	}
}

// TestCopyThatIsRecordedWhenItsDiskFails: the record of a copy is being written at the moment when a
// move of another batch finds that the disk fails, or returns corrupt bytes. That copy goes, too, so
// that no batch is moved to it.
func TestCopyThatIsRecordedWhenItsDiskFails(t *testing.T) {
	persistNeedsLinux(t)
	for name, c := range map[string]struct {
		from, to tier.ID // the move of the other batch
		op       string
		effect   faultfs.Effect
		want     error
	}{
		"a write fails": {firstHost, firstDisk, "write", faultfs.Fail(syscall.EIO), syscall.EIO},
		"a read fails":  {firstDisk, firstHost, "read", faultfs.Fail(syscall.EIO), syscall.EIO},
		"a bit flips":   {firstDisk, firstHost, "read", faultfs.BitFlip(), convert.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			files := faultfs.New(disk.OS(), 1)
			eng := persistentEngine(t, t.TempDir(), func(c *spillway.Config) { c.Disks[0].FS = files })
			repo := scanOf(t, eng)
			var both [2]*batch.Batch
			for n := range both {
				rec := numberedRecord(int64(n), 16_000, wordList(1, 10))
				if err := repo.Put(t.Context(), n, rec, in(tier.Host)); err != nil {
					t.Fatal(err)
				}
				both[n], _ = repo.Peek(n)
			}
			a, b := both[0], both[1]
			moveAlong(t, eng, a, firstDisk, firstHost)
			moveAlong(t, eng, b, c.from)
			goOn, placed := recordsAnew(t, repo, files, a)
			works := files.Add(faultfs.Rule{Ops: []string{c.op}, Times: 1, Effect: c.effect})
			if err := eng.Mover().Move(t.Context(), b, reservation.Specific(c.to)); !errors.Is(err, c.want) {
				t.Errorf("the move ended with %v, want %v", err, c.want)
			}
			close(goOn)
			<-placed
			works()
			if in := a.Copies(); len(in) > 0 {
				t.Errorf("a copy is left on the disk that failed: %v", in)
			}
			if err := errors.Join(a.Drop(), repo.Close(t.Context())); err != nil {
				t.Error(err)
			}
			closePersistent(t, eng)
		})
	}
}

// TestCopiesWithDictionariesWhereTheDiskHasRoom: somebody waits for the GPU, which is in use. The
// disk is nearly empty: its copies are in nobody's way.
func TestCopiesWithDictionariesWhereTheDiskHasRoom(t *testing.T) {
	t.Parallel()
	eng := openMarked(t, 8*mib)
	repo := scanOf(t, eng)
	up := putWithCopies(t, eng, repo, 4, wordList(1, 6000))
	if eng.Mover().DictionaryBytes(firstDisk) == 0 {
		t.Fatal("no dictionaries")
	}
	gpu := eng.Spaces()[0]
	r, err := eng.Reserve(t.Context(), reservation.Specific(gpu.ID()), gpu.State().Room) // work that goes on
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if w, err := eng.Reserve(ctx, reservation.Specific(gpu.ID()), mib); err == nil {
		t.Error(w.Release(), "it need not wait")
	}
	disk := eng.Spaces()[2]
	if n := copiesOf(up); n != len(up) {
		t.Errorf("%d of %d copies are left; the disk has %d of %d bytes in use",
			n, len(up), disk.State().Used(), disk.Capacity)
	}
	if err := r.Release(); err != nil {
		t.Error(err)
	}
	closeBoth(t, repo, eng)
}

// TestReadAheadKeepsWhatPersists: batches that were recorded and that nobody has consumed survive
// the process, also while a Drain is under way and the disk fills.
func TestReadAheadKeepsWhatPersists(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	for name, opts := range map[string][]repository.TakeOption{"none": {repository.ReadAhead(0)}, "two": {repository.ReadAhead(2)}, "as many as it takes": nil} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			eng := persistentEngine(t, dir, func(c *spillway.Config) {
				c.Disks[0].Capacity = spillway.Bytes(4 * mib)
				c.Disks[0].Marks = tier.Marks{Limit: 1, Trigger: 0.99, Stop: 0.98}
			})
			repo := scanOf(t, eng)
			put := func(partition int, n int64) error {
				return repo.Put(t.Context(), partition, numberedRecord(n, 16_000, wordList(1, 10)), repository.WithPlacement(reservation.AnyInTier(tier.Disk)), repository.WithoutWait())
			}
			for n := range int64(4) {
				if err := put(0, n); err != nil {
					t.Fatal(err)
				}
			}
			for h, err := range repo.Drain(t.Context(), 0, tier.Host, opts...) {
				if err != nil {
					t.Fatal(err)
				}
				time.Sleep(200 * time.Millisecond)
				for n := int64(10); put(1, n) == nil; n++ {
				}
				copied := t.TempDir() // what a kill -9 leaves
				testfs.CopyTree(t, copied, dir)
				next := persistentEngine(t, t.TempDir(), func(c *spillway.Config) {
					c.Disks[0].Dir, c.Disks[0].Capacity = copied, spillway.Bytes(16*mib)
				})
				found := 0
				for _, p := range next.Persisted() {
					if p.Partition == 0 {
						found++
					}
					if err := next.ForgetPersisted(p); err != nil {
						t.Error(err)
					}
				}
				closePersistent(t, next)
				if found != 3 {
					t.Errorf("of 3 batches that nobody has consumed %d persist", found)
				}
				if err := h.Close(); err != nil {
					t.Error(err)
				}
				break
			}
			if err := repo.Close(t.Context()); err != nil {
				t.Error(err)
			}
			closePersistent(t, eng)
		})
	}
}

// onFaultyDisk opens an engine whose disk may have faults, with a repository.
func onFaultyDisk(t *testing.T) (*spillway.Engine, *repository.Repository, *faultfs.FS) {
	t.Helper()
	files := faultfs.New(disk.OS(), 1)
	eng := openMarked(t, 8*mib, func(c *spillway.Config) { c.Disks[0].FS = files })
	return eng, scanOf(t, eng), files
}

// putWithCopies puts n batches on disk, each into a partition of its own, and moves them to host
// memory. Their copies stay on the disk.
func putWithCopies(t *testing.T, eng *spillway.Engine, repo *repository.Repository, n int, words arrow.Array) (all []*batch.Batch) {
	t.Helper()
	for i := range n {
		if err := repo.Put(t.Context(), i, numberedRecord(int64(i), 10_000, words), in(tier.Disk)); err != nil {
			t.Fatal(err)
		}
		b, _ := repo.Peek(i)
		moveAlong(t, eng, b, firstHost)
		all = append(all, b)
	}
	if have := copiesOf(all); have != n {
		t.Fatalf("%d copies of %d batches", have, n)
	}
	return all
}

// copiesOf counts the copies of batches.
func copiesOf(all []*batch.Batch) (n int) {
	for _, b := range all {
		n += len(b.Copies())
	}
	return n
}

// closeBoth closes a repository and its engine, which has nothing in use then.
func closeBoth(t *testing.T, repo *repository.Repository, eng *spillway.Engine) {
	t.Helper()
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestPutOnALateFullDiskGivesCopiesBack: the file system is full only when a Put writes. The copies
// are given back before the Put is refused.
func TestPutOnALateFullDiskGivesCopiesBack(t *testing.T) {
	eng, repo, files := onFaultyDisk(t)
	putWithCopies(t, eng, repo, 4, wordList(1, 10))
	s, _ := eng.Reservations().Spaces().ByID(firstDisk)
	defer files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.ENOSPC), Times: 1})()
	if err := repo.Put(t.Context(), 9, numberedRecord(9, 10_000, wordList(1, 10)), in(tier.Disk)); err != nil {
		t.Errorf("refused while copies have %d bytes: %v", s.State().Cached, err)
	}
	closeBoth(t, repo, eng)
}

// TestLateFullDiskKeepsOtherCopies: a disk that is full when it is written gives as many copies
// back as are needed, not all.
func TestLateFullDiskKeepsOtherCopies(t *testing.T) {
	eng, repo, files := onFaultyDisk(t)
	all := putWithCopies(t, eng, repo, 8, wordList(1, 10))
	defer files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.ENOSPC), Times: 1})()
	if err := repo.Put(t.Context(), 9, numberedRecord(9, 2_500, wordList(1, 10)), in(tier.Disk)); err != nil {
		t.Fatal(err)
	}
	if left := copiesOf(all); left < 6 {
		t.Errorf("for a quarter of a batch %d of 8 copies were freed", 8-left)
	}
	closeBoth(t, repo, eng)
}

// TestLateFullDiskWhoseCopiesOthersFree: the copies are gone when a Put notices that the disk is
// full, and so is the reason.
func TestLateFullDiskWhoseCopiesOthersFree(t *testing.T) {
	eng, repo, files := onFaultyDisk(t)
	putWithCopies(t, eng, repo, 1, wordList(1, 10))
	s, _ := eng.Reservations().Spaces().ByID(firstDisk)
	drop := faultfs.Do(func(string, string) { s.DropAllClean() })
	defer files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: drop, Times: 1})()
	defer files.Add(faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.Fail(syscall.ENOSPC), Times: 1})()
	if err := repo.Put(t.Context(), 9, numberedRecord(9, 75_000, wordList(1, 10)), in(tier.Disk)); err != nil {
		t.Errorf("refused: %v", err)
	}
	closeBoth(t, repo, eng)
}
