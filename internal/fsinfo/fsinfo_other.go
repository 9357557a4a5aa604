//go:build !linux && !darwin && !freebsd

package fsinfo

import (
	"errors"
	"io/fs"
)

// Of fails: nothing is known of file systems here.
func Of(string) (Info, error) { return Info{}, errors.ErrUnsupported }

// Owner does not know the owner of a file here.
func Owner(fs.FileInfo) (uid uint32, known bool) { return 0, false }

// Device does not know the device of a file here.
func Device(fs.FileInfo) (id uint64, known bool) { return 0, false }
