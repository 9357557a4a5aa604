package test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/persist"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// keptFiles returns the files of batches and dictionaries in a directory, with those of parts.
func keptFiles(t testing.TB, dir string) (files []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "spillway-kept-*", "????????????????*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	return files
}

// TestDamagedBytesAreNotAdopted: with a byte of a file changed the batch, or those that share the
// dictionary, that it is of cannot be adopted, and stay; the others can.
func TestDamagedBytesAreNotAdopted(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	for _, codec := range []convert.Codec{convert.CodecNone, convert.CodecS2} {
		t.Run(codec.String(), func(t *testing.T) {
			dir := crashed(t, 6, func(c *spillway.Config) { c.Codec = codec })
			harmed := 0
			for i, path := range keptFiles(t, dir) {
				sound, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				for at := i * 301; at < len(sound); at += testseed.Rounds(23003, 46006) {
					if slices.Max(sound[at&^4095:min(len(sound), at&^4095+4096)]) == 0 {
						continue // nothing was written there
					}
					setByte(t, path, at, sound[at]^1<<(at%8))
					harmed += adoptDamaged(t, dir)
					setByte(t, path, at, sound[at])
				}
			}
			if harmed < testseed.Rounds(5, 3) {
				t.Errorf("only %d batches were harmed", harmed)
			}
			eng := persistentEngine(t, dir)
			for _, k := range eng.Persisted() {
				checkAdopted(t, eng, k)
			}
			closePersistent(t, eng)
			wantNothingIn(t, dir)
		})
	}
}

// setByte changes one byte of a file.
func setByte(t *testing.T, path string, at int, value byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte{value}, int64(at))
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// adoptDamaged adopts what it can of a copy of the directory, and returns how many were
// refused.
func adoptDamaged(t *testing.T, dir string) (refused int) {
	t.Helper()
	work := t.TempDir()
	testfs.CopyTree(t, work, dir)
	eng := persistentEngine(t, work)
	for _, k := range eng.Persisted() {
		used := onDisk(eng)
		b, err := eng.Adopt(t.Context(), k)
		if err == nil {
			rec := recordOf(t, eng, b)
			if err := convert.Equal(persistedRecord(rec.Column(0).(*array.Int64).Value(0)), rec); err != nil {
				t.Errorf("adopted, and %v", err)
			}
			rec.Release()
			if err := b.Drop(); err != nil {
				t.Error(err)
			}
			continue
		}
		refused++
		var corrupt *convert.CorruptError
		if !errors.As(err, &corrupt) || corrupt.Batch != k.ID || !strings.HasPrefix(corrupt.Volume, work) {
			t.Errorf("adopting batch %d: %v", k.ID, err)
		}
		if onDisk(eng) != used {
			t.Errorf("%d bytes on disk became %d when nothing was adopted", used, onDisk(eng))
		}
	}
	left := eng.Persisted()
	if len(left) != refused {
		t.Errorf("%d were refused and %d are kept", refused, len(left))
	}
	for _, k := range left {
		if err := eng.ForgetPersisted(k); err != nil {
			t.Error(err)
		}
	}
	closePersistent(t, eng)
	wantNothingIn(t, work)
	return refused
}

// TestMutatedFilesAreRefusedOrRight changes files of batches and of dictionaries at random: bits, lengths
// and numbers in their headers, their own lengths, and their names. The engine adopts only batches
// that are right, and refuses the others with an error that names the file. It allocates nothing for
// bytes that a header only claims.
func TestMutatedFilesAreRefusedOrRight(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	seed := testseed.One(t)
	rng := rand.New(rand.NewPCG(seed, 3))
	dir := crashed(t, 4, func(c *spillway.Config) { c.Codec = convert.CodecS2 })
	files := keptFiles(t, dir)
	sound := filesIn(t, dir)
	refused := 0
	for round := range testseed.Rounds(400, 40) {
		path, other := files[rng.IntN(len(files))], files[rng.IntN(len(files))]
		bad := slices.Clone(sound[path])
		header := len(bad) - 4096 // of the page that ends with the tail, in most cases
		var err error
		switch rng.IntN(6) {
		case 0:
			bad[rng.IntN(len(bad))] ^= 1 << rng.IntN(8)
		case 1: // a number of the header or the tail
			at := header + rng.IntN(512)*8
			copy(bad[at:], binary.LittleEndian.AppendUint64(nil, rng.Uint64()>>rng.IntN(64)))
		case 2: // the same with the right checksum
			at := len(bad) - 1024 + rng.IntN(127)*8
			copy(bad[at:], binary.LittleEndian.AppendUint64(nil, rng.Uint64()>>rng.IntN(64)))
			binary.LittleEndian.PutUint64(bad[len(bad)-8:], xxh3.Hash(bad[len(bad)-1024:len(bad)-8]))
		case 3:
			bad = bad[:rng.IntN(len(bad))]
		case 4: // the length that a header claims is there, and holds nothing
			err = os.Truncate(path, int64(len(bad))+rng.Int64N(1<<22))
			bad = nil
		case 5:
			bad = sound[other]
		}
		if bad != nil {
			err = os.WriteFile(path, bad, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		refused += adoptDamaged(t, dir)
		if err := os.WriteFile(path, sound[path], 0o600); err != nil {
			t.Fatal(err)
		}
		if t.Failed() {
			t.Fatalf("seed %d, round %d: %s", seed, round, path)
		}
	}
	if refused == 0 {
		t.Error("nothing was refused")
	}
}

// TestDictionaryThatNoBatchListsIsRemoved: the next engine removes it, and it takes no room.
func TestDictionaryThatNoBatchListsIsRemoved(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	if onEncryptedDisks(t) {
		return // inspect does not know there which files are batches
	}
	dir := crashed(t, 3)
	found, err := persist.Inspect(dir, false)
	if err != nil || len(found) != 1 || len(found[0].Batches) != 3 || len(found[0].Dictionaries) == 0 {
		t.Fatal(found, err)
	}
	for _, b := range found[0].Batches {
		if err := os.Remove(b.File); err != nil {
			t.Fatal(err)
		}
	}
	if len(keptFiles(t, dir)) != len(found[0].Records)-3 {
		t.Fatalf("%v are left", keptFiles(t, dir))
	}
	eng := persistentEngine(t, dir)
	if n := onDisk(eng); n != 0 || len(eng.Persisted()) != 0 {
		t.Errorf("%d bytes are in use, and %v persist", n, eng.Persisted())
	}
	closePersistent(t, eng)
	wantNothingIn(t, dir)
}

// TestTwoEnginesPersistApart: two engines with one directory have each its own, and adopt only what
// no other engine uses.
func TestTwoEnginesPersistApart(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 2)
	one := persistentEngine(t, dir)
	two := persistentEngine(t, dir)
	if len(one.Persisted()) != 2 || len(two.Persisted()) != 0 {
		t.Errorf("%d and %d are kept", len(one.Persisted()), len(two.Persisted()))
	}
	for _, k := range one.Persisted() {
		checkAdopted(t, one, k)
	}
	closePersistent(t, one)
	closePersistent(t, two)
	wantNothingIn(t, dir)
}

// TestPersistingIsOffByDefault: without Persist there is nothing to find, and no kept directory is
// touched. With it a capacity is needed.
func TestPersistingIsOffByDefault(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 2)
	off := func(c *spillway.Config) { c.Disks[0].Persist = false }
	eng := persistentEngine(t, dir, off)
	plan, err := eng.Plan("query")
	if err != nil {
		t.Fatal(err)
	}
	repo, err := plan.Repository("join", 1)
	if err != nil {
		t.Fatal(err)
	}
	putPersisted(t, eng, repo, 1, false)
	if n := len(eng.Persisted()); n != 0 {
		t.Errorf("%d are kept", n)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("%v, %v", entries, err)
	}
	closePersistent(t, eng)
	eng = persistentEngine(t, dir)
	for _, k := range eng.Persisted() {
		checkAdopted(t, eng, k)
	}
	closePersistent(t, eng)
	wantNothingIn(t, dir)
	if _, err := openPersistent(t, dir, func(c *spillway.Config) { c.Disks[0].Capacity = spillway.Amount{} }); err == nil || !strings.Contains(err.Error(), "capacity") {
		t.Errorf("without a capacity: %v", err)
	}
}

// TestAdoptBesideEachOther: batches that share dictionaries are adopted, forgotten and dropped
// at the same time, some by a context that has ended, while the engine closes: what is not
// adopted stays, and what is, is whole.
func TestAdoptBesideEachOther(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 24)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	var mu sync.Mutex
	taken := make(map[int64]bool) // by record
	for life := 0; len(taken) < 24; life++ {
		eng := persistentEngine(t, dir)
		if n := len(eng.Persisted()); n != 24-len(taken) {
			t.Fatalf("life %d: %d are kept, want %d", life, n, 24-len(taken))
		}
		started := make(chan struct{}, 4*24) // for all of them
		var all sync.WaitGroup
		for g := range 4 {
			all.Go(func() {
				for i, k := range eng.Persisted() {
					started <- struct{}{}
					if _, err := eng.Adopt(ended, k); err == nil {
						t.Error("adopted by a context that has ended")
					}
					if life == 0 && i > 6 {
						return // something must stay for the other lives
					}
					if (i+g)%5 == 0 {
						if err := eng.ForgetPersisted(k); err == nil {
							mu.Lock()
							taken[int64(k.Port)] = true
							mu.Unlock()
						}
						continue
					}
					b, err := eng.Adopt(t.Context(), k)
					if errors.Is(err, tier.ErrReleased) || errors.Is(err, tier.ErrClosed) {
						continue
					}
					if err != nil {
						t.Error(err)
						continue
					}
					if h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host)); err == nil {
						rec, err := eng.Mover().Record(t.Context(), h)
						if err == nil {
							if err := convert.Equal(persistedRecord(int64(k.Port)), rec); err != nil {
								t.Error(err)
							}
							rec.Release()
						} else if !errors.Is(err, tier.ErrClosed) {
							t.Error(err)
						}
						_ = h.Close()
					} else if !errors.Is(err, tier.ErrClosed) {
						t.Error(err)
					}
					if err := b.Drop(); err != nil {
						t.Error(err)
					}
					mu.Lock()
					taken[int64(k.Port)] = true
					mu.Unlock()
				}
			})
		}
		for range min(5+life, len(eng.Persisted())) { // then in the middle
			<-started
		}
		var leak *spillway.LeakError
		if err := eng.Close(); err != nil && !errors.As(err, &leak) { // a holder of a batch drops it later
			t.Error(err)
		}
		all.Wait()
		for _, s := range eng.Stats().Spaces {
			if s.Used() != 0 {
				t.Errorf("life %d: %s ends with %+v", life, s.ID, s.Usage)
			}
		}
	}
	eng := persistentEngine(t, dir)
	closePersistent(t, eng)
	wantNothingIn(t, dir)
}

// TestAdoptingSurvivesEveryFault: with any operation of the file system failing once while an
// engine opens, adopts and closes, each batch is adopted whole, or kept still.
func TestAdoptingSurvivesEveryFault(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 3)
	for i := 0; ; i += testseed.Rounds(1, 4) {
		work := t.TempDir()
		testfs.CopyTree(t, work, dir)
		at := ""
		files := faultfs.New(disk.OS(), 1, faultfs.Rule{Skip: i, Times: 1, Effect: faultfs.Fail(syscall.EIO), Hit: func(op, path string) { at = fmt.Sprint(op, " ", filepath.Base(path)) }})
		eng, err := openPersistent(t, work, func(c *spillway.Config) { c.Disks[0].FS = files })
		adopted := make(map[int64]bool)
		if err == nil {
			for _, k := range eng.Persisted() {
				b, err := eng.Adopt(t.Context(), k)
				if err != nil {
					continue
				}
				n := int64(k.Port)
				adopted[n] = true
				if h, err := eng.Mover().Acquire(t.Context(), b, reservation.AnyInTier(tier.Host)); err == nil {
					rec, err := eng.Mover().Record(t.Context(), h)
					if err == nil {
						if err := convert.Equal(persistedRecord(n), rec); err != nil {
							t.Errorf("fault %d: %v", i, err)
						}
						rec.Release()
					}
					_ = h.Close()
				}
				if err := b.Drop(); err != nil {
					t.Error(err)
				}
			}
			_ = eng.Close()
			if used := onDisk(eng); used != 0 {
				t.Errorf("fault %d: the disk ends with %d bytes", i, used)
			}
		}
		if n := files.Open(); n != 0 {
			t.Fatalf("fault %d: %d files are open", i, n)
		}
		eng = persistentEngine(t, work)
		for _, k := range eng.Persisted() {
			if n := checkAdopted(t, eng, k); !adopted[n] {
				adopted[n] = true
			} else if !errors.Is(err, syscall.EIO) && files.Hits() == 0 {
				t.Errorf("fault %d: record %d was adopted before", i, n)
			}
		}
		if len(adopted) != 3 {
			t.Errorf("fault %d: records %v are left of 3", i, adopted)
		}
		closePersistent(t, eng)
		wantNothingIn(t, work)
		if t.Failed() {
			t.Fatalf("the fault was in: %s; the engine said %v", at, err)
		}
		if files.Hits() == 0 {
			if i < 30 {
				t.Errorf("only %d operations", i)
			}
			return
		}
	}
}

// adoptAll adopts all that an engine has found.
func adoptAll(t *testing.T, eng *spillway.Engine) (all []*batch.Batch) {
	t.Helper()
	for _, k := range eng.Persisted() {
		b, err := eng.Adopt(t.Context(), k)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
	}
	return all
}

// TestAdoptedBatchKeepsItsRecord until it is put somewhere: after the next kill it is found where
// it stood.
func TestAdoptedBatchKeepsItsRecord(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	dir := crashed(t, 2)
	eng := persistentEngine(t, dir)
	adopted := adoptAll(t, eng)
	copied := t.TempDir()
	testfs.CopyTree(t, copied, dir)
	dropAll(t, adopted)
	closePersistent(t, eng)
	eng = persistentEngine(t, copied)
	if n := len(eng.Persisted()); n != 2 {
		t.Errorf("%d are kept, want 2", n)
	}
	for _, k := range eng.Persisted() {
		checkAdopted(t, eng, k)
	}
	closePersistent(t, eng)
}

// TestAdoptedBytesAreTheBatchs: what is kept takes of a disk's room until it is adopted; then it is
// a batch's, which can be dropped.
func TestAdoptedBytesAreTheBatchs(t *testing.T) {
	t.Parallel()
	persistNeedsLinux(t)
	eng := persistentEngine(t, crashed(t, 3))
	space := eng.Reservations().Spaces().InTier(tier.Disk)[0]
	if room, held := space.State().Room, onDisk(eng); held == 0 || room != space.State().Limit-held {
		t.Errorf("of %d bytes there is room for %d beside %d that are kept", space.State().Limit, room, held)
	}
	adopted := adoptAll(t, eng)
	if room := space.State().Room; room != space.State().Limit {
		t.Errorf("of %d bytes there is room for %d when all is adopted", space.State().Limit, room)
	}
	dropAll(t, adopted)
	closePersistent(t, eng)
}
