package test

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
	"github.com/spillway-db/spillway/tier/tiertest"
)

// leavesNothing checks, when the test ends, that no goroutine, no descriptor and no file
// in dir is left that was not there before.
func leavesNothing(t *testing.T, dir string) {
	t.Helper()
	tiertest.NoLeaks(t)
	before := descriptors(t)
	was := snapshot(t, dir)
	t.Cleanup(func() {
		if n := descriptors(t); n != before {
			t.Errorf("%d descriptors are open in the end, %d were in the beginning", n, before)
		}
		if _, err := os.Stat(dir); err == nil {
			unchanged(t, was)
		}
	})
}

// descriptors counts the open files of the process, but for those that the runtime
// opens when it likes.
func descriptors(t *testing.T) (n int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc, to count open files: ", err)
	}
	for _, e := range entries {
		to, err := os.Readlink("/proc/self/fd/" + e.Name())
		if err == nil && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "pipe:") && !strings.HasPrefix(to, "/proc/") {
			n++
		}
	}
	return n
}

// failing is the machine's file system with rules.
func failing(err error, ops ...string) func() disk.FS {
	return func() disk.FS {
		return faultfs.New(disk.OS(), 1, faultfs.Rule{Ops: ops, Effect: faultfs.Fail(err)})
	}
}

// buffered is a file system that cannot do direct I/O: it says so when a file is
// opened, or only when one is read or written.
type buffered struct {
	disk.FS
	at string // "" for opening
}

func (b buffered) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	return b.opened(direct, func() (disk.File, error) { return b.FS.OpenAnonymous(dir, direct && b.at == "") })
}

func (b buffered) Create(path string, direct bool) (disk.File, error) {
	return b.opened(direct, func() (disk.File, error) { return b.FS.Create(path, direct && b.at == "") })
}

func (b buffered) opened(direct bool, open func() (disk.File, error)) (disk.File, error) {
	if direct && b.at == "" {
		return nil, &os.PathError{Op: "open", Path: "x", Err: syscall.EINVAL}
	}
	f, err := open()
	if err != nil || !direct {
		return f, err
	}
	return refusing{f, b.at}, nil
}

type refusing struct {
	disk.File
	op string
}

func (r refusing) Direct() bool { return true }

func (r refusing) ReadAt(p []byte, off int64) (int, error) {
	if r.op == "read" {
		return 0, syscall.EINVAL
	}
	return r.File.ReadAt(p, off)
}

func (r refusing) WriteAt(p []byte, off int64) (int, error) {
	if r.op == "write" {
		return 0, syscall.EINVAL
	}
	return r.File.WriteAt(p, off)
}

// without is a file system on which operations are not supported.
func without(inner disk.FS, err error, ops ...string) disk.FS {
	return faultfs.New(inner, 1, faultfs.Rule{Ops: ops, Effect: faultfs.Fail(err)})
}

// TestPoorFileSystems: the engine does without what a file system lacks, and reports it; every byte
// is what it was.
func TestPoorFileSystems(t *testing.T) {
	top := discover(t)
	named := func(inner disk.FS) disk.FS { return without(inner, syscall.EOPNOTSUPP, "open-anonymous") }
	for name, c := range map[string]struct {
		files func() disk.FS
		warns []string
	}{
		"no O_DIRECT":                   {func() disk.FS { return buffered{disk.OS(), ""} }, []string{"no direct I/O"}},
		"O_DIRECT refused when written": {func() disk.FS { return buffered{disk.OS(), "write"} }, []string{"no direct I/O"}},
		"O_DIRECT refused when read":    {func() disk.FS { return buffered{disk.OS(), "read"} }, []string{"no direct I/O"}},
		"no O_TMPFILE":                  {func() disk.FS { return named(disk.OS()) }, []string{"no anonymous files"}},
		"O_TMPFILE is not known":        {func() disk.FS { return without(disk.OS(), syscall.EISDIR, "open-anonymous") }, []string{"no anonymous files"}},
		"O_TMPFILE is invalid":          {func() disk.FS { return without(disk.OS(), syscall.EINVAL, "open-anonymous") }, []string{"no anonymous files"}},
		"named and no O_DIRECT":         {func() disk.FS { return named(buffered{disk.OS(), ""}) }, []string{"no anonymous files", "no direct I/O"}},
		"named and refused when read":   {func() disk.FS { return named(buffered{disk.OS(), "read"}) }, []string{"no anonymous files", "no direct I/O"}},
		"no fallocate":                  {func() disk.FS { return without(disk.OS(), syscall.EOPNOTSUPP, "allocate") }, nil},
		"no holes":                      {func() disk.FS { return without(disk.OS(), syscall.EOPNOTSUPP, "punch") }, nil},
		"no size":                       {func() disk.FS { return without(disk.OS(), errors.ErrUnsupported, "usage") }, []string{"free space"}},
		"nothing at all": {func() disk.FS {
			return without(buffered{disk.OS(), ""}, syscall.EOPNOTSUPP, "open-anonymous", "allocate", "punch", "usage")
		}, []string{"free space", "no anonymous files", "no direct I/O"}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, codec := range []convert.Codec{convert.CodecS2, convert.CodecNone}[:testseed.Rounds(2, 1)] {
				dir := t.TempDir()
				leavesNothing(t, dir)
				var log bytes.Buffer
				cfg := spillConfig(dir, c.files(), top)
				cfg.Codec, cfg.Logger = codec, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
				s := openSpill(t, cfg)
				s.putAndMove(t.Context())
				if len(s.failed) > 0 {
					t.Errorf("%s: %v", codec, s.failed)
				}
				s.close()
				for _, want := range c.warns {
					if !strings.Contains(log.String(), want) {
						t.Errorf("nobody was warned of %q in %s", want, log.String())
					}
				}
				if len(c.warns) > 0 && !strings.Contains(log.String(), dir) {
					t.Errorf("no warning names the directory: %s", log.String())
				}
			}
		})
	}
}

// TestOpenSaysWhatToDo: a directory in which nothing can be spilled is named, with what
// to do about it, and nothing is left of the engine.
func TestOpenSaysWhatToDo(t *testing.T) {
	top := discover(t)
	named := func(err error, ops ...string) func() disk.FS {
		return func() disk.FS {
			return faultfs.New(disk.OS(), 1, noAnonymous, faultfs.Rule{Ops: ops, Effect: faultfs.Fail(err)})
		}
	}
	another := "name another directory"
	for name, c := range map[string]struct {
		files   func() disk.FS
		prepare func(t *testing.T, dir string)
		change  func(cfg *spillway.DiskConfig)
		want    error
		says    []string
	}{
		"not there": {prepare: func(t *testing.T, dir string) { must(t, os.Remove(dir)) },
			says: []string{"the directory does not exist", "make it", another}},
		"not there, of any size": {prepare: func(t *testing.T, dir string) { must(t, os.Remove(dir)) },
			change: func(d *spillway.DiskConfig) { d.Capacity = spillway.Amount{} }, says: []string{"the directory does not exist", "make it", another}},
		"not there, of any size, on a file system of its own": {prepare: func(t *testing.T, dir string) { must(t, os.Remove(dir)) },
			files: disk.OS, change: func(d *spillway.DiskConfig) { d.Capacity = spillway.Amount{} }, want: os.ErrNotExist, says: []string{"no such file or directory"}},
		"a file": {prepare: func(t *testing.T, dir string) {
			must(t, errors.Join(os.Remove(dir), os.WriteFile(dir, nil, 0o600)))
		}, says: []string{"not a directory", another}},
		"gone once it was looked at": {files: failing(syscall.ENOENT, "open-anonymous"),
			want: syscall.ENOENT, says: []string{"no such file or directory", another}},
		"not ours":                   {files: failing(syscall.EACCES, "open-anonymous"), want: syscall.EACCES, says: []string{"permission denied", "may make files", another}},
		"not ours, named":            {files: named(syscall.EPERM, "mkdir"), want: syscall.EPERM, says: []string{"operation not permitted", "may make files", another}},
		"read-only":                  {files: failing(syscall.EROFS, "open-anonymous"), want: syscall.EROFS, says: []string{"read-only file system", another}},
		"full":                       {files: failing(syscall.ENOSPC, "write"), want: syscall.ENOSPC, says: []string{"no space left", "make room", another}},
		"full, named":                {files: named(syscall.ENOSPC, "lock"), want: syscall.ENOSPC, says: []string{"no space left", "make room", another}},
		"the user's quota":           {files: failing(syscall.EDQUOT, "write"), want: syscall.EDQUOT, says: []string{"quota", "make room", another}},
		"broken":                     {files: failing(syscall.EIO, "write"), want: syscall.EIO, says: []string{"input/output error", another}},
		"too many files":             {files: failing(syscall.EMFILE, "open-anonymous"), want: syscall.EMFILE, says: []string{"too many open files", "limit"}},
		"larger than what is free":   {change: func(d *spillway.DiskConfig) { d.Capacity = spillway.Bytes(1 << 60) }, want: tier.ErrNoSpace, says: []string{"has", "free", "make room", another}},
		"nothing beside the reserve": {change: func(d *spillway.DiskConfig) { d.Capacity, d.Reserve = spillway.Amount{}, 1<<60 }, want: tier.ErrNoSpace, says: []string{"free", "reserve"}},
		"next to nothing":            {change: func(d *spillway.DiskConfig) { d.Capacity = spillway.Bytes(100) }, says: []string{"capacity 100", "at least 4096"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "spill")
			must(t, os.Mkdir(dir, 0o700))
			if c.prepare != nil {
				c.prepare(t, dir)
			}
			leavesNothing(t, filepath.Dir(dir))
			var files disk.FS
			if c.files != nil {
				files = c.files()
			}
			cfg := spillConfig(dir, files, top)
			if c.change != nil {
				c.change(&cfg.Disks[0])
			}
			eng, err := spillway.Open(t.Context(), cfg)
			if err == nil {
				t.Fatal(errors.Join(errors.New("opened"), eng.Close()))
			}
			if c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("%v is not %v", err, c.want)
			}
			isClear(t, err, append(c.says, dir)...)
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// isClear checks that an error is one line that says all that it should.
func isClear(t *testing.T, err error, says ...string) {
	t.Helper()
	if err == nil {
		t.Error("there is no error")
		return
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
	for _, want := range says {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
}
