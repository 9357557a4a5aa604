//go:build !linux

package peer

import (
	"errors"
	"os"
)

// openNameless says that there are no files without names here.
func openNameless(string) (*os.File, error) { return nil, errors.ErrUnsupported }

// dropCache reports that the page cache cannot be dropped here.
func dropCache(*os.File, int64) error { return errors.ErrUnsupported }
