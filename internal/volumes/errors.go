package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/spillway-db/spillway/internal/oneline"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// This file classifies the errors of file systems: isFull, isUnable and advise. Interrupted and short
// transfers are completed in wholeFile.

var (
	errNoDir = errors.New("the directory does not exist")

	// errReserve is the error of a volume that leaves the rest of the file system to others.
	errReserve = errors.New("the file system's free space is down to the reserve")
)

// shortError reports that the file system has fewer than need free bytes, by its own figures.
type shortError struct {
	error
	need int64
}

func (e *shortError) Unwrap() error { return e.error }

// isFull reports whether err means that the file system has no room. Such an error becomes a
// *tier.NoSpaceError, and the disk does not count as failing.
func isFull(err error) bool {
	return errors.Is(err, errReserve) || errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) ||
		errors.Is(err, tier.ErrNoSpace)
}

// isUnable reports whether err means that the file system has no files of a kind. open(2) names
// EOPNOTSUPP, and EISDIR where O_TMPFILE is unknown. EINVAL is what file systems without direct I/O
// return, some of them only for the transfer.
func isUnable(err error) bool {
	return errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EISDIR) || errors.Is(err, syscall.EINVAL)
}

// fullAdvice is for a file system that is full: a larger capacity of the volume would not help.
const fullAdvice = "make room there, or name another directory"

// advise returns an error with a remedy in brackets, if there is one.
func advise(err error) error {
	advice := ""
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errNoDir), errors.Is(err, fs.ErrNotExist):
		advice = "make it, or name another directory"
	case errors.Is(err, fs.ErrPermission):
		advice = "see to it that this process may make files there, or name another directory"
	case isFull(err):
		advice = fullAdvice
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		advice = "raise the limit of open files"
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EROFS):
		advice = "name another directory"
	case errors.Is(err, syscall.EIO):
		advice = "the disk fails: name another directory, on one that works"
	default:
		return err
	}
	return fmt.Errorf("%w (%s)", err, advice)
}

// failed returns the error of a transfer: a *tier.AlteredError that names the file, a *disk.IOError,
// or a *tier.NoSpaceError with that as its cause.
func (e *extents) failed(err error, file string, off, n int64, write bool) error {
	v := e.v
	if a, ok := errors.AsType[*tier.AlteredError](err); ok {
		a.Volume, a.File = v.cfg.Dir, file
		return a
	}
	err = &disk.IOError{
		Space: v.cfg.Space, Dir: v.cfg.Dir, File: file, Offset: off, Bytes: n, Write: write, Err: bare(err),
	}
	if isFull(err) {
		return &tier.NoSpaceError{Space: v.cfg.Space, Requested: n, Cause: err, Hint: fullAdvice}
	}
	return err
}

// full returns the error of an Alloc for which there is no room: in the volume if cause is nil, or else
// in the file system.
func (v *Volume) full(size int64, cause error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	e := &tier.NoSpaceError{Requested: size, Available: v.mu.free}
	if v.cfg.Persist {
		e.Available = v.cfg.Capacity - v.mu.used
	}
	if cause != nil {
		e.Cause = fmt.Errorf("disk: volume %s: %w", v.cfg.Dir, cause)
		e.Hint = fullAdvice
	}
	for _, s := range v.mu.segments {
		if cause == nil { // else the holes cannot be filled
			e.Available += s.holes.FreeBytes()
		}
		e.Largest = max(e.Largest, s.backed.Largest())
	}
	if e.Available < size {
		e.Largest = 0 // room is missing, and not one piece
	}
	return e
}

// refused returns the error of an Alloc that the file system refused.
func (v *Volume) refused(size int64, cause error) error {
	v.Disk.Fail()
	if isFull(cause) {
		return v.full(size, cause)
	}
	return fmt.Errorf("disk: volume %s: %w", v.cfg.Dir, advise(cause))
}

// bare returns the system's error without the path that the os package adds, which the volume's
// messages contain.
func bare(err error) error {
	if p, ok := err.(*fs.PathError); ok {
		return p.Err
	}
	return err
}

// ignoreMissing returns nil for the error of a file that is not there.
func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// join joins errors in one line, without paths.
func join(errs ...error) error {
	for i := range errs {
		errs[i] = bare(errs[i])
	}
	return oneline.Join(errs...)
}
