package leases

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// A ledger that several users share is root's. It has a file that only root can have created:
//
//	DIR/shared         root lets all users join; DIR has mode 1777
//	DIR/<GPU>          also has mode 1777
//	DIR/<GPU>/lease-…  written by its user, read by all
//
// Every user who reaches the directory can create files with false numbers in it, or keep it locked. So
// root creates it where only those users reach it who are to share: below a directory of its own, from
// which containers mount it. Users cannot change, remove or replace the files of others.
const (
	sharedName  = "shared"
	sharedMagic = "Spillway: all users may join this ledger\n"
)

// isShared reports whether root has created a ledger for all users. A file of root's that another user
// has linked there has other content, or two names.
func isShared(dir string) bool {
	f, err := os.OpenFile(filepath.Join(dir, sharedName), readOnly, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || stat(info).Uid != 0 || stat(info).Nlink != 1 || !info.Mode().IsRegular() ||
		info.Mode()&0o022 != 0 {
		return false
	}
	text, err := io.ReadAll(io.LimitReader(f, recordSize))
	return err == nil && string(text) == sharedMagic
}

func stat(info fs.FileInfo) *syscall.Stat_t { return info.Sys().(*syscall.Stat_t) }

// Strangers returns the names of directories that users other than root have created in a ledger that
// root shares. No process takes one for a GPU's. A ledger that is not shared has none, because others
// cannot write there.
func Strangers(dir string) ([]string, error) {
	if !isShared(dir) {
		return nil, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("quota: the ledger: %w", err)
	}
	var names []string
	for _, e := range entries {
		info, err := e.Info()
		if err != nil {
			continue // removed in the meantime
		}
		if info.IsDir() && stat(info).Uid != 0 {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Share creates a ledger that all users may join, for the named GPUs, and removes the files that dead
// processes and other users left there. Only root can call it. An existing directory must belong to root,
// and must either be shared already or be writable only by root. The directories above it must belong to
// root, and be writable only by root or sticky, so that no other user can replace it. A call that failed
// can be repeated.
func Share(dir string, devices ...string) (err error) {
	dir = filepath.Clean(dir)
	defer func() {
		if err != nil {
			err = fmt.Errorf("quota: sharing the ledger in %s: %w", dir, err)
		}
	}()
	if os.Geteuid() != 0 {
		return fmt.Errorf("user %d is not root: %w", os.Geteuid(), fs.ErrPermission)
	}
	if slices.Contains(devices, sharedName) {
		return fmt.Errorf("%q is no name for a GPU", sharedName)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	if err := checkAbove(dir); err != nil {
		return err
	}
	was := isShared(dir)
	if err := checkDir(dir, was); err != nil {
		return err
	}
	// The mark is written before the mode is changed, while only root can write here. So an interrupted
	// call can be repeated.
	mark := filepath.Join(dir, sharedName)
	if !was {
		if err := os.WriteFile(mark, []byte(sharedMagic), 0o644); err != nil {
			return err
		}
	}
	if err := os.Chmod(mark, 0o644); err != nil { // independent of the umask
		return err
	}
	strange, err := Strangers(dir)
	if err != nil {
		return err
	}
	for _, name := range strange {
		_ = os.RemoveAll(filepath.Join(dir, name)) // follows no link; a failure leaves what is ignored anyway
	}
	for _, d := range devices {
		if err := os.MkdirAll(filepath.Join(dir, deviceDir(d)), 0o700); err != nil {
			return err
		}
		n, err := openNode(dir, d, unix.LOCK_EX)
		if err != nil {
			return err
		}
		_, _ = n.read(true) // removes files; those that cannot be read do not keep root from sharing
		if err := errors.Join(n.dir.Chmod(0o777|fs.ModeSticky), n.close()); err != nil {
			return err
		}
	}
	return os.Chmod(dir, 0o777|fs.ModeSticky)
}

// checkAbove refuses a directory that other users could replace while root opens it, or one above it.
func checkAbove(dir string) error {
	path, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if path, err = filepath.EvalSymlinks(filepath.Dir(path)); err != nil {
		return err
	}
	for ; ; path = filepath.Dir(path) {
		info, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if stat(info).Uid != 0 || info.Mode()&0o022 != 0 && info.Mode()&fs.ModeSticky == 0 {
			return fmt.Errorf("users other than root can write to %s, and so replace what is in it: "+
				"name a directory below one that only root writes to", path)
		}
		if path == filepath.Dir(path) {
			return nil
		}
	}
}
