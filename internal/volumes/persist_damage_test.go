package volumes_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// persistedFiles returns the files of a kind in the only kept directory: those of batches, or with
// "*.part" those of their further memories.
func persistedFiles(t testing.TB, dir, kind string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "spillway-kept-*", strings.Replace(kind, "*", "????????????????", 1)))
	if err != nil || len(all) == 0 {
		t.Fatalf("no %s: %v", kind, err)
	}
	return all
}

// keptNumbers returns the seeds of the entries that a volume has found. The bytes of each must be
// those that were kept; owners compare checksums, this test compares with its random source. It
// forgets entries that cannot be read, whose errors must name the file.
func keptNumbers(t *testing.T, v *volumes.Volume, sizes map[uint64]int64) (seeds []uint64) {
	t.Helper()
	for _, k := range v.Persisted() {
		if k.Err != nil {
			if !strings.Contains(warned(v.Stats().Warnings), k.File) {
				t.Errorf("no warning names %s: %q", k.File, v.Stats().Warnings)
			}
			v.Forget(k.Key)
			continue
		}
		var seed uint64
		if _, err := fmt.Sscanf(string(k.Meta), "meta %d", &seed); err != nil || sizes[seed] == 0 {
			t.Fatalf("%q is kept", k.Meta)
		}
		free(v, wantPersisted(t, v, k, seed, sizes[seed]))
		seeds = append(seeds, seed)
	}
	return seeds
}

// TestMutatedFiles changes headers and tails at random: bits, numbers, lengths, names. Afterwards a
// volume finds the entries that were kept, or fewer of them, and a warning names the file. Checksums
// of the owner, and the seals of volumes that encrypt, protect bodies.
func TestMutatedFiles(t *testing.T) {
	small := func(c *volumes.Config) { c.Capacity = mib }
	dir := tempDir(t)
	sizes := map[uint64]int64{0: 2 * page, 10: page, 20: unit + page, 30: 3 * page}
	v := openPersistent(t, dir, small)
	var all []tier.FileMemory
	for seed, n := range sizes {
		_, e := persist(t, v, seed, n)
		all = append(all, e)
	}
	leave(t, v, all...)
	seed := testseed.One(t)
	r := rand.New(rand.NewPCG(seed, 1))
	before, refused := runtime.MemStats{}, 0
	runtime.ReadMemStats(&before)
	rounds := testseed.Rounds(2000, 200)
	const place = 189 // in the tail
	for round := range rounds {
		work := testfs.MemoryDir(t)
		testfs.CopyTree(t, work, dir)
		files := persistedFiles(t, work, "*")
		path := files[r.IntN(len(files))]
		p, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		header, tail := len(p)-page, len(p)-volumes.TailSize
		kind := r.IntN(7)
		switch kind {
		case 0:
			p[header+r.IntN(96)] ^= 1 << r.IntN(8)
		case 1: // the fields of the tail, or the place
			at := r.IntN(place)
			if r.IntN(2) == 0 {
				at = place + r.IntN(len(placeOf(0)))
			}
			p[tail+at] ^= 1 << r.IntN(8)
		case 2: // a number in the tail, with the right checksum
			copy(p[tail+r.IntN(5)*8:], binary.LittleEndian.AppendUint64(nil, r.Uint64()>>r.IntN(64)))
			binary.LittleEndian.PutUint64(p[len(p)-8:], xxh3.Hash(p[tail:len(p)-8]))
		case 3:
			p = p[:r.IntN(len(p))]
		case 4:
			p = append(p, make([]byte, 1+r.IntN(2*page))...)
		case 5: // another file's content
			if p, err = os.ReadFile(files[r.IntN(len(files))]); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.WriteFile(path, p, 0o600); err != nil {
			t.Fatal(err)
		}
		if kind == 6 { // a wrong number in the header, with the right checksums
			if encrypted {
				continue
			}
			if _, err := volumes.Forge(path, int64(header+8+r.IntN(16)), 1<<r.IntN(8)); err != nil {
				t.Fatal(err)
			}
		}
		v := openPersistent(t, work, small)
		refused += len(sizes) - len(keptNumbers(t, v, sizes))
		if s := v.Stats(); s.Used != 0 {
			t.Errorf("%d bytes are in use", s.Used)
		}
		closeVolume(t, v)
		wantEmpty(t, work)
		if t.Failed() {
			t.Fatalf("seed %d, round %d, kind %d: %s", seed, round, kind, path)
		}
	}
	if refused < rounds/3 {
		t.Errorf("only %d of %d were refused", refused, rounds)
	}
	var after runtime.MemStats
	runtime.ReadMemStats(&after)
	if each := int64(after.TotalAlloc-before.TotalAlloc) / int64(rounds); each > 16*mib {
		t.Errorf("each round has allocated %d bytes", each)
	}
}

// TestHugeClaimsAllocateNothing: a header of gigabytes, all of which are there as a hole, is refused
// before it is read.
func TestHugeClaimsAllocateNothing(t *testing.T) {
	const huge = 4 << 30
	dir := t.TempDir() // which has sparse files
	v := openPersistent(t, dir)
	_, es := persist(t, v, 1, page)
	leave(t, v, es)
	path := persistedFiles(t, dir, "*")[0]
	p, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	tail := bytes.Clone(p[len(p)-volumes.TailSize:])
	binary.LittleEndian.PutUint64(tail[16:], huge-page)                  // room
	binary.LittleEndian.PutUint64(tail[24:], huge-page-volumes.TailSize) // length
	binary.LittleEndian.PutUint64(tail[volumes.TailSize-8:], xxh3.Hash(tail[:volumes.TailSize-8]))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(tail, huge-volumes.TailSize)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	v = openPersistent(t, dir, func(c *volumes.Config) { c.Capacity = huge })
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 32*mib {
		t.Errorf("opening has allocated %d bytes", n)
	}
	kept := v.Persisted()
	if len(kept) != 1 || kept[0].Err == nil || kept[0].Room != huge {
		t.Fatalf("kept: %+v", kept)
	}
	v.Forget(kept[0].Key)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestUnreadableHeaderLosesNothing: a directory with a file whose header cannot be read is left alone,
// because the header may list files that would be removed otherwise.
func TestUnreadableHeaderLosesNothing(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, es := persist(t, v, 1, unit)
	leave(t, v, es)
	before := contents(t, dir)
	fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{
		Ops: []string{"read"}, Path: "????????????????", Effect: faultfs.Fail(syscall.EIO),
	})
	v = openPersistent(t, dir, func(c *volumes.Config) { c.FS = fsys })
	if w := warned(v.Stats().Warnings); len(v.Persisted()) != 0 || !strings.Contains(w, "input/output error") {
		t.Errorf("%v are kept, warned of %q", v.Persisted(), w)
	}
	closeVolume(t, v)
	wantSame(t, "opened", before, contents(t, dir))
	v = openPersistent(t, dir)
	if got := keptNumbers(t, v, map[uint64]int64{1: unit}); len(got) != 1 {
		t.Errorf("%v are kept", got)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestMoreThanTheCapacityIsLeftAlone: what does not fit into the volume stays as it is, with a warning.
func TestMoreThanTheCapacityIsLeftAlone(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, es := persist(t, v, 1, 2*mib+page)
	leave(t, v, es)
	before := contents(t, dir)
	v = openPersistent(t, dir, func(c *volumes.Config) { c.Capacity = 2*mib + page })
	if w := warned(v.Stats().Warnings); len(v.Persisted()) != 0 || !strings.Contains(w, "capacity is 2101248") {
		t.Errorf("%v are kept, warned of %q", v.Persisted(), w)
	}
	closeVolume(t, v)
	wantSame(t, "opened", before, contents(t, dir))
	v = openPersistent(t, dir, func(c *volumes.Config) { c.Capacity = 2*mib + 2*page })
	if got := keptNumbers(t, v, map[uint64]int64{1: 2*mib + page}); len(got) != 1 {
		t.Errorf("%v are kept", got)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestOtherFormatIsLeftAlone: a directory with a file of another version stays as it is, with a
// warning. So do files that are none of a volume's.
func TestOtherFormatIsLeftAlone(t *testing.T) {
	other := tempDir(t)
	w := openPersistent(t, other)
	_, one := persist(t, w, 1, mib)
	leave(t, w, one)
	path := persistedFiles(t, other, "*")[0]
	if _, err := volumes.Forge(path, mib+page-volumes.TailSize+7, 1); err != nil {
		t.Fatal(err)
	}
	before, left := contents(t, other), names(t, other)[0]+" was kept and is left as it is"
	w = openPersistent(t, other)
	if text := warned(w.Stats().Warnings); len(w.Persisted()) != 0 || !strings.Contains(text, left) ||
		!strings.Contains(text, "another version") {
		t.Errorf("%v are kept, warned of %q", w.Persisted(), text)
	}
	closeVolume(t, w)
	wantSame(t, "opened", before, contents(t, other))

	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, es := persist(t, v, 1, page)
	leave(t, v, es)
	kept := filepath.Join(dir, names(t, dir)[0])
	foreign := []string{"notes.txt", "ab/0123456789abcdef", "ab/notes", "xy", "manifest-0000000000000001"}
	for _, name := range foreign {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(kept, name)), 0o700),
			os.WriteFile(filepath.Join(kept, name), []byte(name), 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	fsys := faultfs.New(disk.OS(), 1)
	v = openPersistent(t, dir, func(c *volumes.Config) { c.FS = fsys })
	free(v, wantPersisted(t, v, v.Persisted()[0], 1, page))
	closeVolume(t, v)
	if n := fsys.Open(); n != 0 {
		t.Errorf("%d files or locks are open", n)
	}
	for _, name := range foreign {
		if p, err := os.ReadFile(filepath.Join(kept, name)); err != nil || string(p) != name {
			t.Errorf("%s has become %q: %v", name, p, err)
		}
	}
}

// TestPersistingSurvivesEveryFault: with any single operation of the file system failing, from
// opening to closing, nothing that is found afterwards is wrong, and the word of Persist holds:
// what it recorded is there, unless the reading failed.
func TestPersistingSurvivesEveryFault(t *testing.T) {
	const size = mib / 4
	small := func(c *volumes.Config) { c.Capacity = 4 * mib }
	for i := 0; ; i += testseed.Rounds(1, 3) {
		dir := testfs.MemoryDir(t)
		v := openPersistent(t, dir, small)
		_, es := persist(t, v, 1, size)
		leave(t, v, es)
		fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{Skip: i, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
		kept := false
		v, err := openVolume(volumes.Config{Dir: dir, Capacity: 4 * mib, Persist: true, FS: fsys})
		if err == nil {
			found := len(v.Persisted()) == 1
			e, failed := v.Alloc(size, nil)
			if failed == nil {
				failed = e.(tier.FileMemory).WriteAt(t.Context(), random(size, 5), 0)
			}
			if failed == nil {
				_, failed = v.Persist(metaOf(5), placeOf(5), anyRoom, e)
				kept = failed == nil
			}
			if kept && found {
				saved := testfs.MemoryDir(t)
				testfs.CopyTree(t, saved, dir)
				again := openPersistent(t, saved, small)
				if n := len(again.Persisted()); n != 2 {
					t.Errorf("fault %d: %d of 2 are kept", i, n)
				}
				for _, k := range again.Persisted() {
					again.Forget(k.Key)
				}
				closeVolume(t, again)
				wantEmpty(t, saved)
			}
			if e != nil {
				v.Free(e, func() {})
			}
			_ = v.Close()
		}
		if n := fsys.Open(); n != 0 {
			t.Fatalf("fault %d: %d files are open", i, n)
		}
		// Whatever failed: what was kept before is whole, or was said to be lost.
		v = openPersistent(t, dir, small)
		for _, k := range v.Persisted() {
			if string(k.Meta) != "meta 1" {
				t.Errorf("fault %d: %q is kept, and was freed", i, k.Meta)
				v.Forget(k.Key)
				continue
			}
			free(v, wantPersisted(t, v, k, 1, size))
		}
		closeVolume(t, v)
		wantEmpty(t, dir)
		if fsys.Hits() == 0 {
			if i < 30 {
				t.Fatalf("only %d operations", i)
			}
			return
		}
	}
}

// TestRandomPersisting keeps, frees and forgets at random, looks at a copy of the directory
// now and then, as a kill would leave it, and compares with a model.
func TestRandomPersisting(t *testing.T) {
	r := rand.New(rand.NewPCG(4, 2))
	dir := tempDir(t)
	v := openPersistent(t, dir)
	live := make(map[uint64]tier.FileMemory) // by seed
	var loose []tier.FileMemory
	look := func() {
		work := tempDir(t)
		testfs.CopyTree(t, work, dir)
		v := openPersistent(t, work)
		kept := v.Persisted()
		if len(kept) != len(live) || len(v.Stats().Warnings) != 0 {
			t.Fatalf("%d kept, want %d; warnings %q", len(kept), len(live), v.Stats().Warnings)
		}
		for _, k := range kept {
			var seed uint64
			_, _ = fmt.Sscanf(string(k.Meta), "meta %d", &seed)
			free(v, wantPersisted(t, v, k, seed, live[seed].Size()))
		}
		closeVolume(t, v)
		wantEmpty(t, work)
	}
	for step := range uint64(testseed.Rounds(200, 100)) {
		switch k := r.IntN(10); {
		case k < 5 && v.Stats().Used < 8*mib:
			_, live[step] = persist(t, v, step, 1+r.Int64N(mib))
		case k < 7 && v.Stats().Used < 8*mib:
			e := alloc(t, v, 1+r.Int64N(mib))
			write(t, e, random(e.Size(), step), 0)
			loose = append(loose, e)
		case k < 8 && len(loose) > 0:
			free(v, loose[0])
			loose = loose[1:]
		default:
			for seed, e := range live { // any one
				if r.IntN(3) == 0 {
					key, _ := v.KeyOf(e)
					v.Forget(key)
					loose = append(loose, e)
				} else {
					free(v, e)
				}
				delete(live, seed)
				break
			}
		}
		if step%40 == 39 {
			look()
		}
	}
	for _, e := range live {
		free(v, e)
	}
	free(v, loose...)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestFileThatCannotBeRemoved: a batch that was freed does not come back, even if its file could not be
// removed then.
func TestFileThatCannotBeRemoved(t *testing.T) {
	for _, op := range []string{"remove", "rename"} {
		dir := tempDir(t)
		fsys := faultfs.New(disk.OS(), 1)
		v := openPersistent(t, dir, func(c *volumes.Config) { c.FS = fsys })
		_, es := persist(t, v, 1, page)
		_, stays := persist(t, v, 2, page)
		remove := fsys.Add(faultfs.Rule{Ops: []string{op}, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
		free(v, es)
		remove()
		if w := v.Stats().Warnings; len(w) != 1 {
			t.Errorf("%s: warnings %q", op, w)
		}
		leave(t, v, stays)
		v = openPersistent(t, dir)
		if got := keptNumbers(t, v, map[uint64]int64{2: page}); !slices.Equal(got, []uint64{2}) {
			t.Errorf("%s: %v are kept", op, got)
		}
		closeVolume(t, v)
		wantEmpty(t, dir)
	}
}
