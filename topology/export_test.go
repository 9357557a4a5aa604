package topology

import (
	"context"

	"github.com/spillway-db/spillway/internal/nvml"
)

// Library is the used part of NVIDIA's library.
type Library = nvmlLibrary

// NVML returns the source that opens a library of the tests.
func NVML(open func() (Library, error)) func(context.Context) ([]GPU, error) {
	return func(ctx context.Context) ([]GPU, error) { return nvmlGPUs(ctx, open) }
}

// NVMLAt returns the source that asks the library at path.
func NVMLAt(path string) func(context.Context) ([]GPU, error) { return nvmlAt(path) }

// SystemLibrary is where NVIDIA's library is looked for.
const SystemLibrary = nvml.DefaultPath

// Level is the strictest level that a NIC meets.
func Level(n NIC) NICLevel { return n.level() }

// VisibleDevicesError is the error that matches ErrVisibleDevices.
type VisibleDevicesError = visibleDevicesError
