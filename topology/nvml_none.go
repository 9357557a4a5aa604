//go:build !cgo || !linux

package topology

import (
	"context"
	"errors"
)

// SystemGPUs returns the source that asks NVIDIA's library (NVML), which this build
// cannot: that needs cgo, and Linux.
func SystemGPUs() GPUSource { return noLibrary{} }

type noLibrary struct{}

func (noLibrary) GPUs(context.Context) ([]GPU, error) {
	return nil, errors.New("this program is built without cgo, which NVIDIA's library (NVML) needs: names, memory, MIG instances and NVLinks of the GPUs are not known")
}
