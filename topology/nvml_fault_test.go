package topology_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/topology"
)

// TestNVMLFailsAtEachCall: whichever call fails, as a lost GPU's do or as unknown things do, there
// is a warning, the matrix is the same from both sides, and the GPU that did not fail is as it was.
func TestNVMLFailsAtEachCall(t *testing.T) { eachBinding(t, testNVMLFailsAtEachCall) }

func testNVMLFailsAtEachCall(t *testing.T, bind binding) {
	root := readOnly(t, "mig")
	whole := discover(t, topology.Options{Root: root, GPUs: bind(migs())})
	for _, code := range []nvml.Code{errLost, errUnknown, nvml.ErrNotSupported} {
		calls := 0
		first, step := testseed.Share(t, 5)
		for at, turn := 0, 0; at <= calls; at, turn = first+turn*step+1, turn+1 { // the first time none fails
			lib, called := migs(), 0
			lib.before = func(string) error {
				if called++; called == at {
					return code
				}
				return nil
			}
			top := discover(t, topology.Options{Root: root, GPUs: bind(lib)})
			calls = max(calls, called)
			where := fmt.Sprintf("call %d of %d: %v", at, calls, code)
			if at > 0 && len(top.Warnings) == 0 && code != nvml.ErrNotSupported {
				t.Errorf("%s: no warning", where)
			}
			same := 0
			for _, g := range top.GPUs {
				for _, w := range whole.GPUs {
					if asJSON(t, g) == asJSON(t, w) {
						same++
					}
				}
			}
			if asked := !strings.Contains(said(top.Warnings), "PCI bus are listed"); asked && same == 0 || len(top.GPUs) == 0 {
				t.Errorf("%s: got %+v", where, top.GPUs)
			}
			m := top.Matrix()
			for i := range m.Devices {
				for j := range m.Devices {
					if m.Paths[i][j] != m.Paths[j][i] {
						t.Errorf("%s: %s to %s: %q, back %q", where, m.Devices[i], m.Devices[j], m.Paths[i][j], m.Paths[j][i])
					}
				}
			}
			if lib.closed != lib.opened || (lib.closed == 1) != (at != 1) {
				t.Errorf("%s: opened %d times, closed %d times", where, lib.opened, lib.closed)
			}
		}
		if calls < 60 {
			t.Errorf("only %d calls", calls)
		}
	}
}
