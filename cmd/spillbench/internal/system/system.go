package system

import (
	"errors"
	"os"
)

// OpenUnlinked makes a file in dir that has no name, or that loses it at once where the system has no
// such files. So nothing stays, however the process ends.
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
