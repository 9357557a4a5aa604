package topology_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/topology"
)

// What the library may say of any call, and is a problem.
const (
	errLost     = nvml.Code(15)
	errMismatch = nvml.Code(18)
	errUnknown  = nvml.Code(999)
)

// fakeLibrary is a library whose GPUs tests make up.
type fakeLibrary struct {
	gpus   []*fakeGPU
	open   error
	count  func() (int, error)
	lost   map[int]bool            // GPUs that cannot be asked
	before func(call string) error // each call, if there is one
	opened int
	closed int
	known  []*fakeGPU // by handle, from 1
}

// fakeGPU is a GPU, or a MIG instance.
type fakeGPU struct {
	name, uuid                string
	memory                    func() (nvml.Memory, error)
	pci                       nvml.PCI
	generation, width         int
	node                      func() (int, error)
	nodes, cpus               func() ([]uint, error)
	up                        func(link int) (bool, error)
	remote                    func(link int) (nvml.PCI, error)
	kind                      func(link int) (nvml.LinkKind, error)
	parts                     []*fakeGPU // nil: no instance in that place
	mig                       bool
	gpuInstance, partInstance int
}

// binding makes a source for Options.GPUs that calls a fake library.
type binding = func(*fakeLibrary) func(context.Context) ([]topology.GPU, error)

// direct calls the fake as topology calls the run-time binding.
func direct(l *fakeLibrary) func(context.Context) ([]topology.GPU, error) {
	return topology.NVML(func() (nvml.Interface, error) { return l, l.init() })
}

// eachBinding runs a test with each binding: the results must be the same.
func eachBinding(t *testing.T, test func(*testing.T, binding)) {
	for name, b := range bindings {
		t.Run(name, func(t *testing.T) { test(t, b) })
	}
}

func (l *fakeLibrary) init() error {
	err := l.call("nvmlInit_v2")
	if err == nil && l.open != nil {
		err = l.open
	}
	if err == nil {
		l.opened++
	}
	return err
}

func (l *fakeLibrary) call(name string) error {
	if l.before == nil {
		return nil
	}
	return l.before(name)
}

func (l *fakeLibrary) handle(g *fakeGPU) nvml.Device {
	l.known = append(l.known, g)
	return nvml.Device(len(l.known))
}

// asked answers a call for a device, unless it is to fail.
func asked[T any](l *fakeLibrary, d nvml.Device, name string, answer func(g *fakeGPU) (T, error)) (none T, err error) {
	if err := l.call(name); err != nil {
		return none, &nvml.Error{Call: name, Code: err.(nvml.Code)}
	}
	value, err := answer(l.known[d-1])
	if code, is := err.(nvml.Code); is {
		return none, &nvml.Error{Call: name, Code: code}
	}
	return value, err
}

func value[T any](of func(g *fakeGPU) T) func(g *fakeGPU) (T, error) {
	return func(g *fakeGPU) (T, error) { return of(g), nil }
}

func (l *fakeLibrary) Close() { l.closed++ }

func (l *fakeLibrary) Count() (int, error) {
	if err := l.call("nvmlDeviceGetCount_v2"); err != nil {
		return 0, err
	}
	return l.count()
}

func (l *fakeLibrary) Device(i int) (nvml.Device, error) {
	err := l.call("nvmlDeviceGetHandleByIndex_v2")
	switch {
	case err != nil:
		return 0, err
	case l.lost[i]:
		return 0, errLost
	}
	return l.handle(l.gpus[i]), nil
}

func (l *fakeLibrary) Name(d nvml.Device) (string, error) {
	return asked(l, d, "nvmlDeviceGetName", value(func(g *fakeGPU) string { return g.name }))
}

func (l *fakeLibrary) UUID(d nvml.Device) (string, error) {
	return asked(l, d, "nvmlDeviceGetUUID", value(func(g *fakeGPU) string { return g.uuid }))
}

func (l *fakeLibrary) PCI(d nvml.Device) (nvml.PCI, error) {
	return asked(l, d, "nvmlDeviceGetPciInfo_v3", value(func(g *fakeGPU) nvml.PCI { return g.pci }))
}

func (l *fakeLibrary) Memory(d nvml.Device) (nvml.Memory, error) {
	return asked(l, d, "nvmlDeviceGetMemoryInfo", func(g *fakeGPU) (nvml.Memory, error) { return g.memory() })
}

func (l *fakeLibrary) PCIeGeneration(d nvml.Device) (int, error) {
	return asked(l, d, "nvmlDeviceGetMaxPcieLinkGeneration", value(func(g *fakeGPU) int { return g.generation }))
}

func (l *fakeLibrary) PCIeWidth(d nvml.Device) (int, error) {
	return asked(l, d, "nvmlDeviceGetCurrPcieLinkWidth", value(func(g *fakeGPU) int { return g.width }))
}

func (l *fakeLibrary) Node(d nvml.Device) (int, error) {
	return asked(l, d, "nvmlDeviceGetNumaNodeId", func(g *fakeGPU) (int, error) { return g.node() })
}

func (l *fakeLibrary) NodeAffinity(d nvml.Device) ([]uint, error) {
	return asked(l, d, "nvmlDeviceGetMemoryAffinity", func(g *fakeGPU) ([]uint, error) { return g.nodes() })
}

func (l *fakeLibrary) CPUAffinity(d nvml.Device) ([]uint, error) {
	return asked(l, d, "nvmlDeviceGetCpuAffinity", func(g *fakeGPU) ([]uint, error) { return g.cpus() })
}

func (l *fakeLibrary) LinkUp(d nvml.Device, link int) (bool, error) {
	return asked(l, d, "nvmlDeviceGetNvLinkState", func(g *fakeGPU) (bool, error) { return g.up(link) })
}

func (l *fakeLibrary) LinkRemote(d nvml.Device, link int) (nvml.PCI, error) {
	return asked(l, d, "nvmlDeviceGetNvLinkRemotePciInfo_v2", func(g *fakeGPU) (nvml.PCI, error) { return g.remote(link) })
}

func (l *fakeLibrary) LinkKind(d nvml.Device, link int) (nvml.LinkKind, error) {
	return asked(l, d, "nvmlDeviceGetNvLinkRemoteDeviceType", func(g *fakeGPU) (nvml.LinkKind, error) { return g.kind(link) })
}

func (l *fakeLibrary) MIG(d nvml.Device) (bool, error) {
	return asked(l, d, "nvmlDeviceGetMigMode", value(func(g *fakeGPU) bool { return g.mig }))
}

func (l *fakeLibrary) MaxInstances(d nvml.Device) (int, error) {
	return asked(l, d, "nvmlDeviceGetMaxMigDeviceCount", value(func(g *fakeGPU) int { return len(g.parts) }))
}

func (l *fakeLibrary) Instance(d nvml.Device, k int) (nvml.Device, error) {
	return asked(l, d, "nvmlDeviceGetMigDeviceHandleByIndex", func(g *fakeGPU) (nvml.Device, error) {
		if g.parts[k] == nil {
			return 0, nvml.ErrNotFound
		}
		return l.handle(g.parts[k]), nil
	})
}

func (l *fakeLibrary) GPUInstance(d nvml.Device) (int, error) {
	return asked(l, d, "nvmlDeviceGetGpuInstanceId", value(func(g *fakeGPU) int { return g.gpuInstance }))
}

func (l *fakeLibrary) ComputeInstance(d nvml.Device) (int, error) {
	return asked(l, d, "nvmlDeviceGetComputeInstanceId", value(func(g *fakeGPU) int { return g.partInstance }))
}

// busID is a PCI address in NVML's form.
func busID(address string) nvml.PCI {
	return nvml.PCI{Address: "0000" + strings.ToUpper(address), DeviceID: 0x20b010de}
}

func unsupported[T any]() (none T, err error) { return none, nvml.ErrNotSupported }

// a100s is a machine with the GPUs of a DGX A100: they are at the given addresses, and
// have twelve NVLinks, two to each of six switches.
func a100s(addresses ...string) *fakeLibrary {
	lib := &fakeLibrary{}
	lib.count = func() (int, error) { return len(lib.gpus), nil }
	for i, address := range addresses {
		lib.gpus = append(lib.gpus, &fakeGPU{
			name:   "Mock NVIDIA A100-SXM4-40GB",
			uuid:   fmt.Sprintf("GPU-%08x-0000-4000-8000-00000000000%d", 0xa0000000+i/2, i),
			memory: memory(40*gib, 39*gib), pci: busID(address),
			generation: 4, width: 16,
			node: unsupported[int], nodes: unsupported[[]uint], cpus: unsupported[[]uint],
			up: func(link int) (bool, error) {
				if link >= 12 {
					return false, nvml.ErrInvalidArgument
				}
				return true, nil
			},
			remote: func(link int) (nvml.PCI, error) { return busID(fmt.Sprintf("0000:%02x:00.0", 0xc4+link/2)), nil },
			kind:   func(int) (nvml.LinkKind, error) { return nvml.LinkToSwitch, nil },
		})
	}
	return lib
}

func memory(total, free uint64) func() (nvml.Memory, error) {
	return func() (nvml.Memory, error) { return nvml.Memory{Total: total, Free: free, Used: total - free}, nil }
}

// migs is a machine with two GPUs of which the first is divided in three, with a
// place left empty.
func migs() *fakeLibrary {
	lib := a100s("0000:19:00.0", "0000:1a:00.0")
	dev := lib.gpus[0]
	dev.mig, dev.parts = true, make([]*fakeGPU, 7)
	for _, k := range []int{0, 2, 3} {
		dev.parts[k] = &fakeGPU{
			name: fmt.Sprintf("A100 MIG %dg", k+1), uuid: fmt.Sprintf("MIG-b%d000000-0000-5000-8000-000000000000", k),
			memory: memory(uint64(k+1)*gib, 1<<20), gpuInstance: k + 1,
		}
	}
	return lib
}
