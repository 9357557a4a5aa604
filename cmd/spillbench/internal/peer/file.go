package peer

import (
	"errors"
	"os"
)

// anonymousFile makes a file in dir that has no name, or where that cannot be loses
// it at once, so that nothing stays, however the process ends.
func anonymousFile(dir string) (*os.File, error) {
	if f, err := openNameless(dir); err == nil {
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
