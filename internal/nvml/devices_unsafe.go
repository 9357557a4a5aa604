package nvml

import (
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
)

// Device is a GPU, or a MIG instance of one, as the library knows it.
type Device uintptr

// pciInfo is nvmlPciInfo_t.
type pciInfo struct {
	legacy                                 [16]byte
	domain, bus, device, deviceID, boardID uint32
	address                                [32]byte
}

// PCI is where a device is on the PCI bus. What is at the other end of a link and not to be seen
// has a Domain of all ones.
type PCI struct {
	Address             string // such as 00000000:3B:00.0
	Domain, Bus, Device uint32
	DeviceID            uint32 // the device's in the upper half, the vendor's in the lower
}

// Memory is nvmlMemory_t: bytes of a device's memory.
type Memory struct{ Total, Free, Used uint64 }

// LinkKind is what an NVLink leads to.
type LinkKind int

// The kinds, by the library's numbers.
const (
	LinkToGPU       LinkKind = 0
	LinkToProcessor LinkKind = 1 // IBM's
	LinkToSwitch    LinkKind = 2
	LinkUnknown     LinkKind = 0xff
)

// Numbers of the library that stay inside.
const (
	linkEnabled = 1
	migEnabled  = 1
	scopeNode   = 0
)

// MaxLinks is how many NVLinks a device may have.
const MaxLinks = 18

// Count returns how many GPUs there are, with those that cannot be asked.
func (l *Library) Count() (int, error) {
	var n uint32
	err := l.call("nvmlDeviceGetCount_v2", uintptr(unsafe.Pointer(&n)))
	return int(n), err
}

// Minor returns the number of a GPU's file, /dev/nvidia<number>.
func (l *Library) Minor(d Device) (int, error) { return l.number("nvmlDeviceGetMinorNumber", d) }

// Device returns a GPU by its index, from 0.
func (l *Library) Device(index int) (Device, error) {
	var d Device
	err := l.call("nvmlDeviceGetHandleByIndex_v2", uintptr(index), uintptr(unsafe.Pointer(&d)))
	return d, err
}

// Name returns the product's name.
func (l *Library) Name(d Device) (string, error) { return l.text("nvmlDeviceGetName", d) }

// UUID returns the GPU's or instance's own name.
func (l *Library) UUID(d Device) (string, error) { return l.text("nvmlDeviceGetUUID", d) }

// PCI returns where the GPU is.
func (l *Library) PCI(d Device) (PCI, error) {
	var info pciInfo
	err := l.call("nvmlDeviceGetPciInfo_v3", uintptr(d), uintptr(unsafe.Pointer(&info)))
	return info.told(), err
}

func (p *pciInfo) told() PCI {
	return PCI{Address: dynlib.Text(p.address[:]), Domain: p.domain, Bus: p.bus, Device: p.device, DeviceID: p.deviceID}
}

// Memory returns how much memory there is, and is free.
func (l *Library) Memory(d Device) (Memory, error) {
	var m Memory
	err := l.call("nvmlDeviceGetMemoryInfo", uintptr(d), uintptr(unsafe.Pointer(&m)))
	return m, err
}

// PCIeGeneration returns the generation that the GPU and its slot can do.
func (l *Library) PCIeGeneration(d Device) (int, error) {
	return l.number("nvmlDeviceGetMaxPcieLinkGeneration", d)
}

// PCIeWidth returns the lanes that are in use.
func (l *Library) PCIeWidth(d Device) (int, error) {
	return l.number("nvmlDeviceGetCurrPcieLinkWidth", d)
}

// Node returns the NUMA node whose memory is the GPU's own. Where that is none, drivers do not
// support the question, or say all ones.
func (l *Library) Node(d Device) (int, error) { return l.number("nvmlDeviceGetNumaNodeId", d) }

// How many nodes and CPUs are queried: as many as Linux can have, by words of 64.
const (
	askedNodes = 1024 / 64
	askedCPUs  = 8192 / 64
)

// NodeAffinity returns the NUMA nodes whose memory is nearest: bit k of word i is node 64i+k.
func (l *Library) NodeAffinity(d Device) ([]uint64, error) {
	return fill(askedNodes, func(w []uint64) error {
		return l.call("nvmlDeviceGetMemoryAffinity", uintptr(d), uintptr(len(w)), uintptr(unsafe.Pointer(&w[0])), scopeNode)
	})
}

// CPUAffinity returns the CPUs that are nearest, by bits as NodeAffinity.
func (l *Library) CPUAffinity(d Device) ([]uint64, error) {
	return fill(askedCPUs, func(w []uint64) error {
		return l.call("nvmlDeviceGetCpuAffinity", uintptr(d), uintptr(len(w)), uintptr(unsafe.Pointer(&w[0])))
	})
}

// LinkUp reports whether an NVLink is in use.
func (l *Library) LinkUp(d Device, link int) (bool, error) {
	state, err := l.numberAt("nvmlDeviceGetNvLinkState", d, link)
	return state == linkEnabled, err
}

// LinkRemote returns where the other end of an NVLink is.
func (l *Library) LinkRemote(d Device, link int) (PCI, error) {
	var info pciInfo
	err := l.call("nvmlDeviceGetNvLinkRemotePciInfo_v2", uintptr(d), uintptr(link), uintptr(unsafe.Pointer(&info)))
	return info.told(), err
}

// LinkKind returns what is at the other end of an NVLink.
func (l *Library) LinkKind(d Device, link int) (LinkKind, error) {
	kind, err := l.numberAt("nvmlDeviceGetNvLinkRemoteDeviceType", d, link)
	return LinkKind(kind), err
}

// MIG reports whether the GPU is divided into instances.
func (l *Library) MIG(d Device) (bool, error) {
	var current, pending uint32
	err := l.call("nvmlDeviceGetMigMode", uintptr(d), uintptr(unsafe.Pointer(&current)), uintptr(unsafe.Pointer(&pending)))
	return current == migEnabled, err
}

// MaxInstances returns how many places there are for instances, some of which may be empty.
func (l *Library) MaxInstances(d Device) (int, error) {
	return l.number("nvmlDeviceGetMaxMigDeviceCount", d)
}

// Instance returns the instance in place k, from 0; ErrNotFound: there is none.
func (l *Library) Instance(d Device, k int) (Device, error) {
	var part Device
	err := l.call("nvmlDeviceGetMigDeviceHandleByIndex", uintptr(d), uintptr(k), uintptr(unsafe.Pointer(&part)))
	return part, err
}

// GPUInstance returns which GPU instance an instance belongs to.
func (l *Library) GPUInstance(part Device) (int, error) {
	return l.number("nvmlDeviceGetGpuInstanceId", part)
}

// ComputeInstance returns which compute instance of it an instance is.
func (l *Library) ComputeInstance(part Device) (int, error) {
	return l.number("nvmlDeviceGetComputeInstanceId", part)
}
