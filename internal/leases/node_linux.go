package leases

import "golang.org/x/sys/unix"

// isRemote reports whether path lies on a file system whose pages other machines, or
// other kernels, may have too.
func isRemote(path string) (bool, string) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return false, ""
	}
	switch uint32(st.Type) {
	case unix.NFS_SUPER_MAGIC:
		return true, "NFS"
	case unix.SMB_SUPER_MAGIC, unix.SMB2_SUPER_MAGIC, unix.CIFS_SUPER_MAGIC:
		return true, "SMB"
	case unix.V9FS_MAGIC:
		return true, "9p"
	case unix.CEPH_SUPER_MAGIC:
		return true, "Ceph"
	}
	return false, ""
}
