package volumes

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"github.com/spillway-db/spillway/tier"
)

// advised returns an error with what to do about it in brackets, where the system's
// error tells that.
func advised(err error) error {
	if a := advice(err); a != "" {
		return fmt.Errorf("%w (%s)", err, a)
	}
	return err
}

func advice(err error) string {
	switch {
	case err == nil:
	case errors.Is(err, errNoDir), errors.Is(err, fs.ErrNotExist):
		return "make it, or name another directory"
	case errors.Is(err, fs.ErrPermission):
		return "see to it that this process may make files there, or name another directory"
	case errors.Is(err, tier.ErrNoSpace), outOfRoom(err):
		return fullAdvice
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return "raise the limit of open files"
	case errors.Is(err, errNotDir), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EROFS):
		return "name another directory"
	case errors.Is(err, syscall.EIO):
		return "the disk fails: name another directory, on one that works"
	}
	return ""
}

// fullAdvice is for a file system that is full: a larger capacity of the volume would not
// help, as it does where that is what is full.
const fullAdvice = "make room there, or name another directory"

var (
	errNoDir  = errors.New("the directory does not exist")
	errNotDir = errors.New("not a directory")
)
