package topology

// Library is the used part of NVIDIA's library.
type Library = nvmlLibrary

// NVML returns the source that opens a library of the tests.
func NVML(open func() (Library, error)) GPUSource { return nvmlSource(open) }

// NVMLAt returns the source that asks the library at path.
func NVMLAt(path string) GPUSource { return nvmlAt(path) }

// VisibleDevicesError is the error that matches ErrVisibleDevices.
type VisibleDevicesError = visibleDevicesError
