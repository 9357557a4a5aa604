package cuda

import (
	"cmp"
	"fmt"
	"reflect"
	"strings"
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// DefaultPath is the name by which the dynamic linker finds the driver.
const DefaultPath = "libcuda.so.1"

// minVersion is the oldest version of CUDA whose driver has all functions that are needed:
// since 11.0 a primary context's release has its second version.
const minVersion = 11000

// Library is the driver. It is safe for concurrent use, and is never unloaded.
type Library struct {
	required
	optional
	version int32
	pinned  ranges // host memory that copies may use
	pins    pins
}

// symbol is a function of the driver. Its address is 0 if the library lacks it.
type symbol struct {
	name string
	fn   uintptr
}

// required are the functions without which Load fails. Each field has the name under which the
// library exports the function, with the version that fits the arguments used here.
type required struct {
	cuDriverGetVersion, cuInit, cuGetErrorName, cuGetErrorString,
	cuDeviceGetCount, cuDeviceGet, cuDeviceGetName, cuDeviceGetUuid, cuDeviceGetAttribute,
	cuDeviceTotalMem_v2, cuDeviceGetPCIBusId, cuDeviceCanAccessPeer,
	cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRelease_v2,
	cuCtxSetCurrent, cuCtxPushCurrent_v2, cuCtxPopCurrent_v2, cuCtxGetDevice, cuCtxEnablePeerAccess,
	cuStreamCreate, cuStreamDestroy_v2, cuStreamSynchronize, cuStreamWaitEvent,
	cuEventCreate, cuEventDestroy_v2, cuEventRecord, cuEventQuery,
	cuMemAlloc_v2, cuMemFree_v2, cuMemGetInfo_v2, cuMemGetAddressRange_v2, cuPointerGetAttribute,
	cuMemHostRegister_v2, cuMemHostUnregister, cuMemHostAlloc, cuMemFreeHost, cuMemHostGetDevicePointer_v2,
	cuMemcpyHtoDAsync_v2, cuMemcpyDtoHAsync_v2, cuMemcpyDtoDAsync_v2, cuMemcpyPeerAsync, cuMemsetD8Async symbol
}

// optional are the functions that a driver may lack, with the version of CUDA that brought them.
type optional struct {
	cuThreadExchangeStreamCaptureMode symbol // 10.1

	cuMemGetAccess, cuMemRelease symbol // 10.2
	cuMemRetainAllocationHandle  symbol // 11.0

	cuMemAllocFromPoolAsync, cuMemFreeAsync, cuMemPoolCreate, cuMemPoolDestroy, cuMemPoolTrimTo,
	cuMemPoolSetAttribute, cuMemPoolGetAttribute, cuMemPoolSetAccess symbol // 11.2

	cuDeviceGetUuid_v2     symbol // 11.4: that of the instance, where a card is divided
	cuStreamWaitValue32_v2 symbol // 11.7
	cuMemcpyBatchAsync     symbol // 12.8
	cuMemcpyBatchAsync_v2  symbol // 13.0
}

// Load binds the library at path, empty for DefaultPath, and starts the driver. All of
// its errors are *LoadError.
func Load(path string) (*Library, error) {
	path = cmp.Or(path, DefaultPath)
	from, err := dynlib.Open(path)
	if err != nil {
		return nil, &LoadError{Path: path, Reason: ErrNoLibrary, Cause: err}
	}
	l := &Library{pins: pins{turn: make(chan struct{}, 1)}}
	missing := find(from, &l.required)
	find(from, &l.optional)
	var refused *LoadError
	switch {
	case l.cuInit.fn == 0 || l.cuDriverGetVersion.fn == 0:
		refused = &LoadError{
			Reason: ErrNotDriver,
			Detail: "it has no functions " + strings.Join(missing[:min(2, len(missing))], " and "),
		}
	case len(missing) > 0:
		refused = &LoadError{
			Reason: ErrDriverTooOld,
			Detail: fmt.Sprintf("it lacks %s; one for CUDA %s or newer is needed",
				strings.Join(missing, ", "), versionString(minVersion)),
		}
	}
	if refused != nil {
		from.Close()
		refused.Path = path
		return nil, refused
	}
	err = l.call(l.cuDriverGetVersion, uintptr(unsafe.Pointer(&l.version)))
	if err == nil && l.version < minVersion {
		return nil, &LoadError{
			Path:   path,
			Reason: ErrDriverTooOld,
			Detail: fmt.Sprintf("it is for CUDA %s; %s or newer is needed", l.Version(), versionString(minVersion)),
		}
	}
	if err == nil {
		err = l.call(l.cuInit, 0)
	}
	if err != nil {
		return nil, &LoadError{Path: path, Reason: ErrDriverRefused, Cause: err}
	}
	return l, nil
}

// find looks up the functions for which group, a pointer to a struct, has fields, and returns the
// names of those that the library lacks.
func find(from dynlib.Library, group any) (missing []string) {
	fields := reflect.ValueOf(group).Elem()
	for i := range fields.NumField() {
		name := fields.Type().Field(i).Name
		s := (*symbol)(fields.Field(i).Addr().UnsafePointer())
		if *s = (symbol{name, from.Find(name)}); s.fn == 0 {
			missing = append(missing, name)
		}
	}
	return missing
}

func versionString(v int32) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// Version returns the newest version of CUDA that the driver is for, such as "12.8".
func (l *Library) Version() string { return versionString(l.version) }

// HasPools reports whether memory can be allocated in the order of a stream, from pools. A
// device may still lack them; see DeviceInfo.
func (l *Library) HasPools() bool { return l.cuMemAllocFromPoolAsync.fn != 0 }

// Same reports whether other is the same driver, loaded twice.
func (l *Library) Same(other *Library) bool { return l.cuInit.fn == other.cuInit.fn }

// Pinned reports whether all n bytes of host memory at addr were pinned by Calls of this library.
func (l *Library) Pinned(addr uintptr, n int64) bool { return l.pinned.hold(addr, n) }

// Batch names the function that CopyBatch calls: the one of CUDA 13, the one of 12.8, or
// none, and then it is not supported.
func (l *Library) Batch() string {
	for _, s := range []symbol{l.cuMemcpyBatchAsync_v2, l.cuMemcpyBatchAsync} {
		if s.fn != 0 {
			return s.name
		}
	}
	return ""
}

// call calls a function of the driver. Arguments that were pointers are kept where they are, and
// alive, until it returns.
//
//go:uintptrescapes
func (l *Library) call(s symbol, args ...uintptr) error {
	if s.fn == 0 {
		return &Error{Call: s.name, Code: ErrNotSupported, Name: "the driver library has no such function"}
	}
	if code := raw(s, args...); code != 0 {
		return l.failed(s, code)
	}
	return nil
}

// raw is call for a function that the library has, and returns its result.
//
//go:uintptrescapes
func raw(s symbol, args ...uintptr) Code { return Code(int32(dynlib.Call(s.fn, args))) }

// failed returns the error of a call, with the driver's own texts for the code.
func (l *Library) failed(s symbol, code Code) error {
	e := &Error{Call: s.name, Code: code}
	for _, describe := range []symbol{l.cuGetErrorName, l.cuGetErrorString} {
		var text *byte
		if raw(describe, uintptr(code), uintptr(unsafe.Pointer(&text))) != 0 || text == nil {
			break // the driver does not know the code
		}
		if e.Name != "" {
			e.Name += ": "
		}
		e.Name += dynlib.Text(unsafe.Slice(text, 200))
	}
	return e
}
