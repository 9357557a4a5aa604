package testfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/tier/disk"
)

// TestHidingHidesWhatIsOpen checks that a removed file stays until its last close, or until some
// operations later.
func TestHidingHidesWhatIsOpen(t *testing.T) {
	for _, late := range []int{0, 2} {
		dir := filepath.Join(t.TempDir(), "d")
		path := filepath.Join(dir, "file")
		h := NewHiding(disk.OS(), late)
		if err := h.Mkdir(dir); err != nil {
			t.Fatal(err)
		}
		if _, err := h.OpenAnonymous(dir, false); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("an anonymous file: %v", err)
		}
		one, err := h.Create(path, false)
		if err != nil {
			t.Fatal(err)
		}
		other, err := h.Reopen(path, false)
		if err != nil {
			t.Fatal(err)
		}
		in := func() []string {
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, e := range entries {
				names = append(names, e.Name())
			}
			return names
		}
		if err := errors.Join(h.Remove(path), one.Close()); err != nil {
			t.Fatal(err)
		}
		if got := in(); len(got) != 1 || !strings.HasPrefix(got[0], ".fuse_hidden") || h.Hidden() != 1 {
			t.Errorf("removed while it is open: %v", got)
		}
		if err := h.Remove(dir); !errors.Is(err, fs.ErrExist) { // ENOTEMPTY
			t.Errorf("removing the directory: %v", err)
		}
		if err := other.Close(); err != nil {
			t.Fatal(err)
		}
		for range late {
			if len(in()) != 1 {
				t.Error("the close takes effect too early")
			}
			if _, err := h.ReadDir(dir); err != nil {
				t.Fatal(err)
			}
		}
		if got := in(); len(got) != 0 {
			t.Errorf("closed: %v", got)
		}
		if f, err := h.Create(path, false); err != nil {
			t.Error(err)
		} else if err := errors.Join(f.Close(), h.Remove(path)); err != nil {
			t.Error(err)
		}
		for range late {
			_, _ = h.ReadDir(dir)
		}
		if err := h.Remove(dir); err != nil {
			t.Error(err)
		}
	}
}
