package topology

import (
	"context"

	"github.com/spillway-db/spillway/internal/nvml"
)

// NVMLAt returns the source that binds the library at path.
func NVMLAt(path string) func(context.Context) ([]GPU, error) { return nvmlAt(path) }

// SystemLibrary is where NVIDIA's library is looked for.
const SystemLibrary = nvml.DefaultPath

// Level is the strictest level that a NIC meets.
func Level(n NIC) NICLevel { return n.level() }

// VisibleDevicesError is the error that matches ErrVisibleDevices.
type VisibleDevicesError = visibleDevicesError
