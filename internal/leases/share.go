//go:build linux || darwin

package leases

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// A shared ledger is root's. Root has put a file there that nobody else can have made:
//
//	DIR/shared             says that root lets all users join; DIR has mode 1777
//	DIR/<GPU>              has mode 1777, too
//	DIR/<GPU>/generation   all users may write to it
//	DIR/<GPU>/lease-…      others may read it
//
// Whoever reaches the directory is trusted with the numbers in it. So root makes it where only those
// reach it who are to share: below a directory of its own, from where containers mount it.
const (
	sharedName  = "shared"
	sharedMagic = "Spillway: all users may join this ledger\n"
)

// isShared reports whether root has made a ledger for all users. A file of root's that somebody
// else has linked there has other text, or two names.
func isShared(dir string) bool {
	f, err := os.OpenFile(filepath.Join(dir, sharedName), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || st.Uid != 0 || st.Nlink != 1 || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Mode&0o022 != 0 {
		return false
	}
	text := make([]byte, len(sharedMagic)+1)
	n, _ := f.Read(text)
	return string(text[:n]) == sharedMagic
}

// Strangers returns the names of the directories in a ledger that root shares which root has not made. All
// users who reach it can make some, and no process takes one for a GPU's: they are only in the way. In
// a ledger that is not shared there are none: others cannot write there.
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
		var st unix.Stat_t
		switch err := unix.Lstat(filepath.Join(dir, e.Name()), &st); {
		case err == unix.ENOENT: // removed in the meantime
		case err != nil:
			return nil, fmt.Errorf("quota: the ledger: %w", &fs.PathError{Op: "lstat", Path: filepath.Join(dir, e.Name()), Err: err})
		case st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Uid != 0:
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Share makes a ledger that all users may join, for the GPUs that are named, and removes what dead
// processes and strangers left there. Only root can. A directory that is there must be root's. It must be shared
// already, or writable by root alone. Nobody else may be able to replace it: the directories above
// are root's, and writable by root alone or sticky. Who is to be kept from joining must not reach
// the directory: each user who does can put false numbers in it. A call that failed can be repeated.
func Share(dir string, devices ...string) error {
	if err := share(filepath.Clean(dir), devices); err != nil {
		return fmt.Errorf("quota: sharing the ledger in %s: %w", dir, err)
	}
	return nil
}

func share(dir string, devices []string) error {
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
	// The mark comes first, while only root can write here. So an interrupted call can be repeated.
	mark := filepath.Join(dir, sharedName)
	if !was {
		if err := os.WriteFile(mark, []byte(sharedMagic), 0o644); err != nil {
			return err
		}
	}
	if err := os.Chmod(mark, 0o644); err != nil { // whatever the umask is
		return err
	}
	strange, err := Strangers(dir)
	if err != nil {
		return err
	}
	for _, name := range strange {
		// No link is followed. Who fills it again meanwhile has it left; it is no part of the ledger.
		_ = os.RemoveAll(filepath.Join(dir, name))
	}
	for _, d := range devices {
		if err := shareDevice(dir, d); err != nil {
			return err
		}
	}
	return os.Chmod(dir, 0o777|fs.ModeSticky)
}

// checkAbove refuses a directory that others could replace, or one above it, while root opens it.
func checkAbove(dir string) error {
	path, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	if path, err = filepath.EvalSymlinks(filepath.Dir(path)); err != nil {
		return err
	}
	for ; ; path = filepath.Dir(path) {
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return &fs.PathError{Op: "lstat", Path: path, Err: err}
		}
		if st.Uid != 0 || st.Mode&0o022 != 0 && st.Mode&unix.S_ISVTX == 0 {
			return fmt.Errorf("users other than root can write to %s, and so replace what is in it: "+
				"name a directory below one that only root writes to", path)
		}
		if path == filepath.Dir(path) {
			return nil
		}
	}
}

// shareDevice opens one GPU's part to all users.
func shareDevice(dir, device string) (err error) {
	path := filepath.Join(dir, deviceDir(device))
	if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := checkDir(path, true); err != nil {
		return err
	}
	n := &node{path: path, shared: true}
	if n.dir, err = os.OpenRoot(path); err != nil {
		return err
	}
	if err := n.openGeneration(); err != nil {
		return errors.Join(err, n.close())
	}
	defer func() { err = errors.Join(err, n.close()) }()
	unlock, err := n.lock()
	if err != nil {
		return err
	}
	defer unlock()
	names, err := n.leases()
	for _, name := range names {
		n.reap(name)
	}
	n.sweep()
	return errors.Join(err, n.genFile.Chmod(0o666), os.Chmod(path, 0o777|fs.ModeSticky))
}
