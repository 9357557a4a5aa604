package disk

import (
	"errors"
	"io/fs"
)

// FS is what a volume asks of a file system. It is thin, so that faults can be
// put between a volume and the system; OS returns the real one. Errors are the
// system's: a volume looks for errno values in them with errors.Is.
type FS interface {
	// Stat describes what path names.
	Stat(path string) (fs.FileInfo, error)
	// Usage says how much room the file system of dir has.
	Usage(dir string) (Usage, error)
	// OpenAnonymous makes a file in dir that has no name, mode 0600, and is gone
	// when it is closed. An error that matches errors.ErrUnsupported, or is
	// EISDIR, says that the file system cannot; EINVAL, that it cannot with
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
	// Lock locks the file at path, which it makes if create is set and which must
	// not be there then. ErrLocked: another has it. fs.ErrNotExist: it is gone, or
	// went while it was locked. The lock ends when it is closed, or with the
	// process.
	Lock(path string, create bool) (Lock, error)
}

// Lock is a locked file.
type Lock interface {
	Close() error
}

// ErrLocked says that another holds the lock on a file.
var ErrLocked = errors.New("locked by another")

// File is a segment's file. ReadAt, WriteAt, Allocate and Punch may be called
// concurrently.
type File interface {
	// ReadAt and WriteAt may do less than asked for and say so, with or without an
	// error.
	ReadAt(p []byte, off int64) (int, error)
	WriteAt(p []byte, off int64) (int, error)
	// Allocate makes the file system set room aside for n bytes at off, and the
	// file at least that long. errors.ErrUnsupported: it cannot.
	Allocate(off, n int64) error
	// Punch gives the room of n bytes at off back. errors.ErrUnsupported: it
	// cannot.
	Punch(off, n int64) error
	// Direct says whether ReadAt and WriteAt pass by the page cache.
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
