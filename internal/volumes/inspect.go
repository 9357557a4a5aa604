package volumes

import (
	"cmp"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/spillway-db/spillway/tier/disk"
)

// Kept is a directory in which batches persist, as Inspect found it.
type Kept struct {
	Path      string
	InUse     bool         // a volume has it locked, of this process or of another
	Sealed    bool         // it is encrypted with a user's key: of Records only Key, Room and File are known
	Records   []KeptRecord // the oldest first
	Unlisted  []string     // names of files that hold nothing that persists, and are no volume's in use
	FileBytes int64        // the lengths of all files
	Err       error        // why nothing of it could be read
}

// KeptRecord is a batch or a dictionary of a Kept.
type KeptRecord struct {
	Persisted
	order uint64
}

// Inspect describes the directories in dir in which batches persist, or dir itself if it is one. It
// changes nothing. To find out whether a directory is in use it tries the lock, which it gives back
// before it reads. A directory that is in use changes while it is read.
func Inspect(dir string) ([]Kept, error) {
	if persistentName.MatchString(filepath.Base(dir)) {
		return []Kept{inspect(dir)}, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var all []Kept
	for _, e := range entries {
		if e.IsDir() && persistentName.MatchString(e.Name()) {
			all = append(all, inspect(filepath.Join(dir, e.Name())))
		}
	}
	return all, nil
}

func inspect(path string) (k Kept) {
	for range 3 {
		k = Kept{Path: path}
		// The owner of a directory in use may have removed a file meanwhile.
		if k.Err = bare(k.read()); !k.InUse || !errors.Is(k.Err, fs.ErrNotExist) {
			break
		}
	}
	return k
}

func (k *Kept) read() error {
	own := &ownDir{fs: readOnly{disk.OS()}, path: k.Path}
	lock, err := own.fs.Lock(filepath.Join(k.Path, lockName), false)
	switch {
	case errors.Is(err, disk.ErrLocked):
		k.InUse = true
	case err == nil:
		err = lock.Close()
	}
	if err != nil && !k.InUse && !errors.Is(err, fs.ErrNotExist) { // that of a process that was killed early
		return err
	}
	files, err := own.listKept()
	if err != nil {
		return err
	}
	if len(files.keys) > 0 {
		mark, err := own.readFormat()
		if err != nil {
			return err
		}
		k.Sealed = mark.Sealed
	}
	k.FileBytes, k.Unlisted = files.bytes, files.foreign
	for key, length := range files.keys {
		k.Records = append(k.Records, k.record(own, key, length))
	}
	slices.SortFunc(k.Records, func(a, b KeptRecord) int {
		return cmp.Or(cmp.Compare(a.order, b.order), cmp.Compare(a.Key, b.Key))
	})
	if !k.InUse { // else the parts are needed
		for n := range maps.Keys(files.parts) {
			k.Unlisted = append(k.Unlisted, keptName(n, partSuffix))
		}
	}
	slices.Sort(k.Unlisted)
	return nil
}

// record reads the header of a file, if it is not sealed.
func (k *Kept) record(own *ownDir, key uint64, length int64) (r KeptRecord) {
	if k.Sealed {
		r.Key, r.File, r.Room = key, filepath.Join(k.Path, keptName(key, "")), round(length)
		return r
	}
	var h *keptHeader
	r.Persisted, h, _ = own.read(key, length, nil)
	r.order = h.Order
	return r
}

// readOnly is the system's file system, in which files are opened only to be read.
type readOnly struct{ disk.FS }

// Reopen implements disk.FS, for ReadAt and Close.
func (readOnly) Reopen(path string, _ bool) (disk.File, error) {
	f, err := os.Open(path)
	return readOnlyFile{file: f}, err
}

type readOnlyFile struct {
	disk.File
	file *os.File
}

func (f readOnlyFile) ReadAt(p []byte, off int64) (int, error) { return f.file.ReadAt(p, off) }
func (f readOnlyFile) Close() error                            { return f.file.Close() }
