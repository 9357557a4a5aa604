//go:build !cgo || !linux || nonvml

package topology

import (
	"context"
	"errors"
)

// SystemGPUs returns the source that asks NVIDIA's library (NVML), which this build
// cannot: that needs cgo and Linux, and no tag nonvml.
func SystemGPUs() GPUSource { return noLibrary{} }

type noLibrary struct{}

func (noLibrary) GPUs(context.Context) ([]GPU, error) {
	return nil, errors.New("this program is built without cgo, which NVIDIA's library (NVML) needs, or with the tag nonvml: names, memory, MIG instances and NVLinks of the GPUs are not known")
}
