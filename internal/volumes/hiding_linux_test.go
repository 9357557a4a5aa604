package volumes_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"

	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestFilesThatStayWhileTheyAreOpen: on a file system where a removed file that is open has
// another name, as on FUSE and NFS, a volume is closed without an error, and leaves nothing.
func TestFilesThatStayWhileTheyAreOpen(t *testing.T) {
	for _, keep := range []bool{false, true} {
		for _, late := range []int{0, 1, 9} {
			files := testfs.NewHiding(disk.OS(), late)
			v := open(t, volumes.Config{Capacity: 8 * mib, FS: files, Persist: keep, Idle: -1})
			e := alloc(t, v, 4*mib)
			want := random(4*mib, 1)
			write(t, e, want, 0)
			if keep {
				if _, err := v.Persist([]byte("meta"), nil, anyRoom, e); err != nil {
					t.Fatal(err)
				}
			}
			if !bytes.Equal(read(t, e, 4*mib, 0), want) {
				t.Error("reads differ from writes")
			}
			free(v, e)
			if _, err := v.Trim(context.Background()); err != nil {
				t.Error(err)
			}
			if err := v.Close(); err != nil {
				t.Errorf("keep %v, late %d: %v", keep, late, err)
			}
			if files.Hidden() == 0 {
				t.Error("nothing was removed while it was open: this tests nothing")
			}
		}
	}
}

// TestHiddenFileThatStays: a volume does not wait for ever for a file that another process has
// open. When that is closed the next volume removes the directory.
func TestHiddenFileThatStays(t *testing.T) {
	for _, keep := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) { // so that patience takes no time
			dir := t.TempDir()
			files := testfs.NewHiding(disk.OS(), 0)
			v, err := openVolume(volumes.Config{Dir: dir, Capacity: mib, FS: files, Persist: keep})
			if err != nil {
				t.Fatal(err)
			}
			held, err := files.Reopen(filepath.Join(dir, names(t, dir)[0], "lock"), false)
			if err != nil {
				t.Fatal(err)
			}
			if err := v.Close(); !errors.Is(err, fs.ErrExist) { // ENOTEMPTY
				t.Errorf("closed with a file that stays: %v", err)
			}
			left := names(t, filepath.Join(dir, names(t, dir)[0]))
			if len(left) != 1 || !strings.HasPrefix(left[0], ".fuse_hidden") {
				t.Errorf("%v are left", left)
			}
			if err := held.Close(); err != nil {
				t.Fatal(err)
			}
			_ = open(t, volumes.Config{Dir: dir, Capacity: mib, FS: files, Persist: keep}).Close() // which looks at the directory
		})
	}
}

// TestHiddenFilesThatWereLeft, by a server that ended before it removed them, are removed with
// the directory that they lie in, by its name and whether or not its lock is there. A directory
// with anything else in it stays.
func TestHiddenFilesThatWereLeft(t *testing.T) {
	for _, name := range []string{"spillway-7-0123456789abcdef", "spillway-kept-0123456789abcdef"} {
		for _, in := range [][]string{
			{"lock", ".fuse_hidden00000001"}, {".nfs0000000000000001"}, {".__smb0001", "segment-0000", "lock"}, {"lock", ".fuse_hidden1", "notes"}, {".nfs1", ".profile"},
		} {
			dir := t.TempDir()
			own := filepath.Join(dir, name)
			if err := os.Mkdir(own, 0o700); err != nil {
				t.Fatal(err)
			}
			for _, f := range in {
				if err := os.WriteFile(filepath.Join(own, f), []byte("x"), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			v, err := openVolume(volumes.Config{Dir: dir, Capacity: mib, Persist: strings.Contains(name, "kept")})
			if err == nil {
				err = v.Close()
			}
			if err != nil {
				t.Errorf("%s with %v: %v", name, in, err)
			}
			foreign := slices.Contains(in, "notes") || slices.Contains(in, ".profile")
			if stays := len(names(t, dir)) > 0; stays != foreign {
				t.Errorf("%s with %v: it stays is %v", name, in, stays)
			}
			if _, err := os.Stat(filepath.Join(own, in[len(in)-1])); foreign && err != nil {
				t.Errorf("what is not ours: %v", err)
			}
		}
	}
}

// TestVolumeIsOpenedWhileAnotherRemovesItsDirectory: at the moment when the lock has lost its name,
// and is still held.
func TestVolumeIsOpenedWhileAnotherRemovesItsDirectory(t *testing.T) {
	for _, keep := range []bool{false, true} {
		dir := t.TempDir()
		hiding := testfs.NewHiding(disk.OS(), 0)
		at, on := make(chan struct{}), make(chan struct{})
		files := faultfs.New(hiding, 1, faultfs.Rule{Ops: []string{"unlock"}, Times: 1, Effect: faultfs.Do(func(string, string) {
			close(at)
			<-on
		})})
		a := open(t, volumes.Config{Dir: dir, Capacity: mib, FS: files, Persist: keep})
		closed := make(chan error)
		go func() { closed <- a.Close() }()
		<-at
		b := open(t, volumes.Config{Dir: dir, Capacity: mib, FS: hiding, Persist: keep})
		e := alloc(t, b, mib)
		want := random(mib, 2)
		write(t, e, want, 0)
		close(on)
		if err := <-closed; err != nil {
			t.Errorf("the one: %v", err)
		}
		if got := names(t, dir); len(got) != 1 {
			t.Errorf("of two directories there are %v", got)
		}
		if !bytes.Equal(read(t, e, mib, 0), want) {
			t.Error("reads differ from writes")
		}
		free(b, e)
		if err := b.Close(); err != nil {
			t.Errorf("the other: %v", err)
		}
	}
}
