// Package fail turns errors into the exit status of a command and into one line, with the cause and
// with the flag to change.
//
// Its functions are pure and safe for concurrent use.
package fail

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/spillway-db/spillway/cmd/spillbench/internal/headroom"
	"github.com/spillway-db/spillway/convert"
	"github.com/spillway-db/spillway/internal/named"
	"github.com/spillway-db/spillway/internal/size"
	"github.com/spillway-db/spillway/reservation"
	"github.com/spillway-db/spillway/tier"
	"github.com/spillway-db/spillway/topology"
)

// The exit statuses.
const (
	Fine        = 0
	Wrong       = 1   // verification failed, or corruption was found
	Usage       = 2   // wrong use
	Environment = 3   // the machine cannot: no device, no space
	Interrupted = 130 // as shells report a program ended by Ctrl-C: 128 + SIGINT
)

// Error is an error with an exit status. Its text is that of its cause, with Fix in brackets.
type Error struct {
	Status int
	Err    error
	Fix    string // may be empty
}

func (e *Error) Error() string {
	if e.Fix == "" {
		return e.Err.Error()
	}
	return e.Err.Error() + " (" + e.Fix + ")"
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Usagef returns an error of wrong use.
func Usagef(format string, args ...any) error {
	return &Error{Status: Usage, Err: fmt.Errorf(format, args...)}
}

// Wrongf returns an error of data that is not what it should be.
func Wrongf(format string, args ...any) error {
	return &Error{Status: Wrong, Err: fmt.Errorf(format, args...)}
}

// Environmentf returns an error of the machine.
func Environmentf(format string, args ...any) error {
	return &Error{Status: Environment, Err: fmt.Errorf(format, args...)}
}

// misuse is an error of wrong use, unless it wraps one of the machine. *input.Error implements it; an
// import of that package would link every decoder.
type misuse interface {
	error
	Misuse() // marks it
}

// Status returns the exit status of err: that of the *Error in it, or one by its kind.
func Status(err error) int {
	var e *Error
	var m misuse
	var full *headroom.FullError
	switch {
	case err == nil:
		return Fine
	case errors.Is(err, convert.ErrCorrupt):
		return Wrong
	case errors.As(err, &e):
		return e.Status
	case errors.As(err, &full): // input files may also be wrong use because of it
		return Environment
	case errors.As(err, &m), errors.Is(err, topology.ErrVisibleDevices):
		return Usage
	}
	return Environment
}

// Line returns err as one line, with the flag to change if that is known. It escapes control
// characters of names, on which a terminal would act.
func Line(err error) string {
	text := named.Inert(strings.Join(strings.Fields(err.Error()), " "))
	if fix := fix(err); fix != "" {
		text += "; " + fix
	}
	return text
}

// fix returns the flags to change for errors of the engine, which has no flags itself.
func fix(err error) string {
	var e *Error
	if errors.As(err, &e) && e.Fix != "" {
		return ""
	}
	var exceeded *reservation.ExceededError
	var full *tier.NoSpaceError
	var small *headroom.TooSmallError
	var heap *headroom.FullError
	switch {
	case errors.As(err, &small) && small.Fit < tier.Page:
		return "give the process more memory"
	case errors.As(err, &small):
		return fmt.Sprintf("give --gpu-memory and --host-memory %s together at most, or the process more memory",
			size.Approx(small.Fit))
	case errors.As(err, &heap):
		return "make the batches smaller with --rows-per-batch, " +
			"give --gpu-memory and --host-memory less, or the process more memory"
	case errors.Is(err, tier.ErrLost): // its text has the remedy; the errors joined with it may be a consequence
		return ""
	case errors.As(err, &exceeded):
		return "make the batches smaller with --rows-per-batch, or " + larger(exceeded.Space.Kind)
	case causedBy(err, syscall.EDQUOT):
		return "have your disk quota raised, or give --disk another directory"
	case causedBy(err, syscall.EFBIG): // the disk may have room, but one file may not be so large
		return "raise the limit of file sizes (ulimit -f), " +
			"or give --disk a directory whose file system takes larger files"
	case errors.Is(err, tier.ErrOutOfBudget):
		return "raise SPILLWAY_GPU_MEMORY_LIMIT, or wait until the holders that spillbench quota lists hold less"
	case errors.As(err, &full) && !full.Space.Kind.IsStorage():
		// Batches would have made room if they could have gone anywhere.
		return "give --disk DIR=SIZE more room, or " + larger(full.Space.Kind)
	case errors.Is(err, tier.ErrNoSpace):
		return larger(tier.Disk)
	case errors.Is(err, topology.ErrVisibleDevices):
		return "name GPUs of this machine, or unset it"
	}
	return ""
}

// causedBy reports whether an error of the system caused err, or failed the moves that would have made
// room: the monitor puts the text of such an error into the hint.
func causedBy(err error, cause syscall.Errno) bool {
	var full *tier.NoSpaceError
	return errors.Is(err, cause) || errors.As(err, &full) && strings.Contains(full.Hint, cause.Error())
}

func larger(k tier.Kind) string {
	switch k {
	case tier.GPU:
		return "raise --gpu-memory"
	case tier.Host:
		return "raise --host-memory"
	case tier.Disk:
		return "give --disk DIR=SIZE more room, or another directory"
	}
	return "raise --gpu-memory, --host-memory or the size of --disk"
}
