package leases

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
)

func stat(info fs.FileInfo) *syscall.Stat_t { return info.Sys().(*syscall.Stat_t) }

// Share creates a ledger that all users may join, for the named GPUs, and removes the files that
// dead processes left there. Only root can call it.
//
// A ledger that several users share is root's, and only root can add GPUs to it:
//
//	DIR                mode 755
//	DIR/<GPU>          mode 1777: root lets all users join
//	DIR/<GPU>/lease-…  written by its user, read by all
//
// Users cannot change, remove or replace the files of others. But every user who reaches the
// directory of a GPU can create files with false numbers in it, or keep it locked. So root creates
// the ledger where only those users reach it who are to share: below a directory of its own, from
// which containers mount it.
//
// An existing directory must belong to root, and must be writable only by root. The directories
// above it must belong to root, and be writable only by root or sticky, so that no other user can
// replace it. A call that failed can be repeated.
func Share(dir string, devices ...string) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("quota: sharing the ledger in %s: %w", dir, err)
		}
	}()
	if os.Geteuid() != 0 {
		return fmt.Errorf("user %d is not root: %w", os.Geteuid(), fs.ErrPermission)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	above, err := filepath.EvalSymlinks(filepath.Dir(dir))
	if err != nil {
		return err
	}
	for ; ; above = filepath.Dir(above) {
		if _, err := checkDir(above, true); err != nil {
			return fmt.Errorf("users other than root can write to %s, and so replace its files: %w", above, err)
		}
		if above == filepath.Dir(above) {
			break
		}
	}
	if _, err := checkDir(dir, false); err != nil {
		return err
	}
	for _, d := range devices {
		g, err := openGPU(dir, deviceDir(d), unix.LOCK_EX)
		if err == nil {
			_, _ = g.read(true) // removes files; those that cannot be read do not keep root from sharing
			err = g.dir.Chmod(0o777 | fs.ModeSticky)
		}
		g.close()
		if err != nil {
			return err
		}
	}
	return os.Chmod(dir, 0o755)
}
