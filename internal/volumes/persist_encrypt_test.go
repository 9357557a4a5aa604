package volumes_test

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// sealed makes a volume one that encrypts, with the tests' key.
func sealed(c *volumes.Config) { c.Encrypt, c.Key = true, usersKey }

// contents returns all files in a directory, by their names.
func contents(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		p, err := os.ReadFile(path)
		all[path] = string(p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func wantSame(t testing.TB, what string, before, after map[string]string) {
	t.Helper()
	for path, p := range before {
		if after[path] != p {
			t.Errorf("%s: %s was changed or removed", what, path)
		}
	}
	if len(after) != len(before) {
		t.Errorf("%s: %d files became %d", what, len(before), len(after))
	}
}

// TestNothingPlainIsInTheDirectory looks for the bytes of memories, for words of their meta, and
// for the key in all files, whenever something has changed. Without encryption they are found, so
// it looks in the right place.
func TestNothingPlainIsInTheDirectory(t *testing.T) {
	payload, column := []byte("no eye but mine!"), []byte("a column of salaries")
	for name, c := range map[string]struct {
		change func(*volumes.Config)
		plain  bool
	}{"encrypted": {sealed, false}, "plain": {func(*volumes.Config) {}, true}} {
		t.Run(name, func(t *testing.T) {
			dir := testfs.MemoryDir(t)
			seen := 0
			look := func() {
				t.Helper()
				for path, p := range contents(t, dir) {
					if strings.Contains(p, string(usersKey)) {
						t.Errorf("the key is in %s", path)
					}
					found := strings.Contains(p, string(payload[:12])) || strings.Contains(p, string(column))
					if found {
						seen++
					}
					if found && !c.plain {
						t.Fatalf("plain bytes in %s", path)
					}
				}
			}
			meta := bytes.Repeat(column, 5000)
			fill := func(v *volumes.Volume, n int64) tier.FileMemory {
				t.Helper()
				e := alloc(t, v, n)
				p := aligned(n)
				for i := range p {
					p[i] = payload[i%len(payload)]
				}
				write(t, e, p, 0)
				if _, err := v.Persist(meta, column, anyRoom, e); err != nil {
					t.Fatal(err)
				}
				look()
				return e
			}
			small := func(cfg *volumes.Config) { c.change(cfg); cfg.Capacity = 4 * mib }
			v := openPersistent(t, dir, small)
			es := []tier.FileMemory{fill(v, 2*unit+page), fill(v, 3*mib/4), fill(v, 100)}
			leave(t, v, es...)
			for range 3 {
				v = openPersistent(t, dir, small)
				look()
				k := v.Persisted()[0]
				taken, err := v.Take(k.Key)
				if err != nil {
					t.Fatal(err)
				}
				v.Own(k.Key, func() {})
				if err := v.SetPlace(k.Key, append(column, column...)); err != nil {
					t.Fatal(err)
				}
				look()
				var more []tier.FileMemory
				for range 20 {
					more = append(more, fill(v, page))
					free(v, more[0])
					more = more[1:]
				}
				leave(t, v, taken.(tier.FileMemory))
			}
			v = openPersistent(t, dir, small)
			for _, k := range v.Persisted() {
				v.Forget(k.Key)
			}
			look()
			closeVolume(t, v)
			wantEmpty(t, dir)
			if c.plain && seen < 10 {
				t.Errorf("plain bytes were seen %d times only", seen)
			}
		})
	}
}

// segmentWrites is a file system that has all that was written to bodies while it listens.
type segmentWrites struct {
	disk.FS
	mu     sync.Mutex
	listen bool
	all    [][]byte
}

type heardFile struct {
	disk.File
	s *segmentWrites
}

func (s *segmentWrites) heard(path string, f disk.File, err error) (disk.File, error) {
	if err != nil || !strings.HasSuffix(path, ".part") {
		return f, err
	}
	return &heardFile{f, s}, nil
}

func (s *segmentWrites) Create(path string, direct bool) (disk.File, error) {
	f, err := s.FS.Create(path, direct)
	return s.heard(path, f, err)
}

func (s *segmentWrites) Reopen(path string, direct bool) (disk.File, error) {
	f, err := s.FS.Reopen(path, direct)
	return s.heard(path, f, err)
}

func (f *heardFile) WriteAt(p []byte, off int64) (int, error) {
	f.s.mu.Lock()
	if f.s.listen && off+int64(len(p)) <= 2*unit+page { // not the header
		f.s.all = append(f.s.all, bytes.Clone(p))
	}
	f.s.mu.Unlock()
	return f.File.WriteAt(p, off)
}

// TestNoNonceIsUsedTwiceByRestarts: four volumes follow each other in a directory, the same
// room is written again and again, and kept. Of zeros GCM makes the cipher's stream, of
// which no 16 bytes may come twice; and of the nonces in all files none is used for two
// things.
func TestNoNonceIsUsedTwiceByRestarts(t *testing.T) {
	dir := t.TempDir()
	stream, nonces := make(map[[16]byte]int), make(map[volumes.Nonce]string)
	salts := make(map[[32]byte]bool)
	check := func() {
		t.Helper()
		for _, m := range persistedFiles(t, dir, "*") {
			all, err := volumes.NoncesIn(m, usersKey)
			if err != nil {
				t.Fatal(err)
			}
			for n, what := range all {
				salts[n.Salt] = true
				if was, ok := nonces[n]; ok && was != what {
					t.Fatalf("nonce %d is used twice: %s, %s", n.Nonce, was, what)
				}
				nonces[n] = what
			}
		}
	}
	for life := range 4 {
		fsys := &segmentWrites{FS: disk.OS()}
		v := openPersistent(t, dir, sealed, func(c *volumes.Config) { c.FS = fsys })
		fsys.listen = true
		var held []tier.FileMemory
		for _, k := range v.Persisted() {
			taken, err := v.Take(k.Key)
			if err != nil {
				t.Fatal(err)
			}
			v.Own(k.Key, func() {})
			e := taken.(tier.FileMemory)
			if bytes.Count(read(t, e, e.Size(), 0), []byte{0}) != int(e.Size()) {
				t.Fatal("other bytes were kept")
			}
			if err := v.SetPlace(k.Key, placeOf(9)); err != nil { // with a new key, in a file of an old one
				t.Fatal(err)
			}
			check()
			held = append(held, e)
		}
		for len(held) > 3 {
			free(v, held[0])
			held = held[1:]
		}
		for range 6 {
			e := alloc(t, v, 2*unit+page)
			write(t, e, aligned(2*unit+page), 0)
			write(t, e, aligned(unit), unit)
			if _, err := v.Persist(metaOf(1), placeOf(1), anyRoom, e); err != nil {
				t.Fatal(err)
			}
			check()
			held = append(held, e)
			if len(held) > 4 {
				free(v, held[1])
				held = slices.Delete(held, 1, 2)
			}
		}
		if len(fsys.all) < 12 {
			t.Fatalf("%d writes were heard", len(fsys.all))
		}
		for _, w := range fsys.all {
			for i := 0; i < len(w); i += 16 {
				block := [16]byte(w[i:])
				if was, ok := stream[block]; ok {
					t.Fatalf("life %d has a part of the stream that life %d had", life, was)
				}
				stream[block] = life
			}
		}
		leave(t, v, held...)
	}
	if len(salts) != 4 || len(nonces) < 4*6*4 {
		t.Errorf("%d salts and %d nonces were seen", len(salts), len(nonces))
	}
}

// TestForgedHeaderIsNotBelieved changes bytes of headers and tails and makes the checksums right: the
// batch cannot be read then, or is as it was where the byte means nothing.
func TestForgedHeaderIsNotBelieved(t *testing.T) {
	small := func(c *volumes.Config) { sealed(c); c.Capacity = 8 * unit }
	dir := t.TempDir()
	v := openPersistent(t, dir, small)
	_, es := persist(t, v, 10, unit+page)
	leave(t, v, es)
	path := persistedFiles(t, dir, "*")[0]
	refused := 0
	const step = 7 // runs begin at different bytes
	for at := testseed.One(t) % step; at < page; at += step {
		work := testfs.MemoryDir(t)
		testfs.CopyTree(t, work, dir)
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := volumes.Forge(filepath.Join(work, rel), unit+page+int64(at), 1<<(at%8)); err != nil {
			t.Fatal(err)
		}
		if in := int64(at) - (page - volumes.TailSize); in >= 0 && in < 8 || in >= 40 && in < 40+65 {
			// Another version, or another key: all of the directory is left alone.
			before := contents(t, work)
			cfg := volumes.Config{Dir: work, Persist: true}
			small(&cfg)
			v, err := volumes.Open(cfg)
			switch {
			case err == nil && in < 8 && len(v.Persisted()) == 0:
				closeVolume(t, v)
			case in < 8 || !errors.Is(err, disk.ErrKey):
				t.Fatalf("byte %d of the tail: %v", in, err)
			}
			wantSame(t, "opened", before, contents(t, work))
			refused++
			continue
		}
		v := openPersistent(t, work, small)
		for _, k := range v.Persisted() {
			if k.Err != nil {
				refused++
				v.Forget(k.Key)
				continue
			}
			free(v, wantPersisted(t, v, k, 10, unit+page))
		}
		closeVolume(t, v)
		wantEmpty(t, work)
	}
	if refused < 250/step {
		t.Errorf("only %d were refused", refused)
	}
}

// TestPlaceOfAnotherBatchIsRefused: a place is sealed for one file.
func TestPlaceOfAnotherBatchIsRefused(t *testing.T) {
	dir := t.TempDir()
	v := openPersistent(t, dir, sealed)
	_, a := persist(t, v, 1, page)
	_, b := persist(t, v, 2, page)
	leave(t, v, a, b)
	files := persistedFiles(t, dir, "*")
	from, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	to, err := os.ReadFile(files[1])
	if err != nil {
		t.Fatal(err)
	}
	const place = 40 + 65 + 24 // in the tail, with its seal
	copy(to[len(to)-volumes.TailSize+place:], from[len(from)-volumes.TailSize+place:])
	if err := os.WriteFile(files[1], to, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := volumes.Forge(files[1], 0, 0); err != nil {
		t.Fatal(err)
	}
	v = openPersistent(t, dir, sealed)
	kept := v.Persisted()
	if len(kept) != 2 || (kept[0].Err == nil) == (kept[1].Err == nil) {
		t.Errorf("kept: %+v", kept)
	}
	for _, k := range kept {
		v.Forget(k.Key)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestChangedBytesOfWhatPersistsAreFound: a bit anywhere in what was kept, another memory's bytes, and
// zeros are an AlteredError that says where.
func TestChangedBytesOfWhatPersistsAreFound(t *testing.T) {
	const size = 3*unit + 2*page
	dir := t.TempDir()
	v := openPersistent(t, dir, sealed)
	key, a := persist(t, v, 1, size)
	others, b := persist(t, v, 2, size)
	leave(t, v, a, b)
	file := func(dir string, key uint64) string { return persistedFiles(t, dir, fmt.Sprintf("%016x", key))[0] }
	sound, err := os.ReadFile(file(dir, key))
	if err != nil {
		t.Fatal(err)
	}
	other, err := os.ReadFile(file(dir, others))
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, bad []byte, unitAt int64) {
		t.Helper()
		work := testfs.MemoryDir(t)
		testfs.CopyTree(t, work, dir)
		if err := os.WriteFile(file(work, key), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		v := openPersistent(t, work, sealed)
		taken, err := v.Take(key)
		if err != nil {
			t.Fatal(err)
		}
		v.Own(key, func() {})
		e, other := taken.(tier.FileMemory), wantPersisted(t, v, v.Persisted()[0], 2, size)
		_, name, at := e.Locate(0)
		err = e.ReadAt(t.Context(), aligned(size), 0)
		var a *tier.AlteredError
		if !errors.As(err, &a) || a.Volume != work || a.File != name || a.Offset != at+unitAt {
			t.Errorf("%s: %v, and it was at %d of %s", what, err, at+unitAt, name)
		}
		if !bytes.Equal(read(t, e, unitAt, 0), random(size, 1)[:unitAt]) {
			t.Errorf("%s: what was not changed reads differently", what)
		}
		free(v, e, other)
		closeVolume(t, v)
		wantEmpty(t, work)
	}
	r := rand.New(rand.NewPCG(5, 6))
	for range 40 {
		off := r.Int64N(size)
		bad := bytes.Clone(sound)
		bad[off] ^= 1 << r.IntN(8)
		check(fmt.Sprintf("a bit of byte %d", off), bad, off/unit*unit)
	}
	swapped := bytes.Clone(sound)
	copy(swapped[unit:2*unit], other[unit:])
	check("another memory's unit", swapped, unit)
	moved := bytes.Clone(sound)
	copy(moved[unit:2*unit], sound[2*unit:])
	check("another unit", moved, unit)
	zeros := bytes.Clone(sound)
	clear(zeros[:page])
	check("zeros", zeros, 0)
}

// TestWhatWasSealedBeforeIsRead: memory that several volumes kept can be read, its place changed, and
// made to persist again; it cannot be written. Its keys are overwritten in the end.
func TestWhatWasSealedBeforeIsRead(t *testing.T) {
	dir := t.TempDir()
	v := openPersistent(t, dir, sealed)
	_, es := persist(t, v, 0, 2*unit+5)
	leave(t, v, es)
	for life := range 3 {
		v = openPersistent(t, dir, sealed)
		k := v.Persisted()[0]
		es := wantPersisted(t, v, k, 0, 2*unit+5)
		if err := es.WriteAt(t.Context(), aligned(unit), 0); !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("written with a key that sealed before: %v", err)
		}
		var err error
		if life == 1 { // another header, with the salt of this life
			v.Forget(k.Key)
			_, err = v.Persist(metaOf(0), placeOf(0), anyRoom, es)
		} else {
			err = v.SetPlace(k.Key, placeOf(0))
		}
		if err != nil {
			t.Fatal(err)
		}
		leave(t, v, es)
	}
	v = openPersistent(t, dir, sealed)
	secrets := v.Secrets()
	if len(secrets) != 3*4 { // its own and those of the body, the header and the place
		t.Errorf("%d secrets", len(secrets))
	}
	free(v, wantPersisted(t, v, v.Persisted()[0], 0, 2*unit+5))
	closeVolume(t, v)
	for i, s := range secrets {
		if bytes.Count(s, []byte{0}) != len(s) {
			t.Errorf("secret %d is still there", i)
		}
	}
	wantEmpty(t, dir)
}

// TestWhatWasLostDoesNotPersist: memory whose writing failed is not recorded as if it held
// something, and what was never written is kept as zeros.
func TestWhatWasLostDoesNotPersist(t *testing.T) {
	dir := t.TempDir()
	fsys := faultfs.New(disk.OS(), 1)
	v := openPersistent(t, dir, sealed, func(c *volumes.Config) { c.FS = fsys })
	e := alloc(t, v, 3*unit)
	data := random(3*unit, 1)
	write(t, e, data[:2*unit], 0)
	remove := fsys.Add(
		faultfs.Rule{Ops: []string{"write"}, Path: "*.part", Times: 1, Effect: faultfs.Fail(syscall.EIO)},
	)
	if err := e.WriteAt(t.Context(), data[:unit], unit); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	remove()
	if _, err := v.Persist(metaOf(1), placeOf(1), anyRoom, e); !errors.Is(err, syscall.EIO) {
		t.Errorf("kept: %v", err)
	}
	write(t, e, data[unit:2*unit], unit)
	if _, err := v.Persist(metaOf(1), placeOf(1), anyRoom, e); err != nil {
		t.Fatal(err)
	}
	leave(t, v, e)
	v = openPersistent(t, dir, sealed)
	key := v.Persisted()[0].Key
	taken, err := v.Take(key)
	if err != nil {
		t.Fatal(err)
	}
	v.Own(key, func() {})
	clear(data[2*unit:])
	if !bytes.Equal(read(t, taken.(tier.FileMemory), 3*unit, 0), data) {
		t.Error("it reads differently")
	}
	free(v, taken.(tier.FileMemory))
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestKeysStayWhileHeadersAreSealed: a closed volume forgets its keys when no header is being
// written any more, and not before: one that was sealed with zeros would be open to all.
func TestKeysStayWhileHeadersAreSealed(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		fsys := faultfs.New(disk.OS(), 1)
		v := openPersistent(t, dir, sealed, func(c *volumes.Config) { c.FS = fsys })
		secrets := v.Secrets()
		written := make(chan struct{})
		defer fsys.Add(faultfs.Rule{
			Ops: []string{"rename"}, Times: 1,
			Effect: faultfs.Do(func(string, string) { <-written }),
		})()
		kept, closed := make(chan error, 1), make(chan error, 1)
		go func() {
			key, err := v.Persist(metaOf(1), nil, anyRoom, nil) // without memory that a caller could hold
			v.Forget(key)
			kept <- err
		}()
		synctest.Wait()
		go func() { closed <- v.Close() }()
		synctest.Wait()
		for i, s := range secrets {
			if bytes.Count(s, []byte{0}) == len(s) {
				t.Errorf("secret %d is gone while a header is written", i)
			}
		}
		close(written)
		if err := errors.Join(<-kept, <-closed); err != nil {
			t.Error(err)
		}
		for i, s := range secrets {
			if bytes.Count(s, []byte{0}) != len(s) {
				t.Errorf("secret %d is still there", i)
			}
		}
	})
	wantEmpty(t, dir)
}
