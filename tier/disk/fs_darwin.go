package disk

import (
	"io/fs"

	"golang.org/x/sys/unix"
)

func (osFS) Usage(dir string) (Usage, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return Usage{}, &fs.PathError{Op: "statfs", Path: dir, Err: err}
	}
	return Usage{
		FileSystem: unix.ByteSliceToString(st.Fstypename[:]),
		Free:       int64(st.Bavail) * int64(st.Bsize),
		Total:      int64(st.Blocks) * int64(st.Bsize),
	}, nil
}
