package volumes_test

import (
	"bytes"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/causes"
	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

func warnsOfOthers(v *volumes.Volume) bool {
	return slices.ContainsFunc(v.Warnings(), func(w diag.Warning) bool { return w.Cause == causes.KeptLeft })
}

// TestNothingPersistsThere: a process that died with nothing persisted, or no more, leaves a
// directory that the next volume does not warn of.
func TestNothingPersistsThere(t *testing.T) {
	for round := range 16 { // the names are random: the empty one comes first or last
		dir := t.TempDir()
		first, second := openPersistent(t, dir), openPersistent(t, dir)
		_, one := persist(t, first, 1, mib)
		if round%2 == 0 {
			_, two := persist(t, second, 2, mib)
			free(second, two)
		}
		leave(t, first, one)
		leave(t, second)
		v := openPersistent(t, dir)
		volumes.WarnOfOthers(v)
		found := v.Persisted()
		if len(found) != 1 {
			t.Fatalf("kept: %v", found)
		}
		if warnsOfOthers(v) {
			t.Errorf("warnings of what nobody kept: %v", v.Warnings())
		}
		free(v, wantPersisted(t, v, found[0], 1, mib))
		closeVolume(t, v)
	}
}

// whileLooking calls a function when a second directory that persists is read, which locks must not
// be in the way of.
type whileLooking struct {
	disk.FS
	seen []string
	then func()
}

func (f *whileLooking) ReadDir(path string) ([]fs.DirEntry, error) {
	if strings.HasPrefix(filepath.Base(path), "spillway-kept-") && !slices.Contains(f.seen, path) {
		if f.seen = append(f.seen, path); len(f.seen) == 2 {
			f.then()
		}
	}
	return f.FS.ReadDir(path)
}

// TestTwoVolumesAfterTwoCrashes: two processes have died, and two are started again. Each finds
// what one has kept, also if one opens its volume while the other looks whether to warn.
func TestTwoVolumesAfterTwoCrashes(t *testing.T) {
	dir := t.TempDir()
	keptByTwo(t, dir)
	var w *volumes.Volume
	v := openPersistent(t, dir, func(c *volumes.Config) {
		c.FS = &whileLooking{FS: disk.OS(), then: func() { w = openPersistent(t, dir) }}
	})
	volumes.WarnOfOthers(v)
	if w == nil {
		t.Fatal("it did not look")
	}
	if n, m := len(v.Persisted()), len(w.Persisted()); n != 1 || m != 1 {
		t.Errorf("one finds %d, and the other %d", n, m)
	}
	closeVolume(t, v)
	closeVolume(t, w)
}

// TestTwoVolumesOfOneEngine: two disks of one engine in one directory take over what two processes
// kept, and so nothing is left. Of what a third kept one of them warns.
func TestTwoVolumesOfOneEngine(t *testing.T) {
	for left := range 2 {
		dir := t.TempDir()
		dead := make([]*volumes.Volume, 2+left)
		kept := make([]tier.FileMemory, len(dead))
		for i := range dead {
			dead[i] = openPersistent(t, dir)
			_, kept[i] = persist(t, dead[i], uint64(i), mib)
		}
		for i, d := range dead {
			leave(t, d, kept[i])
		}
		v, w := openPersistent(t, dir), openPersistent(t, dir) // as Open does: disk:0, then disk:1
		volumes.WarnOfOthers(v, w)
		if n := len(v.Persisted()) + len(w.Persisted()); n != 2 {
			t.Errorf("%d are found", n)
		}
		if all := slices.Concat(v.Warnings(), w.Warnings()); len(all) != left || warnsOfOthers(v) != (left == 1) {
			t.Errorf("with %d left: %v", left, all)
		}
		closeVolume(t, v)
		closeVolume(t, w)
	}
}

// lateErrors is a file system that renames files and then returns an error.
type lateErrors struct{ disk.FS }

func (f lateErrors) Rename(from, to string) error {
	if err := f.FS.Rename(from, to); err != nil {
		return err
	}
	return syscall.EIO
}

// TestRenamedDespiteAnError: a memory whose file was renamed is there, also if an error was returned.
func TestRenamedDespiteAnError(t *testing.T) {
	dir := tempDir(t)
	v := openPersistent(t, dir, func(c *volumes.Config) { c.FS = lateErrors{disk.OS()} })
	key, e := persist(t, v, 1, page)
	if !bytes.Equal(read(t, e, page, 0), random(page, 1)) {
		t.Error("the memory has other bytes")
	}
	v.Forget(key)
	if !bytes.Equal(read(t, e, page, 0), random(page, 1)) {
		t.Error("the memory has other bytes after its batch has ended")
	}
	free(v, e)
	if w := v.Stats().Warnings; len(w) > 0 {
		t.Errorf("warnings: %q", w)
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}
