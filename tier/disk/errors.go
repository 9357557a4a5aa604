package disk

import (
	"fmt"

	"github.com/spillway-db/spillway/tier"
)

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
