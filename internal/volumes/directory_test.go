package volumes_test

import (
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier/disk"
	"github.com/spillway-db/spillway/tier/disk/faultfs"
)

// TestFileThatWasNotRemoved: a named file that could not be removed is one that the next volume in the
// directory removes, with the directory.
func TestFileThatWasNotRemoved(t *testing.T) {
	onLinux(t)
	dir := tempDir(t)
	fsys := faultfs.New(disk.OS(), 1, noAnonymous)
	v, err := openVolume(volumes.Config{Dir: dir, Capacity: 8 * mib, FS: fsys})
	if err != nil {
		t.Fatal(err)
	}
	free(v, alloc(t, v, 8*mib))
	fsys.Add(faultfs.Rule{Ops: []string{"remove"}, Effect: faultfs.Fail(syscall.EIO)})
	err = v.Close()
	if err == nil {
		t.Fatal("it was closed")
	}
	oneLine(t, err.Error(), "closing: input/output error")
	if n := fsys.Open(); n != 0 || len(names(t, dir)) != 1 {
		t.Errorf("%d files are open, and %v are left", n, names(t, dir))
	}
	v, err = openVolume(volumes.Config{Dir: dir, Capacity: 8 * mib})
	if err != nil {
		t.Fatal(err)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}
