package volumes_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// blocks returns how many bytes the process's nameless files in dir have on disk.
func blocks(t *testing.T, dir string) (n int64) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("needs /proc")
	}
	for _, e := range entries {
		link := filepath.Join("/proc/self/fd", e.Name())
		if to, err := os.Readlink(link); err != nil || !strings.HasPrefix(to, dir+"/") {
			continue
		}
		info, err := os.Stat(link)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != 0o600 {
			t.Errorf("a segment has mode %v", info.Mode())
		}
		n += info.Sys().(*syscall.Stat_t).Blocks * 512
	}
	return n
}

// TestRoomOnDiskIsWhatStatsSays compares with what the file system says that the
// files have.
func TestRoomOnDiskIsWhatStatsSays(t *testing.T) {
	onLinux(t)
	dir := t.TempDir()
	v := open(t, volumes.Config{Dir: dir, Capacity: 256 * mib})
	check := func(when string) {
		t.Helper()
		if got, want := blocks(t, dir), v.Stats().Backed; got < want || got > want+mib { // ext4 adds extent blocks
			t.Errorf("%s: the files have %d bytes, Stats says %d", when, got, want)
		}
	}
	if v.Stats().FileSystem != "ext4" && v.Stats().FileSystem != "xfs" {
		t.Skip("needs a file system whose blocks are what is written, not ", v.Stats().FileSystem)
	}
	check("new")
	a, b := alloc(t, v, 50*mib), alloc(t, v, 100*mib)
	write(t, a, random(50*mib, 1), 0)
	check("taken")
	free(v, b)
	check("freed")
	if _, err := v.Trim(context.Background()); err != nil {
		t.Fatal(err)
	}
	check("trimmed")
	free(v, a)
}

// greedy is a file system that takes half of the room before it says that it is full.
type greedy struct {
	disk.FS
	full bool
}

type greedyFile struct {
	disk.File
	fs *greedy
}

func (g *greedy) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f, err := g.FS.OpenAnonymous(dir, direct)
	if err != nil {
		return nil, err
	}
	return greedyFile{f, g}, nil
}

func (f greedyFile) Allocate(off, n int64) error {
	if !f.fs.full {
		return f.File.Allocate(off, n)
	}
	if err := f.File.Allocate(off, n/2); err != nil {
		return err
	}
	return syscall.ENOSPC
}

// TestRoomTakenInVainIsGivenBack: on a full disk, room that nobody counts would be
// missing for others.
func TestRoomTakenInVainIsGivenBack(t *testing.T) {
	dir := t.TempDir()
	fsys := &greedy{FS: disk.OS()}
	v := open(t, volumes.Config{Dir: dir, Capacity: 256 * mib, FS: fsys})
	a := alloc(t, v, 64*mib)
	before := blocks(t, dir)
	fsys.full = true
	if _, err := v.Alloc(64*mib, nil); !errors.Is(err, tier.ErrNoSpace) {
		t.Errorf("got %v", err)
	}
	if after := blocks(t, dir); after > before+mib {
		t.Errorf("%d MiB are held that nobody counts", (after-before)/mib)
	}
	free(v, a)
}
