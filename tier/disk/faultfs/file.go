package faultfs

import (
	"github.com/spillway-db/spillway/internal/extent"
	"github.com/spillway-db/spillway/tier/disk"
)

// file is a disk.File whose operations can fail.
type file struct {
	disk.File
	*handle
}

func (f *file) Close() error { return f.handle.Close() }

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	return f.transfer(opRead, f.File.ReadAt, p, off)
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	return f.transfer(opWrite, f.File.WriteAt, p, off)
}

func (f *file) transfer(op string, do func([]byte, int64) (int, error), p []byte, off int64) (int, error) {
	e := f.fs.apply(op, f.path, len(p))
	defer e.passed()
	switch {
	case e.err != nil:
		return 0, e.err
	case e.short:
		return f.half(do, p, off)
	case e.flip && op == opWrite && len(p) > 0:
		changed := extent.Aligned(len(p)) // the caller's bytes must not change
		copy(changed, p)
		f.flipBit(changed)
		p = changed
	}
	n, err := do(p, off)
	if e.flip && op == opRead && n > 0 {
		f.flipBit(p[:n])
	}
	return n, err
}

// half does about half of an operation, as much as the file's alignment allows, and returns the
// shorter length. That is an odd number of sectors of 512 bytes, from which a direct transfer
// cannot continue. It is at least the alignment, as on a system that is short each time. An
// operation that is no longer than that is done in full.
func (f *file) half(do func([]byte, int64) (int, error), p []byte, off int64) (int, error) {
	const sector = 512
	n := len(p) / 2
	if n > sector {
		n -= n % sector
		if n/sector%2 == 0 {
			n -= sector
		}
	}
	_, align := f.Alignment()
	if n < align {
		n = min(len(p), align+sector)
	}
	whole := min(len(p), (n+align-1)/align*align)
	done, err := do(p[:whole], off)
	return min(n, done), err
}

func (f *file) flipBit(p []byte) {
	bit := f.fs.rules.Below(int64(len(p)) * 8)
	p[bit/8] ^= 1 << (bit % 8)
}

func (f *file) Allocate(off, n int64) error {
	return f.fs.try(opAllocate, f.path, func(string) error { return f.File.Allocate(off, n) })
}

func (f *file) Punch(off, n int64) error {
	return f.fs.try(opPunch, f.path, func(string) error { return f.File.Punch(off, n) })
}

func (f *file) Truncate(size int64) error {
	return f.fs.try(opTruncate, f.path, func(string) error { return f.File.Truncate(size) })
}
