//go:build cgo && !windows

package gonvml

import (
	"context"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/spillway-db/spillway/internal/dynlib"
	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/topology"
)

// GPUs returns a source for topology.Options.GPUs that reads the GPUs of lib. Each query initializes
// lib and shuts it down again; lib counts, so the caller may have it initialized too. Several
// goroutines may use the source at a time if they may use lib.
//
// A function that a mock does not implement counts as one that the driver does not have.
func GPUs(lib gonvml.Interface) func(context.Context) ([]topology.GPU, error) {
	return topology.NVML(func() (nvml.Interface, error) {
		switch ret := lib.Init(); ret {
		case gonvml.SUCCESS:
			return &library{lib: lib, symbols: symbols(lib)}, nil
		case gonvml.ERROR_LIBRARY_NOT_FOUND:
			return nil, nvml.ErrNoLibrary
		default:
			return nil, failed("nvmlInit_v2", ret)
		}
	})
}

// library makes an nvml.Interface of go-nvml's, for one query.
type library struct {
	lib     gonvml.Interface
	symbols gonvml.ExtendedInterface // nil: lib is a mock without them
	devices []gonvml.Device          // device i has the handle i+1
}

// symbols returns the part of lib that looks up symbols, or nil if lib is a mock that has none.
func symbols(lib gonvml.Interface) (found gonvml.ExtendedInterface) {
	defer notMocked(func() { found = nil })
	return lib.Extensions()
}

// notMocked is deferred. If the function panicked because a mock that moq generated has no
// implementation of a method, notMocked calls then and ends the panic.
func notMocked(then func()) {
	p := recover()
	if text, ok := p.(string); ok && strings.Contains(text, "method is nil but") {
		then()
	} else if p != nil {
		panic(p)
	}
}

// ask calls a function of the library. The process would die at a function that the driver's library
// does not have, so ask looks the symbol up first.
func ask[T any](l *library, name string, call func() (T, gonvml.Return)) (value T, err error) {
	defer notMocked(func() { err = missing(name) })
	if l.symbols != nil && l.symbols.LookupSymbol(name) != nil {
		return value, missing(name)
	}
	value, ret := call()
	return value, failed(name, ret)
}

func missing(name string) error {
	return &nvml.Error{Call: name, Code: nvml.ErrFunctionNotFound, Text: "the library has no such function"}
}

// failed returns the error of a call, or nil. The text of a result may be the library's memory, which
// goes away with the library.
func failed(name string, ret gonvml.Return) error {
	if ret == gonvml.SUCCESS {
		return nil
	}
	return &nvml.Error{Call: name, Code: nvml.Code(ret), Text: strings.Clone(ret.Error())}
}

// keep returns the handle of a device.
func (l *library) keep(d gonvml.Device, err error) (nvml.Device, error) {
	if err != nil || d == nil {
		return 0, err
	}
	l.devices = append(l.devices, d)
	return nvml.Device(len(l.devices)), nil
}

// device returns the device of a handle.
func (l *library) device(d nvml.Device) gonvml.Device { return l.devices[d-1] }

func (l *library) Close() { _ = l.lib.Shutdown() }

func (l *library) Count() (int, error) { return ask(l, "nvmlDeviceGetCount_v2", l.lib.DeviceGetCount) }

func (l *library) Device(index int) (nvml.Device, error) {
	return l.keep(ask(l, "nvmlDeviceGetHandleByIndex_v2", func() (gonvml.Device, gonvml.Return) {
		return l.lib.DeviceGetHandleByIndex(index)
	}))
}

func (l *library) Name(d nvml.Device) (string, error) {
	return ask(l, "nvmlDeviceGetName", l.device(d).GetName)
}

func (l *library) UUID(d nvml.Device) (string, error) {
	return ask(l, "nvmlDeviceGetUUID", l.device(d).GetUUID)
}

func (l *library) PCI(d nvml.Device) (nvml.PCI, error) {
	info, err := ask(l, "nvmlDeviceGetPciInfo_v3", l.device(d).GetPciInfo)
	return pci(info), err
}

func (l *library) Memory(d nvml.Device) (nvml.Memory, error) {
	m, err := ask(l, "nvmlDeviceGetMemoryInfo", l.device(d).GetMemoryInfo)
	return nvml.Memory{Total: m.Total, Free: m.Free, Used: m.Used}, err
}

func (l *library) PCIeGeneration(d nvml.Device) (int, error) {
	return ask(l, "nvmlDeviceGetMaxPcieLinkGeneration", l.device(d).GetMaxPcieLinkGeneration)
}

func (l *library) PCIeWidth(d nvml.Device) (int, error) {
	return ask(l, "nvmlDeviceGetCurrPcieLinkWidth", l.device(d).GetCurrPcieLinkWidth)
}

func (l *library) Node(d nvml.Device) (int, error) {
	return ask(l, "nvmlDeviceGetNumaNodeId", l.device(d).GetNumaNodeId)
}

// The most nodes and CPUs that Linux can have.
const (
	maxNodes = 1024
	maxCPUs  = 8192
)

func (l *library) NodeAffinity(d nvml.Device) ([]uint, error) {
	return ask(l, "nvmlDeviceGetMemoryAffinity", func() ([]uint, gonvml.Return) {
		return l.device(d).GetMemoryAffinity(maxNodes, gonvml.AFFINITY_SCOPE_NODE)
	})
}

func (l *library) CPUAffinity(d nvml.Device) ([]uint, error) {
	return ask(l, "nvmlDeviceGetCpuAffinity", func() ([]uint, gonvml.Return) {
		return l.device(d).GetCpuAffinity(maxCPUs)
	})
}

func (l *library) LinkUp(d nvml.Device, link int) (bool, error) {
	state, err := ask(l, "nvmlDeviceGetNvLinkState", func() (gonvml.EnableState, gonvml.Return) {
		return l.device(d).GetNvLinkState(link)
	})
	return state == gonvml.FEATURE_ENABLED, err
}

func (l *library) LinkRemote(d nvml.Device, link int) (nvml.PCI, error) {
	info, err := ask(l, "nvmlDeviceGetNvLinkRemotePciInfo_v2", func() (gonvml.PciInfo, gonvml.Return) {
		return l.device(d).GetNvLinkRemotePciInfo(link)
	})
	return pci(info), err
}

func (l *library) LinkKind(d nvml.Device, link int) (nvml.LinkKind, error) {
	kind, err := ask(l, "nvmlDeviceGetNvLinkRemoteDeviceType", func() (gonvml.IntNvLinkDeviceType, gonvml.Return) {
		return l.device(d).GetNvLinkRemoteDeviceType(link)
	})
	return nvml.LinkKind(kind), err
}

func (l *library) MIG(d nvml.Device) (bool, error) {
	current, err := ask(l, "nvmlDeviceGetMigMode", func() (int, gonvml.Return) {
		current, _, ret := l.device(d).GetMigMode()
		return current, ret
	})
	return current == gonvml.DEVICE_MIG_ENABLE, err
}

func (l *library) MaxInstances(d nvml.Device) (int, error) {
	return ask(l, "nvmlDeviceGetMaxMigDeviceCount", l.device(d).GetMaxMigDeviceCount)
}

func (l *library) Instance(d nvml.Device, k int) (nvml.Device, error) {
	return l.keep(ask(l, "nvmlDeviceGetMigDeviceHandleByIndex", func() (gonvml.Device, gonvml.Return) {
		return l.device(d).GetMigDeviceHandleByIndex(k)
	}))
}

func (l *library) GPUInstance(d nvml.Device) (int, error) {
	return ask(l, "nvmlDeviceGetGpuInstanceId", l.device(d).GetGpuInstanceId)
}

func (l *library) ComputeInstance(d nvml.Device) (int, error) {
	return ask(l, "nvmlDeviceGetComputeInstanceId", l.device(d).GetComputeInstanceId)
}

func pci(info gonvml.PciInfo) nvml.PCI {
	return nvml.PCI{
		Address: dynlib.Text(info.BusId[:]), Domain: info.Domain, Bus: info.Bus, Device: info.Device,
		DeviceID: info.PciDeviceId,
	}
}
