package tier

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
	for d := range layers(dev) {
		dev = d // the innermost
	}
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
	// Of a device that may fail to find out, FreeBytes says so.
	if t, ok := dev.(interface{ FreeBytes() (int64, error) }); ok {
		free, err := t.FreeBytes()
		return free, err == nil
	}
	free, total := dev.MemInfo()
	return free, total > 0
}
