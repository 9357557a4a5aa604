// Package nvml reads GPUs and their links from NVIDIA's management library (NVML, libnvidia-ml.so.1).
// It binds the library at run time, without cgo, so that one binary serves machines with NVIDIA's
// driver and without.
//
//	Open(path) ──▶ Library ── Count, Device(i) ──▶ Device ── Name, UUID, PCI, Memory, … of a GPU
//	                  │                              │ Instance(k)
//	                  │                              └─────▶ Device, a MIG instance of it
//	                  └─ Close
//
// A Library looks a function up when it calls it. If the library does not have the function (it is
// older, or the name has another version), the call fails with an *Error that has
// ErrFunctionNotFound; other calls are not affected. The versions in the names fit the structs of this
// package: later versions of the same name take others.
//
// The library counts its initializations, keeps no state of a thread, and may be called by several
// goroutines at a time. So may a Library, until it is closed. Devices are valid until then. The
// package takes no locks.
//
// Interface is the part that package topology uses. Package topology/gonvml implements it with
// github.com/NVIDIA/go-nvml, and its tests compare both. Package nvmltest has a library in C for tests.
package nvml

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// DefaultPath is the name by which the dynamic linker finds the library.
const DefaultPath = "libnvidia-ml.so.1"

// ErrNoLibrary is in Open's error if the library cannot be loaded.
var ErrNoLibrary = errors.New("it cannot be loaded")

// Library is the library, open and initialized.
type Library struct{ from dynlib.Library }

// Open opens the library at path, or at DefaultPath if path is empty, and initializes it. An error is
// ErrNoLibrary with the dynamic linker's message, or an *Error: ErrDriverNotLoaded on a machine whose
// kernel has no driver.
func Open(path string) (*Library, error) {
	if path == "" {
		path = DefaultPath
	}
	from, err := dynlib.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLibrary, err)
	}
	l := &Library{from}
	if err := l.call("nvmlInit_v2"); err != nil {
		from.Close()
		return nil, err
	}
	return l, nil
}

// Close shuts the library down and unloads it. Errors are ignored: a caller could not act on them.
func (l *Library) Close() {
	_ = l.call("nvmlShutdown")
	l.from.Close()
}

// call calls a function. Arguments that were pointers are kept where they are, and alive, until
// it returns.
//
//go:uintptrescapes
func (l *Library) call(name string, args ...uintptr) error {
	fn := l.from.Find(name)
	if fn == 0 {
		return &Error{Call: name, Code: ErrFunctionNotFound, Text: "the library has no such function"}
	}
	if code := Code(int32(dynlib.Call(fn, args))); code != success {
		return &Error{Call: name, Code: code, Text: l.describe(code)}
	}
	return nil
}

// describe returns the library's text for a code.
func (l *Library) describe(code Code) string {
	fn := l.from.Find("nvmlErrorString")
	if fn == 0 {
		return ""
	}
	at := dynlib.Call(fn, []uintptr{uintptr(code)})
	text := *(**byte)(unsafe.Pointer(&at)) // C's memory, which does not move
	if text == nil {
		return ""
	}
	return dynlib.Text(unsafe.Slice(text, 200))
}

// number calls a function that writes an unsigned int, or an enum.
func (l *Library) number(name string, d Device) (int, error) {
	var n uint32
	err := l.call(name, uintptr(d), uintptr(unsafe.Pointer(&n)))
	return int(n), err
}

// numberAt is number for functions with an index.
func (l *Library) numberAt(name string, d Device, index int) (int, error) {
	var n uint32
	err := l.call(name, uintptr(d), uintptr(index), uintptr(unsafe.Pointer(&n)))
	return int(n), err
}

// fill calls with buffers of n elements, and larger ones as long as the library needs them.
func fill[T any](n int, call func(buffer []T) error) ([]T, error) {
	for most := 16 * n; ; n *= 2 {
		buffer := make([]T, n)
		err := call(buffer)
		if err == nil {
			return buffer, nil
		}
		if !errors.Is(err, ErrInsufficientSize) || n >= most {
			return nil, err
		}
	}
}

// usualText is NVML_DEVICE_NAME_V2_BUFFER_SIZE, and NVML_DEVICE_UUID_V2_BUFFER_SIZE.
const usualText = 96

// text calls a function that writes a text into a buffer and takes the buffer's length.
func (l *Library) text(name string, d Device) (string, error) {
	b, err := fill(usualText, func(b []byte) error {
		return l.call(name, uintptr(d), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	})
	return dynlib.Text(b), err
}

// Code is a result of the library, by its numbers, and an error that *Error matches.
type Code int32

// The codes that callers may want to distinguish.
const (
	success             Code = 0
	ErrInvalidArgument  Code = 2
	ErrNotSupported     Code = 3
	ErrNotFound         Code = 6
	ErrInsufficientSize Code = 7
	ErrDriverNotLoaded  Code = 9
	ErrFunctionNotFound Code = 13
)

func (c Code) Error() string { return fmt.Sprintf("NVML result %d", int32(c)) }

// Error is a call that the library refused. It matches its Code.
type Error struct {
	Call string // the library's function
	Code Code
	Text string // the library's text for the code; may be empty
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("%s: %v", e.Call, e.Code)
	}
	return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, int32(e.Code))
}

// Is matches the code.
func (e *Error) Is(target error) bool { return target == e.Code }
