package cuda

// Handles of the driver. The zero values are none.
type (
	Context uintptr
	Stream  uintptr
	Event   uintptr
	Pool    uintptr
)

// Ptr is an address in a device's memory: a number, never a pointer.
type Ptr uint64

// DeviceInfo describes a device before it is opened.
type DeviceInfo struct {
	Ordinal int    // among those that the driver shows (CUDA_VISIBLE_DEVICES)
	Name    string // as NVIDIA calls it
	UUID    string // "GPU-" and 32 digits in groups, as NVML writes it
	PCI     string // "0000:17:00.0", in lower case
	Memory  int64  // bytes
	Pools   bool   // the library and the device have stream-ordered allocation
}

// Copy is one of a batch. Each side is device memory or pinned host memory, and the other
// field of that side 0.
type Copy struct {
	Dst, Src         Ptr
	HostDst, HostSrc uintptr
	Size             int64 // bytes, above 0
}
