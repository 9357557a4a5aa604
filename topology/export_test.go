package topology

import (
	"context"
	"slices"

	"github.com/spillway-db/spillway/internal/nvml"
)

// NVMLAt returns the source that binds the library at path.
func NVMLAt(path string) func(context.Context) ([]GPU, error) { return nvmlAt(path) }

// SystemLibrary is where NVIDIA's library is looked for.
const SystemLibrary = nvml.DefaultPath

// Level is the strictest level that a NIC meets.
func Level(n NIC) NICLevel { return n.level() }

// Between returns the path between two devices of t.
func Between(t *Topology, a, b string) (p Path, ok bool) {
	m := t.Matrix()
	i, j := slices.Index(m.Devices, a), slices.Index(m.Devices, b)
	if i < 0 || j < 0 {
		return UnknownPath, false
	}
	return m.Paths[i][j], true
}
