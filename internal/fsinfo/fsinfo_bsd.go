//go:build darwin || freebsd

package fsinfo

import (
	"errors"
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// Of describes the file system of path.
func Of(path string) (Info, error) {
	var st unix.Statfs_t
	for {
		err := unix.Statfs(path, &st)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return Info{}, err
		}
	}
	return Info{
		Name:   unix.ByteSliceToString(st.Fstypename[:]),
		Free:   product(uint64(max(0, int64(st.Bavail))), uint64(st.Bsize)), // below 0 if only root has room
		Total:  product(st.Blocks, uint64(st.Bsize)),
		Remote: st.Flags&unix.MNT_LOCAL == 0,
	}, nil
}

// Owner does not know the owner of a file: there are no locks of files with which an owner would
// matter.
func Owner(fs.FileInfo) (uid uint32, known bool) { return 0, false }

// Device returns the device id of the file system that a file is on, if that is known.
func Device(info fs.FileInfo) (id uint64, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return uint64(st.Dev), true
}
