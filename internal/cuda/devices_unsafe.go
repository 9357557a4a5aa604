package cuda

import (
	"fmt"
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
	"github.com/spillway-db/spillway/internal/named"
)

// Devices describes all devices that the driver shows. None is an error of Load.
func (l *Library) Devices() ([]DeviceInfo, error) {
	var n int32
	if err := l.call(l.cuDeviceGetCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	infos := make([]DeviceInfo, n)
	for i := range infos {
		var err error
		if infos[i], _, err = l.device(i); err != nil {
			return nil, err
		}
	}
	return infos, nil
}

// handle returns the driver's number of a device. It is the ordinal, but the driver's documentation
// does not say so.
func (l *Library) handle(ordinal int) (dev int32, err error) {
	err = l.call(l.cuDeviceGet, uintptr(unsafe.Pointer(&dev)), uintptr(ordinal))
	return dev, err
}

func (l *Library) device(ordinal int) (info DeviceInfo, dev int32, err error) {
	info.Ordinal = ordinal
	if dev, err = l.handle(ordinal); err != nil {
		return info, 0, err
	}
	var name [256]byte
	if err := l.call(l.cuDeviceGetName, uintptr(unsafe.Pointer(&name)), uintptr(len(name)), uintptr(dev)); err != nil {
		return info, 0, err
	}
	info.Name = dynlib.Text(name[:])
	var pci [32]byte
	err = l.call(l.cuDeviceGetPCIBusId, uintptr(unsafe.Pointer(&pci)), uintptr(len(pci)), uintptr(dev))
	if err != nil {
		return info, 0, err
	}
	info.PCI = dynlib.Text(pci[:])
	if address := named.PCIAddress(info.PCI); address != "" {
		info.PCI = address
	}
	identify := l.cuDeviceGetUuid_v2
	if identify.fn == 0 {
		identify = l.cuDeviceGetUuid
	}
	var u [16]byte
	if err := l.call(identify, uintptr(unsafe.Pointer(&u)), uintptr(dev)); err != nil {
		return info, 0, err
	}
	info.UUID = fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
	if err := l.call(l.cuDeviceTotalMem_v2, uintptr(unsafe.Pointer(&info.Memory)), uintptr(dev)); err != nil {
		return info, 0, err
	}
	if !l.HasPools() { // older drivers do not know the question
		return info, dev, nil
	}
	const attributeMemoryPools = 115
	var pools int32
	err = l.call(l.cuDeviceGetAttribute, uintptr(unsafe.Pointer(&pools)), attributeMemoryPools, uintptr(dev))
	info.Pools = pools != 0
	return info, dev, err
}

// Ordinal returns which device the current context is of.
func (c *Calls) Ordinal() (int, error) {
	var dev, n int32
	if err := c.call(c.cuCtxGetDevice, uintptr(unsafe.Pointer(&dev))); err != nil {
		return 0, err
	}
	if err := c.call(c.cuDeviceGetCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return 0, err
	}
	for i := range int(n) {
		if h, err := c.handle(i); err != nil || h == dev {
			return i, err
		}
	}
	return 0, &Error{
		Call: c.cuCtxGetDevice.name,
		Code: ErrInvalidDevice,
		Name: "the context's device is none that the driver shows",
	}
}

// CanAccessPeer reports whether a device can reach the memory of another.
func (l *Library) CanAccessPeer(ordinal, peer int) (bool, error) {
	dev, err := l.handle(ordinal)
	if err != nil {
		return false, err
	}
	other, err := l.handle(peer)
	if err != nil {
		return false, err
	}
	var can int32
	err = l.call(l.cuDeviceCanAccessPeer, uintptr(unsafe.Pointer(&can)), uintptr(dev), uintptr(other))
	return can != 0, err
}

// retain returns the primary context of a device, which stays until release.
func (l *Library) retain(dev int32) (ctx Context, err error) {
	err = l.call(l.cuDevicePrimaryCtxRetain, uintptr(unsafe.Pointer(&ctx)), uintptr(dev))
	return ctx, err
}

// release gives a primary context up.
func (l *Library) release(dev int32) error {
	return l.call(l.cuDevicePrimaryCtxRelease_v2, uintptr(dev))
}
