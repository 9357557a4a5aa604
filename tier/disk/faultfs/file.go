package faultfs

import (
	"github.com/spillway-db/spillway/internal/address"
	"github.com/spillway-db/spillway/tier/disk"
)

// file is a disk.File whose operations can fail.
type file struct {
	fs    *files
	path  string
	inner disk.File
}

func (f *file) Direct() bool                     { return f.inner.Direct() }
func (f *file) Alignment() (address, offset int) { return f.inner.Alignment() }

func (f *file) ReadAt(p []byte, off int64) (int, error) {
	e := f.fs.apply(opRead, f.path, len(p))
	defer e.passed()
	if e.err != nil {
		return 0, e.err
	}
	if e.short {
		return f.half(f.inner.ReadAt, p, off)
	}
	n, err := f.inner.ReadAt(p, off)
	if e.flip && n > 0 {
		f.flipBit(p[:n])
	}
	return n, err
}

func (f *file) WriteAt(p []byte, off int64) (int, error) {
	e := f.fs.apply(opWrite, f.path, len(p))
	defer e.passed()
	switch {
	case e.err != nil:
		return 0, e.err
	case e.short:
		return f.half(f.inner.WriteAt, p, off)
	case e.flip && len(p) > 0:
		changed := address.Aligned(len(p)) // the caller's bytes are not ours to change
		copy(changed, p)
		f.flipBit(changed)
		p = changed
	}
	return f.inner.WriteAt(p, off)
}

// half does about half of an operation, as much as the file's alignment allows, and returns the
// shorter length. That is an odd number of sectors of 512 bytes, from which a direct transfer
// cannot go on. It is at least the alignment, as with a system that is short each time. An
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
	_, align := f.inner.Alignment()
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
	if e := f.fs.apply(opAllocate, f.path, 0); e.err != nil {
		return e.err
	}
	return f.inner.Allocate(off, n)
}

func (f *file) Punch(off, n int64) error {
	if e := f.fs.apply(opPunch, f.path, 0); e.err != nil {
		return e.err
	}
	return f.inner.Punch(off, n)
}

// Close closes also when a rule makes it fail: the system closes a descriptor whatever it returns.
func (f *file) Close() (err error) {
	defer func() { // also if a hook panics
		f.fs.opened(-1)
		if failed := f.inner.Close(); failed != nil {
			err = failed
		}
	}()
	return f.fs.apply(opClose, f.path, 0).err
}
