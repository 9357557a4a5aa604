package system

import (
	"errors"
	"os"
)

// OpenUnlinked creates a file in dir without a name. If the system has no such files, it removes the
// name at once. So a process that is killed leaves no file.
func OpenUnlinked(dir string) (*os.File, error) {
	if f, err := OpenNameless(dir); err == nil {
		return f, nil
	}
	f, err := os.CreateTemp(dir, ".spillbench-*")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
