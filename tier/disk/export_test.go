package disk

// UnderWay is how many bytes of reads and writes the volume's window has under way.
func (v *Volume) UnderWay() int64 {
	v.window.mu.Lock()
	defer v.window.mu.Unlock()
	return v.window.mu.inside
}
