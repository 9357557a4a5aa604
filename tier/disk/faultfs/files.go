package faultfs

import (
	"io/fs"
	"path/filepath"
	"strconv"

	"github.com/spillway-db/spillway/internal/faultrule"
	"github.com/spillway-db/spillway/internal/lockrank"
	"github.com/spillway-db/spillway/tier/disk"
)

// files has the methods of disk.FS.
type files struct {
	inner disk.FS
	rules *faultrule.Set[Rule]

	mu struct {
		lockrank.Mutex[lockrank.Device]
		files int // anonymous ones opened
		open  int // files and locks
	}
}

// Stat implements disk.FS.
func (f *files) Stat(path string) (fs.FileInfo, error) {
	if e := f.apply(opStat, path, 0); e.err != nil {
		return nil, e.err
	}
	return f.inner.Stat(path)
}

// Usage implements disk.FS.
func (f *files) Usage(dir string) (disk.Usage, error) {
	if e := f.apply(opUsage, dir, 0); e.err != nil {
		return disk.Usage{}, e.err
	}
	return f.inner.Usage(dir)
}

// OpenAnonymous implements disk.FS.
func (f *files) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f.mu.Lock()
	path := filepath.Join(dir, "#"+strconv.Itoa(f.mu.files))
	f.mu.files++
	f.mu.Unlock()
	return f.openFile(opOpenAnonymous, path, func() (disk.File, error) { return f.inner.OpenAnonymous(dir, direct) })
}

// Create implements disk.FS.
func (f *files) Create(path string, direct bool) (disk.File, error) {
	return f.openFile(opCreate, path, func() (disk.File, error) { return f.inner.Create(path, direct) })
}

// Reopen implements disk.FS.
func (f *files) Reopen(path string, direct bool) (disk.File, error) {
	return f.openFile(opReopen, path, func() (disk.File, error) { return f.inner.Reopen(path, direct) })
}

func (f *files) openFile(op, path string, open func() (disk.File, error)) (disk.File, error) {
	if e := f.apply(op, path, 0); e.err != nil {
		return nil, e.err
	}
	inner, err := open()
	if err != nil {
		return nil, err
	}
	f.opened(1)
	return &file{fs: f, path: path, inner: inner}, nil
}

// Mkdir implements disk.FS.
func (f *files) Mkdir(path string) error {
	if e := f.apply(opMkdir, path, 0); e.err != nil {
		return e.err
	}
	return f.inner.Mkdir(path)
}

// ReadDir implements disk.FS.
func (f *files) ReadDir(path string) ([]fs.DirEntry, error) {
	if e := f.apply(opReadDir, path, 0); e.err != nil {
		return nil, e.err
	}
	return f.inner.ReadDir(path)
}

// Remove implements disk.FS.
func (f *files) Remove(path string) error {
	if e := f.apply(opRemove, path, 0); e.err != nil {
		return e.err
	}
	return f.inner.Remove(path)
}

// Lock implements disk.FS.
func (f *files) Lock(path string, create bool) (disk.Lock, error) {
	if e := f.apply(opLock, path, 0); e.err != nil {
		return nil, e.err
	}
	inner, err := f.inner.Lock(path, create)
	if err != nil {
		return nil, err
	}
	f.opened(1)
	return &lock{fs: f, path: path, inner: inner}, nil
}

type lock struct {
	fs    *files
	path  string
	inner disk.Lock
}

// Close unlocks also when a rule makes it fail: the system closes a descriptor whatever it returns.
func (l *lock) Close() (err error) {
	defer func() { // also if a hook panics
		l.fs.opened(-1)
		if failed := l.inner.Close(); failed != nil {
			err = failed
		}
	}()
	return l.fs.apply(opUnlock, l.path, 0).err
}
