package test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/monitor"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// writtenTo returns how many bytes batches have brought to disk, and how many were there already.
func writtenTo(eng *spillway.Engine, k tier.Kind) (written, unmoved int64) {
	for _, e := range eng.Stats().Edges {
		if e.To.Kind == k {
			written, unmoved = written+e.Bytes, unmoved+e.Unmoved
		}
	}
	return written, unmoved
}

// TestPassesWriteOnce: data of three times the GPU and host memory is worked on in three passes. No
// byte of it is written to disk twice.
func TestPassesWriteOnce(t *testing.T) {
	t.Parallel()
	eng := openMarked(t, 4*mib)
	repo := scanOf(t, eng)
	words := wordList(1, 100)
	for i := range int64(60) {
		if err := repo.Put(
			t.Context(),
			0,
			numberedRecord(i, 10_000, words),
			repository.WithPlacement(reservation.AnyInTier(tier.GPU)),
		); err != nil {
			t.Fatal(err)
		}
	}
	put := repo.Bytes(tier.GPU) + repo.Bytes(tier.Host) + repo.Bytes(tier.Disk)
	if put < 20*mib {
		t.Fatalf("%d bytes were put: too few", put)
	}
	var written, unmoved [3]int64
	for pass := range written {
		for b := range repo.Batches(0) {
			h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.GPU))
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
		}
		written[pass], unmoved[pass] = writtenTo(eng, tier.Disk)
	}
	if written[2] > put || unmoved[2] <= unmoved[1] {
		t.Errorf("%d bytes were put; %v were written after each pass, and %v found a copy", put, written, unmoved)
	}
	var cached int64
	for _, s := range eng.Stats().Spaces {
		cached += s.Cached
	}
	if cached == 0 {
		t.Error("there are no copies")
	}
	if _, err := eng.Trim(t.Context()); err != nil {
		t.Error(err)
	}
	for _, s := range eng.Stats().Spaces {
		if s.Cached != 0 {
			t.Errorf("%s is trimmed and keeps %d bytes of copies", s.ID, s.Cached)
		}
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestCleanImageChoosesTheDisk: a batch goes back to the disk that has a clean image of it, although
// another disk has more room; but a disk that the strategy names gets it.
func TestCleanImageChoosesTheDisk(t *testing.T) {
	t.Parallel()
	eng := openMarked(t, 4*mib, func(c *spillway.Config) {
		c.Disks = append(c.Disks, spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(4096 * mib)})
	})
	defer closeClean(t, eng)
	repo := scanOf(t, eng)
	if err := repo.Put(t.Context(), 0, numberedRecord(1, 10_000, wordList(1, 100)),
		repository.WithPlacement(reservation.Specific(tier.ID{Kind: tier.Disk}))); err != nil {
		t.Fatal(err)
	}
	b, _ := repo.Peek(0)
	for i, c := range []struct {
		to    reservation.Strategy
		want  int
		moves bool // bytes
	}{
		{reservation.AnyInTier(tier.Disk), 0, false},
		{reservation.AnyInTierPreferring(tier.Disk, 1), 1, true},
		{reservation.AnyInTier(tier.Disk), 1, false},
		{reservation.Specific(tier.ID{Kind: tier.Disk}), 0, true}, // a batch has one image on disks
	} {
		if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Host)); err != nil {
			t.Fatal(err)
		}
		before, _ := writtenTo(eng, tier.Disk)
		if err := eng.Mover().Move(t.Context(), b, c.to); err != nil {
			t.Fatal(err)
		}
		after, _ := writtenTo(eng, tier.Disk)
		if at := b.Info().Space; at.Kind != tier.Disk || at.Ordinal != c.want || (after > before) != c.moves {
			t.Errorf("move %d to %s: the batch is in %s, and %d bytes were written", i, c.to, at, after-before)
		}
	}
}

// TestDictionariesOfCopiesMakeRoom: copies on disk keep dictionaries in use there. These go before
// a batch finds no room.
func TestDictionariesOfCopiesMakeRoom(t *testing.T) {
	eng := openMarked(t, 8*mib, func(c *spillway.Config) { c.Disks[0].Capacity = spillway.Bytes(2 * mib) })
	repo := scanOf(t, eng)
	var up []*batch.Batch
	for i := range int64(20) { // each with 130 KiB of words of its own, and few rows
		if err := repo.Put(
			t.Context(),
			0,
			numberedRecord(i, 10, wordList(uint64(i), 6000)),
			repository.WithPlacement(reservation.AnyInTier(tier.Disk)),
		); err != nil {
			t.Fatal(err)
		}
		for b := range repo.Batches(0) {
			if b.Info().Space.Kind == tier.Disk {
				if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Host)); err != nil {
					t.Fatal(err)
				}
				up = append(up, b)
			}
		}
	}
	disk := eng.Spaces()[2]
	n := eng.Mover().DictionaryBytes(disk.ID())
	if len(up) != 20 || n == 0 {
		t.Errorf("%d batches are up, and the disk keeps %d bytes of dictionaries: the test is too easy", len(up), n)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// fillWithDictionariesOfCopies puts batches on disk that are mostly dictionary, and brings them up.
// All that is used of the disk then is what copies keep.
func fillWithDictionariesOfCopies(t *testing.T, eng *spillway.Engine, repo *repository.Repository, share float64) {
	t.Helper()
	disk := eng.Spaces()[2]
	for i := int64(0); float64(disk.State().Used()) < share*float64(disk.Capacity); i++ {
		if err := repo.Put(
			t.Context(),
			0,
			numberedRecord(i, 10, wordList(uint64(i), 6000)),
			repository.WithPlacement(reservation.AnyInTier(tier.Disk)),
		); err != nil {
			t.Fatal(err)
		}
		for b := range repo.Batches(0) {
			if b.Info().Space.Kind != tier.Disk {
				continue
			}
			if err := eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.GPU)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// TestPutWithoutWaitBesideDictionariesOfCopies: nothing else lies on the disk, so a Put that must
// not wait finds room there.
func TestPutWithoutWaitBesideDictionariesOfCopies(t *testing.T) {
	t.Parallel()
	eng := openMarked(t, 8*mib, func(c *spillway.Config) { c.Disks[0].Capacity = spillway.Bytes(2 * mib) })
	repo := scanOf(t, eng)
	fillWithDictionariesOfCopies(t, eng, repo, 0.7)
	rec := numberedRecord(1000, 20_000, wordList(1000, 10))
	if err := repo.Put(
		t.Context(),
		0,
		rec,
		repository.WithPlacement(reservation.AnyInTier(tier.Disk)),
		repository.WithoutWait(),
	); err != nil {
		t.Errorf("the disk has only copies: %v", err)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestWaiterAboveDictionariesOfCopies: who waits for host memory is not refused while copies keep
// the room on disk that batches in host memory need to leave.
func TestWaiterAboveDictionariesOfCopies(t *testing.T) {
	t.Parallel()
	eng := openMarked(t, 4*mib, func(c *spillway.Config) {
		c.Disks[0].Capacity = spillway.Bytes(2 * mib)
		c.StallTimeout = 2 * time.Second
		c.HostMarks = tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}
		c.GPUMarks = tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}
	})
	repo := scanOf(t, eng)
	fillWithDictionariesOfCopies(t, eng, repo, 0.75)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for i := range int64(5) { // each of 0.8 MiB or so: it fits on disk only without the dictionaries
		rec := numberedRecord(2000+i, 20_000, wordList(1, 10))
		if err := repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
			t.Fatalf("put %d: refused although only copies fill the disk: %v", i, err)
		}
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestMonitorGoesOnWhileFilesHang: the files of clean images that are to be freed wait for a disk
// that hangs. The monitor moves batches from the GPU to host memory meanwhile.
func TestMonitorGoesOnWhileFilesHang(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	files := faultfs.New(disk.OS(), 1)
	eng := openMarked(t, 8*mib, func(c *spillway.Config) {
		c.Disks[0].Capacity, c.Disks[0].FS, c.Disks[0].Persist = spillway.Bytes(4*mib), files, true
	})
	repo := scanOf(t, eng)
	fillWithDictionariesOfCopies(t, eng, repo, 0.5)
	goOn := make(chan struct{})
	release := sync.OnceFunc(func() { close(goOn) })
	defer release()
	hangs := make(chan struct{}, 100)
	defer files.Add(faultfs.Rule{Ops: []string{"rename"}, Path: "*.part", Effect: faultfs.Do(func(string, string) {
		select {
		case hangs <- struct{}{}:
		default:
		}
		<-goOn
	})})()
	if err := eng.Spaces()[2].SetMarks(tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.3}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	words := wordList(1, 10)
	for i := range int64(25) {
		rec := numberedRecord(2000+i, 10_000, words)
		if err := repo.Put(ctx, 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
			t.Errorf("put %d: %v", i, err)
			break
		}
	}
	select { // files are recorded by another goroutine
	case <-hangs:
	case <-ctx.Done():
		t.Error("no end of a file hung: the test is too easy")
	}
	release()
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}

// TestCopiesOnAFailingDiskAreNotUsed: when a disk has failed, neither moves nor the monitor leave a
// batch to the copy that lies there.
func TestCopiesOnAFailingDiskAreNotUsed(t *testing.T) {
	t.Parallel()
	for name, hostMemory := range map[string]int64{"moves": 8 * mib, "the monitor": 4 * mib} {
		t.Run(name, func(t *testing.T) {
			files := faultfs.New(disk.OS(), 1)
			eng := openMarked(t, 8*mib, func(c *spillway.Config) {
				c.GPUs, c.HostMemory = []spillway.GPUConfig{}, spillway.Bytes(hostMemory)
				c.HostMarks = tier.Marks{Limit: 1, Trigger: 0.9, Stop: 0.6}
				c.Disks[0].FS = files
				c.Disks = append(c.Disks, spillway.DiskConfig{Dir: t.TempDir(), Capacity: spillway.Bytes(16 * mib)})
				c.Policy = monitor.LRU()
			})
			repo := scanOf(t, eng)
			first := reservation.Specific(tier.ID{Kind: tier.Disk})
			for n := range int64(4) {
				if err := repo.Put(
					t.Context(),
					0,
					numberedRecord(n, 10_000, wordList(1, 10)),
					repository.WithPlacement(reservation.AnyInTier(tier.Host)),
				); err != nil {
					t.Fatal(err)
				}
			}
			all := slices.Collect(repo.Batches(0))
			for _, b := range all[:3] {
				for _, to := range []reservation.Strategy{first, reservation.AnyInTier(tier.Host)} {
					if err := eng.Mover().Move(t.Context(), b, to); err != nil {
						t.Fatal(err)
					}
				}
				if len(b.Copies()) != 1 {
					t.Fatalf("copies in %v", b.Copies())
				}
			}
			files.Add(faultfs.Rule{Ops: []string{"read", "write", "allocate"}, Effect: faultfs.Fail(syscall.EIO)})
			if err := eng.Mover().Move(t.Context(), all[3], first); !errors.Is(err, syscall.EIO) {
				t.Fatalf("the disk works: %v", err)
			}
			if name == "moves" {
				for _, b := range all[:3] {
					_ = eng.Mover().Move(t.Context(), b, reservation.AnyInTier(tier.Disk)) // or it stays
				}
			} else {
				for n := range int64(12) {
					if err := repo.Put(
						t.Context(),
						0,
						numberedRecord(20+n, 10_000, wordList(1, 10)),
						repository.WithPlacement(reservation.AnyInTier(tier.Host)),
					); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, b := range all {
				h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host))
				if err != nil {
					t.Errorf("batch %d in %s is lost: %v", b.ID(), b.Info().Space, err)
				} else if err := h.Close(); err != nil {
					t.Error(err)
				}
			}
			if err := repo.Close(t.Context()); err != nil {
				t.Error(err)
			}
			closeClean(t, eng)
		})
	}
}

// recordsAnew takes b out of the repository and gives it another place, so that it is recorded anew.
// It returns when that is being written. The write goes on when goOn is closed, and placed is closed
// at its end.
func recordsAnew(
	t *testing.T,
	repo *repository.Repository,
	files *faultfs.FS,
	b *batch.Batch,
) (goOn, placed chan struct{}) {
	t.Helper()
	writing, goOn, placed := make(chan struct{}), make(chan struct{}), make(chan struct{})
	t.Cleanup(
		files.Add(
			faultfs.Rule{Ops: []string{"write"}, Path: "[0-9a-f]*", Times: 1, Effect: faultfs.Do(func(string, string) {
				close(writing)
				<-goOn
			})},
		),
	)
	go func() {
		defer close(placed)
		got, err := repo.Take(t.Context(), 0, batch.Idle, repository.NoWait())
		if err != nil || got != b {
			t.Errorf("%v %v", got, err)
			return
		}
		place := got.Info().Place
		place.Partition++
		got.SetPlace(place)
	}()
	<-writing
	return goOn, placed
}

// TestMoveWhileACopyIsRecorded: the place of a batch that is up is recorded anew, and a move needs
// the room of its copy. The move waits for the record, and is not refused.
func TestMoveWhileACopyIsRecorded(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	files := faultfs.New(disk.OS(), 1)
	eng := persistentEngine(t, t.TempDir(), func(c *spillway.Config) {
		c.Disks[0].FS, c.Disks[0].Capacity = files, spillway.Bytes(1*mib)
		c.Disks[0].Marks = tier.Marks{Limit: 1, Trigger: 1, Stop: 0.9}
	})
	repo := scanOf(t, eng)
	var both [2]*batch.Batch
	for n := range both {
		if err := repo.Put(
			t.Context(),
			n,
			numberedRecord(int64(n), 16_000, wordList(1, 10)),
			repository.WithPlacement(reservation.AnyInTier(tier.Host)),
		); err != nil {
			t.Fatal(err)
		}
		for b := range repo.Batches(n) {
			both[n] = b
		}
	}
	a, b := both[0], both[1]
	for _, k := range []tier.Kind{tier.Disk, tier.Host} {
		if err := eng.Mover().Move(t.Context(), a, reservation.AnyInTier(k)); err != nil {
			t.Fatal(err)
		}
	}
	s, _ := eng.Reservations().Spaces().ByID(tier.ID{Kind: tier.Disk})
	if n := s.State().Cached; n == 0 || n+b.Info().Bytes < s.Capacity {
		t.Fatalf("a batch and a copy fit: %+v, %d", s.State().Usage, b.Info().Bytes)
	}
	goOn, placed := recordsAnew(t, repo, files, a)
	time.AfterFunc(200*time.Millisecond, func() { close(goOn) })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := eng.Mover().Move(ctx, b, reservation.AnyInTier(tier.Disk)); err != nil {
		t.Errorf("the disk holds a copy only, and yet: %v (%+v)", err, s.State().Usage)
	}
	<-placed
	if err := errors.Join(a.Drop(), repo.Close(t.Context())); err != nil {
		t.Error(err)
	}
	closePersistent(t, eng)
}
