//go:build !linux

package disk

import (
	"errors"
	"os"
)

// OpenAnonymous makes a temporary file and removes its name. A process killed
// between the two leaves an empty file behind.
func (osFS) OpenAnonymous(dir string, direct bool) (File, error) {
	f, err := os.CreateTemp(dir, "spillway-*.tmp") // mode 0600
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	return newFile(f, false), nil
}

func openFile(path string, flags int, direct bool) (File, error) {
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	return newFile(f, false), nil
}

func directAlignment(*os.File) (address, offset int) { return fallbackAlignment, fallbackAlignment }

func (f *osFile) Allocate(off, n int64) error { return errors.ErrUnsupported }
func (f *osFile) Punch(off, n int64) error    { return errors.ErrUnsupported }

// Lock is not there: anonymous files need none.
func (osFS) Lock(string, bool) (Lock, error) { return nil, errors.ErrUnsupported }
