package volumes_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/copytree"
	"github.com/spillway-db/spillway/internal/memdir"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// persistedFiles returns the files in the only kept directory.
func persistedFiles(t testing.TB, dir, kind string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(dir, "spillway-kept-*", kind))
	if err != nil || len(all) == 0 {
		t.Fatalf("no %s: %v", kind, err)
	}
	return all
}

// TestEveryByteOfTheManifestIsChecked: with any byte of it changed, of which each run tries a
// part, what is found is what was kept, or less, and a warning says so.
func TestEveryByteOfTheManifestIsChecked(t *testing.T) {
	small := func(c *volumes.Config) { c.Capacity, c.SegmentSize = 16*page, 16*page }
	dir := tempDir(t)
	v := openPersistent(t, dir, small)
	var all []tier.FileMemory
	for i := range uint64(4) {
		_, es := persist(t, v, 10*i, page, page)
		all = append(all, es...)
	}
	free(v, all[2])                     // a record that is over,
	_, again := persist(t, v, 40, page) // and its room used again
	leave(t, v, slices.Concat(all[:2], all[3:], again)...)
	manifest := persistedFiles(t, dir, "manifest-*")[0]
	sound, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	pristine := memdir.New(t)
	copytree.Copy(t, pristine, dir)
	const step = 9 // each meets all bits, and all fields; runs begin at different bytes
	for at := int(testseed.One(t) % step); at < len(sound); at += step {
		work := memdir.New(t)
		copytree.Copy(t, work, pristine)
		bad := slices.Clone(sound)
		bad[at] ^= 1 << (at % 8)
		if err := os.WriteFile(persistedFiles(t, work, "manifest-*")[0], bad, 0o600); err != nil {
			t.Fatal(err)
		}
		v := openPersistent(t, work, small)
		found := make(map[string]bool)
		for _, k := range v.Persisted() {
			var seed uint64
			if _, err := fmt.Sscanf(string(k.Meta), "meta %d", &seed); err != nil {
				t.Fatalf("byte %d: meta %q", at, k.Meta)
			}
			found[string(k.Meta)] = true
			free(v, wantPersisted(t, v, k, seed, []int64{page, page, page}[:len(k.Sizes)]...)...)
		}
		told := warned(v.Stats().Warnings)
		// The zeros behind a record, and the end of one that is over, may be wrong.
		lost := !found["meta 0"] || !found["meta 20"] || !found["meta 30"] || !found["meta 40"]
		if (lost || found["meta 10"]) && told == "" {
			t.Errorf("byte %d: found %v and no warning", at, found)
		}
		if found["meta 10"] && found["meta 40"] {
			t.Errorf("byte %d: a page is two memories'", at)
		}
		closeVolume(t, v)
	}
}

// TestCutManifestIsRead: cut at any length it says what it said up to there.
func TestCutManifestIsRead(t *testing.T) {
	small := func(c *volumes.Config) { c.Capacity, c.SegmentSize = 16*page, 16*page } // copied for each cut
	dir := tempDir(t)
	v := openPersistent(t, dir, small)
	var all []tier.FileMemory
	var ends []int64
	for i := range uint64(3) {
		_, es := persist(t, v, 10*i, page)
		all = append(all, es...)
		info, err := os.Stat(persistedFiles(t, dir, "manifest-*")[0])
		if err != nil {
			t.Fatal(err)
		}
		ends = append(ends, info.Size())
	}
	leave(t, v, all...)
	pristine := memdir.New(t)
	copytree.Copy(t, pristine, dir)
	for cut := int64(0); cut <= ends[2]; cut += int64(testseed.Rounds(7, 13)) { // not divisors of anything
		work := memdir.New(t)
		copytree.Copy(t, work, pristine)
		if err := os.Truncate(persistedFiles(t, work, "manifest-*")[0], cut); err != nil {
			t.Fatal(err)
		}
		v := openPersistent(t, work, small)
		want := 0
		for _, end := range ends {
			if cut > end-8 { // the zeros at the end may be missing
				want++
			}
		}
		kept := v.Persisted()
		if len(kept) > want || len(kept) < want-1 || cut > ends[2]-2 && len(kept) != 3 {
			t.Errorf("cut at %d of %v: %d kept, want %d", cut, ends, len(kept), want)
		}
		for i, k := range kept {
			free(v, wantPersisted(t, v, k, uint64(10*i), page)...)
		}
		closeVolume(t, v)
		wantEmpty(t, work)
	}
}

// TestMissingAndShortSegments: what lay there is lost, with a warning; the rest is there.
func TestMissingAndShortSegments(t *testing.T) {
	for name, harm := range map[string]func(string) error{
		"missing": os.Remove,
		"short":   func(p string) error { return os.Truncate(p, 2*mib) },
		"link":    func(p string) error { return errors.Join(os.Remove(p), os.Symlink("/dev/null", p)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			v := openPersistent(t, dir)
			_, a := persist(t, v, 1, 4*mib)
			_, b := persist(t, v, 2, 4*mib)
			leave(t, v, append(a, b...)...)
			files := persistedFiles(t, dir, "segment-*")
			if len(files) != 2 {
				t.Fatal(files)
			}
			if err := harm(files[0]); err != nil {
				t.Fatal(err)
			}
			v = openPersistent(t, dir)
			kept := v.Persisted()
			if len(kept) != 1 {
				t.Fatalf("kept: %+v", kept)
			}
			oneLine(t, warned(v.Stats().Warnings), "is lost", filepath.Base(files[0]))
			free(v, wantPersisted(t, v, kept[0], 2, 4*mib)...)
			if name == "link" { // its owner is not known
				if err := os.Remove(files[0]); err != nil {
					t.Error(err)
				}
			}
			closeVolume(t, v)
			wantEmpty(t, dir)
		})
	}
}

// TestForeignManifestIsLeftAlone: a directory that this version cannot read stays as it
// is, with a warning; so does one that the volume is too small for.
func TestForeignManifestIsLeftAlone(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, es := persist(t, v, 1, 4*mib)
	leave(t, v, es...)
	manifest := persistedFiles(t, dir, "manifest-*")[0]
	sound, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	before := names(t, dir)
	check := func(why string, change func(*volumes.Config)) {
		t.Helper()
		v := openPersistent(t, dir, change)
		if len(v.Persisted()) != 0 {
			t.Errorf("%s: kept %+v", why, v.Persisted())
		}
		oneLine(t, warned(v.Stats().Warnings), "left as it is", why, before[0])
		closeVolume(t, v)
		if got := names(t, dir); !slices.Equal(got, before) {
			t.Errorf("%s: %v became %v", why, before, got)
		}
	}
	check("capacity", func(c *volumes.Config) { c.Capacity = 2 * mib })
	same := func(*volumes.Config) {}
	for why, harm := range map[string]func([]byte){
		"not a manifest": func(p []byte) { copy(p, "PARQUET1") },
		"version 1":      func(p []byte) { binary.LittleEndian.PutUint32(p[8:], 1) },
		"version 2":      func(p []byte) { binary.LittleEndian.PutUint32(p[8:], 2) },
		"version 4":      func(p []byte) { binary.LittleEndian.PutUint32(p[8:], 4) },
		"damaged":        func(p []byte) { p[20] ^= 1 },
	} {
		bad := slices.Clone(sound)
		harm(bad)
		if err := os.WriteFile(manifest, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		check(why, same)
	}
	short := slices.Clone(sound[:64]) // of a version whose header is shorter, and so was all of it
	binary.LittleEndian.PutUint32(short[8:], 1)
	if err := os.WriteFile(manifest, short, 0o600); err != nil {
		t.Fatal(err)
	}
	check("version 1", same)
	if err := os.WriteFile(manifest, sound, 0o600); err != nil {
		t.Fatal(err)
	}
	v = openPersistent(t, dir)
	free(v, wantPersisted(t, v, v.Persisted()[0], 1, 4*mib)...)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestManifestIsWrittenAnew: it does not grow without end, and the new one says the same.
func TestManifestIsWrittenAnew(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, stays := persist(t, v, 1, page)
	first := persistedFiles(t, dir, "manifest-*")[0]
	meta := bytes.Repeat([]byte{7}, 100<<10)
	var last tier.FileMemory
	for range 64 {
		e := alloc(t, v, page)
		if _, err := v.Persist(nil, meta, e); err != nil {
			t.Fatal(err)
		}
		if last != nil {
			free(v, last)
		}
		last = e
	}
	files := persistedFiles(t, dir, "manifest-*")
	info, err := os.Stat(files[0])
	if err != nil || len(files) != 1 || files[0] == first || info.Size() > 2<<20 {
		t.Errorf("after 64 records of 100 KiB: %v, %d bytes, %v", files, info.Size(), err)
	}
	leave(t, v, append(stays, last)...)
	v = openPersistent(t, dir)
	kept := v.Persisted()
	if len(kept) != 2 || !bytes.Equal(kept[1].Meta, meta) {
		t.Fatalf("%d kept", len(kept))
	}
	free(v, wantPersisted(t, v, kept[0], 1, page)...)
	v.Forget(kept[1].Key)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestPersistingSurvivesEveryFault: with any single operation of the file system failing, from
// opening to closing, nothing that is found afterwards is wrong, and the word of Persist holds:
// what it recorded is there, unless the reading failed.
func TestPersistingSurvivesEveryFault(t *testing.T) {
	const size = mib / 4
	small := func(c *volumes.Config) { c.Capacity, c.SegmentSize = 4*mib, mib }
	for i := 0; ; i += testseed.Rounds(1, 3) {
		dir := memdir.New(t)
		v := openPersistent(t, dir, small)
		_, es := persist(t, v, 1, size)
		leave(t, v, es...)
		fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{Skip: i, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
		kept := false
		v, err := openVolume(volumes.Config{Dir: dir, Capacity: 4 * mib, SegmentSize: mib, Persist: true, FS: fsys})
		if err == nil {
			found := len(v.Persisted()) == 1
			e, failed := v.Alloc(size, nil)
			if failed == nil {
				failed = e.(tier.FileMemory).WriteAt(t.Context(), random(size, 5), 0)
			}
			if failed == nil {
				_, failed = v.Persist(sharedOf(5), metaOf(5), e)
				kept = failed == nil
			}
			if kept && found {
				saved := memdir.New(t)
				copytree.Copy(t, saved, dir)
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
			free(v, wantPersisted(t, v, k, 1, size)...)
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
	type held struct {
		es    []tier.FileMemory
		sizes []int64
	}
	live := make(map[uint64]held) // by seed
	var loose []tier.FileMemory
	look := func() {
		work := tempDir(t)
		copytree.Copy(t, work, dir)
		v := openPersistent(t, work)
		kept := v.Persisted()
		if len(kept) != len(live) || len(v.Stats().Warnings) != 0 {
			t.Fatalf("%d kept, want %d; warnings %q", len(kept), len(live), v.Stats().Warnings)
		}
		for _, k := range kept {
			var seed uint64
			_, _ = fmt.Sscanf(string(k.Meta), "meta %d", &seed)
			free(v, wantPersisted(t, v, k, seed, live[seed].sizes...)...)
		}
		closeVolume(t, v)
		wantEmpty(t, work)
	}
	for step := range uint64(testseed.Rounds(200, 100)) {
		switch k := r.IntN(10); {
		case k < 5 && v.Stats().Used < 8*mib:
			sizes := []int64{page * (1 + r.Int64N(64))}
			if r.IntN(2) == 0 {
				sizes = append(sizes, 1+r.Int64N(mib))
			}
			_, es := persist(t, v, 100*step, sizes...)
			live[100*step] = held{es, sizes}
		case k < 7 && v.Stats().Used < 8*mib:
			e := alloc(t, v, 1+r.Int64N(mib))
			write(t, e, random(e.Size(), step), 0)
			loose = append(loose, e)
		case k < 8 && len(loose) > 0:
			free(v, loose[0])
			loose = loose[1:]
		default:
			for seed, h := range live { // any one
				if r.IntN(3) == 0 {
					key, _ := v.KeyOf(h.es[0])
					v.Forget(key)
					loose = append(loose, h.es...)
				} else {
					free(v, h.es...)
				}
				delete(live, seed)
				break
			}
		}
		if step%40 == 39 {
			look()
		}
	}
	for _, h := range live {
		free(v, h.es...)
	}
	free(v, loose...)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestFreedStaysFreedOnAFullDisk: while a manifest can neither grow nor be written anew, what
// is freed does not come back, nor what its record had replaced; and once there is
// room again, all is as ever.
func TestFreedStaysFreedOnAFullDisk(t *testing.T) {
	dir := tempDir(t)
	full := &fullDisk{FS: disk.OS()}
	v := openPersistent(t, dir, func(c *volumes.Config) { c.FS = full })
	_, stays := persist(t, v, 1, page)
	_, once := persist(t, v, 2, page)
	_, thrice := persist(t, v, 3, page)
	for range 2 {
		if _, err := v.Persist(sharedOf(3), metaOf(3), thrice[0]); err != nil {
			t.Fatal(err)
		}
	}
	forgotten, es := persist(t, v, 4, page)
	look := func(want ...uint64) {
		t.Helper()
		work := tempDir(t)
		copytree.Copy(t, work, dir)
		next := openPersistent(t, work)
		kept := next.Persisted()
		if len(kept) != len(want) {
			t.Errorf("%d are kept, want %d", len(kept), len(want))
		}
		for i, k := range kept[:min(len(kept), len(want))] {
			free(next, wantPersisted(t, next, k, want[i], page)...)
		}
		for _, k := range next.Persisted() {
			next.Forget(k.Key)
		}
		closeVolume(t, next)
		wantEmpty(t, work)
	}
	full.now.Store(true)
	if _, err := v.Persist(sharedOf(5), metaOf(5), es[0], once[0]); err == nil {
		t.Error("kept together with what is kept already")
	}
	look(1, 2, 3, 4)
	free(v, once...)
	look(1, 3, 4)
	free(v, thrice...)
	look(1, 4)
	v.Forget(forgotten)
	look(1)
	full.now.Store(false)
	_, more := persist(t, v, 6, page)
	look(1, 6)
	free(v, more...)
	look(1)
	free(v, append(stays, es...)...)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestOldManifestThatStays: one that could not be removed says that something is kept, which
// was freed since. The next one stays too when its volume is closed, and is believed.
func TestOldManifestThatStays(t *testing.T) {
	dir := tempDir(t)
	fsys := faultfs.New(disk.OS(), 1)
	v := openPersistent(t, dir, func(c *volumes.Config) { c.FS = fsys })
	_, es := persist(t, v, 1, page)
	old := filepath.Base(persistedFiles(t, dir, "manifest-*")[0])
	var heal []func()
	for _, path := range []string{old, "segment-*"} {
		heal = append(heal, fsys.Add(faultfs.Rule{Ops: []string{"remove"}, Path: path, Effect: faultfs.Fail(syscall.EIO)}))
	}
	large := make([]byte, 600<<10)
	for range 3 {
		key, err := v.Persist(nil, large)
		if err != nil {
			t.Fatal(err)
		}
		v.Forget(key)
	}
	if n := len(persistedFiles(t, dir, "manifest-*")); n != 2 {
		t.Fatalf("%d manifests, want the old and a new one", n)
	}
	free(v, es...)
	if err := v.Close(); !errors.Is(err, syscall.EIO) {
		t.Errorf("closing while files cannot be removed: %v", err)
	}
	for _, h := range heal {
		h()
	}
	v = openPersistent(t, dir)
	if kept, w := v.Persisted(), v.Stats().Warnings; len(kept) != 0 || len(w) != 0 {
		t.Errorf("kept: %+v, warnings: %q", kept, w)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// fullDisk is a file system on which, for some time, no manifest can be made and none
// becomes longer.
type fullDisk struct {
	disk.FS
	now atomic.Bool
}

func (f *fullDisk) Create(path string, direct bool) (disk.File, error) {
	manifest := strings.HasPrefix(filepath.Base(path), "manifest-")
	if manifest && f.now.Load() {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.ENOSPC}
	}
	file, err := f.FS.Create(path, direct)
	if err != nil || !manifest {
		return file, err
	}
	return &fullFile{File: file, full: f}, nil
}

type fullFile struct {
	disk.File
	full   *fullDisk
	length atomic.Int64
}

func (f *fullFile) WriteAt(p []byte, off int64) (int, error) {
	end := off + int64(len(p))
	if f.full.now.Load() && end > f.length.Load() {
		return 0, syscall.ENOSPC
	}
	f.length.Store(max(end, f.length.Load()))
	return f.File.WriteAt(p, off)
}

// TestWhatIsNoManifestIsNotRead: a file that only has the name of one is known by its first
// bytes, however long it is.
func TestWhatIsNoManifestIsNotRead(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, es := persist(t, v, 1, page)
	leave(t, v, es...)
	long := filepath.Join(filepath.Dir(persistedFiles(t, dir, "manifest-*")[0]), "manifest-0000000000000099")
	if err := os.WriteFile(long, make([]byte, mib), 0o600); err != nil {
		t.Fatal(err)
	}
	fsys := &readCounter{FS: disk.OS()}
	v = openPersistent(t, dir, func(c *volumes.Config) { c.FS = fsys })
	oneLine(t, v.Stats().Warnings[0].What, "manifest-0000000000000099", "not a manifest")
	closeVolume(t, v)
	if n := fsys.read.Load(); n == 0 || n > page {
		t.Errorf("%d bytes of it were read", n)
	}
	if err := os.Remove(long); err != nil {
		t.Fatal(err)
	}
	v = openPersistent(t, dir)
	free(v, wantPersisted(t, v, v.Persisted()[0], 1, page)...)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// readCounter counts the bytes read from files that were there.
type readCounter struct {
	disk.FS
	read atomic.Int64
}

func (r *readCounter) Reopen(path string, direct bool) (disk.File, error) {
	file, err := r.FS.Reopen(path, direct)
	if err != nil {
		return nil, err
	}
	return &countedFile{file, r}, nil
}

type countedFile struct {
	disk.File
	all *readCounter
}

func (f *countedFile) ReadAt(p []byte, off int64) (int, error) {
	f.all.read.Add(int64(len(p)))
	return f.File.ReadAt(p, off)
}
