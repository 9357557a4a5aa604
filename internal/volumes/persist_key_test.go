package volumes_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"testing"

	"github.com/spillway-db/spillway/internal/volumes"
	"github.com/spillway-db/spillway/test/testfs"
	"github.com/spillway-db/spillway/tier/disk"
)

// TestWrongKeyDestroysNothing: what was kept is opened with another key, without one, or with one
// where none was. That is an error, and all is there for a volume with the right key.
func TestWrongKeyDestroysNothing(t *testing.T) {
	plain := func(*volumes.Config) {}
	other := func(c *volumes.Config) { c.Encrypt, c.Key = true, bytes.Repeat([]byte{7}, 32) }
	shorter := func(c *volumes.Config) { c.Encrypt, c.Key = true, usersKey[:16] }
	for name, c := range map[string]struct {
		kept, opened func(*volumes.Config)
		says         string
	}{
		"another key":        {sealed, other, "another Key than this one"},
		"a part of the key":  {sealed, shorter, "another Key than this one"},
		"without encryption": {sealed, plain, "was kept encrypted, and this volume does not encrypt"},
		"with encryption":    {plain, sealed, "was kept without encryption, and this volume encrypts"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			v := openPersistent(t, dir, c.kept)
			_, a := persist(t, v, 1, mib+page)
			_, b := persist(t, v, 2, 5*mib)
			leave(t, v, a, b)
			before, fds := contents(t, dir), descriptors(t)
			kept := names(t, dir)[0]
			for _, capacity := range []int64{16 * mib, 16 * mib, 4 * mib} { // the last is too little for it
				cfg := volumes.Config{Dir: dir, Capacity: capacity, Persist: true}
				c.opened(&cfg)
				_, err := volumes.Open(cfg)
				var e *disk.KeyError
				if !errors.Is(err, disk.ErrKey) || !errors.As(err, &e) || e.Dir != dir || e.Name != kept {
					t.Fatalf("opened: %v", err)
				}
				oneLine(t, err.Error(), dir, kept, c.says, "nothing in it was changed")
				wantSame(t, "opened", before, contents(t, dir))
				if n := descriptors(t); n > fds {
					t.Errorf("%d descriptors became %d", fds, n)
				}
			}
			// Beside one of the right key it is left alone, with a warning.
			elsewhere := t.TempDir()
			v = openPersistent(t, elsewhere, c.opened)
			_, es := persist(t, v, 3, page)
			leave(t, v, es)
			mine := names(t, elsewhere)[0]
			testfs.CopyTree(t, filepath.Join(dir, mine), filepath.Join(elsewhere, mine))
			v = openPersistent(t, dir, c.opened)
			if len(v.Persisted()) != 1 {
				t.Fatalf("kept: %+v", v.Persisted())
			}
			free(v, wantPersisted(t, v, v.Persisted()[0], 3, page))
			if kept < mine { // it was looked at
				oneLine(t, warned(v.Stats().Warnings), kept, "left as it is", c.says)
			}
			closeVolume(t, v)
			wantSame(t, "beside", before, contents(t, dir))

			v = openPersistent(t, dir, c.kept)
			for _, k := range v.Persisted() {
				if string(k.Meta) == "meta 1" {
					free(v, wantPersisted(t, v, k, 1, mib+page))
				} else {
					free(v, wantPersisted(t, v, k, 2, 5*mib))
				}
			}
			closeVolume(t, v)
			wantEmpty(t, dir)
		})
	}
}

// TestNoKeyIsNeededForNothing: a directory in which nothing is kept goes, whatever the key.
func TestNoKeyIsNeededForNothing(t *testing.T) {
	dir := t.TempDir()
	v := openPersistent(t, dir, sealed)
	_, es := persist(t, v, 1, page)
	free(v, es)
	leave(t, v)
	v = openPersistent(t, dir)
	if w := v.Stats().Warnings; len(v.Persisted()) != 0 || len(w) != 0 || len(names(t, dir)) != 1 {
		t.Errorf("kept: %+v, %q, %v", v.Persisted(), w, names(t, dir))
	}
	closeVolume(t, v)
	wantEmpty(t, dir)
}

// TestPersistingNeedsTheUsersKey: with one that is made at the start nothing could be taken back.
func TestPersistingNeedsTheUsersKey(t *testing.T) {
	dir := t.TempDir()
	_, err := volumes.Open(volumes.Config{Dir: dir, Capacity: mib, Persist: true, Encrypt: true})
	if err == nil {
		t.Fatal("opened")
	}
	oneLine(t, err.Error(), dir, "needs a Key")
	wantEmpty(t, dir)
}
