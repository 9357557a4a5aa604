package leases

import "golang.org/x/sys/unix"

// isRemote reports whether path lies on a file system whose pages other machines may have
// too.
func isRemote(path string) (bool, string) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil || st.Flags&unix.MNT_LOCAL != 0 {
		return false, ""
	}
	return true, unix.ByteSliceToString(st.Fstypename[:])
}
