package testfs

import (
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

const (
	root   = "/dev/shm" // a memory file system on Linux
	prefix = root + "/spillway-memdir-"
	room   = 1 << 30 // that it must have free: containers have 64 MiB of it, unless asked for more
)

// usable reports whether root is in memory, has room, and is like a disk: with anonymous files
// and direct I/O (since Linux 6.6).
var usable = sync.OnceValue(func() bool {
	u, err := disk.OS().Usage(root)
	if err != nil || !u.Memory || u.Free < room {
		return false
	}
	f, err := disk.OS().OpenAnonymous(root, true)
	return err == nil && f.Close() == nil
})

// MemoryDir returns a new directory in memory, which is removed when t ends. Where the machine has
// no memory file system that serves, it is t.TempDir().
func MemoryDir(t testing.TB) string {
	t.Helper()
	if !usable() {
		return t.TempDir()
	}
	dir, err := os.MkdirTemp(root, strings.TrimPrefix(prefix, root+"/"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// DiskFS returns inner, or disk.OS() if it is nil, for a directory of MemoryDir: it does not report
// that it is in memory, so that volumes do not warn of it, and files take the memory for room when
// they are written. For another directory it returns inner itself.
func DiskFS(dir string, inner disk.FS) disk.FS {
	switch {
	case !strings.HasPrefix(dir, prefix):
		return inner
	case inner == nil:
		inner = disk.OS()
	}
	return memory{inner}
}

type memory struct{ disk.FS }

func (m memory) Usage(dir string) (disk.Usage, error) {
	u, err := m.FS.Usage(dir)
	u.Memory = false
	return u, err
}

func (m memory) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	return lazily(m.FS.OpenAnonymous(dir, direct))
}

func (m memory) Create(path string, direct bool) (disk.File, error) {
	return lazily(m.FS.Create(path, direct))
}

func (m memory) Reopen(path string, direct bool) (disk.File, error) {
	return lazily(m.FS.Reopen(path, direct))
}

// lazy is a file that takes the last page of room alone, so that it is as long. The memory for all
// of it would be cleared, which took a tenth of the time of package convert's tests.
type lazy struct{ disk.File }

func lazily(f disk.File, err error) (disk.File, error) {
	if err != nil {
		return nil, err
	}
	return lazy{f}, nil
}

func (l lazy) Allocate(off, n int64) error {
	last := min(n, tier.Page)
	return l.File.Allocate(off+n-last, last)
}
