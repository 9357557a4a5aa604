package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"

	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/tier/disk"
)

// This file classifies the errors of file systems: errsFull, errsUnable and advised. Interrupted and
// short transfers are completed in wholeFile.

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

// The classes of errors.
var (
	// errsFull: the file system has no room, or allows no longer file (EFBIG). Such an error
	// becomes a *tier.NoSpaceError, and the disk does not count as failing.
	errsFull = []error{errReserve, syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, tier.ErrNoSpace}

	// errsUnable: the file system has no files of a kind. open(2) names EOPNOTSUPP, and EISDIR where
	// O_TMPFILE is unknown. EINVAL is what file systems without direct I/O return, some of them only
	// for the transfer.
	errsUnable = []error{errors.ErrUnsupported, syscall.EISDIR, syscall.EINVAL}

	// advised has the remedies of further classes, the first that fits.
	advised = []struct {
		class  []error
		advice string
	}{
		{[]error{errNoDir, fs.ErrNotExist}, "make it, or name another directory"},
		{[]error{fs.ErrPermission}, "see to it that this process may make files there, or name another directory"},
		{errsFull, fullAdvice},
		{[]error{syscall.EMFILE, syscall.ENFILE}, "raise the limit of open files"},
		{[]error{syscall.ENOTDIR, syscall.EROFS}, "name another directory"},
		{[]error{syscall.EIO}, "the disk fails: name another directory, on one that works"},
	}
)

// fullAdvice is for a file system that is full: a larger capacity of the volume would not help.
const fullAdvice = "make room there, or name another directory"

// isOf reports whether err is of a class.
func isOf(class []error, err error) bool {
	return slices.ContainsFunc(class, func(e error) bool { return errors.Is(err, e) })
}

// advise returns an error with a remedy in brackets, if there is one.
func advise(err error) error {
	for _, a := range advised {
		if isOf(a.class, err) {
			return fmt.Errorf("%w (%s)", err, a.advice)
		}
	}
	return err
}

// failed returns the error of a transfer: a *tier.AlteredError that names the file, a *disk.IOError,
// or a *tier.NoSpaceError with that as its cause.
func (e *extents) failed(err error, file string, off, n int64, what request) error {
	v := e.v
	if a, ok := errors.AsType[*tier.AlteredError](err); ok {
		a.Volume, a.File = v.cfg.Dir, file
		return a
	}
	err = &disk.IOError{
		Space: v.cfg.Space, Dir: v.cfg.Dir, File: file, Offset: off, Bytes: n, Write: what == writing, Err: bare(err),
	}
	if isOf(errsFull, err) {
		return &tier.NoSpaceError{Space: v.cfg.Space, Requested: n, Cause: err, Hint: fullAdvice}
	}
	return err
}

// full returns the error of an Alloc for which there is no room: in the volume if cause is nil, or else
// in the file system.
func (v *Volume) full(size int64, cause error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	e := &tier.NoSpaceError{
		Requested: size, Available: v.mu.backed.FreeBytes(), Largest: v.mu.backed.Largest(),
	}
	if v.cfg.Persist {
		e.Available = v.cfg.Capacity - v.mu.used
	}
	if cause != nil {
		e.Cause = fmt.Errorf("disk: volume %s: %w", v.cfg.Dir, cause)
		e.Hint = fullAdvice
	} else { // holes can be filled
		e.Available += v.mu.holes.FreeBytes()
	}
	if e.Available < size {
		e.Largest = 0 // room is missing, and not one piece
	}
	return e
}

// refused returns the error of an Alloc that the file system refused.
func (v *Volume) refused(size int64, cause error) error {
	v.fail()
	if isOf(errsFull, cause) {
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

// join returns an error that wraps those of errs that are not nil, without paths, or nil. It reads "first; then
// second", for logs and warnings.
func join(errs ...error) (all error) {
	for _, err := range errs {
		switch {
		case err == nil:
		case all == nil:
			all = bare(err)
		default:
			all = fmt.Errorf("%w; then %w", all, bare(err))
		}
	}
	return all
}
