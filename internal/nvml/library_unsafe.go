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

// Close shuts the library down and gives it up. That it refuses is of no use to anybody.
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

// text calls a function that writes a text into a buffer of the length that it is told.
func (l *Library) text(name string, d Device) (string, error) {
	b, err := fill(usualText, func(b []byte) error {
		return l.call(name, uintptr(d), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	})
	return dynlib.Text(b), err
}
