package volumes_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

const (
	page = tier.Page
	mib  = 1 << 20
)

// childEnv makes the test binary a process that opens a volume in a directory,
// writes, and waits to be killed.
const childEnv = "SPILLWAY_DISK_TEST_CHILD"

func TestMain(m *testing.M) {
	if mode := os.Getenv(childEnv); mode != "" {
		childMain(mode)
		return
	}
	if !testseed.Raced {
		debug.SetGCPercent(400) // the heap is small: to collect it at each doubling was a fifth of the time
	}
	os.Exit(m.Run())
}

// encrypted is set while TestTheSuiteOnEncryptedVolumes runs the other tests.
var encrypted bool

// usersKey is the key of volumes that encrypt and keep, if a test gives no other.
var usersKey = []byte("a key of 32 bytes, for the tests")

// openVolume is volumes.Open, on an encrypted volume where the suite wants that.
func openVolume(cfg volumes.Config) (*volumes.Volume, error) {
	if cfg.Encrypt = cfg.Encrypt || encrypted; cfg.Encrypt && cfg.Persist && cfg.Key == nil {
		cfg.Key = usersKey
	}
	cfg.FS = testfs.DiskFS(cfg.Dir, cfg.FS)
	return volumes.Open(cfg)
}

// tempDir returns a new directory: on the disk, or in memory where the test has been on the disk
// already, unencrypted.
func tempDir(t testing.TB) string {
	t.Helper()
	if encrypted {
		return testfs.MemoryDir(t)
	}
	return t.TempDir()
}

// open opens a volume in a new directory. At the end of the test it is closed, and
// nothing may be left: no file, no descriptor.
func open(t testing.TB, cfg volumes.Config) *volumes.Volume {
	t.Helper()
	fds := descriptors(t)
	if cfg.Dir == "" {
		cfg.Dir = tempDir(t)
	}
	v, err := openVolume(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.Close(); err != nil && !errors.Is(err, tier.ErrClosed) {
			t.Error(err)
		}
		if s := v.Stats(); s.Used != 0 || s.Backed != 0 || s.Segments != 0 {
			t.Errorf("in the end: %+v", s)
		}
		if fs, ok := cfg.FS.(*faultfs.FS); ok && fs.Open() != 0 {
			t.Errorf("%d files are open in the end", fs.Open())
		}
		if n := descriptors(t); n > fds {
			t.Errorf("%d descriptors in the end, %d in the beginning", n, fds)
		}
		wantEmpty(t, cfg.Dir)
	})
	return v
}

func wantEmpty(t testing.TB, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Error(err)
	}
	for _, e := range entries {
		t.Errorf("%s is left in the directory", e.Name())
	}
}

// descriptors counts the open files of the process.
func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0 // no such thing here
	}
	n := 0
	for _, e := range entries {
		// What the runtime and the test framework open when they like.
		to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name()))
		if err == nil && !strings.HasPrefix(to, "anon_inode:") && !strings.HasPrefix(to, "pipe:") && !strings.HasPrefix(to, "/proc/") {
			n++
		}
	}
	return n
}

// The ways in which a file system can fall short.
var (
	noAnonymous = faultfs.Rule{Ops: []string{"open-anonymous"}, Effect: faultfs.Fail(syscall.EOPNOTSUPP)}
	noAllocate  = faultfs.Rule{Ops: []string{"allocate"}, Effect: faultfs.Fail(syscall.EOPNOTSUPP)}
	noPunch     = faultfs.Rule{Ops: []string{"punch"}, Effect: faultfs.Fail(syscall.EOPNOTSUPP)}
)

// noDirect is a file system that refuses O_DIRECT.
type noDirect struct{ disk.FS }

func (f noDirect) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	if direct {
		return nil, &os.PathError{Op: "open", Path: dir, Err: syscall.EINVAL}
	}
	return f.FS.OpenAnonymous(dir, false)
}

func (f noDirect) Create(path string, direct bool) (disk.File, error) {
	if direct {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EINVAL}
	}
	return f.FS.Create(path, false)
}

// room is a file system whose free space the test sets.
type room struct {
	disk.FS
	free atomic.Int64
}

func (r *room) Usage(dir string) (disk.Usage, error) {
	return disk.Usage{FileSystem: "testfs", Free: r.free.Load(), Total: 1 << 40}, nil
}

func alloc(t testing.TB, v *volumes.Volume, size int64, cuts ...int64) tier.FileMemory {
	t.Helper()
	m, err := v.Alloc(size, cuts)
	if err != nil {
		t.Fatalf("Alloc(%d): %v", size, err)
	}
	return m.(tier.FileMemory)
}

func free(v *volumes.Volume, es ...tier.FileMemory) {
	for _, e := range es {
		v.Free(e, func() {})
	}
}

// random returns n bytes that start at a page and repeat nothing.
func random(n int64, seed uint64) []byte {
	b := aligned(n)
	testseed.Fill(b, seed)
	return b
}

func write(t testing.TB, e tier.FileMemory, p []byte, off int64) {
	t.Helper()
	if err := e.WriteAt(context.Background(), p, off); err != nil {
		t.Fatalf("WriteAt: %v", err)
	}
}

func read(t testing.TB, e tier.FileMemory, n, off int64) []byte {
	t.Helper()
	p := aligned(n)
	if err := e.ReadAt(context.Background(), p, off); err != nil {
		t.Fatalf("ReadAt: %v", err)
	}
	return p
}

func onLinux(t testing.TB) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("needs anonymous files, direct I/O and holes")
	}
}

// oneLine fails if an error or a warning is not one line, or names none of what it
// must.
func oneLine(t testing.TB, s string, want ...string) {
	t.Helper()
	if strings.Contains(s, "\n") {
		t.Errorf("more than one line: %q", s)
	}
	for _, w := range want {
		if !strings.Contains(s, w) {
			t.Errorf("%q does not say %q", s, w)
		}
	}
}
