//go:build !linux

package peer

import (
	"errors"
	"os"
)

// openNameless says that there are no files without names here.
func openNameless(string) (*os.File, error) { return nil, errors.ErrUnsupported }

// dropCache says that the page cache cannot be told to let go here.
func dropCache(*os.File, int64) error { return errors.ErrUnsupported }
