package tier

// FreeTeller is a device that can say that it does not know how much of its memory is free.
// A decorator may implement it, or be looked through.
type FreeTeller interface {
	// FreeBytes returns the bytes that can still be allocated on the device, as MemInfo does, or
	// the error that kept it from finding out.
	FreeBytes() (int64, error)
}

// ForeignOn returns how many bytes of the space's capacity others hold on dev, the device
// that the space is on: other processes, other libraries of this one, and other spaces on
// the same device. It is what is neither free nor in the space's own books. What the device
// keeps of freed memory counts as free, and memory of others that the space has adopted
// (LentMemory) as its own. If the device is larger than the space, others may fill the rest
// of it first.
//
// Decorators are looked through, because the limits that they make are not foreign bytes.
// ok is false if that cannot be said now: the space is lost, the device does not answer, or
// the space's books change all the time. The call may take as long as the device's driver
// does; it must be made with no lock held.
func (s *Space) ForeignOn(dev Device) (bytes int64, ok bool) {
	dev = innermost(dev)
	for range 4 {
		before := s.Usage()
		free, known := freeOn(dev)
		after := s.Usage()
		if s.Lost() != nil || !known {
			return 0, false
		}
		if before.Live == after.Live && before.Retired == after.Retired {
			return max(0, s.cfg.Capacity-after.Live-after.Retired-free), true
		}
	}
	return 0, false
}

func freeOn(dev Device) (bytes int64, known bool) {
	if t, ok := dev.(FreeTeller); ok {
		free, err := t.FreeBytes()
		return free, err == nil
	}
	free, total := dev.MemInfo()
	return free, total > 0
}

// innermost returns the device that all decorators of dev are over.
func innermost(dev Device) Device {
	for {
		w, ok := dev.(interface{ Unwrap() Device })
		if !ok {
			return dev
		}
		inner := w.Unwrap()
		if inner == nil {
			return dev
		}
		dev = inner
	}
}
