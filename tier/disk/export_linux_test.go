package disk

// Descriptor returns the descriptor of a real file, for tests that compare a volume
// with what the system does.
func Descriptor(f File) int { return int(f.(*osFile).f.Fd()) }
