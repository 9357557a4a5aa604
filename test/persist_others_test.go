package test

import (
	"errors"
	"sync"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/arrowgen"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestBatchesOfTwoProcesses: an engine with one disk finds what one of two processes has kept and
// warns of the other's. One with two disks finds both, and warns of nothing.
func TestBatchesOfTwoProcesses(t *testing.T) {
	persistNeedsLinux(t)
	work := t.TempDir()
	rec := arrowgen.Ints(1, 1000, 1)
	defer rec.Release()
	var processes []*spillway.Engine
	for range 2 {
		eng := persistentEngine(t, work)
		if err := scanOf(t, eng).Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
			t.Fatal(err)
		}
		processes = append(processes, eng)
	}
	dir := t.TempDir()
	testfs.CopyTree(t, dir, work) // as if both had been killed
	for _, eng := range processes {
		closeClean(t, eng)
	}
	for disks := 1; disks <= 2; disks++ {
		copied := t.TempDir()
		testfs.CopyTree(t, copied, dir)
		eng := persistentEngine(t, copied, func(c *spillway.Config) {
			for len(c.Disks) < disks {
				c.Disks = append(c.Disks, c.Disks[0])
			}
		})
		if n := len(eng.Persisted()); n != disks {
			t.Errorf("%d disks find %d batches", disks, n)
		}
		warned := 0
		for _, w := range eng.Warnings() {
			if w.Cause == "kept-left" {
				warned++
			}
		}
		if warned != 2-disks {
			t.Errorf("%d disks have %d warnings of what others kept: %v", disks, warned, eng.Warnings())
		}
		for _, p := range eng.Persisted() {
			if err := eng.ForgetPersisted(p); err != nil {
				t.Error(err)
			}
		}
		closeClean(t, eng)
	}
}

// changing changes a batch all the time, from n goroutines, until stop is called.
func changing(b *batch.Batch, n int) (stop func()) {
	over := make(chan struct{})
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
					b.Subscribe()()
				}
			}
		})
	}
	return func() {
		close(over)
		all.Wait()
	}
}

// putAndMove puts a batch into host memory and moves it to one space after the other.
func putAndMove(t *testing.T, eng *spillway.Engine, repo *repository.Repository, to ...tier.ID) *batch.Batch {
	t.Helper()
	rec := numberedRecord(1, 10_000, wordList(1, 10))
	if err := repo.Put(t.Context(), 0, rec, repository.WithPlacement(reservation.AnyInTier(tier.Host))); err != nil {
		t.Fatal(err)
	}
	for b := range repo.Batches(0) {
		moveAlong(t, eng, b, to...)
		return b
	}
	t.Fatal("no batch is there")
	return nil
}

func moveAlong(t *testing.T, eng *spillway.Engine, b *batch.Batch, to ...tier.ID) {
	t.Helper()
	for _, to := range to {
		if err := eng.Mover().Move(t.Context(), b, reservation.Specific(to)); err != nil {
			t.Fatal(err)
		}
	}
}

// persistIn counts what an engine would find, if this process was killed, on disks in these
// directories.
func persistIn(t *testing.T, dirs ...string) int {
	t.Helper()
	next := persistentEngine(t, t.TempDir(), func(c *spillway.Config) {
		first := c.Disks[0]
		c.Disks = nil
		for _, dir := range dirs {
			first.Dir = t.TempDir()
			testfs.CopyTree(t, first.Dir, dir)
			c.Disks = append(c.Disks, first)
		}
	})
	found := next.Persisted()
	for _, p := range found {
		if err := next.ForgetPersisted(p); err != nil {
			t.Error(err)
		}
	}
	closePersistent(t, next)
	return len(found)
}

var (
	firstHost             = tier.ID{Kind: tier.Host}
	firstDisk, secondDisk = tier.ID{Kind: tier.Disk}, tier.ID{Kind: tier.Disk, Ordinal: 1}
)

// TestRecordIsOfTheLatestChange: many goroutines change a batch while it moves. It has a record
// afterwards, on disk or above its copy there.
func TestRecordIsOfTheLatestChange(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := t.TempDir()
	eng := persistentEngine(t, dir)
	repo := scanOf(t, eng)
	b := putAndMove(t, eng, repo, firstDisk)
	for round := range testseed.Rounds(80, 10) {
		stop := changing(b, 3)
		for range 5 {
			moveAlong(t, eng, b, firstHost, firstDisk)
		}
		if round%2 == 0 {
			moveAlong(t, eng, b, firstHost)
		}
		stop()
		want := 1
		if b.Info().Space != firstDisk && len(b.Copies()) == 0 { // it was being recorded when it moved up
			want = 0
		}
		if n := persistIn(t, dir); n != want {
			t.Errorf("round %d: %d persist; the batch is in %s, and copies in %v", round, n, b.Info().Space, b.Copies())
			b.Subscribe()() // so that it is recorded again
		}
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closePersistent(t, eng)
}

// TestRecordOfACopyThatIsUsed: a batch moves down onto its recorded copy while others change it.
// The record is not written again.
func TestRecordOfACopyThatIsUsed(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	files := faultfs.New(disk.OS(), 1)
	eng := persistentEngine(t, t.TempDir(), func(c *spillway.Config) { c.Disks[0].FS = files })
	repo := scanOf(t, eng)
	b := putAndMove(t, eng, repo, firstDisk)
	before := files.Count("write")
	stop := changing(b, 1)
	for range testseed.Rounds(200, 50) {
		moveAlong(t, eng, b, firstHost, firstDisk)
	}
	stop()
	if n := files.Count("write") - before; n != 0 {
		t.Errorf("%d writes", n)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closePersistent(t, eng)
}

// TestPlaceThatChangesAsACopyIsTaken: a batch gets another place when a move has taken its copy and
// not drawn it yet. Its record has that place when the move has ended.
func TestPlaceThatChangesAsACopyIsTaken(t *testing.T) {
	persistNeedsLinux(t)
	dir := t.TempDir()
	eng := persistentEngine(t, dir)
	plan, err := eng.Plan("q")
	if err != nil {
		t.Fatal(err)
	}
	join, err := plan.Repository("join", 0)
	if err != nil {
		t.Fatal(err)
	}
	scan := scanOf(t, eng)
	putAndMove(t, eng, scan, firstDisk, firstHost)
	b, err := scan.Take(t.Context(), 0, batch.Idle)
	if err != nil || len(b.Copies()) != 1 {
		t.Fatalf("no copy to begin with: %v", err)
	}
	// What a move does. The reservation grows as it draws, which tells listeners in the middle.
	transit, err := b.TryTransit()
	if err != nil {
		t.Fatal(err)
	}
	r, err := eng.Reservations().Reserve(t.Context(), reservation.Specific(firstDisk), tier.Page, &reservation.Options{Policy: reservation.Increase(1)})
	if err != nil {
		t.Fatal(err)
	}
	s, _ := eng.Reservations().Spaces().ByID(firstDisk)
	if err := s.SetMarks(tier.Marks{Limit: 1, Trigger: 0.001, Stop: 0.0005}); err != nil {
		t.Fatal(err)
	}
	var once sync.Once
	end := s.Subscribe(func(aboveTrigger bool) {
		if aboveTrigger {
			once.Do(func() { err = join.PutBatch(0, b) })
		}
	})
	p := b.Promote("", r)
	end()
	if p == nil || err != nil || join.Len(0) != 1 {
		t.Fatalf("%d batches in the other place, the copy is there: %v, %v", join.Len(0), p != nil, err)
	}
	if err := errors.Join(transit.Commit(p, false), r.Release()); err != nil {
		t.Fatal(err)
	}
	copied := t.TempDir()
	testfs.CopyTree(t, copied, dir)
	next := persistentEngine(t, copied)
	if n := len(next.Persisted()); n != 1 {
		t.Errorf("%d batches persist", n)
	}
	for _, p := range next.Persisted() {
		if p.Operator != "join" {
			t.Errorf("the batch is in join, and its record says %q", p.Operator)
		}
		if err := next.ForgetPersisted(p); err != nil {
			t.Error(err)
		}
	}
	closePersistent(t, next)
	if err := join.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closePersistent(t, eng)
}

// TestRecordStaysWithItsCopy: a batch has one image in a tier, so of two disks on which it was, the
// last has its clean image and its record. Both stay while the batch moves between memories, and
// the record goes with the image.
func TestRecordStaysWithItsCopy(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	files := faultfs.New(disk.OS(), 1)
	dirs := []string{t.TempDir(), t.TempDir()}
	eng := persistentEngine(t, dirs[0], func(c *spillway.Config) {
		c.GPUs = []spillway.GPUConfig{{Backend: spillway.Sim, Memory: spillway.Bytes(8 * mib)}}
		c.Disks = append(c.Disks, c.Disks[0])
		c.Disks[1].Dir = dirs[1]
		c.Disks[0].FS, c.Disks[1].FS = files, files
	})
	repo := scanOf(t, eng)
	b := putAndMove(t, eng, repo, firstDisk, firstHost, secondDisk)
	before := files.Count("write")
	moveAlong(t, eng, b, firstHost)
	if in := b.Copies(); len(in) != 1 || in[0] != secondDisk {
		t.Fatalf("copies are in %v", in)
	}
	for range 4 {
		moveAlong(t, eng, b, tier.ID{Kind: tier.GPU}, firstHost)
	}
	if n := files.Count("write") - before; n != 0 {
		t.Errorf("%d writes for moves between memories; copies are in %v", n, b.Copies())
	}
	if n := persistIn(t, dirs...); n != 1 {
		t.Errorf("%d persist; copies are in %v", n, b.Copies())
	}
	for _, gone := range []tier.ID{firstDisk, secondDisk} {
		s, _ := eng.Reservations().Spaces().ByID(gone)
		s.DropAllClean()
		b.Subscribe()()
		if n := persistIn(t, dirs...); n != len(b.Copies()) {
			t.Errorf("%s is without copies: %d persist; copies are in %v", gone, n, b.Copies())
		}
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closePersistent(t, eng)
}
