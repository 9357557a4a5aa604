//go:build gonvml && cgo

package topology_test

import (
	"context"
	"errors"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"

	"github.com/spillway-db/spillway/internal/nvml"
	"github.com/spillway-db/spillway/topology"
	adapter "github.com/spillway-db/spillway/topology/gonvml"
)

var bindings = map[string]binding{"run-time binding": direct, "go-nvml": mocked}

// mocked calls the fake through go-nvml's mock and the adapter.
func mocked(l *fakeLibrary) func(context.Context) ([]topology.GPU, error) {
	return adapter.GPUs(&mock.Interface{
		ExtensionsFunc: func() gonvml.ExtendedInterface {
			return &mock.ExtendedInterface{LookupSymbolFunc: func(string) error { return nil }}
		},
		InitFunc:           func() gonvml.Return { return returned(l.init()) },
		ShutdownFunc:       func() gonvml.Return { l.Close(); return gonvml.SUCCESS },
		DeviceGetCountFunc: func() (int, gonvml.Return) { return result(l.Count()) },
		DeviceGetHandleByIndexFunc: func(i int) (gonvml.Device, gonvml.Return) {
			d, err := l.Device(i)
			return mockedDevice(l, d), returned(err)
		},
	})
}

func mockedDevice(l *fakeLibrary, d nvml.Device) gonvml.Device {
	if d == 0 {
		return nil
	}
	return &mock.Device{
		GetNameFunc: func() (string, gonvml.Return) { return result(l.Name(d)) },
		GetUUIDFunc: func() (string, gonvml.Return) { return result(l.UUID(d)) },
		GetPciInfoFunc: func() (gonvml.PciInfo, gonvml.Return) {
			p, err := l.PCI(d)
			return pciInfo(p), returned(err)
		},
		GetMemoryInfoFunc: func() (gonvml.Memory, gonvml.Return) {
			m, err := l.Memory(d)
			return gonvml.Memory{Total: m.Total, Free: m.Free, Used: m.Used}, returned(err)
		},
		GetMaxPcieLinkGenerationFunc: func() (int, gonvml.Return) { return result(l.PCIeGeneration(d)) },
		GetCurrPcieLinkWidthFunc:     func() (int, gonvml.Return) { return result(l.PCIeWidth(d)) },
		GetNumaNodeIdFunc:            func() (int, gonvml.Return) { return result(l.Node(d)) },
		GetMemoryAffinityFunc: func(int, gonvml.AffinityScope) ([]uint, gonvml.Return) {
			w, err := l.NodeAffinity(d)
			return w, returned(err)
		},
		GetCpuAffinityFunc: func(int) ([]uint, gonvml.Return) {
			w, err := l.CPUAffinity(d)
			return w, returned(err)
		},
		GetNvLinkStateFunc: func(link int) (gonvml.EnableState, gonvml.Return) {
			up, err := l.LinkUp(d, link)
			if up {
				return gonvml.FEATURE_ENABLED, returned(err)
			}
			return gonvml.FEATURE_DISABLED, returned(err)
		},
		GetNvLinkRemotePciInfoFunc: func(link int) (gonvml.PciInfo, gonvml.Return) {
			p, err := l.LinkRemote(d, link)
			return pciInfo(p), returned(err)
		},
		GetNvLinkRemoteDeviceTypeFunc: func(link int) (gonvml.IntNvLinkDeviceType, gonvml.Return) {
			kind, err := l.LinkKind(d, link)
			return gonvml.IntNvLinkDeviceType(kind), returned(err)
		},
		GetMigModeFunc: func() (int, int, gonvml.Return) {
			mig, err := l.MIG(d)
			if mig {
				return gonvml.DEVICE_MIG_ENABLE, gonvml.DEVICE_MIG_DISABLE, returned(err)
			}
			return gonvml.DEVICE_MIG_DISABLE, gonvml.DEVICE_MIG_ENABLE, returned(err)
		},
		GetMaxMigDeviceCountFunc: func() (int, gonvml.Return) { return result(l.MaxInstances(d)) },
		GetMigDeviceHandleByIndexFunc: func(k int) (gonvml.Device, gonvml.Return) {
			part, err := l.Instance(d, k)
			return mockedDevice(l, part), returned(err)
		},
		GetGpuInstanceIdFunc:     func() (int, gonvml.Return) { return result(l.GPUInstance(d)) },
		GetComputeInstanceIdFunc: func() (int, gonvml.Return) { return result(l.ComputeInstance(d)) },
	}
}

func result[T any](value T, err error) (T, gonvml.Return) { return value, returned(err) }

func returned(err error) gonvml.Return {
	var failed *nvml.Error
	var code nvml.Code
	switch {
	case err == nil:
		return gonvml.SUCCESS
	case errors.Is(err, nvml.ErrNoLibrary):
		return gonvml.ERROR_LIBRARY_NOT_FOUND
	case errors.As(err, &failed):
		return gonvml.Return(failed.Code)
	case errors.As(err, &code):
		return gonvml.Return(code)
	}
	panic(err)
}

func pciInfo(p nvml.PCI) gonvml.PciInfo {
	info := gonvml.PciInfo{Domain: p.Domain, Bus: p.Bus, Device: p.Device, PciDeviceId: p.DeviceID}
	copy(info.BusId[:], p.Address)
	return info
}
