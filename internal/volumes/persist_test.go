package volumes_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// openPersistent opens a volume that keeps.
func openPersistent(t testing.TB, dir string, change ...func(*volumes.Config)) *volumes.Volume {
	t.Helper()
	onLinux(t)
	cfg := volumes.Config{Dir: dir, Capacity: 16 * mib, Persist: true}
	for _, c := range change {
		c(&cfg)
	}
	v, err := openVolume(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func closeVolume(t testing.TB, v *volumes.Volume) {
	t.Helper()
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

// persist allocates, fills and keeps memory; what it holds is made of seed.
func persist(t testing.TB, v *volumes.Volume, seed uint64, size int64) (uint64, tier.FileMemory) {
	t.Helper()
	e := alloc(t, v, size)
	write(t, e, random(size, seed), 0)
	key, err := v.Persist(metaOf(seed), placeOf(seed), anyRoom, e)
	if err != nil {
		t.Fatal(err)
	}
	return key, e
}

// anyRoom is a space that always has room for a header.
func anyRoom(int64) (giveUp func(), err error) { return func() {}, nil }

func metaOf(seed uint64) []byte { return fmt.Appendf(nil, "meta %d", seed) }

func placeOf(seed uint64) []byte { return fmt.Appendf(nil, "place %d", seed) }

// leave closes a volume so that its directory looks as if the process had been killed:
// what it keeps is copied, and put back afterwards.
func leave(t testing.TB, v *volumes.Volume, es ...tier.FileMemory) {
	t.Helper()
	saved := tempDir(t)
	testfs.CopyTree(t, saved, v.Dir())
	free(v, es...)
	closeVolume(t, v)
	if err := os.RemoveAll(v.Dir()); err != nil {
		t.Fatal(err)
	}
	testfs.CopyTree(t, v.Dir(), saved)
}

// wantPersisted takes what was kept with seed, compares it, and makes it the volume's own.
func wantPersisted(t testing.TB, v *volumes.Volume, k volumes.Persisted, seed uint64, size int64) tier.FileMemory {
	t.Helper()
	e := wantLent(t, v, k, seed, size)
	v.Own(k.Key, func() {})
	return e
}

// wantLent takes what was kept with seed and compares it.
func wantLent(t testing.TB, v *volumes.Volume, k volumes.Persisted, seed uint64, size int64) tier.FileMemory {
	t.Helper()
	if !bytes.Equal(k.Meta, metaOf(seed)) || k.Size != size || !bytes.Equal(k.Place, placeOf(seed)) {
		t.Errorf("kept: %q, %q of %d, want %q, %q of %d", k.Place, k.Meta, k.Size, placeOf(seed), metaOf(seed), size)
	}
	m, err := v.Take(k.Key)
	if err != nil {
		t.Fatal(err)
	}
	e := m.(tier.FileMemory)
	if !bytes.Equal(read(t, e, size, 0), random(size, seed)) {
		t.Errorf("the memory of %q has other bytes", k.Meta)
	}
	return e
}

// reopenHook is a file system that calls before once, when a file is about to be opened again.
type reopenHook struct {
	disk.FS
	before atomic.Pointer[func()]
}

func (f *reopenHook) Reopen(path string, direct bool) (disk.File, error) {
	if before := f.before.Swap(nil); before != nil {
		(*before)()
	}
	return f.FS.Reopen(path, direct)
}

// TestReadDuringRename: a memory can be read while its file gets its key for a name, and while it
// loses it.
func TestReadDuringRename(t *testing.T) {
	hook := &reopenHook{FS: disk.OS()}
	v := openPersistent(t, tempDir(t), func(c *volumes.Config) { c.FS = hook })
	defer closeVolume(t, v)
	e := alloc(t, v, mib)
	defer v.Free(e, func() {})
	write(t, e, random(mib, 1), 0)
	var key uint64
	persisting := func() {
		var err error
		if key, err = v.Persist(metaOf(1), placeOf(1), anyRoom, e); err != nil {
			t.Error(err)
		}
	}
	forgetting := func() { v.Forget(key) }
	for _, rename := range []func(){persisting, forgetting} {
		var renaming sync.WaitGroup
		before := func() {
			renaming.Go(rename)
			for range 10_000 { // it has time to go wrong, and cannot fail if it is slow
				runtime.Gosched()
			}
		}
		hook.before.Store(&before)
		if !bytes.Equal(read(t, e, mib, 0), random(mib, 1)) {
			t.Error("the memory has other bytes")
		}
		renaming.Wait()
	}
}

// TestPersistedMemoriesAreThereAfterwards: what was kept is found with its bytes, whatever
// was freed or not kept beside it is room again, and in the end nothing is left.
func TestPersistedMemoriesAreThereAfterwards(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, a := persist(t, v, 1, mib)
	_, gone := persist(t, v, 2, 3*mib)
	_, b := persist(t, v, 3, 5*mib+2*page+100)
	loose := alloc(t, v, mib)
	write(t, loose, random(mib, 9), 0)
	free(v, gone)
	again := alloc(t, v, 3*mib)
	write(t, again, random(3*mib, 10), 0)
	leave(t, v, a, b, loose, again)

	v = openPersistent(t, dir)
	if w := v.Stats().Warnings; len(w) != 0 {
		t.Errorf("warnings: %q", w)
	}
	if parts, err := filepath.Glob(filepath.Join(dir, "*", "*.part")); err != nil || len(parts) > 0 {
		t.Errorf("what did not persist is left: %v, %v", parts, err)
	}
	kept := v.Persisted()
	if len(kept) != 2 {
		t.Fatalf("kept: %+v", kept)
	}
	held := int64(mib + 5*mib + 3*page + 2*page) // with two headers
	if encrypted {
		held += page // the seals of 81 blocks
	}
	if s := v.Stats(); s.Used != held || s.Backed != held {
		t.Errorf("%+v, want %d used", s, held)
	}
	rest := alloc(t, v, 16*mib-held) // all that is left, and no more
	write(t, rest, random(16*mib-held, 11), 0)
	if _, err := v.Alloc(page, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("more than the capacity was handed out: %v", err)
	}
	es := []tier.FileMemory{wantPersisted(t, v, kept[0], 1, mib), wantPersisted(t, v, kept[1], 3, 5*mib+2*page+100)}
	if _, err := v.Take(kept[0].Key); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("taken twice: %v", err)
	}
	free(v, append(es, rest)...)
	if s := v.Stats(); s.Used != 0 {
		t.Errorf("all is freed: %+v", s)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestPersistedStaysUntilTaken: a volume that is closed keeps what nobody took, however often,
// and what was put back.
func TestPersistedStaysUntilTaken(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, e := persist(t, v, 1, mib)
	_, more := persist(t, v, 2, mib+page)
	leave(t, v, e, more)
	for range 3 {
		v = openPersistent(t, dir)
		kept := v.Persisted()
		if len(kept) != 2 {
			t.Fatalf("kept: %+v", kept)
		}
		taken := wantLent(t, v, kept[1], 2, mib+page)
		if n := len(v.Persisted()); n != 1 {
			t.Errorf("%d are listed while one is lent", n)
		}
		free(v, taken)
		again := wantLent(t, v, v.Persisted()[1], 2, mib+page)
		e := alloc(t, v, 16*mib-2*mib-3*page)
		write(t, e, random(16*mib-2*mib-3*page, 5), 0)
		free(v, again, e)
		closeVolume(t, v)
		if s := v.Stats(); s.Segments != 0 {
			t.Errorf("closed: %+v", s)
		}
	}
	// An ordinary volume removes nothing of it.
	before := names(t, dir)
	plain, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib})
	if err != nil {
		t.Fatal(err)
	}
	closeVolume(t, plain)
	if got := names(t, dir); len(got) != 1 || !slices.Equal(got, before) {
		t.Errorf("%v became %v", before, got)
	}
	v = openPersistent(t, dir)
	for _, k := range v.Persisted() {
		v.Forget(k.Key)
		v.Forget(k.Key)
	}
	if s := v.Stats(); s.Used != 0 {
		t.Errorf("all is forgotten: %+v", s)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestPersistedPlaceChanges: a batch has one place, the last; one that was freed, or forgotten, does
// not persist.
func TestPersistedPlaceChanges(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	key, e := persist(t, v, 1, mib)
	if err := v.SetPlace(key, placeOf(7)); err != nil {
		t.Error(err)
	}
	if now, ok := v.KeyOf(e); !ok || now != key {
		t.Errorf("kept as %d: %d, %v", key, now, ok)
	}
	if err := v.SetPlace(
		key,
		make([]byte, volumes.TailSize),
	); err == nil ||
		!strings.Contains(err.Error(), "too long") {
		t.Errorf("a place of %d bytes: %v", volumes.TailSize, err)
	}
	other := alloc(t, v, page)
	if _, err := v.Persist(nil, nil, anyRoom, e); err == nil {
		t.Error("kept twice")
	}
	forgotten, f := persist(t, v, 3, mib)
	v.Forget(forgotten)
	if _, ok := v.KeyOf(f); ok {
		t.Error("forgotten, and it has a key")
	}
	if err := v.SetPlace(forgotten, nil); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("the place of what was forgotten: %v", err)
	}
	free(v, other)
	if _, err := v.Persist(nil, nil, anyRoom, other); !errors.Is(err, tier.ErrReleased) {
		t.Errorf("keeping what was freed: %v", err)
	}
	leave(t, v, e, f)
	v = openPersistent(t, dir)
	kept := v.Persisted()
	if len(kept) != 1 || string(kept[0].Meta) != "meta 1" || string(kept[0].Place) != "place 7" {
		t.Fatalf("kept: %+v", kept)
	}
	v.Forget(kept[0].Key)
	closeVolume(t, v)
	wantEmpty(t, dir)

	plain, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib})
	if err != nil {
		t.Fatal(err)
	}
	e = alloc(t, plain, page)
	if _, err := plain.Persist(nil, nil, anyRoom, e); err == nil {
		t.Error("a volume without Persist records what persists")
	}
	free(plain, e)
	closeVolume(t, plain)
	wantEmpty(t, dir)
}

// TestTwoVolumesPersistApart: while one uses a kept directory another makes its own.
func TestTwoVolumesPersistApart(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	_, es := persist(t, v, 1, mib)
	leave(t, v, es)
	first := openPersistent(t, dir)
	second := openPersistent(t, dir)
	if len(first.Persisted()) != 1 || len(second.Persisted()) != 0 || len(names(t, dir)) != 2 {
		t.Errorf("kept: %v and %v in %v", first.Persisted(), second.Persisted(), names(t, dir))
	}
	_, two := persist(t, second, 2, mib)
	es = wantPersisted(t, first, first.Persisted()[0], 1, mib)
	free(second, two)
	closeVolume(t, second)
	if len(names(t, dir)) != 1 {
		t.Errorf("left: %v", names(t, dir))
	}
	free(first, es)
	closeVolume(t, first)
	wantEmpty(t, dir)
}

// keptByTwo leaves in dir what two processes kept: a batch each.
func keptByTwo(t *testing.T, dir string) {
	t.Helper()
	first, second := openPersistent(t, dir), openPersistent(t, dir)
	_, one := persist(t, first, 1, mib)
	_, two := persist(t, second, 2, mib)
	leave(t, first, one)
	leave(t, second, two)
}

// TestTwoKeptDirectories: the next volume takes over one of two, and warns of the other. The one
// after it finds the other.
func TestTwoKeptDirectories(t *testing.T) {
	dir := tempDir(t)
	keptByTwo(t, dir)
	open := func(warns bool) (*volumes.Volume, volumes.Persisted) {
		t.Helper()
		v := openPersistent(t, dir)
		volumes.WarnOfOthers(v)
		found := v.Persisted()
		if len(found) != 1 {
			t.Fatalf("kept: %v", found)
		}
		if left := warnsOfOthers(v); left != warns {
			t.Errorf("a warning of the other is %v; want %v: %v", left, warns, v.Warnings())
		}
		return v, found[0]
	}
	v, a := open(true)
	w, b := open(false)
	seed := uint64(1)
	if bytes.Equal(a.Meta, metaOf(2)) {
		seed = 2
	}
	free(v, wantPersisted(t, v, a, seed, mib))
	free(w, wantPersisted(t, w, b, 3-seed, mib))
	closeVolume(t, v)
	closeVolume(t, w)
	wantEmpty(t, dir)
}

// TestClosedVolumeLeavesTheNextOneAlone: what is kept without memories ends with its
// volume. A late Forget of that, or of what stays, does not write where another volume keeps.
func TestClosedVolumeLeavesTheNextOneAlone(t *testing.T) {
	for _, stays := range []bool{false, true} {
		dir := tempDir(t)
		v := openPersistent(t, dir)
		var keys []uint64
		if stays { // so that the directory does
			_, es := persist(t, v, 1, page)
			leave(t, v, es)
			v = openPersistent(t, dir)
			keys = append(keys, v.Persisted()[0].Key)
		}
		for i := range uint64(3) {
			key, err := v.Persist(metaOf(10+i), nil, anyRoom, nil)
			if err != nil {
				t.Fatal(err)
			}
			keys = append(keys, key)
		}
		closeVolume(t, v)
		if !stays {
			wantEmpty(t, dir)
		}

		next := openPersistent(t, dir)
		if n := len(next.Persisted()); n > 1 || n == 1 != stays {
			t.Errorf("%d are kept of a volume that was closed", n)
		}
		for _, k := range next.Persisted() {
			free(next, wantPersisted(t, next, k, 1, page))
		}
		_, es := persist(t, next, 2, mib)
		for _, key := range keys {
			v.Forget(key)
		}
		if w := v.Stats().Warnings; len(w) != 0 {
			t.Errorf("warnings: %q", w)
		}
		leave(t, next, es)
		next = openPersistent(t, dir)
		kept := next.Persisted()
		if len(kept) != 1 {
			t.Fatalf("%d are kept, want 1", len(kept))
		}
		free(next, wantPersisted(t, next, kept[0], 2, mib))
		closeVolume(t, next)
		wantEmpty(t, dir)
	}
}

// TestRoomWaitsForTheEnd: memory that is freed while its batch is forgotten is no room before the batch
// has ended on the disk.
func TestRoomWaitsForTheEnd(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	v := openPersistent(t, tempDir(t), func(c *volumes.Config) { c.FS = fsys })
	key, e := persist(t, v, 1, page)
	ending, goOn := make(chan struct{}), make(chan struct{})
	used := int64(0)
	defer fsys.Add(faultfs.Rule{
		Ops: []string{"rename"}, Times: 1,
		Effect: faultfs.Do(func(string, string) {
			used = v.Stats().Used
			close(ending)
			<-goOn
		}),
	})()
	var both sync.WaitGroup
	both.Go(func() { v.Forget(key) })
	<-ending
	var early atomic.Bool
	both.Go(func() { v.Free(e, func() { early.Store(true) }) })
	for range 10_000 { // it has time to go wrong, and cannot fail if it is slow
		runtime.Gosched()
	}
	if early.Load() {
		t.Error("the room was free while the batch was still there")
	}
	close(goOn)
	both.Wait()
	if _, ok := v.KeyOf(e); ok || !early.Load() {
		t.Error("the batch has not ended")
	}
	if used != 2*page {
		t.Errorf("%d bytes were in use while the batch ended, want %d", used, 2*page)
	}
	if n := v.Stats().Used; n != 0 {
		t.Errorf("%d bytes are in use afterwards", n)
	}
	closeVolume(t, v)
}

// TestHeaderTakesRoom: a header is charged in whole pages, and given back with its file. Where there is
// no room for it the batch does not persist.
func TestHeaderTakesRoom(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir)
	var charged int64
	occupy := func(n int64) (func(), error) {
		charged += n
		return func() { charged -= n }, nil
	}
	e, f := alloc(t, v, mib), alloc(t, v, 15*mib-3*page)
	meta := make([]byte, 2*page)
	if _, err := v.Persist(meta, nil, occupy, e); err != nil {
		t.Fatal(err)
	}
	if n := v.Stats().Used; charged != 3*page || n != 16*mib {
		t.Errorf("a header of more than two pages takes %d bytes, and %d are in use", charged, n)
	}
	if _, err := v.Persist(meta, nil, occupy, f); !errors.Is(err, tier.ErrNoSpace) || charged != 3*page {
		t.Errorf("without room: %v, and %d bytes are charged", err, charged)
	}
	full := errors.New("full")
	free(v, e)
	if _, err := v.Persist(meta, nil, func(int64) (func(), error) { return nil, full }, f); !errors.Is(err, full) {
		t.Errorf("where the space has no room: %v", err)
	}
	if n := v.Stats().Used; charged != 0 || n != 15*mib-3*page {
		t.Errorf("%d bytes are charged, and %d in use", charged, n)
	}
	free(v, f)
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestShrunkFile: a memory that was cut takes as much room as is left, in the file system too, and
// persists. If its file cannot be cut, it stays as it was.
func TestShrunkFile(t *testing.T) {
	const left = 75 * page
	for _, fails := range []bool{false, true} {
		dir := tempDir(t)
		fsys := faultfs.New(disk.OS(), 1)
		v := openPersistent(t, dir, func(c *volumes.Config) { c.FS = fsys })
		e := alloc(t, v, mib)
		write(t, e, random(left, 1), 0)
		want, cut := int64(left), func() {}
		if fails {
			want, cut = mib, fsys.Add(faultfs.Rule{Ops: []string{"truncate"}, Effect: faultfs.Fail(syscall.EIO)})
		}
		v.Shrink(e, left-page+1)
		cut()
		if s := v.Stats(); e.Size() != want || s.Used != want || s.Fresh-s.Given != want || s.Backlog != want-left {
			t.Errorf("%d bytes are left, want %d: %+v", e.Size(), want, s)
		}
		_, file, _ := e.Locate(0)
		files, err := filepath.Glob(filepath.Join(dir, "*", file))
		if err != nil || len(files) != 1 {
			t.Fatal(files, err)
		}
		if info, err := os.Stat(files[0]); err != nil || info.Size() != want {
			t.Errorf("a file of %d bytes, want %d: %v", info.Size(), want, err)
		}
		if _, err := v.Persist(metaOf(1), placeOf(1), anyRoom, e); err != nil {
			t.Fatal(err)
		}
		leave(t, v, e)
		if s := v.Stats(); s.Used != 0 || s.Backlog != 0 {
			t.Errorf("in the end: %+v", s)
		}
		v = openPersistent(t, dir)
		kept := v.Persisted()
		if len(kept) != 1 || kept[0].Room != want+page {
			t.Fatalf("kept: %+v; %q", kept, v.Stats().Warnings)
		}
		m, err := v.Take(kept[0].Key)
		if err != nil {
			t.Fatal(err)
		}
		v.Own(kept[0].Key, func() {})
		if e = m.(tier.FileMemory); e.Size() != want || !bytes.Equal(read(t, e, left, 0), random(left, 1)) {
			t.Errorf("%d bytes are left, want %d, or they are others", e.Size(), want)
		}
		free(v, e)
		closeVolume(t, v)
		wantEmpty(t, dir)
	}
}

// TestPersistedEndOfASparseFile: where files are sparse and written as they are asked to be, one
// may end inside of a page, and what is kept there is kept all the same, for a volume with direct
// I/O too.
func TestPersistedEndOfASparseFile(t *testing.T) {
	for _, size := range []int64{1, page - 1, page + 1, mib + 5000} {
		for _, direct := range []bool{false, true} {
			dir := tempDir(t)
			sparse := func(c *volumes.Config) { c.FS = faultfs.New(noDirect{disk.OS()}, 1, noAllocate) }
			v := openPersistent(t, dir, sparse)
			_, a := persist(t, v, 1, page)
			_, b := persist(t, v, 2, size)
			leave(t, v, a, b)
			next := sparse
			if direct {
				next = func(*volumes.Config) {}
			}
			v = openPersistent(t, dir, next)
			kept := v.Persisted()
			if len(kept) != 2 {
				t.Fatalf("%d bytes: %d are kept; %q", size, len(kept), v.Stats().Warnings)
			}
			free(v, wantPersisted(t, v, kept[0], 1, page))
			free(v, wantPersisted(t, v, kept[1], 2, size))
			closeVolume(t, v)
			wantEmpty(t, dir)
		}
	}
}
