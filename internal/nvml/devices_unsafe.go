package nvml

import (
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// Device is the library's handle of a GPU, or of a MIG instance of one.
type Device uintptr

// pciInfo is nvmlPciInfo_t.
type pciInfo struct {
	legacy                                 [16]byte
	domain, bus, device, deviceID, boardID uint32
	address                                [32]byte
}

// PCI is the place of a device on the PCI bus. A device at the other end of a link that this machine
// does not see has a Domain of all ones.
type PCI struct {
	Address             string // such as 00000000:3B:00.0
	Domain, Bus, Device uint32
	DeviceID            uint32 // the device's in the upper half, the vendor's in the lower
}

// Memory is nvmlMemory_t: bytes of a device's memory.
type Memory struct{ Total, Free, Used uint64 }

// LinkKind is the kind of device at the other end of an NVLink.
type LinkKind int

// The kinds, by the library's numbers.
const (
	LinkToGPU       LinkKind = 0
	LinkToProcessor LinkKind = 1 // IBM's
	LinkToSwitch    LinkKind = 2
	LinkUnknown     LinkKind = 0xff
)

// Numbers of the library that callers do not need.
const (
	linkEnabled = 1
	migEnabled  = 1
	scopeNode   = 0
)

// MaxLinks is the most NVLinks that a device may have.
const MaxLinks = 18

// Count returns the number of GPUs, lost ones included.
func (l *Library) Count() (int, error) {
	var n uint32
	err := l.call("nvmlDeviceGetCount_v2", uintptr(unsafe.Pointer(&n)))
	return int(n), err
}

// Device returns a GPU by its index, from 0.
func (l *Library) Device(index int) (Device, error) {
	var d Device
	err := l.call("nvmlDeviceGetHandleByIndex_v2", uintptr(index), uintptr(unsafe.Pointer(&d)))
	return d, err
}

// Name returns the product's name.
func (l *Library) Name(d Device) (string, error) { return l.text("nvmlDeviceGetName", d) }

// UUID returns the UUID of the GPU or the instance.
func (l *Library) UUID(d Device) (string, error) { return l.text("nvmlDeviceGetUUID", d) }

// PCI returns the place of the GPU.
func (l *Library) PCI(d Device) (PCI, error) {
	var info pciInfo
	err := l.call("nvmlDeviceGetPciInfo_v3", uintptr(d), uintptr(unsafe.Pointer(&info)))
	return info.told(), err
}

func (p *pciInfo) told() PCI {
	return PCI{Address: dynlib.Text(p.address[:]), Domain: p.domain, Bus: p.bus, Device: p.device, DeviceID: p.deviceID}
}

// Memory returns the total and free memory.
func (l *Library) Memory(d Device) (Memory, error) {
	var m Memory
	err := l.call("nvmlDeviceGetMemoryInfo", uintptr(d), uintptr(unsafe.Pointer(&m)))
	return m, err
}

// PCIeGeneration returns the highest generation that the GPU and its slot support.
func (l *Library) PCIeGeneration(d Device) (int, error) {
	return l.number("nvmlDeviceGetMaxPcieLinkGeneration", d)
}

// PCIeWidth returns the number of lanes in use.
func (l *Library) PCIeWidth(d Device) (int, error) {
	return l.number("nvmlDeviceGetCurrPcieLinkWidth", d)
}

// Node returns the NUMA node whose memory is the GPU's own. If there is none, drivers do not support
// the query, or return all ones.
func (l *Library) Node(d Device) (int, error) { return l.number("nvmlDeviceGetNumaNodeId", d) }

// The words of 64 bits that hold as many nodes and CPUs as Linux can have.
const (
	askedNodes = 1024 / 64
	askedCPUs  = 8192 / 64
)

// NodeAffinity returns the NUMA nodes whose memory is nearest: bit k of word i is node 64i+k.
func (l *Library) NodeAffinity(d Device) ([]uint, error) {
	return fill(askedNodes, func(w []uint) error {
		return l.call(
			"nvmlDeviceGetMemoryAffinity",
			uintptr(d),
			uintptr(len(w)),
			uintptr(unsafe.Pointer(&w[0])),
			scopeNode,
		)
	})
}

// CPUAffinity returns the CPUs that are nearest, by bits as NodeAffinity.
func (l *Library) CPUAffinity(d Device) ([]uint, error) {
	return fill(askedCPUs, func(w []uint) error {
		return l.call("nvmlDeviceGetCpuAffinity", uintptr(d), uintptr(len(w)), uintptr(unsafe.Pointer(&w[0])))
	})
}

// LinkUp reports whether an NVLink is in use.
func (l *Library) LinkUp(d Device, link int) (bool, error) {
	state, err := l.numberAt("nvmlDeviceGetNvLinkState", d, link)
	return state == linkEnabled, err
}

// LinkRemote returns the place of the device at the other end of an NVLink.
func (l *Library) LinkRemote(d Device, link int) (PCI, error) {
	var info pciInfo
	err := l.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", uintptr(d), uintptr(link), uintptr(unsafe.Pointer(&info)))
	return info.told(), err
}

// LinkKind returns the kind of device at the other end of an NVLink.
func (l *Library) LinkKind(d Device, link int) (LinkKind, error) {
	kind, err := l.numberAt("nvmlDeviceGetNvLinkRemoteDeviceType", d, link)
	return LinkKind(kind), err
}

// MIG reports whether the GPU is divided into instances.
func (l *Library) MIG(d Device) (bool, error) {
	var current, pending uint32
	err := l.call(
		"nvmlDeviceGetMigMode",
		uintptr(d),
		uintptr(unsafe.Pointer(&current)),
		uintptr(unsafe.Pointer(&pending)),
	)
	return current == migEnabled, err
}

// MaxInstances returns the number of places for instances. Some may be empty.
func (l *Library) MaxInstances(d Device) (int, error) {
	return l.number("nvmlDeviceGetMaxMigDeviceCount", d)
}

// Instance returns the instance in place k, from 0. If the place is empty, the error is ErrNotFound.
func (l *Library) Instance(d Device, k int) (Device, error) {
	var part Device
	err := l.call("nvmlDeviceGetMigDeviceHandleByIndex", uintptr(d), uintptr(k), uintptr(unsafe.Pointer(&part)))
	return part, err
}

// GPUInstance returns the number of the GPU instance that a MIG instance belongs to.
func (l *Library) GPUInstance(part Device) (int, error) {
	return l.number("nvmlDeviceGetGpuInstanceId", part)
}

// ComputeInstance returns the number of the compute instance in its GPU instance.
func (l *Library) ComputeInstance(part Device) (int, error) {
	return l.number("nvmlDeviceGetComputeInstanceId", part)
}
