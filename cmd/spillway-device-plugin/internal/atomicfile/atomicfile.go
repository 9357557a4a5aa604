// Package atomicfile replaces files as a whole: a reader, also one after a crash, finds either the old
// or the new content.
package atomicfile

import (
	"cmp"
	"errors"
	"os"
	"path/filepath"
)

// draft is the pattern for the names of drafts. Readers of the directories ignore these names.
const draft = ".spillway-db.github.io-*.tmp"

// Write replaces the file at path. It writes a draft, calls check with the draft's path unless check is
// nil, and renames the draft. After an error the old file is unchanged and the draft is gone. Only the
// owner can read the file.
func Write(path string, text []byte, check func(draft string) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), draft)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	err = cmp.Or(err, f.Sync())
	err = cmp.Or(err, f.Close())
	if err == nil && check != nil {
		err = check(f.Name())
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

// RemoveDrafts removes the drafts that killed processes have left in a directory. No Write may run there.
func RemoveDrafts(dir string) error {
	paths, err := filepath.Glob(filepath.Join(dir, draft))
	for _, path := range paths {
		err = cmp.Or(err, os.Remove(path))
	}
	return err
}
