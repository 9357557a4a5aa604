// Package disk has the public part of the disk tier. It declares what a spill volume needs of a
// file system, so that programs can provide another one, and the tier's figures and errors. An
// engine opens the volumes that its configuration names (spillway.DiskConfig).
//
//	spillway.DiskConfig.FS --> FS -- OpenAnonymous, Create --> File <-- reads and writes of a volume
//	                            +- OS(), or a decorator of it, such as faultfs.FS
//
// A volume calls FS and File on several goroutines, and with no lock held. Panics are errors there.
package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/spillway-db/spillway/diag"
	"github.com/spillway-db/spillway/internal/fsinfo"
	"github.com/spillway-db/spillway/tier"
)

// FS is what a volume asks of a file system. It is thin, so that faults can be
// put between a volume and the system; OS returns the real one. Errors are the
// system's: a volume looks for errno values in them with errors.Is.
type FS interface {
	// Stat describes what path names.
	Stat(path string) (fs.FileInfo, error)
	// Usage returns how much room the file system of dir has.
	Usage(dir string) (Usage, error)
	// OpenAnonymous makes a file in dir that has no name, mode 0600, and is gone
	// when it is closed. An error that matches errors.ErrUnsupported, or is
	// EISDIR, means that the file system cannot; EINVAL, that it cannot with
	// direct I/O.
	OpenAnonymous(dir string, direct bool) (File, error)
	// Create makes a file that was not there, mode 0600.
	Create(path string, direct bool) (File, error)
	// Reopen opens a file that is there, to read and to write.
	Reopen(path string, direct bool) (File, error)
	// Mkdir makes a directory, mode 0700.
	Mkdir(path string) error
	// ReadDir lists a directory.
	ReadDir(path string) ([]fs.DirEntry, error)
	// Remove removes a file or an empty directory.
	Remove(path string) error
	// Rename gives a file another name in the same file system, at once.
	Rename(from, to string) error
	// Lock locks the file at path, which it makes if create is set and which must
	// not be there then. ErrLocked: another has it. fs.ErrNotExist: it is gone, or
	// went while it was locked. The lock ends when it is closed, or with the
	// process.
	Lock(path string, create bool) (Lock, error)
}

// Lock is a file that is locked until Close.
type Lock interface {
	Close() error
}

// ErrLocked: another holds the lock on a file.
var ErrLocked = errors.New("locked by another")

// File is a file of a volume. ReadAt, WriteAt, Allocate and Punch may be called
// concurrently.
type File interface {
	// ReadAt and WriteAt may transfer fewer bytes and return that number, with or without an
	// error.
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)
	// Allocate takes room for n bytes at off from the file system, and makes the file at least
	// that long. errors.ErrUnsupported: it cannot.
	Allocate(off, n int64) error
	// Punch gives the room of n bytes at off back. errors.ErrUnsupported: it
	// cannot.
	Punch(off, n int64) error
	// Truncate cuts the file, so that it is size bytes long.
	Truncate(size int64) error
	// Direct reports whether ReadAt and WriteAt bypass the page cache.
	Direct() bool
	// Alignment returns what the addresses, and the offsets and lengths, given to
	// ReadAt and WriteAt must be multiples of: 1 and 1 for any.
	Alignment() (address, offset int)
	Close() error
}

// Usage describes a file system.
type Usage struct {
	FileSystem string // "ext4", "xfs", …
	Free       int64  // bytes that this process may still take
	Total      int64  // bytes
	Memory     bool   // it keeps its files in memory
}

// Stats describes a volume at a moment; sizes are in bytes.
type Stats struct {
	Dir        string
	FileSystem string // "ext4", "xfs", …
	Direct     bool   // transfers bypass the page cache
	Anonymous  bool   // the files have no names
	Encrypted  bool
	Request    int64
	Depth      int

	Capacity int64
	Used     int64 // handed out
	Backed   int64 // taken from the file system: handed out, or free for reuse
	Segments int   // open files: one, or none if batches persist or when the volume has ended

	Written int64 // bytes since the volume was opened
	Read    int64
	Fresh   int64 // bytes of room that were taken from the file system
	Given   int64 // bytes of room that were given back to it

	Bandwidth int64         // bytes a second that were written of late, while a write was under way; 0: nothing yet
	Backlog   int64         // handed out, and not written since
	Writing   time.Duration // in which at least one write was under way, since the volume was opened
	Ailing    bool          // a write failed, or the file system had no room, a moment ago: other volumes come first

	Warnings []diag.Warning // what was asked for and could not be had
}

// ErrKey is what a KeyError matches.
var ErrKey = errors.New("not the key that it was kept with")

// KeyError reports that what persists in a directory is encrypted with another key than the volume
// has, or that only one of them is encrypted at all. Nothing in it was changed. It matches ErrKey.
type KeyError struct {
	Dir     string // of the volume
	Name    string // the directory in it
	Sealed  bool   // what persists there is encrypted
	Encrypt bool   // the volume encrypts
}

func (e *KeyError) Error() string {
	what := "was kept with another Key than this one: give the one that it was kept with"
	switch {
	case !e.Encrypt:
		what = "was kept encrypted, and this volume does not encrypt: set Encrypt, with the Key that it was kept with"
	case !e.Sealed:
		what = "was kept without encryption, and this volume encrypts: open it without Encrypt first"
	}
	return filepath.Join(e.Dir, e.Name) + " " + what + ", or name another directory; nothing in it was changed"
}

// Is matches ErrKey.
func (e *KeyError) Is(target error) bool { return target == ErrKey }

// IOError is a read or a write that the system could not do: which volume, and where.
// It is what WriteAt and ReadAt return, and the cause of a tier.NoSpaceError where the
// file system was full. errors.Is finds the system's error, such as syscall.EIO.
type IOError struct {
	Space  tier.ID // of the volume
	Dir    string
	File   string // an anonymous one has the name only here
	Offset int64  // in the file
	Bytes  int64
	Write  bool
	Err    error
}

func (e *IOError) Error() string {
	verb := "reading"
	if e.Write {
		verb = "writing"
	}
	return fmt.Sprintf("disk: %s %d bytes at offset %d of %s in %s: %v", verb, e.Bytes, e.Offset, e.File, e.Dir, e.Err)
}

func (e *IOError) Unwrap() error { return e.Err }

// OS returns the real file system.
func OS() FS { return osFS{} }

type osFS struct{}

func (osFS) Stat(path string) (fs.FileInfo, error)      { return os.Stat(path) }
func (osFS) Mkdir(path string) error                    { return os.Mkdir(path, 0o700) }
func (osFS) ReadDir(path string) ([]fs.DirEntry, error) { return os.ReadDir(path) }
func (osFS) Remove(path string) error                   { return os.Remove(path) }
func (osFS) Rename(from, to string) error               { return os.Rename(from, to) }

// Usage fails with errors.ErrUnsupported where nothing is known of file systems: a volume relies on
// its capacity alone there.
func (osFS) Usage(dir string) (Usage, error) {
	info, err := fsinfo.Of(dir)
	if err != nil {
		return Usage{}, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return Usage{FileSystem: info.Name, Free: info.Free, Total: info.Total, Memory: info.Memory}, nil
}

func (osFS) Create(path string, direct bool) (File, error) {
	return openFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, direct)
}

func (osFS) Reopen(path string, direct bool) (File, error) {
	return openFile(path, os.O_RDWR, direct)
}

// osFile is an open file. It is an os.File, and not a bare descriptor, so that a use after Close is an
// error and never reaches a file that took the number.
type osFile struct {
	*os.File
	direct          bool
	address, offset int
}

func newFile(f *os.File, direct bool) *osFile {
	file := &osFile{File: f, direct: direct, address: 1, offset: 1}
	if direct {
		file.address, file.offset = directAlignment(f)
	}
	return file
}

// fallbackAlignment is the alignment for direct I/O where the system does not report
// one: enough for every disk of today.
const fallbackAlignment = tier.Page

func (f *osFile) Direct() bool                     { return f.direct }
func (f *osFile) Alignment() (address, offset int) { return f.address, f.offset }
