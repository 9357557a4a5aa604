//go:build !cgo || !linux || nonvml

package topology_test

import (
	"strings"
	"testing"

	"github.com/spillway-db/spillway/topology"
)

// TestWithoutLibrary: a build that cannot ask the driver tells what the PCI bus knows,
// and what it does not know.
func TestWithoutLibrary(t *testing.T) {
	top := discover(t, topology.Options{Root: readOnly(t, "dgx-a100"), GPUs: topology.SystemGPUs()})
	if len(top.GPUs) != 8 || top.GPUs[0].PCIAddress != "0000:07:00.0" || len(top.Warnings) != 1 ||
		!strings.Contains(top.Warnings[0], "cgo") || !strings.Contains(top.Warnings[0], "NVLinks") {
		t.Errorf("%d GPUs, warnings %q", len(top.GPUs), top.Warnings)
	}
}
