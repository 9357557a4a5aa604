package nvml

// Interface is the part of NVIDIA's library that package topology calls. A *Library is one, bound at
// run time; package topology/gonvml makes one of go-nvml's. Both fail alike: with an *Error that has
// the name of the function and the library's code.
//
// A Device is valid until Close. The methods are documented at Library.
type Interface interface {
	Count() (int, error)
	Device(index int) (Device, error)
	Name(Device) (string, error)
	UUID(Device) (string, error)
	PCI(Device) (PCI, error)
	Memory(Device) (Memory, error)
	PCIeGeneration(Device) (int, error)
	PCIeWidth(Device) (int, error)
	Node(Device) (int, error)
	NodeAffinity(Device) ([]uint, error)
	CPUAffinity(Device) ([]uint, error)
	LinkUp(d Device, link int) (bool, error)
	LinkRemote(d Device, link int) (PCI, error)
	LinkKind(d Device, link int) (LinkKind, error)
	MIG(Device) (bool, error)
	MaxInstances(Device) (int, error)
	Instance(d Device, k int) (Device, error)
	GPUInstance(Device) (int, error)
	ComputeInstance(Device) (int, error)
	Close()
}

var _ Interface = (*Library)(nil)
