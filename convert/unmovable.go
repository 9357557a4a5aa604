package convert

import (
	"errors"
	"syscall"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/tier"
)

// ofMachine says whether an error tells of memory, a volume or a device: other batches meet
// it as well.
func ofMachine(err error) bool {
	var system syscall.Errno
	return errors.Is(err, tier.ErrNoSpace) || errors.Is(err, tier.ErrLost) || errors.Is(err, tier.ErrClosed) || errors.As(err, &system)
}

// ofConverter makes an error of a conversion an UnmovableError if the batch is the cause.
// What a program's own converter returns is about the batch that it was given, unless it
// names the machine. The built-in converters also return what devices say, which may be
// anything; so there only errors that are known to be about the batch count.
func ofConverter(err error, builtin bool) error {
	if err == nil || ofMachine(err) || errors.Is(err, batch.ErrUnmovable) {
		return err
	}
	own := !builtin
	for _, known := range [...]error{ErrNoConverter, ErrCorrupt, ErrInvalid, tier.ErrNotSupported} {
		own = own || errors.Is(err, known)
	}
	if own {
		return &batch.UnmovableError{Err: err}
	}
	return err
}
