// Package nvml asks NVIDIA's management library (NVML, libnvidia-ml.so.1) what GPUs there are and
// how they are linked. It is bound at run time, without cgo, so that one binary serves machines
// with NVIDIA's driver and without.
//
//	Open(path) ──▶ Library ── Count, Device(i) ──▶ Device ── Name, UUID, PCI, Memory, … of a GPU
//	                  │                              │ Instance(k)
//	                  │                              └─────▶ Device, a MIG instance of it
//	                  ├─ Events ──▶ what happens to GPUs
//	                  └─ Close
//
// A function is looked up when it is called. One that the library does not have (it is older, or
// the name has another version) is an *Error of that call with ErrFunctionNotFound, and nothing
// else is the worse for it. Which version of a name is called fits the structs of this package:
// later versions of the same name take others.
//
// The library counts its initializations, keeps no state of a thread, and may be called by several
// goroutines at a time. So may a Library, until it is closed. Devices are valid until then. The
// package takes no locks.
//
// Package nvmltest has a library in C for tests. With the tag gonvml the tests compare layouts,
// numbers and answers with those of github.com/NVIDIA/go-nvml, which is made from NVIDIA's header.
package nvml

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// DefaultPath is what the dynamic linker finds the library by.
const DefaultPath = "libnvidia-ml.so.1"

// ErrNoLibrary is in Open's error if there is no library to call.
var ErrNoLibrary = errors.New("it cannot be loaded")

// Library is the library, open and initialized.
type Library struct{ from dynlib.Library }

// Open opens the library at path, empty for DefaultPath, and initializes it. An error is
// ErrNoLibrary with what the dynamic linker said, or an *Error. ErrDriverNotLoaded is that of a
// machine whose kernel has no driver.
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

// Close shuts the library down and gives it up. Its errors have no use.
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

// describe asks the library for a text that is its own.
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

// numberAt calls one of those that have an index.
func (l *Library) numberAt(name string, d Device, index int) (int, error) {
	var n uint32
	err := l.call(name, uintptr(d), uintptr(index), uintptr(unsafe.Pointer(&n)))
	return int(n), err
}

// fill calls with buffers of n elements and more until the library says no more that it needs a
// larger one.
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
	ErrTimeout          Code = 10
	ErrFunctionNotFound Code = 13
)

func (c Code) Error() string { return fmt.Sprintf("NVML result %d", int32(c)) }

// Error is a call that the library refused. It matches its Code.
type Error struct {
	Call string // the library's function
	Code Code
	Text string // what the library says of the code; may be empty
}

func (e *Error) Error() string {
	if e.Text == "" {
		return fmt.Sprintf("%s: %v", e.Call, e.Code)
	}
	return fmt.Sprintf("%s: %s (%d)", e.Call, e.Text, int32(e.Code))
}

// Is matches the code.
func (e *Error) Is(target error) bool { return target == e.Code }
