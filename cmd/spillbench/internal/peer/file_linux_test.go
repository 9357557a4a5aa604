package peer

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
)

// TestNoName: the peer's file is in the directory, and the directory is empty.
func TestNoName(t *testing.T) {
	dir := t.TempDir()
	f, err := anonymousFile(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("x"), 0); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("%v, %v", left, err)
	}
	var of, in unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &of); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat(dir, &in); err != nil || of.Dev != in.Dev || of.Nlink != 0 {
		t.Errorf("the file is on device %d with %d names, the directory on %d (%v)", of.Dev, of.Nlink, in.Dev, err)
	}
}

// TestDropCache: what was synced and dropped is not in the page cache.
func TestDropCache(t *testing.T) {
	f, err := anonymousFile(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page := make([]byte, 1<<20)
	if _, err := f.WriteAt(page, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	// A read that may not wait finds what is in the cache and nothing else.
	cached := func() (int, error) { return unix.Preadv2(int(f.Fd()), [][]byte{page[:4096]}, 512<<10, unix.RWF_NOWAIT) }
	if n, err := cached(); err != nil || n != 4096 {
		t.Skipf("needs a system that tells whether a page is cached: %d, %v", n, err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil || fs.Type == unix.TMPFS_MAGIC {
		t.Skipf("needs a file system on a disk: %v", err)
	}
	for _, c := range []struct {
		drop int64
		left bool
	}{{512 << 10, true}, {0, false}} {
		// Large pages of the cache are dropped whole or not at all, so only what is surely
		// outside or inside of what was dropped is looked at.
		if err := system.DropCache(f, c.drop); err != nil {
			t.Fatal(err)
		}
		n, err := cached()
		// A page that somebody else looks at just then, such as the kernel's own lists, stays.
		for again := 0; c.drop == 0 && err != unix.EAGAIN && again < 100; again++ {
			time.Sleep(time.Millisecond)
			if err := system.DropCache(f, c.drop); err != nil {
				t.Fatal(err)
			}
			n, err = cached()
		}
		if c.drop == 0 && err != unix.EAGAIN {
			t.Errorf("read %d bytes, %v: they are in the cache still", n, err)
		}
		if c.left && n != 4096 {
			t.Errorf("read %d bytes, %v: more was dropped than asked for", n, err)
		}
	}
}
