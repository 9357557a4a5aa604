package cuda

import (
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// DefaultPath is what the dynamic linker finds the driver by.
const DefaultPath = "libcuda.so.1"

// minVersion is the oldest version of CUDA whose driver has all that is needed:
// since 11.0 a primary context's release has its second version.
const minVersion = 11000

// Library is the driver. It is safe for concurrent use, and is never unloaded.
type Library struct {
	path    string
	version int
	sym     symbols
	pinned  ranges // host memory that copies may use
	pins    pins
}

// Load binds the library at path, empty for DefaultPath, and starts the driver. All of
// its errors are *LoadError.
func Load(path string) (*Library, error) {
	if path == "" {
		path = DefaultPath
	}
	from, err := dynlib.Open(path)
	if err != nil {
		return nil, &LoadError{Path: path, Reason: ErrNoLibrary, Cause: err}
	}
	l := &Library{path: path, pins: pins{turn: make(chan struct{}, 1)}}
	err = l.bind(from)
	if err == nil {
		err = l.linked()
	}
	if err != nil {
		from.Close()
		return nil, err
	}
	return l, l.start()
}

// bind looks up all functions.
func (l *Library) bind(from dynlib.Library) error {
	var missing []string
	for _, s := range l.sym.table() {
		*s.at = entry{s.name, from.Find(s.name)}
		if s.required && s.at.fn == 0 {
			missing = append(missing, s.name)
		}
	}
	switch {
	case l.sym.init.fn == 0 || l.sym.driverGetVersion.fn == 0:
		return &LoadError{
			Path:   l.path,
			Reason: ErrNotDriver,
			Detail: "it has no functions " + strings.Join(missing[:min(2, len(missing))], " and "),
		}
	case len(missing) > 0:
		return &LoadError{
			Path:   l.path,
			Reason: ErrDriverTooOld,
			Detail: fmt.Sprintf(
				"it lacks %s; one for CUDA %s or newer is needed",
				strings.Join(missing, ", "),
				versionString(minVersion),
			),
		}
	}
	return nil
}

// start asks for the version and initializes the driver.
func (l *Library) start() error {
	var version int32
	if err := l.call(&l.sym.driverGetVersion, uintptr(unsafe.Pointer(&version))); err != nil {
		return &LoadError{Path: l.path, Reason: ErrDriverRefused, Cause: err}
	}
	l.version = int(version)
	if l.version < minVersion {
		return &LoadError{
			Path:   l.path,
			Reason: ErrDriverTooOld,
			Detail: fmt.Sprintf(
				"it is for CUDA %s; %s or newer is needed",
				versionString(l.version),
				versionString(minVersion),
			),
		}
	}
	if err := l.call(&l.sym.init, 0); err != nil {
		return &LoadError{Path: l.path, Reason: ErrDriverRefused, Cause: err}
	}
	return nil
}

func versionString(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// Version returns the newest version of CUDA that the driver is for, such as "12.8".
func (l *Library) Version() string { return versionString(l.version) }

// HasPools reports whether memory can be allocated in the order of a stream, from pools. A
// device may still lack them; see DeviceInfo.
func (l *Library) HasPools() bool {
	s := &l.sym
	needed := []*entry{
		&s.memAllocFromPool, &s.memFreeAsync, &s.poolCreate, &s.poolDestroy, &s.poolTrim, &s.poolSet, &s.poolGet,
	}
	return !slices.ContainsFunc(needed, func(e *entry) bool { return e.fn == 0 })
}

// Same reports whether other is the same driver, loaded twice.
func (l *Library) Same(other *Library) bool { return l.sym.init.fn == other.sym.init.fn }

// Pinned reports whether all n bytes of host memory at addr were pinned by Calls of this library.
func (l *Library) Pinned(addr uintptr, n int64) bool { return l.pinned.hold(addr, n) }

// HasPoolAccess reports whether peers can be let into a pool.
func (l *Library) HasPoolAccess() bool { return l.sym.poolAccess.fn != 0 }

// HasValues reports whether streams can wait for a word of memory.
func (l *Library) HasValues() bool { return l.sym.streamWaitValue.fn != 0 }

// Batch names the function that CopyBatch calls: the one of CUDA 13, the one of 12.8, or
// none, and then it is not supported.
func (l *Library) Batch() string {
	switch {
	case l.sym.copyBatch2.fn != 0:
		return l.sym.copyBatch2.name
	case l.sym.copyBatch.fn != 0:
		return l.sym.copyBatch.name
	}
	return ""
}

// invoke calls fn and returns its int.
func invoke(fn uintptr, args []uintptr) Code { return Code(int32(dynlib.Call(fn, args))) }

// call calls e. Arguments that were pointers are kept where they are, and alive,
// until it returns.
//
//go:uintptrescapes
func (l *Library) call(e *entry, args ...uintptr) error {
	if e.fn == 0 {
		return &Error{Call: e.name, Code: ErrNotSupported, Name: "the driver library has no such function"}
	}
	if code := invoke(e.fn, args); code != 0 {
		return l.failed(e, code)
	}
	return nil
}

// raw calls e and returns what it does, where that is not to become an error.
//
//go:uintptrescapes
func raw(e *entry, args ...uintptr) Code { return invoke(e.fn, args) }

// failed makes the error of a call.
func (l *Library) failed(e *entry, code Code) error {
	name, text := l.describe(&l.sym.errorName, code), l.describe(&l.sym.errorString, code)
	if text != "" {
		name += ": " + text
	}
	return &Error{Call: e.name, Code: code, Name: name}
}

// describe asks the driver for a text that is its own.
func (l *Library) describe(e *entry, code Code) string {
	var text *byte
	if raw(e, uintptr(code), uintptr(unsafe.Pointer(&text))) != 0 || text == nil {
		return ""
	}
	return dynlib.Text(unsafe.Slice(text, 200))
}
