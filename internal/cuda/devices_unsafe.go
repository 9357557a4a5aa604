package cuda

import (
	"fmt"
	"unsafe"

	"github.com/spillway-db/spillway/internal/dynlib"
	"github.com/spillway-db/spillway/internal/gpuid"
)

// Devices describes all devices that the driver shows. None is an error of Load.
func (l *Library) Devices() ([]DeviceInfo, error) {
	var n int32
	if err := l.call(&l.sym.deviceCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	infos := make([]DeviceInfo, n)
	for i := range infos {
		var err error
		if infos[i], err = l.device(i); err != nil {
			return nil, err
		}
	}
	return infos, nil
}

// handle returns the driver's number of a device.
func (l *Library) handle(ordinal int) (int32, error) {
	var dev int32
	err := l.call(&l.sym.deviceGet, uintptr(unsafe.Pointer(&dev)), uintptr(ordinal))
	return dev, err
}

func (l *Library) device(ordinal int) (DeviceInfo, error) {
	info := DeviceInfo{Ordinal: ordinal}
	dev, err := l.handle(ordinal)
	if err != nil {
		return info, err
	}
	if info.Name, err = l.deviceText(&l.sym.deviceName, dev, 256); err != nil {
		return info, err
	}
	if info.PCI, err = l.deviceText(&l.sym.devicePCI, dev, 32); err != nil {
		return info, err
	}
	if address := gpuid.Address(info.PCI); address != "" {
		info.PCI = address
	}
	if info.UUID, err = l.deviceUUID(dev); err != nil {
		return info, err
	}
	var size uintptr
	if err := l.call(&l.sym.deviceMemory, uintptr(unsafe.Pointer(&size)), uintptr(dev)); err != nil {
		return info, err
	}
	info.Memory = int64(size)
	if !l.HasPools() { // older drivers do not know the question
		return info, nil
	}
	pools, err := l.Attribute(ordinal, AttributeMemoryPools)
	info.Pools = pools != 0
	return info, err
}

func (l *Library) deviceText(e *entry, dev int32, n int) (string, error) {
	b := make([]byte, n)
	if err := l.call(e, uintptr(unsafe.Pointer(&b[0])), uintptr(n), uintptr(dev)); err != nil {
		return "", err
	}
	return dynlib.Text(b), nil
}

func (l *Library) deviceUUID(dev int32) (string, error) {
	e := &l.sym.deviceUUID
	if l.sym.device2ID.fn != 0 {
		e = &l.sym.device2ID
	}
	var u [16]byte
	if err := l.call(e, uintptr(unsafe.Pointer(&u)), uintptr(dev)); err != nil {
		return "", err
	}
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]), nil
}

// Ordinal returns which device the current context is of.
func (c *Calls) Ordinal() (int, error) {
	var dev, n int32
	if err := c.lib.call(&c.lib.sym.ctxDevice, uintptr(unsafe.Pointer(&dev))); err != nil {
		return 0, err
	}
	if err := c.lib.call(&c.lib.sym.deviceCount, uintptr(unsafe.Pointer(&n))); err != nil {
		return 0, err
	}
	for i := range int(n) {
		if h, err := c.lib.handle(i); err != nil || h == dev {
			return i, err
		}
	}
	return 0, &Error{
		Call: c.lib.sym.ctxDevice.name,
		Code: ErrInvalidDevice,
		Name: "the context's device is none that the driver shows",
	}
}

// Attribute asks a device.
func (l *Library) Attribute(ordinal int, a Attribute) (int, error) {
	dev, err := l.handle(ordinal)
	if err != nil {
		return 0, err
	}
	var value int32
	err = l.call(&l.sym.deviceAttribute, uintptr(unsafe.Pointer(&value)), uintptr(a), uintptr(dev))
	return int(value), err
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
	err = l.call(&l.sym.canAccessPeer, uintptr(unsafe.Pointer(&can)), uintptr(dev), uintptr(other))
	return can != 0, err
}

// release gives a primary context up. The device's number is its ordinal for the driver, but
// that is nowhere written.
func (l *Library) release(ordinal int) error {
	dev, err := l.handle(ordinal)
	if err != nil {
		dev = int32(ordinal)
	}
	return l.releasePrimary(dev)
}
