package cuda

import (
	"errors"
	"fmt"
	"slices"
)

// Code is a result of the driver, and an error that *Error matches.
type Code int32

// The codes that callers may want to distinguish, by the driver's numbers.
const (
	ErrInvalidValue                Code = 1
	ErrOutOfMemory                 Code = 2
	ErrNotInitialized              Code = 3
	ErrDeinitialized               Code = 4
	ErrDeviceUnavailable           Code = 46
	ErrNoDevice                    Code = 100
	ErrInvalidDevice               Code = 101
	ErrInvalidContext              Code = 201
	ErrPeerAccessUnsupported       Code = 217
	ErrInvalidHandle               Code = 400
	ErrNotFound                    Code = 500
	ErrNotReady                    Code = 600
	ErrIllegalAddress              Code = 700
	ErrPeerAccessAlreadyEnabled    Code = 704
	ErrHostMemoryAlreadyRegistered Code = 712
	ErrHostMemoryNotRegistered     Code = 713
	ErrNotSupported                Code = 801
	ErrStreamCaptureUnsupported    Code = 900 // not while a graph is recorded, here or on another thread
	ErrUnknown                     Code = 999
)

func (c Code) Error() string { return fmt.Sprintf("CUDA result %d", int32(c)) }

// lost are the codes that the driver gives to every call when the context is lost with all that is
// in it. What 700 and its neighbours say a kernel or a copy has done; before them are errors of the
// hardware.
var lost = []Code{ErrDeinitialized, 214, 220, 226, ErrIllegalAddress, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721}

// Lost reports whether err, of a call that was refused, means that the context is lost and every
// call will be.
func Lost(err error) bool {
	var e *Error
	return errors.As(err, &e) && slices.Contains(lost, e.Code)
}

// MaybeLost reports whether the driver returns err, among other cases, for a GPU that is gone: it
// is not available, or the driver does not know what has happened. Another call shows whether the
// context is lost.
func MaybeLost(err error) bool {
	var e *Error
	return errors.As(err, &e) && (e.Code == ErrDeviceUnavailable || e.Code == ErrUnknown)
}

// Error is a call that the driver refused, or one that returned the failure of earlier work. It
// matches its Code.
type Error struct {
	Call string // the driver's function, as the library exports it
	Code Code
	Name string // what the driver calls the code, and what it says of it; may be empty
}

func (e *Error) Error() string {
	if e.Name == "" {
		return fmt.Sprintf("cuda: %s: %v", e.Call, e.Code)
	}
	return fmt.Sprintf("cuda: %s: %s (%d)", e.Call, e.Name, int32(e.Code))
}

// Is matches the code.
func (e *Error) Is(target error) bool { return target == e.Code }

// Sentinels, to be matched with errors.Is.
var (
	// ErrUnavailable: there is no device to work with, for one of the four reasons below.
	ErrUnavailable = errors.New("CUDA is not available")
	// ErrNoLibrary: no driver library can be loaded here.
	ErrNoLibrary = errors.New("no CUDA driver library")
	// ErrNotDriver: the library is there, but is not CUDA's driver.
	ErrNotDriver = errors.New("not a CUDA driver library")
	// ErrDriverTooOld: the driver lacks what is needed.
	ErrDriverTooOld = errors.New("the CUDA driver is too old")
	// ErrDriverRefused: the driver does not start; ErrNoDevice is the usual Code.
	ErrDriverRefused = errors.New("the CUDA driver does not start")

	// ErrClosed: the device is closed.
	ErrClosed = errors.New("cuda: the device is closed")
	// ErrNotPinned: host memory of an asynchronous copy that this library has not pinned.
	ErrNotPinned = errors.New("cuda: host memory of a copy is not pinned")
)

// LoadError says why there is no CUDA here. It matches ErrUnavailable, its Reason
// and its Cause.
type LoadError struct {
	Path   string // of the library, as it was given
	Reason error  // ErrNoLibrary, ErrNotDriver, ErrDriverTooOld or ErrDriverRefused
	Detail string // which version there is and which is needed, what is missing; may be empty
	Cause  error  // what the loader or the driver said; may be nil
}

func (e *LoadError) Error() string {
	s := fmt.Sprintf("cuda: %s: %v", e.Path, e.Reason)
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	if e.Cause != nil {
		s += ": " + e.Cause.Error()
	}
	return s
}

// Is matches ErrUnavailable and the reason.
func (e *LoadError) Is(target error) bool { return target == ErrUnavailable || target == e.Reason }

// Unwrap returns the cause.
func (e *LoadError) Unwrap() error { return e.Cause }
