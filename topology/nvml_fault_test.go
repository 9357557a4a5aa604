//go:build cgo && linux && !nonvml

package topology_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/server"

	"github.com/spillway-db/spillway/internal/testseed"
	"github.com/spillway-db/spillway/topology"
)

// faults makes one call of a library fail: the one with the number at, from 1.
type faults struct {
	at, calls int
	ret       nvml.Return
}

func (f *faults) hit() bool { f.calls++; return f.calls == f.at }

func failing[T any](f *faults, call func() (T, nvml.Return)) func() (T, nvml.Return) {
	return func() (T, nvml.Return) {
		if f.hit() {
			var none T
			return none, f.ret
		}
		return call()
	}
}

func failingAt[A, T any](f *faults, call func(A) (T, nvml.Return)) func(A) (T, nvml.Return) {
	return func(a A) (T, nvml.Return) { return failing(f, func() (T, nvml.Return) { return call(a) })() }
}

func (f *faults) device(dev *server.Device) {
	dev.GetNameFunc = failing(f, dev.GetNameFunc)
	dev.GetUUIDFunc = failing(f, dev.GetUUIDFunc)
	dev.GetPciInfoFunc = failing(f, dev.GetPciInfoFunc)
	dev.GetMemoryInfoFunc = failing(f, dev.GetMemoryInfoFunc)
	dev.GetMaxPcieLinkGenerationFunc = failing(f, dev.GetMaxPcieLinkGenerationFunc)
	dev.GetCurrPcieLinkWidthFunc = failing(f, dev.GetCurrPcieLinkWidthFunc)
	dev.GetNumaNodeIdFunc = failing(f, dev.GetNumaNodeIdFunc)
	dev.GetCpuAffinityFunc = failingAt(f, dev.GetCpuAffinityFunc)
	nodes := dev.GetMemoryAffinityFunc
	dev.GetMemoryAffinityFunc = func(n int, scope nvml.AffinityScope) ([]uint, nvml.Return) {
		return failing(f, func() ([]uint, nvml.Return) { return nodes(n, scope) })()
	}
	dev.GetNvLinkStateFunc = failingAt(f, dev.GetNvLinkStateFunc)
	dev.GetNvLinkRemotePciInfoFunc = failingAt(f, dev.GetNvLinkRemotePciInfoFunc)
	dev.GetNvLinkRemoteDeviceTypeFunc = failingAt(f, dev.GetNvLinkRemoteDeviceTypeFunc)
	mode := dev.GetMigModeFunc
	dev.GetMigModeFunc = func() (int, int, nvml.Return) {
		if f.hit() {
			return 0, 0, f.ret
		}
		return mode()
	}
	if dev.GetMaxMigDeviceCountFunc == nil {
		return
	}
	dev.GetMaxMigDeviceCountFunc = failing(f, dev.GetMaxMigDeviceCountFunc)
	part := dev.GetMigDeviceHandleByIndexFunc
	dev.GetMigDeviceHandleByIndexFunc = failingAt(f, func(i int) (nvml.Device, nvml.Return) {
		p, ret := part(i)
		if ret == nvml.SUCCESS {
			p := p.(*server.Device)
			p.GetNameFunc, p.GetUUIDFunc, p.GetMemoryInfoFunc = failing(f, p.GetNameFunc), failing(f, p.GetUUIDFunc), failing(f, p.GetMemoryInfoFunc)
			p.GetGpuInstanceIdFunc, p.GetComputeInstanceIdFunc = failing(f, p.GetGpuInstanceIdFunc), failing(f, p.GetComputeInstanceIdFunc)
		}
		return p, ret
	})
}

// TestNVMLFailsAtEachCall: whichever call fails, as a lost GPU's do or as unknown things do, there is a warning, the
// matrix is the same from both sides, and the GPU that did not fail is as it was.
func TestNVMLFailsAtEachCall(t *testing.T) {
	root := unpack(t, "mig")
	whole := discover(t, topology.Options{Root: root, GPUs: topology.NVML(migs())})
	for _, ret := range []nvml.Return{nvml.ERROR_GPU_IS_LOST, nvml.ERROR_UNKNOWN, nvml.ERROR_NOT_SUPPORTED} {
		calls := 0
		first, step := testseed.Share(t, 5)
		for at, turn := 0, 0; at <= calls; at, turn = first+turn*step+1, turn+1 { // the first time none fails
			lib, f := migs(), &faults{at: at, ret: ret}
			init := lib.InitFunc
			lib.InitFunc = func() nvml.Return {
				if f.hit() {
					return ret
				}
				return init()
			}
			lib.DeviceGetCountFunc = failing(f, lib.DeviceGetCountFunc)
			get := lib.DeviceGetHandleByIndexFunc
			lib.DeviceGetHandleByIndexFunc = failingAt(f, get)
			for _, d := range lib.Devices[:2] {
				f.device(d.(*server.Device))
			}
			top := discover(t, topology.Options{Root: root, GPUs: topology.NVML(lib)})
			calls = max(calls, f.calls)
			where := fmt.Sprintf("call %d of %d: %v", at, calls, ret)
			if at > 0 && len(top.Warnings) == 0 && ret != nvml.ERROR_NOT_SUPPORTED {
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
			if asked := !strings.Contains(strings.Join(top.Warnings, "\n"), "PCI bus are told"); asked && same == 0 || len(top.GPUs) == 0 {
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
			if n := len(lib.ShutdownCalls()); (n == 1) != (at != 1) {
				t.Errorf("%s: shut down %d times", where, n)
			}
		}
		if calls < 60 {
			t.Errorf("only %d calls", calls)
		}
	}
}
