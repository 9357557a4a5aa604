package volumes

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-db/spillway/tier/disk"
)

// PersistedDir is a directory in which batches persist, as Inspect found it.
type PersistedDir struct {
	Path      string
	InUse     bool        // a volume has it locked, of this process or of another
	Sealed    bool        // it is encrypted with a user's key: of Records only Key, Room and File are known
	Records   []Persisted // the oldest first
	Unlisted  []string    // names of files that hold nothing that persists, and are no volume's in use
	FileBytes int64       // the lengths of all files
	Err       error       // why nothing of it could be read
}

// Inspect describes the directories in dir in which batches persist, or dir itself if it is one. It
// changes nothing. To find out whether a directory is in use it tries the lock, which it gives back
// before it reads. A directory that is in use changes while it is read.
func Inspect(dir string) ([]PersistedDir, error) {
	paths := []string{dir}
	if !persists(dir) {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		paths = nil
		for _, e := range entries {
			if e.IsDir() && persists(e.Name()) {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	all := make([]PersistedDir, len(paths))
	for i, path := range paths {
		for range 3 {
			k := &all[i]
			*k = PersistedDir{Path: path}
			// The owner of a directory in use may have removed a file meanwhile.
			if k.Err = bare(k.read()); !k.InUse || !errors.Is(k.Err, fs.ErrNotExist) {
				break
			}
		}
	}
	return all, nil
}

func (k *PersistedDir) read() error {
	own := &ownDir{fs: disk.OS(), path: k.Path}
	lock, err := own.fs.Lock(filepath.Join(k.Path, lockName), false)
	switch {
	case err == nil:
		err = lock.Close()
	case errors.Is(err, disk.ErrLocked):
		k.InUse, err = true, nil
	case errors.Is(err, fs.ErrNotExist): // its process was killed early
		err = nil
	}
	if err != nil {
		return err
	}
	files, err := own.list()
	if err != nil {
		return err
	}
	k.FileBytes, k.Unlisted = files.bytes, files.foreign
	all, err := own.readFiles(files, func(path string) (openedFile, error) { return os.Open(path) }, nil)
	if k.Sealed = errors.Is(err, disk.ErrKey); err != nil && !k.Sealed {
		return err
	}
	for _, f := range all {
		if k.Sealed {
			f.Err = nil
		}
		k.Records = append(k.Records, f.Persisted)
	}
	sortPersisted(k.Records)
	if !k.InUse { // else the parts are needed
		k.Unlisted = append(k.Unlisted, files.ours...)
	}
	slices.Sort(k.Unlisted)
	return nil
}
