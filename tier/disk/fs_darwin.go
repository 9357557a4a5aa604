package disk

import (
	"io/fs"
	"math"

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

// fileLimit is how many files the process may have open. The Go runtime has raised it to
// the hard limit.
func fileLimit() int64 {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || r.Cur > math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(r.Cur)
}
