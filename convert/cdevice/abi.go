package cdevice

// DeviceType says what kind of memory an array is in, as ArrowDeviceType does.
type DeviceType int32

// The types that Spillway knows.
const (
	CPU      DeviceType = 1
	CUDA     DeviceType = 2
	CUDAHost DeviceType = 3
)

// Flags of a Schema.
const (
	flagOrdered    = 1
	flagNullable   = 2
	flagKeysSorted = 4
)

// Schema is struct ArrowSchema. Pointers are numbers, for they are C's.
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

// Array is struct ArrowArray.
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

// DeviceArray is struct ArrowDeviceArray.
type DeviceArray struct {
	Array      Array
	DeviceID   int64
	DeviceType DeviceType
	_          [4]byte
	SyncEvent  uintptr // for CUDA a cudaEvent_t *; 0 if there is nothing to wait for
	_          [3]int64
}
