package volumes

import (
	"io/fs"

	"github.com/spillway-db/spillway/internal/guard"
	"github.com/spillway-db/spillway/tier/disk"
)

// guardedFS is a program's file system, whose panics are errors. A volume calls it on goroutines
// of its own, too, and with tokens that must come back.
type guardedFS struct{ fs disk.FS }

// filesOf is how a file system that panicked is named.
const filesOf = "Config.FS"

func (g guardedFS) Stat(path string) (_ fs.FileInfo, err error) {
	defer guard.Error(&err, filesOf)
	return g.fs.Stat(path)
}

func (g guardedFS) Usage(dir string) (_ disk.Usage, err error) {
	defer guard.Error(&err, filesOf)
	return g.fs.Usage(dir)
}

func (g guardedFS) OpenAnonymous(dir string, direct bool) (disk.File, error) {
	return guardedOpen(g.fs.OpenAnonymous, dir, direct)
}

func (g guardedFS) Create(path string, direct bool) (disk.File, error) {
	return guardedOpen(g.fs.Create, path, direct)
}

func (g guardedFS) Reopen(path string, direct bool) (disk.File, error) {
	return guardedOpen(g.fs.Reopen, path, direct)
}

func (g guardedFS) Mkdir(path string) (err error) {
	defer guard.Error(&err, filesOf)
	return g.fs.Mkdir(path)
}

func (g guardedFS) ReadDir(path string) (_ []fs.DirEntry, err error) {
	defer guard.Error(&err, filesOf)
	return g.fs.ReadDir(path)
}

func (g guardedFS) Remove(path string) (err error) {
	defer guard.Error(&err, filesOf)
	return g.fs.Remove(path)
}

func (g guardedFS) Rename(from, to string) (err error) {
	defer guard.Error(&err, filesOf)
	return g.fs.Rename(from, to)
}

func (g guardedFS) Lock(path string, create bool) (_ disk.Lock, err error) {
	defer guard.Error(&err, filesOf)
	l, err := g.fs.Lock(path, create)
	if err != nil {
		return nil, err
	}
	return guardedLock{l}, nil
}

type guardedLock struct{ lock disk.Lock }

func (l guardedLock) Close() (err error) {
	defer guard.Error(&err, filesOf)
	return l.lock.Close()
}

// guardedFile is one of its files. Direct and Alignment are called under a guard of their own, when a
// volume is opened: see probeFile.
type guardedFile struct{ disk.File }

func guardedOpen(open func(string, bool) (disk.File, error), path string, direct bool) (_ disk.File, err error) {
	defer guard.Error(&err, filesOf)
	f, err := open(path, direct)
	if err != nil {
		return nil, err
	}
	return guardedFile{f}, nil
}

func (g guardedFile) ReadAt(p []byte, off int64) (_ int, err error) {
	defer guard.Error(&err, filesOf)
	return g.File.ReadAt(p, off)
}

func (g guardedFile) WriteAt(p []byte, off int64) (_ int, err error) {
	defer guard.Error(&err, filesOf)
	return g.File.WriteAt(p, off)
}

func (g guardedFile) Allocate(off, n int64) (err error) {
	defer guard.Error(&err, filesOf)
	return g.File.Allocate(off, n)
}

func (g guardedFile) Punch(off, n int64) (err error) {
	defer guard.Error(&err, filesOf)
	return g.File.Punch(off, n)
}

func (g guardedFile) Truncate(size int64) (err error) {
	defer guard.Error(&err, filesOf)
	return g.File.Truncate(size)
}

func (g guardedFile) Close() (err error) {
	defer guard.Error(&err, filesOf)
	return g.File.Close()
}
