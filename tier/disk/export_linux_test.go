package disk

import "os"

// LockOpen is what OS().Lock does when it has opened a file.
func LockOpen(f *os.File) error { return lockOpen(f) }

// Descriptor returns the descriptor of a real file, for tests that compare a volume
// with what the system does.
func Descriptor(f File) int { return int(f.(*osFile).f.Fd()) }
