// Package cdevice shares batches in a GPU's memory with other programs in the process, such as
// libcudf, without copying them: it exports and imports the structs of the Arrow C device data
// interface (https://arrow.apache.org/docs/format/CDeviceDataInterface.html). A consumer of a batch
// gets the addresses of its buffers; a table that a library has made becomes a batch that the
// engine can evict.
//
//	batch.Handle ──Export──▶ DeviceArray, Schema ──▶ C
//	batch.Payload ◀──Import── DeviceArray, Schema ◀── C
//
// The caller provides the memory of the outermost structs. Those of an export point to Go memory,
// which is pinned until the release, or to device memory. Go code treats the pointers in structs as
// numbers. The package needs no C compiler, neither to build nor to run.
//
// An export walks the batch's descriptor along its schema and writes one struct for each array; an
// import walks the structs along the types that the schema names, and makes a convert.DeviceTable
// of them. Neither copies Arrow buffers, except for what C must find and the batch does not have in
// one piece; see Export. Package image decides later what of an imported table goes where.
//
// # Ownership
//
// Export takes the handle over. The batch stays in its space, in use, until the array's holder
// calls its release callback, from any thread, which closes the handle. Children that a consumer
// has moved out of the array count by themselves, as the interface has it. What reads the memory
// must be done by then.
//
// The memory is there until then also if the engine, or the device, is closed before: closing waits
// for no consumer. Engine.Close reports the batch as one that is held (spillway.LeakError), and
// leaves of a GPU what arrays need (tier.Lender); the last release gives it up. Devices of other
// backends than the module's keep it only if they can.
//
// For a CUDA device a release calls the driver: it may free memory and destroy the array's event.
// So release must not be called in a callback that the driver calls (cuLaunchHostFunc,
// cudaStreamAddCallback), where calls of the driver are forbidden; hand it to another thread there.
//
// Import takes the array and the schema over if it succeeds, and marks them as released; on an
// error they stay the caller's. The array's release callback is called once, when the resulting
// table is released and its memory is not leased: when the batch has been moved away or dropped.
// Bytes are charged in the space meanwhile.
//
// # Devices
//
// CUDA devices have the type CUDA, their number, and addresses as they are. What the engine makes
// is complete, so its arrays have no event. A program that puts work of its own on a batch names
// the stream (Config.Stream), and consumers get a CUevent behind it. Import waits for the event of
// its array, because the shape of arrays is read from the device. The memory of the simulated
// device is host memory, and exported as such (CPU).
//
// Each number in a struct is checked before it is used. A pointer that points nowhere cannot be
// found out, and ends the process.
//
// # Files
//
// types.go has the table of types and their formats, schema.go the structs of schemas, both ways.
// export.go and export_arrays.go write arrays, import.go reads them, and callback.go releases them.
// device.go finds out what a space's device is to C, and memory_unsafe.go has all uses of package
// unsafe. C calls back with a number, not with an object of Go's, so there is one table of exports
// for the process. It is the only state that calls share, and is safe for concurrent use; the
// package takes no locks.
package cdevice

// DeviceType is the kind of memory that an array is in. The values are those of ArrowDeviceType in
// the specification, which has more of them.
type DeviceType int32

// The types that Spillway's own backends have. A program's backend may have another one; see
// Config.Type.
const (
	CPU  DeviceType = 1
	CUDA DeviceType = 2
)

// Flags of a Schema, ARROW_FLAG_… in the specification.
const (
	flagOrdered    = 1
	flagNullable   = 2
	flagKeysSorted = 4
)

// Schema is struct ArrowSchema of the C data interface, field by field. It describes one field, and
// its children the fields below. Pointers are numbers, because they are C's: the garbage collector
// must not follow them. A struct whose Release is 0 is released: its other fields mean nothing.
type Schema struct {
	Format      uintptr // char *
	Name        uintptr // char *
	Metadata    uintptr // char *
	Flags       int64
	NChildren   int64
	Children    uintptr // struct ArrowSchema **
	Dictionary  uintptr // struct ArrowSchema *
	Release     uintptr // void (*)(struct ArrowSchema *); 0 if released
	PrivateData uintptr
}

// Array is struct ArrowArray of the C data interface, field by field. The pointers in Buffers are
// addresses of the array's device, except for the lengths of a view's data buffers; all others are
// of host memory. Length, NullCount and Offset are in rows.
type Array struct {
	Length      int64
	NullCount   int64
	Offset      int64
	NBuffers    int64
	NChildren   int64
	Buffers     uintptr // void **
	Children    uintptr // struct ArrowArray **
	Dictionary  uintptr // struct ArrowArray *
	Release     uintptr // void (*)(struct ArrowArray *); 0 if released
	PrivateData uintptr
}

// Child returns the i-th child: for the array of a batch, its i-th column. It panics if there is no
// such child. The result is valid until a is released.
func (a *Array) Child(i int) *Array { return at[Array](several[uintptr](a.Children, a.NChildren)[i]) }

// Buffer returns the address of the i-th buffer, 0 if the array has none there, such as for a
// validity without nulls. The address is one of the array's device. The first row is at Offset in
// the buffer, plus the Offset of the struct array that a is a child of. It panics if i is out of
// range. The memory is valid until a is released.
func (a *Array) Buffer(i int) uintptr { return several[uintptr](a.Buffers, a.NBuffers)[i] }

// DeviceArray is struct ArrowDeviceArray: an array, and the device on which its buffers are. The
// last field is reserved, and must be zero.
type DeviceArray struct {
	Array      Array
	DeviceID   int64
	DeviceType DeviceType
	_          [4]byte
	SyncEvent  uintptr // for CUDA a cudaEvent_t *; 0 if there is nothing to wait for
	_          [3]int64
}
