package fsinfo

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"

	"golang.org/x/sys/unix"
)

// names are those of the file systems that people put spill files on, and of those that are
// remote, by the magic numbers of statfs(2).
var names = map[uint32]string{
	unix.EXT4_SUPER_MAGIC:      "ext4",
	unix.XFS_SUPER_MAGIC:       "xfs",
	unix.BTRFS_SUPER_MAGIC:     "btrfs",
	unix.F2FS_SUPER_MAGIC:      "f2fs",
	unix.TMPFS_MAGIC:           "tmpfs",
	unix.RAMFS_MAGIC:           "ramfs",
	unix.OVERLAYFS_SUPER_MAGIC: "overlayfs",
	unix.NFS_SUPER_MAGIC:       "nfs",
	unix.SMB_SUPER_MAGIC:       "smb",
	unix.SMB2_SUPER_MAGIC:      "smb",
	unix.CIFS_SUPER_MAGIC:      "cifs",
	unix.V9FS_MAGIC:            "9p",
	unix.CEPH_SUPER_MAGIC:      "ceph",
	unix.FUSE_SUPER_MAGIC:      "fuse",
	unix.MSDOS_SUPER_MAGIC:     "vfat",
	unix.BCACHEFS_SUPER_MAGIC:  "bcachefs",
	0x2fc12fc1:                 "zfs",
	0x0bd00bd0:                 "lustre",
}

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
	magic := uint32(st.Type)
	info := Info{
		Name:  names[magic],
		Free:  product(st.Bavail, uint64(st.Bsize)),
		Total: product(st.Blocks, uint64(st.Bsize)),
	}
	switch info.Name {
	case "":
		info.Name = fmt.Sprintf("%#x", magic)
	case "tmpfs", "ramfs":
		info.Memory = true
	case "nfs", "smb", "cifs", "9p", "ceph":
		info.Remote = true
	}
	return info, nil
}

// Owner returns the owner of a file, if that is known.
func Owner(info fs.FileInfo) (uid uint32, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return st.Uid, true
}

// Device returns the device id of the file system that a file is on, if that is known.
func Device(info fs.FileInfo) (id uint64, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return st.Dev, true
}
