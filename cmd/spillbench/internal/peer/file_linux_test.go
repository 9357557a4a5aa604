package peer

import (
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/apache/arrow-go/v18/arrow"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/system"
)

// TestNoName: the peer's file is in the directory, and the directory is empty.
func TestNoName(t *testing.T) {
	dir := t.TempDir()
	f, err := system.OpenUnlinked(dir)
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

// cached returns how many of four pages of a file the page cache has. It skips the test on systems
// that do not report that. Asking begins to read ahead, so the last page is the first that it asks
// for, and each answer counts once.
func cached(t *testing.T, f *os.File) (pages int) {
	t.Helper()
	for off := int64(384 << 10); off >= 0; off -= 128 << 10 {
		n, err := unix.Preadv2(int(f.Fd()), [][]byte{make([]byte, 4096)}, off, unix.RWF_NOWAIT)
		switch {
		case err == unix.EAGAIN:
		case err != nil || n == 0:
			t.Skipf("needs a system that reports whether a page is cached: %d, %v", n, err)
		default:
			pages++
		}
	}
	return pages
}

// TestColdFiles: the peer's files are in the page cache when they have been written, and not when
// they have been synced, nor when they have been read cold. A page that somebody else looks at at
// this moment, such as the kernel's own lists, may stay, so either is tried several times.
func TestColdFiles(t *testing.T) {
	var fs unix.Statfs_t
	if err := unix.Statfs(t.TempDir(), &fs); err != nil || fs.Type == unix.TMPFS_MAGIC {
		t.Skipf("needs a file system on a disk: %v", err)
	}
	r := newRig(t, table(1), table(2)).runner()
	err := r.withPeer(t.Context(), func(p *ipcFiles) error {
		if _, _, err := p.write(t.Context(), false); err != nil {
			return err
		}
		if len(p.files) != 2 || cached(t, p.files[0]) != 4 || cached(t, p.files[1]) != 4 {
			t.Fatalf("%d files are not cached", len(p.files))
		}
		cold := func(do func() error) (most int, err error) {
			for range 100 {
				if err := do(); err != nil {
					return 0, err
				}
				if most = max(cached(t, p.files[0]), cached(t, p.files[1])); most <= 2 {
					return most, nil
				}
				time.Sleep(time.Millisecond)
			}
			return most, nil
		}
		n, err := cold(func() error {
			_, err := p.sync(t.Context(), 0)
			return err
		})
		if err != nil || n > 2 {
			t.Errorf("after the sync %d of 4 pages of a file are cached: %v", n, err)
		}
		p.cold = true
		n, err = cold(func() error {
			batches := 0
			err := p.read(t.Context(), func(arrow.RecordBatch) error { batches++; return nil })
			if batches != 2*15 {
				t.Errorf("%d batches were read", batches)
			}
			return err
		})
		if n > 2 {
			t.Errorf("after reading %d of 4 pages of a file are cached", n)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
