package testfs_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/spillway-db/spillway/test/testfs"
)

// TestCopyOfZerosTakesNoRoom checks that zeros become a hole: most of a volume's files is
// unwritten.
func TestCopyOfZerosTakesNoRoom(t *testing.T) {
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "new")
	if err := os.WriteFile(filepath.Join(src, "zeros"), make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	testfs.CopyTree(t, dst, src)
	var room unix.Stat_t
	err := unix.Stat(filepath.Join(dst, "zeros"), &room)
	if err != nil || room.Size != 1<<20 || room.Blocks*512 > 64<<10 {
		t.Errorf("the copy has %d bytes and takes %d blocks: %v", room.Size, room.Blocks, err)
	}
}
