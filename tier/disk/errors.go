package disk

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spillway-db/spillway/tier"
)

// ErrKey is what a KeyError matches.
var ErrKey = errors.New("not the key that it was kept with")

// KeyError says that what persists in a directory is encrypted with another key than the volume
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
	File   string // the segment; an anonymous one has the name only here
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
