package convert

import (
	"context"
	"errors"
	"syscall"

	"github.com/spillway-db/spillway/batch"
	"github.com/spillway-db/spillway/internal/image"
	"github.com/spillway-db/spillway/tier"
)

// ofMachine says whether an error of a built-in converter tells of memory, a volume or a device:
// other batches meet it as well.
func ofMachine(err error) bool {
	var system syscall.Errno
	return errors.Is(err, tier.ErrNoSpace) || errors.Is(err, tier.ErrLost) || errors.Is(err, tier.ErrClosed) || errors.As(err, &system)
}

// meets says whether an error of a program's own converter, from one space to another, is what
// other batches meet as well: the target has no room, a space is lost, or the conversion was
// broken off. What else it says may come from files and memory of the program's.
func meets(ctx context.Context, err error, from, to *tier.Space) bool {
	var full *tier.NoSpaceError
	return ctx.Err() != nil || errors.As(err, &full) && to != nil && full.Space == to.ID() ||
		errors.Is(err, tier.ErrLost) && (isLost(from) || isLost(to))
}

func isLost(s *tier.Space) bool { return s != nil && s.Lost() != nil }

// ofConverter makes an error of a conversion an UnmovableError if the batch is the cause.
// What a program's own converter returns is about the batch that it was given, unless others
// meet it as well. The built-in converters also return what devices say, which may be
// anything; so there only errors that are known to be about the batch count.
func ofConverter(ctx context.Context, err error, builtin bool, from, to *tier.Space) error {
	if err == nil || errors.Is(err, batch.ErrUnmovable) {
		return err
	}
	own := !builtin && !meets(ctx, err, from, to)
	for _, known := range [...]error{ErrNoConverter, image.ErrCorrupt, image.ErrInvalid, tier.ErrNotSupported} {
		own = own || builtin && !ofMachine(err) && errors.Is(err, known)
	}
	if own {
		return &batch.UnmovableError{Err: err}
	}
	return err
}
