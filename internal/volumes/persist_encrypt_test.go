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

	"github.com/spillway-db/spillway/internal/copytree"
	"github.com/spillway-db/spillway/internal/memdir"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
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
			dir := memdir.New(t)
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
				if _, err := v.Persist(nil, meta, e); err != nil {
					t.Fatal(err)
				}
				look()
				return e
			}
			small := func(cfg *volumes.Config) { c.change(cfg); cfg.Capacity, cfg.SegmentSize = 4*mib, mib }
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
				if _, err := v.Persist(nil, append(meta, column...), taken...); err != nil { // in its new place
					t.Fatal(err)
				}
				look()
				var more []tier.FileMemory
				for range 20 { // until the manifest is written anew
					more = append(more, fill(v, page))
					free(v, more[0])
					more = more[1:]
				}
				leave(t, v, taken[0].(tier.FileMemory))
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

// segmentWrites is a file system that has all that was written to segments while it listens.
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
	if err != nil || !strings.HasPrefix(filepath.Base(path), "segment-") {
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
	if f.s.listen {
		f.s.all = append(f.s.all, bytes.Clone(p))
	}
	f.s.mu.Unlock()
	return f.File.WriteAt(p, off)
}

// TestNoNonceIsUsedTwiceByRestarts: four volumes follow each other in a directory, the same
// room is written again and again, and kept. Of zeros GCM makes the cipher's stream, of
// which no 16 bytes may come twice; and of the nonces in all manifests none is used for two
// things.
func TestNoNonceIsUsedTwiceByRestarts(t *testing.T) {
	dir := t.TempDir()
	stream, nonces := make(map[[16]byte]int), make(map[volumes.Nonce]string)
	salts := make(map[[32]byte]bool)
	check := func() {
		t.Helper()
		for _, m := range persistedFiles(t, dir, "manifest-*") {
			all, err := volumes.NoncesIn(m)
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
			e := taken[0].(tier.FileMemory)
			if bytes.Count(read(t, e, e.Size(), 0), []byte{0}) != int(e.Size()) {
				t.Fatal("other bytes were kept")
			}
			if _, err := v.Persist(sharedOf(9), metaOf(9), e); err != nil { // a new record of old units
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
			write(t, e, aligned(unit), unit/2)
			if _, err := v.Persist(sharedOf(1), metaOf(1), e); err != nil {
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

// TestForgedManifestIsNotBelieved changes each byte of a manifest and makes the checksums right:
// what is found is what was kept, or less, and of a header that says another key nothing goes.
func TestForgedManifestIsNotBelieved(t *testing.T) {
	small := func(c *volumes.Config) { sealed(c); c.Capacity, c.SegmentSize = 8*unit, 8*unit }
	dir := t.TempDir()
	v := openPersistent(t, dir, small)
	_, a := persist(t, v, 1, page)
	_, b := persist(t, v, 10, page, unit+page)
	leave(t, v, append(a, b...)...)
	v = openPersistent(t, dir, small) // a manifest written anew, and in it records of two keys
	_, c := persist(t, v, 20, page)
	saved := memdir.New(t)
	copytree.Copy(t, saved, dir)
	free(v, c...)
	closeVolume(t, v)
	info, err := os.Stat(persistedFiles(t, saved, "manifest-*")[0])
	if err != nil {
		t.Fatal(err)
	}
	keys := map[uint64]uint64{1: 2, 10: 4, 20: 6} // of what was kept with a seed, each after what it shares
	refused := make(map[string]int)
	const step = 7 // runs begin at different bytes
	for at := int(testseed.One(t) % step); at < int(info.Size()); at += step {
		work := memdir.New(t)
		copytree.Copy(t, work, saved)
		what, err := volumes.Forge(persistedFiles(t, work, "manifest-*")[0], at, 1<<(at%8))
		if err != nil {
			t.Fatal(err)
		}
		before := contents(t, work)
		v, err := volumes.Open(volumes.Config{Dir: work, Capacity: 8 * unit, Persist: true, Encrypt: true, Key: usersKey})
		if err != nil {
			if what != "header" || !errors.Is(err, disk.ErrKey) {
				t.Fatalf("byte %d (%s): %v", at, what, err)
			}
			wantSame(t, "forged", before, contents(t, work))
			refused["key"]++
			continue
		}
		found := 0
		for _, k := range v.Persisted() {
			var seed uint64
			if _, err := fmt.Sscanf(string(k.Meta), "meta %d", &seed); err != nil {
				t.Fatalf("byte %d: meta %q", at, k.Meta)
			}
			sizes := map[uint64][]int64{1: {page}, 10: {page, unit + page}, 20: {page}}[seed]
			if k.Key != keys[seed] {
				t.Errorf("byte %d: %q has key %d", at, k.Meta, k.Key)
			}
			free(v, wantPersisted(t, v, k, seed, sizes...)...)
			found++
		}
		told := warned(v.Stats().Warnings)
		switch {
		case what == "sealed" && found != 2:
			t.Errorf("byte %d was changed, and %d of 3 were found", at, found)
		case what == "sealed" && !strings.Contains(told, "lost"):
			t.Errorf("byte %d was changed: %q", at, told)
		case what == "sealed" && strings.Contains(told, "not what was written (at "):
			refused["record"]++
		}
		closeVolume(t, v)
	}
	if refused["key"] < 64/step || refused["record"] < 300/step {
		t.Errorf("refused: %v", refused)
	}
}

// TestChangedBytesOfWhatPersistsAreFound: a bit anywhere in what was kept, another memory's
// bytes, and those that were kept in the same room before are an AlteredError that says where.
func TestChangedBytesOfWhatPersistsAreFound(t *testing.T) {
	const size = 3*unit + 2*page
	dir := t.TempDir()
	v := openPersistent(t, dir, sealed)
	old := alloc(t, v, size)
	write(t, old, random(size, 1), 0) // the same bytes as those that are kept there later
	file := persistedFiles(t, dir, "segment-*")[0]
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	free(v, old)
	_, es := persist(t, v, 1, size, size)
	leave(t, v, es...)
	sound, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, bad []byte, unitAt int64) {
		t.Helper()
		work := memdir.New(t)
		copytree.Copy(t, work, dir)
		if err := os.WriteFile(persistedFiles(t, work, "segment-*")[0], bad, 0o600); err != nil {
			t.Fatal(err)
		}
		v := openPersistent(t, work, sealed)
		taken, err := v.Take(v.Persisted()[0].Key)
		if err != nil {
			t.Fatal(err)
		}
		e, other := taken[0].(tier.FileMemory), taken[1].(tier.FileMemory)
		_, name, at := e.Locate(0)
		err = e.ReadAt(t.Context(), aligned(size), 0)
		var a *tier.AlteredError
		if !errors.As(err, &a) || a.Volume != work || a.File != name || a.Offset != at+unitAt {
			t.Errorf("%s: %v, and it was at %d of %s", what, err, at+unitAt, name)
		}
		if !bytes.Equal(read(t, e, unitAt, 0), random(size, 1)[:unitAt]) || !bytes.Equal(read(t, other, size, 0), random(size, 2)) {
			t.Errorf("%s: what was not changed reads differently", what)
		}
		free(v, e, other)
		closeVolume(t, v)
		wantEmpty(t, work)
	}
	_, _, at := es[0].Locate(0)
	_, _, second := es[1].Locate(0)
	r := rand.New(rand.NewPCG(5, 6))
	for range 40 {
		off := r.Int64N(size)
		bad := bytes.Clone(sound)
		bad[at+off] ^= 1 << r.IntN(8)
		check(fmt.Sprintf("a bit of byte %d", off), bad, off/unit*unit)
	}
	swapped := bytes.Clone(sound)
	copy(swapped[at+unit:at+2*unit], sound[second+unit:])
	check("another memory's unit", swapped, unit)
	moved := bytes.Clone(sound)
	copy(moved[at+unit:at+2*unit], sound[at+2*unit:])
	check("another unit", moved, unit)
	older := bytes.Clone(sound)
	copy(older[at+2*unit:at+3*unit], before[at+2*unit:])
	check("older bytes", older, 2*unit)
	zeros := bytes.Clone(sound)
	clear(zeros[at : at+page])
	check("zeros", zeros, 0)
}

// TestWhatWasSealedBeforeIsRead: memory that was kept by several volumes before can be read and
// kept again, together and under one record, and not written.
func TestWhatWasSealedBeforeIsRead(t *testing.T) {
	dir := t.TempDir()
	v := openPersistent(t, dir, sealed)
	_, es := persist(t, v, 0, 2*unit+5)
	leave(t, v, es...)
	for life := uint64(1); life < 4; life++ {
		v = openPersistent(t, dir, sealed)
		k := v.Persisted()[0]
		var sizes []int64
		for range life {
			sizes = append(sizes, 2*unit+5)
		}
		if !bytes.Equal(k.Meta, metaOf(0)) {
			t.Errorf("meta %q", k.Meta)
		}
		es := wantPersisted(t, v, k, 0, sizes...)
		v.Forget(k.Key)
		if err := es[0].WriteAt(t.Context(), aligned(unit), 0); !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("written with a key that sealed before: %v", err)
		}
		e := alloc(t, v, 2*unit+5)
		write(t, e, random(2*unit+5, life), 0)
		es = append(es, e)
		var all []tier.Memory
		for _, e := range es {
			all = append(all, e)
		}
		if _, err := v.Persist(sharedOf(0), metaOf(0), all...); err != nil {
			t.Fatal(err)
		}
		leave(t, v, es...)
	}
	v = openPersistent(t, dir, sealed)
	secrets := v.Secrets()
	if len(secrets) != 3*5 { // its own and four others'
		t.Errorf("%d secrets", len(secrets))
	}
	free(v, wantPersisted(t, v, v.Persisted()[0], 0, 2*unit+5, 2*unit+5, 2*unit+5, 2*unit+5)...)
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
	remove := fsys.Add(faultfs.Rule{Ops: []string{"write"}, Path: "segment-*", Times: 1, Effect: faultfs.Fail(syscall.EIO)})
	if err := e.WriteAt(t.Context(), data[:unit], unit); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	remove()
	if _, err := v.Persist(sharedOf(1), metaOf(1), e); !errors.Is(err, syscall.EIO) {
		t.Errorf("kept: %v", err)
	}
	write(t, e, data[unit:2*unit], unit)
	if _, err := v.Persist(sharedOf(1), metaOf(1), e); err != nil {
		t.Fatal(err)
	}
	leave(t, v, e)
	v = openPersistent(t, dir, sealed)
	taken, err := v.Take(v.Persisted()[0].Key)
	if err != nil {
		t.Fatal(err)
	}
	clear(data[2*unit:])
	if !bytes.Equal(read(t, taken[0].(tier.FileMemory), 3*unit, 0), data) {
		t.Error("it reads differently")
	}
	free(v, taken[0].(tier.FileMemory))
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestKeysStayWhileRecordsAreSealed: a closed volume forgets its keys when no record is being
// written any more, and not before: one that was sealed with zeros would be open to all.
func TestKeysStayWhileRecordsAreSealed(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		fsys := faultfs.New(disk.OS(), 1)
		v := openPersistent(t, dir, sealed, func(c *volumes.Config) { c.FS = fsys })
		secrets := v.Secrets()
		written := make(chan struct{})
		defer fsys.Add(faultfs.Rule{
			Ops: []string{"write"}, Path: "manifest-*", Times: 1,
			Effect: faultfs.Do(func(string, string) { <-written }),
		})()
		kept, closed := make(chan error, 1), make(chan error, 1)
		go func() {
			_, err := v.Persist(sharedOf(1), metaOf(1)) // without memory, which would keep the volume open
			kept <- err
		}()
		synctest.Wait()
		go func() { closed <- v.Close() }()
		synctest.Wait()
		for i, s := range secrets {
			if bytes.Count(s, []byte{0}) == len(s) {
				t.Errorf("secret %d is gone while a record is written", i)
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
