package test

import (
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/repository"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
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
// byte of it is written to disk twice, and the third pass writes none at all.
func TestPassesWriteOnce(t *testing.T) {
	eng := openMarked(t, 4*mib)
	repo := scanOf(t, eng)
	words := wordList(1, 100)
	for i := range int64(60) {
		if err := repo.Put(t.Context(), 0, numberedRecord(i, 10_000, words), repository.WithPlacement(reservation.AnyInTier(tier.GPU))); err != nil {
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
	if written[2] > put || written[2] != written[1] || unmoved[2] <= unmoved[1] {
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

// TestDictionariesOfCopiesMakeRoom: copies on disk keep dictionaries in use there. These go before a
// batch finds no room.
func TestDictionariesOfCopiesMakeRoom(t *testing.T) {
	eng := openMarked(t, 8*mib, func(c *spillway.Config) { c.Disks[0].Capacity = spillway.Bytes(2 * mib) })
	repo := scanOf(t, eng)
	var up []*batch.Batch
	for i := range int64(20) { // each with 130 KiB of words of its own, and few rows
		if err := repo.Put(t.Context(), 0, numberedRecord(i, 10, wordList(uint64(i), 6000)), repository.WithPlacement(reservation.AnyInTier(tier.Disk))); err != nil {
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
	n := eng.Mover().Inside().DictionaryBytes(disk.ID())
	if len(up) != 20 || n == 0 {
		t.Errorf("%d batches are up, and the disk keeps %d bytes of dictionaries: the test is too easy", len(up), n)
	}
	if err := repo.Close(t.Context()); err != nil {
		t.Error(err)
	}
	closeClean(t, eng)
}
