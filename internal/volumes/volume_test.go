package volumes_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/tiertest"
)

func TestVolumeKeepsThePoolContract(t *testing.T) {
	for name, cfg := range map[string]func() volumes.Config{
		"plain": func() volumes.Config { return volumes.Config{} },
		"named files": func() volumes.Config {
			return volumes.Config{FS: faultfs.New(disk.OS(), 1, noAnonymous)}
		},
		"buffered sparse": func() volumes.Config {
			return volumes.Config{FS: noDirect{faultfs.New(disk.OS(), 1, noAllocate, noPunch)}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			tiertest.RunPool(t, func(t *testing.T, capacity int64) tier.Pool {
				cfg := cfg()
				cfg.Dir, cfg.Capacity = tempDir(t), capacity
				v, err := openVolume(cfg)
				if err != nil {
					t.Fatal(err)
				}
				return v
			})
		})
	}
}

func TestConfigIsChecked(t *testing.T) {
	dir := tempDir(t)
	for _, cfg := range []volumes.Config{
		{},
		{Dir: dir},
		{Capacity: mib},
		{Dir: dir, Capacity: page - 1},
		{Dir: dir, Capacity: mib, Reserve: -1},
	} {
		if v, err := openVolume(cfg); err == nil {
			v.Close()
			t.Errorf("%+v was accepted", cfg)
		} else {
			oneLine(t, err.Error(), "disk: ")
		}
	}
}

func TestOpenErrorsAreClear(t *testing.T) {
	dir := tempDir(t)
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fail := func(err error, ops ...string) disk.FS {
		return faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: ops, Effect: faultfs.Fail(err)})
	}
	full := &room{FS: disk.OS()}
	full.free.Store(2 * mib)
	for _, c := range []struct {
		name string
		cfg  volumes.Config
		want []string
	}{
		{"missing", volumes.Config{Dir: filepath.Join(dir, "none")}, []string{"none: the directory does not exist"}},
		{"a file", volumes.Config{Dir: file}, []string{"file: not a directory"}},
		{"below a file", volumes.Config{Dir: filepath.Join(file, "x")}, []string{"not a directory"}},
		{"not writable", volumes.Config{FS: fail(syscall.EACCES, "open-anonymous")}, []string{dir, "opening a spill file: permission denied"}},
		{"read-only", volumes.Config{FS: fail(syscall.EROFS, "open-anonymous")}, []string{dir, "opening a spill file: read-only file system"}},
		{"too many files", volumes.Config{FS: fail(syscall.EMFILE, "open-anonymous")}, []string{"too many open files"}},
		{"cannot write", volumes.Config{FS: fail(syscall.EIO, "write")}, []string{"writing a page: input/output error"}},
		{"cannot read", volumes.Config{FS: fail(syscall.EIO, "read")}, []string{"reading a page: input/output error"}},
		{"lies", volumes.Config{FS: faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Effect: faultfs.BitFlip()})}, []string{"reads differently"}},
		{"full", volumes.Config{FS: fail(syscall.ENOSPC, "write")}, []string{"no space left on device"}},
		{"too small", volumes.Config{FS: full, Capacity: 4 * mib}, []string{"no space: capacity 4194304 bytes", "2097152 free"}},
		{"the reserve", volumes.Config{FS: full, Capacity: 2 * mib, Reserve: page}, []string{"capacity 2097152", "2097152 free", "4096 are to stay free"}},
		{"statfs", volumes.Config{FS: fail(syscall.EIO, "usage")}, []string{dir, "input/output error"}},
		{"no lock", volumes.Config{FS: faultfs.New(disk.OS(), 1, noAnonymous, faultfs.Rule{Ops: []string{"lock"}, Effect: faultfs.Fail(syscall.ENOLCK)})}, []string{"locking a directory for spill files: no locks available"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			onLinux(t)
			tiertest.NoLeaks(t)
			fds := descriptors(t)
			cfg := c.cfg
			if cfg.Dir == "" {
				cfg.Dir = dir
			}
			if cfg.Capacity == 0 {
				cfg.Capacity = mib
			}
			v, err := openVolume(cfg)
			if err == nil {
				v.Close()
				t.Fatal("it was opened")
			}
			oneLine(t, err.Error(), append(c.want, "disk: volume "+cfg.Dir)...)
			if descriptors(t) != fds {
				t.Error("a descriptor is left")
			}
			if entries, _ := os.ReadDir(dir); len(entries) != 1 {
				t.Errorf("left in the directory: %v", entries)
			}
		})
	}
}

func TestKindsOfFiles(t *testing.T) {
	onLinux(t)
	for _, c := range []struct {
		name              string
		fs                disk.FS
		direct, anonymous bool
		warnings          []string
	}{
		{"best", disk.OS(), true, true, nil},
		{"no O_TMPFILE", faultfs.New(disk.OS(), 1, noAnonymous), true, false, []string{"no anonymous files"}},
		{"O_TMPFILE unknown", faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"open-anonymous"}, Effect: faultfs.Fail(syscall.EISDIR)}), true, false, []string{"no anonymous files"}},
		{"no O_DIRECT", noDirect{disk.OS()}, false, true, []string{"no direct I/O"}},
		{"O_DIRECT refused when used", faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Times: 1, Effect: faultfs.Fail(syscall.EINVAL)}), false, true, []string{"no direct I/O"}},
		{"neither", noDirect{faultfs.New(disk.OS(), 1, noAnonymous)}, false, false, []string{"no anonymous files", "no direct I/O"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := tempDir(t)
			v := open(t, volumes.Config{Dir: dir, Capacity: 8 * mib, FS: c.fs})
			s := v.Stats()
			if c.name == "best" && !s.Direct {
				t.Skipf("needs direct I/O, which %s under the temporary directory does not have", s.FileSystem)
			}
			if s.Direct != c.direct || s.Anonymous != c.anonymous || len(s.Warnings) != len(c.warnings) {
				t.Errorf("direct %v, anonymous %v, warnings %q", s.Direct, s.Anonymous, s.Warnings)
			}
			for i, w := range s.Warnings {
				oneLine(t, w.String(), c.warnings[i], dir)
			}
			e := alloc(t, v, 3*mib)
			want := random(3*mib, 1)
			write(t, e, want, 0)
			if !bytes.Equal(read(t, e, 3*mib, 0), want) {
				t.Error("reads differ from writes")
			}
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			if c.anonymous != (len(entries) == 0) {
				t.Errorf("in the directory: %v", entries)
			}
			for _, entry := range entries {
				checkModes(t, filepath.Join(dir, entry.Name()))
			}
			free(v, e)
		})
	}
}

// checkModes checks that nobody else can read a directory of named files.
func checkModes(t *testing.T, dir string) {
	t.Helper()
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%s: %v, %v", dir, info.Mode(), err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("a lock and a segment are expected in %s: %v, %v", dir, entries, err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode() != 0o600 {
			t.Errorf("%s: %v, %v", e.Name(), info.Mode(), err)
		}
	}
}

func TestMemoryFileSystemIsWarnedOf(t *testing.T) {
	if _, err := os.Stat("/dev/shm"); err != nil {
		t.Skip("needs a tmpfs")
	}
	dir, err := os.MkdirTemp("/dev/shm", "spillway-test-")
	if err != nil {
		t.Skip("needs a tmpfs: ", err)
	}
	defer os.RemoveAll(dir)
	v, err := openVolume(volumes.Config{Dir: dir, Capacity: mib})
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	s := v.Stats()
	if s.FileSystem != "tmpfs" {
		t.Skip("needs a tmpfs, not ", s.FileSystem)
	}
	oneLine(t, warned(s.Warnings), "on tmpfs: what is spilled there stays in memory")
}

// TestFreedExtentsAreReusedFirst: after the first round nothing fresh is taken,
// whatever the sizes.
func TestFreedExtentsAreReusedFirst(t *testing.T) {
	v := open(t, volumes.Config{Capacity: 512 * mib})
	a, b, c := alloc(t, v, 60*mib), alloc(t, v, 40*mib), alloc(t, v, 28*mib)
	fresh := v.Stats().Fresh
	if fresh < 128*mib || fresh > 192*mib {
		t.Fatalf("%d MiB were taken for 128", fresh/mib)
	}
	file, at := where(a)
	free(v, a)
	again := alloc(t, v, 60*mib)
	if f, o := where(again); f != file || o != at {
		t.Errorf("60 MiB were freed at %d of %s, and taken at %d of %s", at, file, o, f)
	}
	free(v, b, again)
	parts := []tier.FileMemory{alloc(t, v, 30*mib), alloc(t, v, 50*mib), alloc(t, v, 20*mib)}
	if got := v.Stats().Fresh; got != fresh {
		t.Errorf("%d bytes were taken fresh with 100 MiB free", got-fresh)
	}
	free(v, parts...)
	free(v, c)
}

func where(e tier.FileMemory) (string, int64) {
	_, file, off := e.Locate(0)
	return file, off
}

// TestSmallestFitIsTaken: a hole is not broken up while a smaller one does.
func TestSmallestFitIsTaken(t *testing.T) {
	v := open(t, volumes.Config{Capacity: 64 * mib})
	var all []tier.FileMemory
	for _, n := range []int64{8, 1, 4, 1, 50} {
		all = append(all, alloc(t, v, n*mib))
	}
	_, want := where(all[2])
	free(v, all[0], all[2])
	e := alloc(t, v, 3*mib)
	if _, at := where(e); at != want {
		t.Errorf("3 MiB went to %d, not into the 4 MiB at %d", at, want)
	}
	free(v, e, all[1], all[3], all[4])
}

// TestSplitting: a memory longer than any free piece is split at cuts and at multiples of a request,
// and works as one.
func TestSplitting(t *testing.T) {
	v := open(t, volumes.Config{Capacity: 16 * mib, Request: mib / 4})
	var all []tier.FileMemory
	for range 5 {
		all = append(all, alloc(t, v, 3*mib))
	}
	free(v, all[0], all[2], all[4]) // 3, 3 and 4 MiB
	e := alloc(t, v, 9*mib+5000)
	data := random(9*mib+5000, 2)
	write(t, e, data, 0)
	pieces := 1
	for off := int64(mib / 4); off < 9*mib; off += mib / 4 {
		_, _, before := e.Locate(off - 1)
		if _, _, at := e.Locate(off); at != before+1 {
			pieces++
		}
	}
	if pieces != 3 {
		t.Errorf("9 MiB are in %d pieces", pieces)
	}
	// Across the ends of pieces, whatever the alignment.
	for _, r := range [][2]int64{{3*mib - 4096, 8192}, {3*mib - 100, 200}, {3 * mib, 5 * mib}, {9*mib - 1, 5001}, {7, 9 * mib}} {
		if !bytes.Equal(read(t, e, r[1], r[0]), data[r[0]:r[0]+r[1]]) {
			t.Errorf("%d bytes at %d are wrong", r[1], r[0])
		}
	}
	free(v, e, all[1], all[3])
}

// fragment fills a volume with pieces of a length and frees every other one.
func fragment(t *testing.T, v *volumes.Volume, piece int64) (rest []tier.FileMemory) {
	t.Helper()
	var drop []tier.FileMemory
	for {
		m, err := v.Alloc(piece, nil)
		if err != nil {
			break
		}
		if e := m.(tier.FileMemory); len(drop) < len(rest) {
			drop = append(drop, e)
		} else {
			rest = append(rest, e)
		}
	}
	free(v, drop...)
	return rest
}

func TestFragmentedRoom(t *testing.T) {
	v := open(t, volumes.Config{Capacity: 32 * mib, Request: mib})
	rest := fragment(t, v, 2*mib)
	e := alloc(t, v, 16*mib-100) // longer than a request: split where requests meet
	data := random(16*mib-100, 3)
	write(t, e, data, 0)
	if !bytes.Equal(read(t, e, 16*mib-100, 0), data) {
		t.Error("a memory in pieces is wrong")
	}
	free(v, e)
	free(v, rest...)

	rest = fragment(t, v, mib/2)
	_, err := v.Alloc(mib, nil)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Largest != mib/2 || full.Available != 16*mib || full.Requested != mib {
		t.Errorf("a request in one piece: %v", err)
	}
	free(v, alloc(t, v, mib, mib/2))
	free(v, rest...)
}

func TestRoomIsTakenInStepsAndWithinTheReserve(t *testing.T) {
	fsys := &room{FS: disk.OS()}
	fsys.free.Store(300 * mib)
	v := open(t, volumes.Config{Capacity: 256 * mib, Reserve: 40 * mib, FS: fsys})
	a := alloc(t, v, page)
	if s := v.Stats(); s.Fresh != 64*mib || s.Backed != 64*mib || s.Used != page || s.Segments != 1 {
		t.Errorf("for one page: %+v", s)
	}
	fsys.free.Store(60 * mib) // 20 may be taken, less than a step
	b := alloc(t, v, 80*mib)
	if s := v.Stats(); s.Fresh > 84*mib {
		t.Errorf("%d MiB taken with 20 allowed", s.Fresh/mib-64)
	}
	fsys.free.Store(50 * mib)
	_, err := v.Alloc(30*mib, nil)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || full.Cause == nil {
		t.Fatalf("beyond the reserve: %v", err)
	}
	oneLine(t, err.Error(), "reserve", "52428800 bytes are free", "41943040 are to stay free")
	c := alloc(t, v, 3*mib) // what is backed is there still
	free(v, a, b, c)
}

func TestFullFileSystem(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	v := open(t, volumes.Config{Capacity: 256 * mib, FS: fsys, Space: tier.ID{Kind: tier.Disk, Ordinal: 3}})
	a := alloc(t, v, 10*mib)
	remove := fsys.Add(faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(syscall.ENOSPC)})
	_, err := v.Alloc(100*mib, nil)
	var full *tier.NoSpaceError
	if !errors.As(err, &full) || !errors.Is(err, syscall.ENOSPC) || full.Available != 54*mib || full.Largest != 0 {
		t.Errorf("Alloc on a full file system: %v", err)
	}
	oneLine(t, err.Error(), "no space left on device")
	b := alloc(t, v, 54*mib)
	remove()

	remove = fsys.Add(faultfs.Rule{Ops: []string{"write"}, Skip: 2, Effect: faultfs.Fail(syscall.EDQUOT)})
	err = b.WriteAt(context.Background(), random(20*mib, 1), 0)
	if !errors.As(err, &full) || !errors.Is(err, syscall.EDQUOT) || full.Space.Ordinal != 3 {
		t.Errorf("WriteAt on a full file system: %v", err)
	}
	oneLine(t, err.Error(), "disk:3 has no space", "segment-0000", v.Dir())
	remove()
	write(t, b, random(20*mib, 1), 0)
	c := alloc(t, v, 100*mib)
	free(v, a, b, c)
}

func TestOtherErrorsOfGrowthAreNotNoSpace(t *testing.T) {
	fsys := faultfs.New(disk.OS(), 1)
	v := open(t, volumes.Config{Capacity: 64 * mib, FS: fsys})
	for _, op := range []string{"allocate", "usage"} {
		remove := fsys.Add(faultfs.Rule{Ops: []string{op}, Effect: faultfs.Fail(syscall.EIO)})
		_, err := v.Alloc(mib, nil)
		if !errors.Is(err, syscall.EIO) || errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("%s: %v", op, err)
		}
		oneLine(t, err.Error(), "disk: volume "+v.Dir())
		if s := v.Stats(); s.Used != 0 || s.Backed != 0 {
			t.Errorf("%s: %+v", op, s)
		}
		remove()
	}
	free(v, alloc(t, v, 64*mib))
}

// TestCloseWithMemoryOut: what is handed out works on, and the last Free ends it all.
func TestCloseWithMemoryOut(t *testing.T) {
	for _, fsys := range []disk.FS{disk.OS(), faultfs.New(disk.OS(), 1, noAnonymous)} {
		v := open(t, volumes.Config{Capacity: 16 * mib, FS: fsys})
		a, b := alloc(t, v, 4*mib), alloc(t, v, 4*mib)
		data := random(4*mib, 1)
		write(t, a, data, 0)
		if err := v.Close(); err != nil {
			t.Fatal(err)
		}
		if s := v.Stats(); s.Segments != 1 || s.Used != 8*mib {
			t.Errorf("after Close: %+v", s)
		}
		if !bytes.Equal(read(t, a, 4*mib, 0), data) {
			t.Error("after Close memory reads differently")
		}
		write(t, b, data, 0)
		free(v, b)
		if s := v.Stats(); s.Segments != 1 {
			t.Errorf("after one Free: %+v", s)
		}
		if _, err := v.Trim(context.Background()); err != nil {
			t.Errorf("Trim after Close: %v", err)
		}
		free(v, a)
		if s := v.Stats(); s.Segments != 0 || s.Used != 0 {
			t.Errorf("after the last Free: %+v", s)
		}
		wantEmpty(t, v.Dir())
	}
}

// TestCloseAndTheLastFreeMeet: the last Free removes the directory of named files
// only when Close has removed the files.
func TestCloseAndTheLastFreeMeet(t *testing.T) {
	onLinux(t)
	synctest.Test(t, func(t *testing.T) {
		leave := make(chan struct{})
		fsys := faultfs.New(disk.OS(), 1, noAnonymous)
		v := open(t, volumes.Config{Capacity: 8 * mib, FS: fsys})
		a, b := alloc(t, v, 4*mib), alloc(t, v, 4*mib)
		free(v, a)
		fsys.Add(faultfs.Rule{Ops: []string{"remove"}, Path: "segment-0000", Effect: faultfs.Do(func(string, string) { <-leave })})
		closed, freed := make(chan error, 1), make(chan struct{})
		go func() { closed <- v.Close() }()
		synctest.Wait()
		go func() { free(v, b); close(freed) }()
		synctest.Wait()
		close(leave)
		if err := <-closed; err != nil {
			t.Error(err)
		}
		<-freed
		wantEmpty(t, v.Dir())
	})
}

func TestFreeDuringATransferWaitsForIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		leave := make(chan struct{})
		fsys := faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: []string{"write"}, Skip: 1, Effect: faultfs.Do(func(string, string) { <-leave })})
		v := open(t, volumes.Config{Capacity: 16 * mib, FS: fsys})
		e := alloc(t, v, 16*mib)
		written, reclaimed, closed := make(chan error, 1), make(chan struct{}, 1), make(chan error, 1)
		go func() { written <- e.WriteAt(context.Background(), random(16*mib, 1), 0) }()
		synctest.Wait()
		v.Free(e, func() { reclaimed <- struct{}{} })
		go func() { closed <- v.Close() }()
		synctest.Wait()
		if len(reclaimed) > 0 || len(closed) > 0 || v.Stats().Used != 16*mib {
			t.Error("the room was given away under a transfer")
		}
		if err := e.WriteAt(context.Background(), aligned(page), 0); !errors.Is(err, tier.ErrReleased) {
			t.Errorf("WriteAt on freed memory: %v", err)
		}
		close(leave)
		if err := <-written; err != nil {
			t.Error(err)
		}
		if err := <-closed; err != nil {
			t.Error(err)
		}
		if len(reclaimed) != 1 {
			t.Error("Close did not wait until the room was reclaimed")
		}
	})
}

// TestFreeTwicePanics: also where the room is another's by now.
func TestFreeTwicePanics(t *testing.T) {
	v := open(t, volumes.Config{Capacity: mib})
	e := alloc(t, v, 100)
	free(v, e)
	other := alloc(t, v, 100)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
			return
		}
		free(v, other)
	}()
	free(v, e)
}

func TestWrongSizesAreRefused(t *testing.T) {
	v := open(t, volumes.Config{Capacity: mib})
	for _, size := range []int64{0, -1} {
		if _, err := v.Alloc(size, nil); err == nil || errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("Alloc(%d): %v", size, err)
		}
	}
	for _, size := range []int64{mib + 1, 1<<63 - 1} {
		if _, err := v.Alloc(size, nil); !errors.Is(err, tier.ErrNoSpace) {
			t.Errorf("Alloc(%d): %v", size, err)
		}
	}
	e := alloc(t, v, 10000)
	for _, r := range [][2]int64{{-1, 1}, {0, 10001}, {10000, 1}, {1<<63 - 1, 1}} {
		if err := e.ReadAt(context.Background(), make([]byte, r[1]), r[0]); err == nil {
			t.Errorf("ReadAt of %d bytes at %d was done", r[1], r[0])
		}
	}
	if err := e.ReadAt(context.Background(), nil, 10000); err != nil {
		t.Errorf("ReadAt of nothing at the end: %v", err)
	}
	free(v, e)
}

func TestTwoVolumesInOneDirectory(t *testing.T) {
	for name, fsys := range map[string]disk.FS{"anonymous": disk.OS(), "named": faultfs.New(disk.OS(), 1, noAnonymous)} {
		t.Run(name, func(t *testing.T) {
			onLinux(t)
			dir := tempDir(t)
			cfg := volumes.Config{Dir: dir, Capacity: 32 * mib, FS: fsys}
			first, err := openVolume(cfg)
			if err != nil {
				t.Fatal(err)
			}
			a := alloc(t, first, 10*mib)
			data := random(10*mib, 1)
			write(t, a, data, 0)
			second, err := openVolume(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if w := second.Stats().Warnings; slices.ContainsFunc(w, func(w diag.Warning) bool { return w.Cause == causes.Abandoned }) {
				t.Errorf("the second took the first for dead: %q", w)
			}
			b := alloc(t, second, 10*mib)
			write(t, b, random(10*mib, 2), 0)
			if !bytes.Equal(read(t, a, 10*mib, 0), data) {
				t.Error("the second wrote over the first")
			}
			free(second, b)
			if err := second.Close(); err != nil {
				t.Error(err)
			}
			if !bytes.Equal(read(t, a, 10*mib, 0), data) {
				t.Error("closing the second took the first's data")
			}
			c := alloc(t, first, 20*mib)
			write(t, c, random(20*mib, 3), 0)
			free(first, a, c)
			if err := first.Close(); err != nil {
				t.Error(err)
			}
			wantEmpty(t, dir)
		})
	}
}

func TestVanishedDirectory(t *testing.T) {
	onLinux(t)
	dir := filepath.Join(tempDir(t), "spill")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	v := open(t, volumes.Config{Dir: dir, Capacity: 128 * mib})
	if !v.Stats().Anonymous {
		t.Skip("needs files without names, as those with names vanish with their directory")
	}
	a := alloc(t, v, 64*mib)
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	b := alloc(t, v, 64*mib) // what is open works on
	for i, e := range []tier.FileMemory{a, b} {
		data := random(mib, uint64(i))
		write(t, e, data, 0)
		if !bytes.Equal(read(t, e, mib, 0), data) {
			t.Error("reads differ from writes")
		}
	}
	free(v, a, b)
}

func TestConcurrentUseUnderTrim(t *testing.T) {
	for name, rules := range map[string][]faultfs.Rule{"punched": nil, "cut": {noPunch}} {
		t.Run(name, func(t *testing.T) {
			tiertest.NoLeaks(t)
			v := open(t, volumes.Config{Capacity: 12 * mib, Request: 256 << 10, FS: faultfs.New(disk.OS(), 1, rules...)})
			useUnderTrim(t, v)
		})
	}
}

// useUnderTrim writes and reads memory of a volume on several goroutines, while the volume gives
// room back.
func useUnderTrim(t *testing.T, v *volumes.Volume) {
	var owners sync.WaitGroup
	for g := range uint64(3) {
		owners.Go(func() {
			for i := range uint64(12) {
				size := int64(1+(g*7+i*5)%16) * mib / 4
				m, err := v.Alloc(size, nil)
				if err != nil {
					t.Errorf("Alloc(%d): %v", size, err) // 3 × 4 MiB fit
					return
				}
				e := m.(tier.FileMemory)
				data := random(size, g<<8|i)
				write(t, e, data, 0)
				if !bytes.Equal(read(t, e, size, 0), data) {
					t.Error("another owner wrote here")
				}
				free(v, e)
			}
		})
	}
	done := make(chan struct{})
	go func() { owners.Wait(); close(done) }()
	for {
		if _, err := v.Trim(context.Background()); err != nil {
			t.Error(err)
		}
		select {
		case <-done:
			return
		default:
		}
	}
}
