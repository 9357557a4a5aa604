package sim

import "unsafe"

// ByteAt reads the process's memory, as a program in C does.
func ByteAt(p uintptr) byte { return **(**byte)(unsafe.Pointer(&p)) }

// Gone says whether nobody has the memory any more.
func (d *Device) Gone() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.mu.lent == 0
}

// Touched returns how many bytes were touched ahead of use.
func (d *Device) Touched() int64 { return d.arena.touched.Load() }
