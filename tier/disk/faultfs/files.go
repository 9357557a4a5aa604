package faultfs

import (
	"io"
	"io/fs"
	"path/filepath"
	"strconv"

	"github.com/spillway-db/spillway/tier/disk"
)

// do applies a rule to an operation on path and calls it, unless the rule makes it fail.
func do[T any](f *FS, op, path string, call func(path string) (T, error)) (result T, err error) {
	if e := f.apply(op, path, 0); e.err != nil {
		return result, e.err
	}
	return call(path)
}

// try is do for a call that returns only an error.
func (f *FS) try(op, path string, call func(path string) error) error {
	if e := f.apply(op, path, 0); e.err != nil {
		return e.err
	}
	return call(path)
}

// Stat implements disk.FS.
func (f *FS) Stat(path string) (fs.FileInfo, error) { return do(f, opStat, path, f.inner.Stat) }

// Usage implements disk.FS.
func (f *FS) Usage(dir string) (disk.Usage, error) { return do(f, opUsage, dir, f.inner.Usage) }

// Mkdir implements disk.FS.
func (f *FS) Mkdir(path string) error { return f.try(opMkdir, path, f.inner.Mkdir) }

// ReadDir implements disk.FS.
func (f *FS) ReadDir(path string) ([]fs.DirEntry, error) {
	return do(f, opReadDir, path, f.inner.ReadDir)
}

// Remove implements disk.FS.
func (f *FS) Remove(path string) error { return f.try(opRemove, path, f.inner.Remove) }

// Rename implements disk.FS. Rules know it by the new name.
func (f *FS) Rename(from, to string) error {
	return f.try(opRename, to, func(string) error { return f.inner.Rename(from, to) })
}

// OpenAnonymous implements disk.FS.
func (f *FS) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	f.mu.Lock()
	path := filepath.Join(dir, "#"+strconv.Itoa(f.mu.anonymous))
	f.mu.anonymous++
	f.mu.Unlock()
	return f.openFile(opOpenAnonymous, path, dir, direct, f.inner.OpenAnonymous)
}

// Create implements disk.FS.
func (f *FS) Create(path string, direct bool) (disk.File, error) {
	return f.openFile(opCreate, path, path, direct, f.inner.Create)
}

// Reopen implements disk.FS.
func (f *FS) Reopen(path string, direct bool) (disk.File, error) {
	return f.openFile(opReopen, path, path, direct, f.inner.Reopen)
}

// openFile opens the file at path, which rules know as name.
func (f *FS) openFile(
	op, name, path string, direct bool, open func(path string, direct bool) (disk.File, error),
) (disk.File, error) {
	if e := f.apply(op, name, 0); e.err != nil {
		return nil, e.err
	}
	inner, err := open(path, direct)
	if err != nil {
		return nil, err
	}
	return &file{File: inner, handle: f.opened(opClose, name, inner)}, nil
}

// Lock implements disk.FS.
func (f *FS) Lock(path string, create bool) (disk.Lock, error) {
	inner, err := do(f, opLock, path, func(string) (disk.Lock, error) { return f.inner.Lock(path, create) })
	if err != nil {
		return nil, err
	}
	return f.opened(opUnlock, path, inner), nil
}

// handle is an open file or lock.
type handle struct {
	fs            *FS
	closeOp, path string
	inner         io.Closer
}

// opened counts a file or lock as open until its handle is closed.
func (f *FS) opened(closeOp, path string, inner io.Closer) *handle {
	f.countOpen(1)
	return &handle{f, closeOp, path, inner}
}

// Close closes the file or lock even if a rule makes the operation fail or panic, because the
// system closes a descriptor no matter which error it returns.
func (h *handle) Close() (err error) {
	defer func() {
		h.fs.countOpen(-1)
		if failed := h.inner.Close(); failed != nil {
			err = failed
		}
	}()
	return h.fs.apply(h.closeOp, h.path, 0).err
}

func (f *FS) countOpen(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.mu.open += n
}
