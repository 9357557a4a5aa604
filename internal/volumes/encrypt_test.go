package volumes_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// unit is the longest block that a volume seals at once.
const unit = 64 << 10

// recorder is a file system that keeps what is written to the last file that was opened,
// and lets tests change it.
type recorder struct {
	disk.FS

	mu     sync.Mutex
	writes [][]byte // all that ever reached a file
	file   disk.File
}

type recordedFile struct {
	disk.File
	r *recorder
}

func (r *recorder) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	return r.opened(r.FS.OpenAnonymous(dir, direct))
}

func (r *recorder) Create(path string, direct bool) (disk.File, error) {
	return r.opened(r.FS.Create(path, direct))
}

func (r *recorder) opened(f disk.File, err error) (disk.File, error) {
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.file = f
	return &recordedFile{f, r}, nil
}

func (f *recordedFile) WriteAt(p []byte, off int64) (int, error) {
	f.r.mu.Lock()
	f.r.writes = append(f.r.writes, bytes.Clone(p))
	f.r.mu.Unlock()
	return f.File.WriteAt(p, off)
}

// raw returns n bytes of the file at the page off.
func (r *recorder) raw(t testing.TB, n, off int64) []byte {
	t.Helper()
	p := aligned(n)
	for done := int64(0); done < n; { // the file may be one that does less than asked for
		k, err := r.file.ReadAt(p[done:], off+done)
		if err != nil || k < page {
			t.Fatalf("reading the file: %d bytes, %v", k, err)
		}
		done += int64(k) / page * page
	}
	return p
}

// put writes pages to the file behind the volume's back.
func (r *recorder) put(t testing.TB, p []byte, off int64) {
	t.Helper()
	if n, err := r.file.WriteAt(p, off); err != nil || n != len(p) {
		t.Fatalf("writing the file: %d bytes, %v", n, err)
	}
}

// forgetWrites forgets what was written so far: the page with which a volume tries the
// file system is the same for all.
func (r *recorder) forgetWrites() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.writes = nil
}

// crypt opens an encrypted volume on a recorder, with a memory of each of some sizes.
func crypt(t *testing.T, cfg volumes.Config, sizes ...int64) (*volumes.Volume, *recorder, []tier.FileMemory) {
	t.Helper()
	if cfg.FS == nil {
		cfg.FS = disk.OS()
	}
	r := &recorder{FS: cfg.FS}
	cfg.FS, cfg.Encrypt = r, true
	v := open(t, cfg)
	r.forgetWrites()
	var es []tier.FileMemory
	for _, n := range sizes {
		e := alloc(t, v, n)
		es = append(es, e)
		t.Cleanup(func() { free(v, e) })
	}
	return v, r, es
}

// TestEncryptedRoundTrips writes memory in parts of whole pages, in any order, and reads parts of every
// length and offset, in memory of one piece and of several that end inside of blocks. No write reads.
func TestEncryptedRoundTrips(t *testing.T) {
	const size = 7*unit + 3*page + 77
	for name, key := range map[string][]byte{"made": nil, "16": make([]byte, 16), "24": make([]byte, 24), "32": make([]byte, 32)} {
		t.Run(name, func(t *testing.T) {
			files := faultfs.New(disk.OS(), 1)
			v := open(t, volumes.Config{Capacity: 4 * mib, Request: 2 * unit, Encrypt: true, Key: key, FS: files})
			if !v.Stats().Encrypted {
				t.Error("Stats does not say that it encrypts")
			}
			var cuts []int64
			for c := int64(page); c < size; c += page {
				cuts = append(cuts, c)
			}
			rest := fragment(t, v, 11*page)
			for _, e := range []tier.FileMemory{alloc(t, v, size, cuts...), alloc(t, v, 100)} {
				roundTrips(t, files, e)
				free(v, e)
			}
			free(v, rest...)
			e := alloc(t, v, size)
			roundTrips(t, files, e)
			free(v, e)
		})
	}
}

func roundTrips(t *testing.T, files *faultfs.FS, e tier.FileMemory) {
	size := e.Size()
	model := make([]byte, size) // what was never written reads as zeros
	r := rand.New(rand.NewPCG(uint64(size), 2))
	edge := func(limit int64) int64 { // often near a page or a block
		n := r.Int64N(limit + 1)
		switch r.IntN(4) {
		case 0:
			n = n / page * page
		case 1:
			n = n / unit * unit
		case 2:
			n = n/unit*unit + r.Int64N(3) - 1
		}
		return min(limit, max(0, n))
	}
	var parts [][2]int64
	for off := int64(0); off < size; {
		end := min(size, off+page*(1+r.Int64N(40)))
		parts = append(parts, [2]int64{off, end})
		off = end
	}
	for round := range uint64(2) {
		r.Shuffle(len(parts), func(i, j int) { parts[i], parts[j] = parts[j], parts[i] })
		for i, part := range parts {
			skew := int64(i % 3)
			p := random(part[1]-part[0]+skew, round<<32|uint64(i))[skew:] // not aligned, often
			reads := files.Count("read")
			write(t, e, p, part[0])
			if files.Count("read") != reads {
				t.Error("a write read")
			}
			copy(model[part[0]:], p)
			for range 3 {
				off := edge(size - 1)
				n := edge(size - off)
				if !bytes.Equal(read(t, e, n, off), model[off:off+n]) {
					t.Fatalf("round %d, part %d: %d bytes at %d are wrong", round, i, n, off)
				}
			}
		}
	}
	for _, off := range []int64{1, size - 1} { // a part of a page, and of a block
		if err := e.WriteAt(t.Context(), model[off:], off); !errors.Is(err, tier.ErrNotSupported) {
			t.Errorf("a write at %d of %d: %v", off, size, err)
		}
	}
	if !bytes.Equal(read(t, e, size, 0), model) {
		t.Error("the whole is wrong")
	}
	whole := random(size, 99)
	write(t, e, whole, 0)
	if !bytes.Equal(read(t, e, size, 0), whole) {
		t.Error("the whole is wrong when it was written at once")
	}
}

// TestShrinkWithinABlock: a memory keeps all of a block that it would be cut in.
func TestShrinkWithinABlock(t *testing.T) {
	v, _, es := crypt(t, volumes.Config{Capacity: mib}, 4*unit)
	e, want := es[0], random(4*unit, 1)
	write(t, e, want, 0)
	for _, c := range []struct{ size, want int64 }{{3*unit + page, 4 * unit}, {2*unit + 1, 3 * unit}, {unit, unit}} {
		v.Shrink(e, c.size)
		if e.Size() != c.want || !bytes.Equal(read(t, e, e.Size(), 0), want[:e.Size()]) {
			t.Errorf("cut at %d: %d bytes are left, want %d, or they are others", c.size, e.Size(), c.want)
		}
	}
}

// TestConcurrentPartsOfBlocks: several goroutines write and read parts of their own, of which several
// are in 64 KiB. Each read and write of the disk takes a while, in fake time.
func TestConcurrentPartsOfBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := faultfs.Rule{Ops: []string{"read", "write"}, Effect: faultfs.Slow(time.Second)}
		v := open(t, volumes.Config{Capacity: 4 * mib, Request: unit, Encrypt: true, FS: faultfs.New(disk.OS(), 1, slow)})
		const parts, part = 7, 3 * page // more than one block
		e := alloc(t, v, parts*part)
		done := make(chan error, parts)
		for i := range int64(parts) {
			go func() {
				done <- func() error {
					for round := range uint64(8) {
						p, got := random(part, uint64(i)<<8|round), aligned(part)
						if err := e.WriteAt(t.Context(), p, i*part); err != nil {
							return err
						}
						if err := e.ReadAt(t.Context(), got, i*part); err != nil {
							return err
						}
						if !bytes.Equal(got, p) {
							return errors.New("what was written was undone")
						}
					}
					return nil
				}()
			}()
		}
		for range parts {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		free(v, e)
	})
}

// TestPlainBytesNeverReachTheFile writes a pattern in every way, and looks for it in all
// that the file was ever given, and in what it holds.
func TestPlainBytesNeverReachTheFile(t *testing.T) {
	for name, fsys := range map[string]disk.FS{
		"direct": disk.OS(), "buffered": noDirect{disk.OS()}, "named sparse": faultfs.New(disk.OS(), 1, noAnonymous, noAllocate),
		"disturbed": faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write", "read"}, Probability: 0.3, Effect: faultfs.Short()}),
		"failing":   faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Skip: 3, Probability: 0.2, Effect: faultfs.Fail(syscall.EIO)}),
	} {
		t.Run(name, func(t *testing.T) {
			const size = 9*unit + 5*page + 10
			pattern := []byte("no eye but mine!")
			_, r, es := crypt(t, volumes.Config{Capacity: 2 * mib, Request: 3 * unit, FS: fsys}, size)
			e := es[0]
			plain := aligned(size + 1)
			for i := range plain {
				plain[i] = pattern[i%len(pattern)]
			}
			model := make([]byte, size)
			for _, w := range [][2]int64{{0, size}, {0, unit}, {3 * unit, 3 * unit}, {9 * unit, 5*page + 10}} {
				for _, p := range [][]byte{plain[:w[1]], plain[1 : 1+w[1]]} { // aligned, and not
					if err := e.WriteAt(t.Context(), p, w[0]); err != nil && name != "failing" {
						t.Fatal(err)
					}
					copy(model[w[0]:], p)
				}
			}
			_, _, at := e.Locate(0)
			if name != "failing" {
				if !bytes.Equal(read(t, e, size, 0), model) {
					t.Error("reads differ from writes")
				}
				r.writes = append(r.writes, r.raw(t, 9*unit, at))
			}
			total := 0
			for _, w := range r.writes {
				total += len(w)
				for shift := range pattern {
					turned := append(pattern[shift:len(pattern):len(pattern)], pattern[:shift]...)
					if i := bytes.Index(w, turned[:8]); i >= 0 {
						t.Fatalf("plain bytes at %d of a write of %d", i, len(w))
					}
				}
			}
			if total < size {
				t.Errorf("only %d bytes were looked at", total)
			}
		})
	}
}

// TestEveryFlippedBitIsFound changes a bit of the file in each unit, and then others, and
// reads parts of the unit and all of it.
func TestEveryFlippedBitIsFound(t *testing.T) {
	const size = 8*unit + 2*page + 9
	v, r, es := crypt(t, volumes.Config{Capacity: 4 * mib, Request: 2 * unit}, size)
	e := es[0]
	data := random(size, 1)
	write(t, e, data, 0)
	_, file, at := e.Locate(0)
	rnd := rand.New(rand.NewPCG(3, 4))
	const units = size/unit + 1
	for i := range int64(4 * units) {
		u := i % units
		length := min(unit, (size+page-1)/page*page-u*unit)
		off := u*unit + rnd.Int64N(length)
		raw := r.raw(t, page, at+off/page*page)
		bit := byte(1) << rnd.IntN(8)
		raw[off%page] ^= bit
		r.put(t, raw, at+off/page*page)
		from := u*unit + rnd.Int64N(min(unit, size-u*unit))
		for _, p := range [][2]int64{{0, size}, {u * unit, min(unit, size-u*unit)}, {from, 1}} {
			err := e.ReadAt(t.Context(), aligned(p[1]), p[0])
			var a *tier.AlteredError
			if !errors.Is(err, tier.ErrAltered) || !errors.As(err, &a) {
				t.Fatalf("bit of byte %d, reading %d at %d: %v", off, p[1], p[0], err)
			}
			if a.Volume != v.Dir() || a.File != file || a.Offset != at+u*unit || a.Length != length {
				t.Errorf("unit %d: %+v", u, a)
			}
			oneLine(t, err.Error(), "disk: ", file, v.Dir(), "not what was written")
		}
		if u > 0 && !bytes.Equal(read(t, e, u*unit, 0), data[:u*unit]) {
			t.Error("the units before it read differently")
		}
		raw[off%page] ^= bit // back
		r.put(t, raw, at+off/page*page)
	}
	if !bytes.Equal(read(t, e, size, 0), data) {
		t.Error("the bytes are back, and read differently")
	}
}

// TestShortenedFilesAreFound: what was cut off a file with a name, or a part of that is
// written, is altered at the unit that has lost bytes.
func TestShortenedFilesAreFound(t *testing.T) {
	for name, fsys := range map[string]disk.FS{"direct": disk.OS(), "buffered": noDirect{disk.OS()}} {
		t.Run(name, func(t *testing.T) {
			onLinux(t)
			dir := t.TempDir()
			_, _, es := crypt(t, volumes.Config{Dir: dir, Capacity: mib, FS: faultfs.New(fsys, 1, noAnonymous, noAllocate)}, 3*unit+100)
			e := es[0]
			data := random(e.Size(), 1)
			write(t, e, data, 0)
			files, err := filepath.Glob(filepath.Join(dir, "*", "segment-*"))
			if err != nil || len(files) != 1 {
				t.Fatal(files, err)
			}
			for _, end := range []int64{3*unit + page - 1, 3*unit + page/2, 3 * unit, 2*unit + 1, 0} {
				if err := os.Truncate(files[0], end); err != nil {
					t.Fatal(err)
				}
				last := end / unit * unit
				at := func(err error) {
					t.Helper()
					var a *tier.AlteredError
					if !errors.As(err, &a) || a.Offset != last {
						t.Errorf("cut at %d: %v", end, err)
					}
				}
				n := min(unit, e.Size()-last)
				at(e.ReadAt(t.Context(), aligned(n), last))
				if !bytes.Equal(read(t, e, last, 0), data[:last]) {
					t.Errorf("cut at %d: what is before it reads differently", end)
				}
			}
			write(t, e, data, 0)
			if !bytes.Equal(read(t, e, e.Size(), 0), data) {
				t.Error("written again it reads differently")
			}
		})
	}
}

// TestSwappedAndOlderBlocksAreFound: the volume's own units, in another place, of another
// memory, or from before, are not taken for what was written.
func TestSwappedAndOlderBlocksAreFound(t *testing.T) {
	_, r, es := crypt(t, volumes.Config{Capacity: 4 * mib}, 4*unit, 4*unit)
	a, b := es[0], es[1]
	data := random(4*unit, 1)
	write(t, a, data, 0)
	write(t, b, data, 0)
	_, _, atA := a.Locate(0)
	_, _, atB := b.Locate(0)
	wrong := func(what string, e tier.FileMemory, at, u int64, raw []byte) {
		t.Helper()
		kept := r.raw(t, unit, at+u*unit)
		r.put(t, raw, at+u*unit)
		if err := e.ReadAt(t.Context(), aligned(unit), u*unit); !errors.Is(err, tier.ErrAltered) {
			t.Errorf("%s: %v", what, err)
		}
		r.put(t, kept, at+u*unit)
		if !bytes.Equal(read(t, e, unit, u*unit), data[u*unit:(u+1)*unit]) {
			t.Errorf("%s: back in its place it reads differently", what)
		}
	}
	wrong("another unit", a, atA, 0, r.raw(t, unit, atA+unit))
	wrong("another unit", a, atA, 3, r.raw(t, unit, atA+unit))
	wrong("the same unit of another memory", a, atA, 2, r.raw(t, unit, atB+2*unit))
	wrong("the same unit of another memory", b, atB, 2, r.raw(t, unit, atA+2*unit))
	old := r.raw(t, unit, atA)
	write(t, a, data[:unit], 0) // the same bytes
	wrong("from before", a, atA, 0, old)
	wrong("zeros", a, atA, 1, aligned(unit))
}

// TestNoNonceIsUsedTwice: of zeros GCM makes the cipher's stream, which depends on the key
// and the nonce alone. No 16 bytes of it may come twice: in one unit, in two, in one
// that is written again or in parts, or whose write failed; in two volumes
// of the same user's key, or of keys of their own.
func TestNoNonceIsUsedTwice(t *testing.T) {
	seen := make(map[[16]byte]string)
	key := random(32, 9)
	for name, k := range map[string][]byte{"one": key, "another": key, "made": nil, "made too": nil} {
		fsys := faultfs.New(disk.OS(), 1)
		_, r, es := crypt(t, volumes.Config{Capacity: mib, Request: unit, Key: k, FS: fsys}, 2*unit, 2*unit)
		for _, e := range es {
			write(t, e, aligned(2*unit), 0)
			write(t, e, aligned(2*unit), 0)
			remove := fsys.Add(faultfs.Rule{Ops: []string{"write"}, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
			if err := e.WriteAt(t.Context(), aligned(unit), 0); !errors.Is(err, syscall.EIO) {
				t.Errorf("got %v", err)
			}
			remove()
			write(t, e, aligned(unit), 0)
		}
		if len(r.writes) < 12 {
			t.Fatalf("%d writes", len(r.writes))
		}
		for _, w := range r.writes {
			for i := 0; i < len(w); i += 16 {
				block := [16]byte(w[i:])
				if who, ok := seen[block]; ok {
					t.Fatalf("volume %q has a part of the stream that %q had", name, who)
				}
				seen[block] = name
			}
		}
	}
}

func TestWrongKeysAreRefused(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []int{0, 1, 15, 17, 31, 33, 64} {
		v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib, Encrypt: true, Key: make([]byte, n)})
		if err == nil {
			v.Close()
			t.Fatalf("a key of %d bytes was taken", n)
		}
		oneLine(t, err.Error(), dir, "16, 24 or 32")
	}
	v, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib, Key: make([]byte, 16)})
	if err == nil {
		v.Close()
		t.Fatal("a key for nothing was taken")
	}
	oneLine(t, err.Error(), "Encrypt is not set")
}

// TestKeyIsForgotten: in the end, and not before, the memory that the key was in is zeros.
// The user's is left alone.
func TestKeyIsForgotten(t *testing.T) {
	users := random(32, 1)
	for name, key := range map[string][]byte{"made": nil, "derived": bytes.Clone(users)} {
		v := open(t, volumes.Config{Capacity: mib, Encrypt: true, Key: key})
		secrets := v.Secrets()
		blank := func(b []byte) bool { return bytes.Count(b, []byte{0}) == len(b) }
		if len(secrets) != 3 || len(secrets[0]) != 32 || !bytes.Contains(secrets[1], secrets[0]) {
			t.Fatalf("%s: the key is not where it is looked for", name)
		}
		if bytes.Equal(secrets[0], users) {
			t.Error("the user's key is used as it is")
		}
		e := alloc(t, v, mib)
		data := random(mib, 2)
		write(t, e, data, 0)
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(read(t, e, mib, 0), data) { // it needs the key still
			t.Errorf("%s: after Close memory reads differently", name)
		}
		free(v, e)
		for i, s := range secrets {
			if !blank(s) {
				t.Errorf("%s: secret %d is still there", name, i)
			}
		}
		if key != nil && !bytes.Equal(key, users) {
			t.Error("the caller's key was changed")
		}
	}
}

// TestFailedWriteLosesNothingSilently: bytes whose write failed are not read as what was there before,
// nor as anything else, until all of them are written.
func TestFailedWriteLosesNothingSilently(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	_, _, es := crypt(t, volumes.Config{Capacity: mib, FS: fsys}, 3*unit)
	e := es[0]
	data := random(3*unit, 1)
	fail := func(n, off int64) {
		t.Helper()
		remove := fsys.Add(faultfs.Rule{Ops: []string{"write"}, Times: 1, Effect: faultfs.Fail(syscall.EIO)})
		defer remove()
		if err := e.WriteAt(t.Context(), data[off:off+n], off); !errors.Is(err, syscall.EIO) {
			t.Fatalf("got %v", err)
		}
	}
	fail(page, unit) // never written before
	write(t, e, data[:unit], 0)
	fail(unit, 0)
	for _, at := range [][2]int64{{0, 1}, {0, unit}, {unit, 1}} {
		if err := e.ReadAt(t.Context(), aligned(at[1]), at[0]); !errors.Is(err, tier.ErrAltered) {
			t.Errorf("reading what was lost: %v", err)
		} else {
			oneLine(t, err.Error(), "writing it failed before: input/output error")
		}
	}
	if err := e.WriteAt(t.Context(), data[:page], 0); !errors.Is(err, tier.ErrNotSupported) {
		t.Errorf("a part of what was lost is written: %v", err)
	}
	write(t, e, data[:unit+page], 0)
	if !bytes.Equal(read(t, e, unit+page, 0), data[:unit+page]) {
		t.Error("written again it reads differently")
	}
}

// TestBuffersAreBounded: a volume maps memory for as many requests as it has workers, and
// more than those have what the heap gives them; all of it is given back in the end.
func TestBuffersAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leave := make(chan struct{})
		fsys := faultfs.New(disk.OS(), 1)
		v := open(t, volumes.Config{Capacity: 64 * mib, Request: unit, Depth: 2, Encrypt: true, FS: fsys})
		if n := v.Mapped(); n != 0 {
			t.Errorf("%d bytes are mapped before anything is written", n)
		}
		e := alloc(t, v, 64*mib)
		const callers = 20
		data := random(callers*2*unit, 1)
		fsys.Add(faultfs.Rule{Ops: []string{"write"}, Times: callers, Effect: faultfs.Do(func(string, string) { <-leave })})
		done := make(chan error, callers)
		for i := range int64(callers) {
			go func() { done <- e.WriteAt(t.Context(), data[i*2*unit:(i+1)*2*unit], i*2*unit) }()
		}
		synctest.Wait()
		most := int64(4 * (2*(unit+page) + 2*mib)) // slabs, each with room to begin at a huge page
		if n := v.Mapped(); n > most {
			t.Errorf("%d bytes are mapped, and %d would do", n, most)
		}
		close(leave)
		for range callers {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
		if !bytes.Equal(read(t, e, callers*2*unit, 0), data) {
			t.Error("reads differ from writes")
		}
		free(v, e)
		if err := v.Close(); err != nil {
			t.Error(err)
		}
		if n := v.Mapped(); n != 0 {
			t.Errorf("%d bytes are mapped in the end", n)
		}
	})
}
