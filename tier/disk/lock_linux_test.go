package disk

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestLockThatHasLostItsName: who opened it before, and gets it when the one who removed it
// lets go of it, must not take it for the directory's: with links or without.
func TestLockThatHasLostItsName(t *testing.T) {
	for name, lose := range map[string]func(path string) error{
		"removed": os.Remove,
		"hidden":  func(path string) error { return os.Rename(path, filepath.Join(filepath.Dir(path), ".nfs1")) },
	} {
		path := filepath.Join(t.TempDir(), "lock")
		first, err := OS().Lock(path, true)
		if err != nil {
			t.Fatal(err)
		}
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := lockOpen(f); !errors.Is(err, ErrLocked) {
			t.Errorf("%s: while it is held: %v", name, err)
		}
		if err := errors.Join(lose(path), first.Close()); err != nil {
			t.Fatal(err)
		}
		if err := lockOpen(f); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A child process that is being started has all files open for a moment.
func TestLockEndsBesideACopyOfItsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	first, err := OS().Lock(path, true)
	if err != nil {
		t.Fatal(err)
	}
	copied := -1
	if err := control(first.(locked).File, func(fd int) error { copied, err = unix.Dup(fd); return err }); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(copied)
	if _, err := OS().Lock(path, false); !errors.Is(err, ErrLocked) {
		t.Errorf("while it is held: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second, err := OS().Lock(path, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
}
