//go:build darwin || freebsd

package fsinfo

import (
	"io/fs"

	"golang.org/x/sys/unix"
)

// Of describes the file system of path.
func Of(path string) (Info, error) {
	st, err := statfs(path)
	if err != nil {
		return Info{}, err
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
